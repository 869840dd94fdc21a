"""A `torch.optim.Optimizer` over a functional step, for training loops that hold one."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.effects.agreement import checking, report_fault
from mfsdp_func.effects.groups import number_of_ranks
from mfsdp_func.effects.here import carrier_of
from mfsdp_func.optim.torch_decisions import clip_gradients, decide_over, gradient_of
from mfsdp_func.optim.torch_groups import (
    COMPLAINT,
    Group,
    GroupParams,
    Make,
    as_groups,
    by_key,
    is_buffered,
    is_plain,
    local_of,
    parameter_of,
    refuse_shards,
    refuse_unknown,
    settings_of,
)
from mfsdp_func.optim.torch_state import (
    as_tensors,
    compiled_step,
    copy_state,
    keep_counts,
    show_state,
    with_boxes,
    with_counts,
)
from mfsdp_func.optim.transformation import GradientTransformation
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh


class TorchOptimizer(torch.optim.Optimizer):
    """Runs transformations of this package (or their like) on parameters in place, one per parameter group.

    Every rank calls `step`, also with groups in which it holds nothing (``"params": {}``): owners compute for others.
    Groups, and the transformations that communicate, stand in the same order on all ranks.

    Everything that a group sets is handed to its transformation, as it is at each step: ``weight_decay``, ``betas``,
    ``momentum``, ``eps`` and what else the function takes (``functools.partial(muon, owner_layout=owners)`` takes all that
    `muon` takes). What it does not know is refused.

    Norms: `clip_grad_norm_` sees all ranks. `torch.nn.utils.clip_grad_norm_` on flat parameters or shards sees one rank's
    part alone, and clips each rank by another norm. With `torch.amp`, use `mfsdp_func.optim.GradScaler`.

    Learning-rate schedulers work: each step makes its transformations anew (in a compiled step while tracing) from a
    tensor that holds the group's ``"lr"``, so that no change of it compiles anything again.

    Parameters and states are written in place; in a compiled step the compiler fuses the writes into the computation
    and needs no second copy of them, which is what buffer donation is for elsewhere. `state` holds, for every
    parameter, tensors under the names of the transformation's state fields (``"momentum"``, ``"step"``; for a flat
    buffer, ``"momentum.3"`` for its tensor 3), as DTensors for a DTensor.

    Args:
        params: parameters of one group, or a list of groups: dicts with "params" (see `GroupParams`), and optionally
            "lr", "transformation", settings of it, "name", and "tensors": which tensors of the buffers the group trains,
            by the keys of `partition` (so that a buffer may serve several groups, with learning rates of their own).
            Shards are those that the transformation expects, and lie in ``.grad`` likewise.
            Of DTensors (FSDP2), the local tensors are meant. Of a `DBuffer`, the local buffer is the parameter
            (which is made to require gradients), and the transformation sees the tensors by index; of a dict of buffers,
            such as `fully_shard` returns, by ``(key, index)``.
        transformation: makes the transformation of groups that bring none of their own; see `Make`.
        lr: learning rate of groups that have none.
        compile: run the whole of `step` in one ``torch.compile(fullgraph=True)`` region; a string names a backend.
        mesh: the ranks that step together; by default those of the first `DBuffer`. While the agreement check is on,
            all of them then raise where one of them lacks a gradient.

    Raises:
        TypeError: if a group's transformation is not a function of a learning rate, or a parameter no tensor.
        ValueError: if a transformation needs whole tensors, as `muon` without an owner layout, and gets shards.
        ValueError: on a wrong learning rate, or as `torch.optim.Optimizer` and the transformation do.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> bias = torch.nn.Parameter(torch.ones(2))
    >>> from mfsdp_func.optim import adamw, muon
    >>> groups = [{"params": [weight], "transformation": muon, "lr": 0.02}, {"params": [bias]}]
    >>> optimizer = TorchOptimizer(groups, adamw, lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     (weight @ bias).sum().backward()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> bias.data, sorted(optimizer.state[weight]), round(optimizer.param_groups[1]["lr"], 6)
    (tensor([0.8889, 0.8889]), ['momentum', 'step'], 0.001)
    """

    def __init__(
        self,
        params: GroupParams | Iterable[Mapping[str, Any]],
        transformation: Make | None = None,
        *,
        lr: float | torch.Tensor = 1e-3,
        compile: bool | str = False,
        mesh: Mesh | MeshLike | None = None,
    ) -> None:
        self._make = transformation
        self._groups: list[Group] = []
        self._indices: list[dict[tuple[int, str], int]] = []
        self._agreed = False
        _ALL.add(self)
        self._mesh = None if mesh is None else as_mesh(mesh)
        self._compile = compile
        self._run = compiled_step(compile)
        super().__init__(as_groups(params), {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class."""
        group = dict(param_group)
        given: GroupParams = group["params"]
        make = group.pop("transformation", self._make)
        only = group.pop("tensors", None)
        if isinstance(make, GradientTransformation) or not callable(make):
            raise TypeError(f"TorchOptimizer: got {type(make).__name__} as transformation; {COMPLAINT}")
        checked = cast("Make", make)
        known = settings_of(checked)
        refuse_unknown(checked, known, group)
        defaults = {name: value for name, value in known.items() if is_plain(value)}
        leaves = by_key(given)
        named = {key: parameter_of(leaf) for key, leaf in leaves.items()}
        specs = tuple([getattr(leaf, "spec", None) for leaf in leaves.values()])
        # A buffer may serve several groups: torch refuses a parameter that it has seen.
        seen = {id(param) for other in self.param_groups for param in other["params"]}
        shared = {id(param) for param, spec in zip(named.values(), specs, strict=True) if spec and only is not None}
        fresh = [param for param in named.values() if not (id(param) in seen and id(param) in shared)]
        super().add_param_group({**defaults, **group, "params": fresh})
        self.param_groups[-1]["params"] = list(named.values())
        lr = self.param_groups[-1]["lr"]
        if not lr >= 0:
            raise ValueError(f"TorchOptimizer: lr must be a number >= 0, got {lr}")
        locals_ = [local_of(param) for param in named.values()]
        rate = torch.zeros((), dtype=torch.float64, device=locals_[0].device if locals_ else None)
        self._mesh = self._mesh or next((spec.mesh for spec in specs if spec), None)
        with torch.no_grad():
            chosen = None if only is None else frozenset[Any](only)
            made = Group(checked, rate, tuple(named), specs, is_buffered(given), chosen, frozenset(known))
            self._refuse_claimed(made, list(named.values()))
            transformation = made.make(rate, **self._settings(made, self.param_groups[-1]))
            if transformation.needs.host_count:
                raise ValueError(
                    "TorchOptimizer: its transformation accumulates gradients; call backward several times before step,"
                    " which adds up in .grad, instead"
                )
            refuse_shards(transformation, made, named)
            state, counts = as_tensors(transformation.init(made.tensors(locals_)))
            made = replace(made, where=transformation.needs.where, state=state, counts=counts)
        self._groups.append(made)
        self._indices.append(show_state(self.state, len(self._groups) - 1, made, list(named.values())))

    def _settings(self, made: Group, group: Mapping[str, Any]) -> dict[str, Any]:
        """What a group says to its transformation. In compiled steps numbers are tensors, which never compile again."""
        settings = {name: value for name, value in group.items() if name in made.settings}
        if not self._compile:
            return settings

        def tensor(value: Any) -> torch.Tensor:
            return torch.as_tensor(value, dtype=torch.float64, device=made.rate.device)

        for name, value in settings.items():
            if isinstance(value, float):
                settings[name] = tensor(value)
            elif name == "betas":
                settings[name] = tuple(map(tensor, value))
        return settings

    def _refuse_claimed(self, made: Group, params: list[torch.Tensor]) -> None:
        """Refuse a tensor of a buffer that another group trains."""
        mine = {(id(params[n]), i) for n, i in made.places().values()}
        for other, group in zip(self._groups, self.param_groups, strict=False):
            for key, (n, i) in other.places().items():
                if (id(group["params"][n]), i) in mine:
                    del self.param_groups[-1]
                    raise ValueError(f"TorchOptimizer: tensor {key!r} appears in more than one parameter group")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters by their gradients. Every rank calls.

        Args:
            closure: computes the loss and the gradients again, and returns the loss.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: before any communication, if a parameter of which this rank holds an element has no gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if skip is not None and not self._agreed and self._several_ranks():
            raise RuntimeError(
                "TorchOptimizer.step: a torch.amp.GradScaler decides on each rank alone whether to skip, so that ranks part"
                " (and owners wait for ever); use mfsdp_func.optim.GradScaler, which has the same arguments"
            )
        self._check_gradients()
        params: list[dict[Hashable, torch.Tensor]] = []
        grads: list[dict[Hashable, torch.Tensor]] = []
        settings: list[dict[str, Any]] = []
        for made, group in zip(self._groups, self.param_groups, strict=True):
            made.rate.fill_(group["lr"])
            params.append(made.tensors([local_of(param) for param in group["params"]]))
            given = [gradient_of(param) for param in group["params"]]
            grads.append(made.tensors(given if scale is None else [grad / scale.to(grad.device) for grad in given]))
            settings.append(self._settings(made, group))
        makes, rates, states = zip(*[(made.make, made.rate, with_counts(made)) for made in self._groups], strict=True)
        counts = self._run(makes, rates, tuple(settings), params, grads, states, None if skip is None else skip > 0)
        keep_counts(self._groups, counts)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells a grad scaler to hand over ``grad_scale`` and ``found_inf``, and to call `step` in any case."""
        return True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Multiply all gradients by one number, so that their norm over all ranks is at most `max_norm`. Every rank calls.

        Replicas count once, padding never. One all-reduce of 16 bytes (of an all-gather, for the largest element), over
        the ranks that step together: those of the buffers, of owner layouts, of DTensors, or ``mesh=`` of the optimizer.

        Args:
            max_norm: a positive number.
            norm_type: 2, or ``math.inf`` for the largest element.

        Returns:
            The norm before: 0-D, float64, alike on all ranks.

        Raises:
            ValueError: on another number; or if nothing tells which ranks step together.
        """
        return clip_gradients(self._groups, self.param_groups, self._mesh, max_norm, norm_type)

    def over_all_ranks(self, number: torch.Tensor) -> torch.Tensor:
        """The sum of a 0-D number over the ranks that step together."""
        return decide_over(self._groups, self.param_groups, self._mesh, number)

    def _several_ranks(self) -> bool:
        return number_of_ranks() > 1 and (self._mesh is None or self._mesh.size() > 1)

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter number and name, as `torch.optim.Optimizer` gives it.

        Of a flat buffer that is cut, this rank's part of each tensor is wrapped in a `BoxTensor`, which
        `torch.distributed.checkpoint` saves and loads as a part of the whole tensor, on any number of ranks. So is that of
        a bare shard of which the transformation's owner layout tells; others beside it are refused there.
        """
        return with_boxes(super().state_dict(), self._groups, self._indices)

    @property
    def states(self) -> tuple[Any, ...]:
        """The states of the groups' transformations: what `mfsdp_func.checkpoint.save` takes, with the parameters beside it.

        Tensors of buffers go by ``(group, index)``, of which ``names=`` makes names; see `load_states`.
        """
        return tuple([made.state for made in self._groups])

    @torch.no_grad()
    def load_states(self, states: Any) -> None:
        """Copy states, such as `mfsdp_func.checkpoint.load` returns, into those of this optimizer.

        Raises:
            ValueError: if they are of another structure or shape; nothing is copied then.
        """
        own, structure = pytree.tree_flatten(self.states)
        new, given = pytree.tree_flatten(tuple(states))
        if given != structure or [tensor.shape for tensor in own] != [tensor.shape for tensor in new]:
            raise ValueError(
                "TorchOptimizer.load_states: the states are of another structure or shape than those of this optimizer; load"
                ' them like its own: checkpoint.load(path, {..., "optimizer": optimizer.states})'
            )
        for tensor, value in zip(own, new, strict=True):
            tensor.copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, into the tensors of `state`, which stay the same objects.

        Raises:
            KeyError: if a parameter lacks a tensor of its state.
            ValueError: if a tensor has another shape, or groups differ; see `torch.optim.Optimizer.load_state_dict`.
        """
        own, given = dict(self.state), dict[str, Any]()

        def adopt(_: Any) -> None:
            self.state.clear()
            self.state.update(own)
            params = [param for group in self.param_groups for param in group["params"]]
            copy_state(own, params, given)

        # Values are taken from here: torch would cast all but "step" to the dtype of the parameter.
        first = self.register_load_state_dict_pre_hook(lambda _, state: given.update(state))
        last = self.register_load_state_dict_post_hook(adopt, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            first.remove()
            last.remove()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_make": self._make, "_groups": self._groups, "_mesh": self._mesh, "_compile": self._compile}
        return super().__getstate__() | own | {"_indices": self._indices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_compile" in state:
            self._run = compiled_step(self._compile)
            _ALL.add(self)

    def _check_gradients(self) -> None:
        """Raise where this rank would leave its peers alone in an exchange."""
        missing = [
            f"{key!r} of group {n}"
            for n, (made, group) in enumerate(zip(self._groups, self.param_groups, strict=True))
            for key, param in zip(made.keys, group["params"], strict=True)
            if param.grad is None and local_of(param).numel()
        ]
        if not missing:
            return
        where = "" if self._mesh is None else f" on rank {self._mesh.rank}"
        error = RuntimeError(
            f"TorchOptimizer.step: no gradient{where} for parameter {missing[0]} ({len(missing)} missing in all). Every"
            " rank takes part in every step, with all that it holds, else its peers wait for it: let the loss depend on"
            " all parameters, or zero_grad(set_to_none=False), or leave out the parameter on all ranks"
        )
        if self._mesh is not None and checking():
            report_fault(carrier_of(self._mesh), self._mesh, "TorchOptimizer.step", error)
        raise error


def storages_written_in_place() -> set[int]:
    """The storages that steps of living `TorchOptimizer`s write into: parameters and states."""
    found: set[int] = set()
    for optimizer in _ALL:
        params = (param for group in optimizer.param_groups for param in group["params"])
        leaves = pytree.tree_leaves([made.state for made in optimizer._groups])
        found |= {local_of(tensor).untyped_storage()._cdata for tensor in (*params, *leaves)}
    return found


_ALL: WeakSet["TorchOptimizer"] = WeakSet()
