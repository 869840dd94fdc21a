"""Owner-compute gather and scatter over sharded flat buffers, as pure functions."""

from mfsdp_func import checkpoint, faults, inplace, optim, streams
from mfsdp_func.effects.agreement import agreement_check
from mfsdp_func.effects.exchange_error import ExchangeError
from mfsdp_func.effects.token import Token
from mfsdp_func.fsdp import FsdpContext, fully_shard
from mfsdp_func.operations.commit import Commit, CommitError, commit
from mfsdp_func.operations.dbuffer import DBuffer, allgather, allreduce, redistribute, reduce_scatter
from mfsdp_func.operations.gather_scatter import gather, gather_coalesced, plan_of, scatter, scatter_coalesced
from mfsdp_func.operations.norm import global_norm
from mfsdp_func.operations.pipeline import pipeline
from mfsdp_func.plans.plan import Plan
from mfsdp_func.preflight import Preflight, preflight
from mfsdp_func.simulation.choices import PCT
from mfsdp_func.simulation.errors import SimulationError, SlowRankWarning
from mfsdp_func.simulation.results import Simulation
from mfsdp_func.simulation.simulate import simulate
from mfsdp_func.values.balance import OwnerBalance, WorkGroup, balance_owner_work
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_balanced,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
    build_row_atomic_layout,
)
from mfsdp_func.values.mesh import Mesh, as_mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout, assign_owner_work, ns_cost_fn
from mfsdp_func.values.padding import PaddingReport, PaddingWarning, finer_view, padding_report
from mfsdp_func.values.placement import (
    BlockAtomic,
    Partial,
    Placements,
    Replicate,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
    changed_mesh_axis,
)
from mfsdp_func.values.ranges import Range, intersect_ranges

__all__ = [
    "PCT",
    "BlockAtomic",
    "BufferSpec",
    "Commit",
    "CommitError",
    "DBuffer",
    "ExchangeError",
    "FsdpContext",
    "GlobalLayout",
    "GroupOwnerLayout",
    "Mesh",
    "OwnerBalance",
    "PaddingReport",
    "PaddingWarning",
    "Partial",
    "Placements",
    "Plan",
    "Preflight",
    "Range",
    "Replicate",
    "RowAtomic",
    "ShardLayout",
    "Simulation",
    "SimulationError",
    "SlowRankWarning",
    "TensorAtomic",
    "Token",
    "WorkGroup",
    "agreement_check",
    "allgather",
    "allreduce",
    "as_mesh",
    "assign_owner_work",
    "balance_owner_work",
    "build_for_row_atomic",
    "build_for_row_atomic_balanced",
    "build_for_row_atomic_unpadding",
    "build_for_tensor_atomic",
    "build_row_atomic_layout",
    "changed_mesh_axis",
    "checkpoint",
    "commit",
    "faults",
    "finer_view",
    "fully_shard",
    "gather",
    "gather_coalesced",
    "global_norm",
    "inplace",
    "intersect_ranges",
    "ns_cost_fn",
    "optim",
    "padding_report",
    "pipeline",
    "plan_of",
    "preflight",
    "redistribute",
    "reduce_scatter",
    "scatter",
    "scatter_coalesced",
    "simulate",
    "streams",
]
