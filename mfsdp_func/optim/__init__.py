"""Functional optimizers: ``init(params) -> state``, ``update(grads, state, params) -> (updates, state)``.

>>> import torch
>>> optimizer = adamw(0.1)
>>> params = {"w": torch.tensor([1.0])}
>>> state = optimizer.init(params)
>>> for _ in range(50):
...     grads = torch.func.grad(lambda params: (params["w"] ** 2).sum())(params)
...     updates, state = optimizer.update(grads, state, params)
...     params = apply_updates(params, updates)
>>> bool(params["w"].abs() < 0.1), int(state.step)
(True, 50)
"""

from mfsdp_func.optim.accumulation import AccumulateState, accumulate
from mfsdp_func.optim.adamw import AdamWState, adamw, scale_by_adam
from mfsdp_func.optim.block_layout import BlockLayout, block_layout, owners_of_blocks
from mfsdp_func.optim.block_split import join_blocks, split_blocks
from mfsdp_func.optim.blocks import Blocks, blocks
from mfsdp_func.optim.chains import (
    EmaState,
    EmptyState,
    ScheduleState,
    add_decayed_weights,
    chain,
    ema,
    ema_of_params,
    scale,
    scale_by_learning_rate,
)
from mfsdp_func.optim.decisions import (
    ApplyIfFiniteState,
    ClipState,
    CountState,
    DynamicLossScaleState,
    apply_if_finite,
    clip_by_global_norm,
    divide_by_count,
    dynamic_loss_scale,
)
from mfsdp_func.optim.facts import Facts
from mfsdp_func.optim.hyperparams import InjectHyperparamsState, inject_hyperparams
from mfsdp_func.optim.masks import Mask, MaskedState, masked, partition
from mfsdp_func.optim.muon import MuonState, muon, scale_by_muon
from mfsdp_func.optim.newton_schulz import newton_schulz
from mfsdp_func.optim.orthogonal import gram, normalize_rows, polar_express, polar_express_coefficients
from mfsdp_func.optim.owned import owned, owners_of
from mfsdp_func.optim.owners import Owners, map_on_owners
from mfsdp_func.optim.route import Route, RouteLine, route
from mfsdp_func.optim.routed import RoutePlan, from_route, plan_route
from mfsdp_func.optim.schedules import (
    Schedule,
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_constant_schedule,
    warmup_cosine_decay,
    warmup_cosine_decay_schedule,
    warmup_exponential_decay_schedule,
)
from mfsdp_func.optim.soap import SoapState, soap, soap_offsets
from mfsdp_func.optim.torch_decisions import GradScaler
from mfsdp_func.optim.torch_optimizer import TorchOptimizer
from mfsdp_func.optim.transformation import GradientTransformation, LearningRate, apply_updates

__all__ = [
    "AccumulateState",
    "AdamWState",
    "ApplyIfFiniteState",
    "BlockLayout",
    "Blocks",
    "ClipState",
    "CountState",
    "DynamicLossScaleState",
    "EmaState",
    "EmptyState",
    "Facts",
    "GradScaler",
    "GradientTransformation",
    "InjectHyperparamsState",
    "LearningRate",
    "Mask",
    "MaskedState",
    "MuonState",
    "Owners",
    "Route",
    "RouteLine",
    "RoutePlan",
    "Schedule",
    "ScheduleState",
    "SoapState",
    "TorchOptimizer",
    "accumulate",
    "adamw",
    "add_decayed_weights",
    "apply_if_finite",
    "apply_updates",
    "block_layout",
    "blocks",
    "chain",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "divide_by_count",
    "dynamic_loss_scale",
    "ema",
    "ema_of_params",
    "exponential_decay",
    "from_route",
    "gram",
    "inject_hyperparams",
    "join_blocks",
    "join_schedules",
    "linear_schedule",
    "map_on_owners",
    "masked",
    "muon",
    "newton_schulz",
    "normalize_rows",
    "owned",
    "owners_of",
    "owners_of_blocks",
    "partition",
    "piecewise_constant_schedule",
    "plan_route",
    "polar_express",
    "polar_express_coefficients",
    "polynomial_schedule",
    "route",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_muon",
    "soap",
    "soap_offsets",
    "split_blocks",
    "warmup_constant_schedule",
    "warmup_cosine_decay",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
]
