"""Pre-flight: what a training run will move, store and take, before anyone rents a GPU. No process group, no GPU."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mfsdp_func.optim.route import Choice
from mfsdp_func.optim.routed import BYTE_COST
from mfsdp_func.preflight.activations import measure_activations
from mfsdp_func.preflight.hardware import hardware_named
from mfsdp_func.preflight.memory import memory_of
from mfsdp_func.preflight.models import ModelLike, ModelShapes, read_model
from mfsdp_func.preflight.page import save_page
from mfsdp_func.preflight.parts import lay_out
from mfsdp_func.preflight.pictures import save_pictures
from mfsdp_func.preflight.result import Answer
from mfsdp_func.preflight.settings import Carrying, Optimizing, Owning, Settings
from mfsdp_func.preflight.timing import time_step
from mfsdp_func.preflight.traffic import operations_of
from mfsdp_func.values.placement import ShardLayout

__all__ = ["Preflight", "Settings", "preflight", "run"]


class Preflight(Answer):
    """What a training step will move, store and take, on every rank: a value to print, or to write as JSON or a page."""

    def save_html(self, path: str | Path) -> Path:
        """Write a page with pictures that needs nothing else: no network, no script. Needs matplotlib.

        Returns:
            The path.
        """
        return save_page([self], path)

    def plot(self, path: str | Path) -> Path:
        """Write all pictures into one PNG, SVG or PDF. Needs matplotlib.

        Returns:
            The path.

        Raises:
            ValueError: on another suffix.
        """
        return save_pictures(self, path)


def preflight(
    model: ModelLike,
    mesh_shape: Iterable[int] | int,
    *,
    changes: Mapping[str, Any] | None = None,
    node: int = 8,
    layout: ShardLayout = ShardLayout.PADDED,
    owners: Owning = "planned",
    optimizer: Optimizing = "muon",
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    travel_dtype: torch.dtype = torch.bfloat16,
    finer_rows: Iterable[str] = (),
    recompute: bool = False,
    byte_cost: float = BYTE_COST,
    near_nodes: bool = False,
    blocks: Mapping[str, Choice] | None = None,
    batch: tuple[int, int] | None = None,
    hardware: str = "h100",
    hardware_file: str | Path | None = None,
    carrier: Carrying = "process group",
) -> Preflight:
    """Tell what a training step of a model on a mesh costs: bytes, messages, peers, memory, padding, owner load, time.

    Bytes, messages and peers are those of the run; times are a model (`mfsdp_func.preflight.timing`). The step is that
    of `fully_shard` with every parameter sharded along the last axis of the mesh and replicated along the others, then
    Muon for the matrices of blocks, in one exchange each way, and AdamW for the rest.

    Args:
        model: a configuration file or class of `transformers`, ``module:function``, a module (the meta device will do),
            shapes of one buffer, or shapes by unit.
        mesh_shape: number of ranks along each axis; the last one shards.
        changes: values of the configuration, such as ``{"num_hidden_layers": 80}``.
        node: see `Settings`, as the arguments that are not listed here.
        layout: how rows are cut.
        owners: how owners are chosen.
        optimizer: Muon (with AdamW for the rest) or AdamW.
        dtype: of main weights and state.
        param_dtype: of gathered parameters.
        reduce_dtype: of averaged gradients.
        travel_dtype: of matrices on their way to owners.
        finer_rows: patterns of names of parameters that are laid out by their last dim, such as ``["*.experts.*"]``.
        recompute: units run again in the backward pass, and keep no activations.
        byte_cost: price of a byte in the choice of owners.
        near_nodes: whether bytes between nodes cost more there.
        blocks: name pattern -> what parameters get, over what `optim.route` says; see `Route.override`.
        batch: (sequences, tokens of each) of one rank.
        hardware: name of an entry of the hardware table.
        hardware_file: more entries, as JSON; see `mfsdp_func.preflight.hardware.read_hardware`.
        carrier: whose messages are counted.

    Returns:
        A value to print; ``.to_json()``, ``.save_html(path)`` and ``.plot(path)``.

    Raises:
        ValueError: on a model, setting or file that makes no sense, or a layout that is refused; before any work.
        TypeError: on a model of another type.

    Effects: no communication; builds modules on the meta device, and imports `transformers` where a configuration is
    named.

    >>> result = preflight([(64, 32), (32, 64), (64,)], 4, node=2, travel_dtype=torch.float32)
    >>> [(op.name, op.nbytes) for op in result.operations if op.schedule == "pieces"]
    [('optimizer gather', 7680), ('optimizer scatter', 7680)]
    >>> round(result.imbalance, 2), round(result.imbalance_bound, 2)
    (2.0, 2.0)
    """
    mesh = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    settings = Settings(
        mesh=mesh,
        node=node,
        layout=layout,
        owners=owners,
        optimizer=optimizer,
        dtype=dtype,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        travel_dtype=travel_dtype,
        finer_rows=finer_rows if isinstance(finer_rows, str) else tuple(finer_rows),  # pyright: ignore[reportArgumentType]
        recompute=recompute,
        byte_cost=byte_cost,
        near_nodes=near_nodes,
        batch=batch,
        hardware=hardware,
        carrier=carrier,
    )
    return run(read_model(model, changes), settings, blocks=blocks, hardware_file=hardware_file)


def run(
    model: ModelShapes,
    settings: Settings,
    *,
    blocks: Mapping[str, Choice] | None = None,
    hardware_file: str | Path | None = None,
) -> Preflight:
    """The same from values, so that a model need not be read again for other settings.

    Raises:
        ValueError: see `preflight`.
    """
    device = hardware_named(settings.hardware, hardware_file)
    parts = lay_out(model, settings, blocks)
    operations = operations_of(parts)
    kept = measure_activations(model, settings.batch, settings.gather_dtype) if settings.batch else None
    units = sum(not unit.held for unit in model.units)
    flops = kept.flops if kept else 0
    timing = time_step(operations, parts.loads, settings, device, flops, units)
    return Preflight(settings, parts, operations, memory_of(parts, kept), timing, device, kept)
