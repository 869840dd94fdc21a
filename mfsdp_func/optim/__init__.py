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

from mfsdp_func.optim.adamw import AdamWState, adamw, scale_by_adam
from mfsdp_func.optim.block_layout import BlockLayout, block_layout, owners_of_blocks
from mfsdp_func.optim.block_split import join_blocks, split_blocks
from mfsdp_func.optim.blocks import Blocks, blocks
from mfsdp_func.optim.chains import add_decayed_weights, chain, scale_by_learning_rate
from mfsdp_func.optim.muon import MuonState, muon, scale_by_muon
from mfsdp_func.optim.newton_schulz import newton_schulz
from mfsdp_func.optim.orthogonal import gram, normalize_rows, polar_express, polar_express_coefficients
from mfsdp_func.optim.owners import Owners, map_on_owners
from mfsdp_func.optim.route import Route, RouteLine, route
from mfsdp_func.optim.routed import RoutePlan, from_route, plan_route
from mfsdp_func.optim.torch_optimizer import TorchOptimizer
from mfsdp_func.optim.transformation import GradientTransformation, LearningRate, apply_updates, partition

__all__ = [
    "AdamWState",
    "BlockLayout",
    "Blocks",
    "GradientTransformation",
    "LearningRate",
    "MuonState",
    "Owners",
    "Route",
    "RouteLine",
    "RoutePlan",
    "TorchOptimizer",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "block_layout",
    "blocks",
    "chain",
    "from_route",
    "gram",
    "join_blocks",
    "map_on_owners",
    "muon",
    "newton_schulz",
    "normalize_rows",
    "owners_of_blocks",
    "partition",
    "plan_route",
    "polar_express",
    "polar_express_coefficients",
    "route",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_muon",
    "split_blocks",
]
