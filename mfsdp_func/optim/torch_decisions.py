"""What a `TorchOptimizer` decides for all ranks: norms of its gradients, and whether a scaled step is skipped."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from mfsdp_func.effects.groups import flat_mesh
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.norm import largest_over, one_each_spec, sum_spec
from mfsdp_func.optim.facts import Where, local_facts, over_all_ranks, reduction
from mfsdp_func.optim.torch_groups import Group, local_of
from mfsdp_func.values.buffer_spec import BufferSpec, is_first_replica
from mfsdp_func.values.mesh import Mesh, as_mesh

Groups = Sequence[Group]
ParamGroups = Sequence[Mapping[str, Any]]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for several ranks: all of them skip a step, or none.

    What the ranks found is added up, one all-reduce of 16 bytes, when the gradients are unscaled (in ``unscale_``, or
    else in ``step``); so all ranks change the scale alike. A step that is skipped leaves parameters and the state of a
    `TorchOptimizer` as they were, bit for bit. Arguments are those of `torch.amp.GradScaler`.

    Raises:
        TypeError: in ``step`` and ``unscale_``, on an optimizer that is no `TorchOptimizer`, which knows no ranks.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See `torch.amp.GradScaler.step`. Every rank calls."""
        chosen: Any = optimizer
        chosen._agreed = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            chosen._agreed = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """See `torch.amp.GradScaler.unscale_`. Every rank calls."""
        super().unscale_(optimizer)
        self._agree(optimizer)

    def _unscale_grads_(self, optimizer: Any, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        # A buffer may serve several groups, but its gradient is divided once.
        unique = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        once: Any = SimpleNamespace(param_groups=[{"params": list(unique.values())}])
        return super()._unscale_grads_(once, *args, **kwargs)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        super()._check_inf_per_device(optimizer)
        return self._agree(optimizer)

    def _agree(self, optimizer: Any) -> dict[Any, Any]:
        state: dict[Any, Any] = self._per_optimizer_states[id(optimizer)]
        if not self._enabled or self._scale is None:
            return state["found_inf_per_device"]
        if not hasattr(optimizer, "over_all_ranks"):
            raise TypeError(
                f"GradScaler: got a {type(optimizer).__name__}, expected a TorchOptimizer, which knows its ranks"
            )
        device = self._scale.device
        found = torch.zeros((), dtype=torch.float64, device=device)
        for one in state["found_inf_per_device"].values():
            found = found + one.to(device)
        total = optimizer.over_all_ranks(found)
        state["found_inf_per_device"] = {device: (total > 0).float()}
        return state["found_inf_per_device"]


def clip_gradients(
    groups: Groups, param_groups: ParamGroups, mesh: Mesh | None, max_norm: float, norm_type: float
) -> torch.Tensor:
    """See `TorchOptimizer.clip_grad_norm_`."""
    if not max_norm > 0 or norm_type not in (2, math.inf):
        raise ValueError(
            f"clip_grad_norm_: expected max_norm > 0 and norm_type 2 or inf, got {max_norm} and {norm_type}"
        )
    numbers: list[torch.Tensor] = []
    seen: set[int] = set()
    for made, group in zip(groups, param_groups, strict=True):
        known = made.where._replace(mesh=made.where.mesh or mesh)
        for key, spec, param in zip(made.keys, made.specs, group["params"], strict=True):
            if id(param) in seen or param.grad is None:
                continue
            seen.add(id(param))
            local = gradient_of(param)
            if spec is not None:
                numbers.append(local_facts(DBuffer(spec, local), known, norm_type).squares)
            elif isinstance(param, DTensor):
                if any(isinstance(placement, Partial) for placement in param.placements):
                    raise ValueError(f"clip_grad_norm_: parameter {key!r} is {param.placements}, not summed yet")
                first = is_first_replica(as_mesh(param.device_mesh), param.placements)
                number = local_facts({"": local}, Where(), norm_type).squares
                numbers.append(number if first else torch.where(number.isnan(), number, 0.0))
            else:
                numbers.append(local_facts({key: local}, known, norm_type).squares)
    device = numbers[0].device if numbers else None
    zero = torch.zeros((), dtype=torch.float64, device=device)
    parts = torch.stack([zero, *[number.to(device) for number in numbers]])
    specs, where, plain = _places(groups, param_groups, mesh)
    if math.isinf(norm_type):
        spec = reduction(specs, where, plain)
        every = None if spec is None else one_each_spec(spec.mesh, tuple(range(spec.mesh.ndim)))
        norm = parts.max() if every is None else largest_over(every, parts.max())
    else:
        norm = over_all_ranks(parts.sum().reshape(1), specs, where, plain)[0].sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    done: set[int] = set()
    for group in param_groups:
        for param in group["params"]:
            if param.grad is not None and id(param) not in done:
                done.add(id(param))
                local_of(param.grad).mul_(factor.to(param.grad.device))
    return norm


def decide_over(groups: Groups, param_groups: ParamGroups, mesh: Mesh | None, number: torch.Tensor) -> torch.Tensor:
    """The sum of a 0-D number over the ranks that step together."""
    specs, where, plain = _places(groups, param_groups, mesh)
    return over_all_ranks(number.reshape(1), specs, where, plain)[0]


def _places(groups: Groups, param_groups: ParamGroups, mesh: Mesh | None) -> tuple[list[BufferSpec], Where, bool]:
    specs: list[BufferSpec] = []
    where, plain = Where(), False
    for made, group in zip(groups, param_groups, strict=True):
        where = where + made.where
        for spec, param in zip(made.specs, group["params"], strict=True):
            if spec is not None:
                specs.append(spec)
            elif isinstance(param, DTensor):
                specs.append(sum_spec(flat_mesh(as_mesh(param.device_mesh)), 2))
            else:
                plain = True
    known = bool(specs or where.owners or where.mesh)
    return specs, where if known or mesh is None else where._replace(mesh=mesh), plain


def gradient_of(param: torch.Tensor) -> torch.Tensor:
    """This rank's gradient of a parameter; zeros where there is none.

    Raises:
        ValueError: if it is placed otherwise than its parameter.
    """
    if param.grad is None:
        return torch.zeros_like(local_of(param))
    if isinstance(param.grad, DTensor) and isinstance(param, DTensor) and param.grad.placements != param.placements:
        raise ValueError(
            f"TorchOptimizer.step: a gradient is {param.grad.placements}, its parameter {param.placements};"
            " redistribute the gradient first"
        )
    return local_of(param.grad)
