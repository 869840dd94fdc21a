"""A `torch.optim.Optimizer` over a functional step, for training loops that hold one."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import FunctionType
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mfsdp_func.effects.agreement import checking, report_fault
from mfsdp_func.effects.here import carrier_of
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.optim.transformation import GradientTransformation, apply_updates
from mfsdp_func.values.buffer_spec import BufferSpec, local_part
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh

Make: TypeAlias = Callable[[torch.Tensor], GradientTransformation[Any]]
"""Makes a transformation from its learning rate: ``adamw``, or ``lambda lr: muon(lr, owner_layout=owners)``."""

GroupParams: TypeAlias = DBuffer | Mapping[Hashable, torch.Tensor] | Iterable[torch.Tensor]
"""The parameters of a group: a flat buffer; tensors (or shards) by key; or tensors whose keys are 0, 1, ..."""

_COMPLAINT = "give each parameter group a function from a 0-D learning rate to a transformation, such as optim.adamw"


@dataclass(frozen=True)
class _Group:
    """What a parameter group is to its transformation. All tensors stay the same objects, and change in place."""

    make: Make
    rate: torch.Tensor
    keys: tuple[Hashable, ...]
    spec: BufferSpec | None
    state: Any

    def tensors(self, locals_: list[torch.Tensor]) -> dict[Hashable, torch.Tensor]:
        """This rank's tensors by key, as views of one local tensor per parameter."""
        if self.spec is not None:
            return cast("dict[Hashable, torch.Tensor]", DBuffer(self.spec, locals_[0]).tensor_views())
        return dict(zip(self.keys, locals_, strict=True))


class TorchOptimizer(torch.optim.Optimizer):
    """Runs transformations of this package (or their like) on parameters in place, one per parameter group.

    Every rank calls `step`, also with groups in which it holds nothing (``"params": {}``): owners compute for others.
    Groups, and the transformations that communicate, stand in the same order on all ranks.

    Learning-rate schedulers work: each step makes its transformations anew (in a compiled step while tracing) from a
    tensor that holds the group's ``"lr"``, so that no change of it compiles anything again.

    Parameters and states are written in place; in a compiled step the compiler fuses the writes into the computation
    and needs no second copy of them, which is what buffer donation is for elsewhere. `state` holds, for every
    parameter, tensors under the names of the transformation's state fields (``"momentum"``, ``"step"``; for a flat
    buffer, ``"momentum.3"`` for its tensor 3), as DTensors for a DTensor.

    Args:
        params: parameters of one group, or a list of groups: dicts with "params" (see `GroupParams`), and optionally
            "lr" and "transformation". Shards are those that the transformation expects, and lie in ``.grad`` likewise.
            Of DTensors (FSDP2), the local tensors are meant. Of a `DBuffer`, the local buffer is the parameter
            (call ``requires_grad_`` on it), and the transformation sees the tensors by index.
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
        self._groups: list[_Group] = []
        self._indices: list[dict[str, int]] = []
        _ALL.add(self)
        self._mesh = None if mesh is None else as_mesh(mesh)
        self._compile = compile
        self._run = _compiled(compile)
        super().__init__(_as_groups(params), {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class."""
        group = dict(param_group)
        given: GroupParams = group["params"]
        make = group.pop("transformation", self._make)
        if isinstance(make, GradientTransformation) or not callable(make):
            raise TypeError(f"TorchOptimizer: got {type(make).__name__} as transformation; {_COMPLAINT}")
        named = _by_key(given)
        super().add_param_group(group | {"params": list(named.values())})
        lr = self.param_groups[-1]["lr"]
        if not lr >= 0:
            raise ValueError(f"TorchOptimizer: lr must be a number >= 0, got {lr}")
        locals_ = [_local(param) for param in named.values()]
        rate = torch.zeros((), dtype=torch.float64, device=locals_[0].device if locals_ else None)
        spec = given.spec if isinstance(given, DBuffer) else None
        self._mesh = self._mesh or (spec.mesh if spec else None)
        with torch.no_grad():
            made = _Group(cast("Make", make), rate, tuple(named), spec, None)
            transformation = made.make(rate)
            _refuse_shards(transformation, made.tensors(locals_), spec, named)
            made = replace(made, state=transformation.init(made.tensors(locals_)))
        self._groups.append(made)
        self._indices.append(self._publish(made, list(named.values())))

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
        self._check_gradients()
        params: list[dict[Hashable, torch.Tensor]] = []
        grads: list[dict[Hashable, torch.Tensor]] = []
        for made, group in zip(self._groups, self.param_groups, strict=True):
            made.rate.fill_(group["lr"])
            params.append(made.tensors([_local(param) for param in group["params"]]))
            grads.append(made.tensors([_gradient(param) for param in group["params"]]))
        makes, rates, states = zip(*[(made.make, made.rate, made.state) for made in self._groups], strict=True)
        self._run(makes, rates, params, grads, states)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter number and name, as `torch.optim.Optimizer` gives it.

        Of a flat buffer that is cut, this rank's part of each tensor is wrapped in a `BoxTensor`, which
        `torch.distributed.checkpoint` saves and loads as a part of the whole tensor, on any number of ranks.
        """
        from mfsdp_func.checkpoint.dcp import BoxTensor

        packed = super().state_dict()
        for made, indices, group in zip(self._groups, self._indices, packed["param_groups"], strict=True):
            spec = made.spec
            if spec is None or not spec.is_sharded or group["params"][0] not in packed["state"]:
                continue
            number: int = group["params"][0]
            held = dict(packed["state"][number])
            for name, i in indices.items():
                part = local_part(spec, i)
                if held[name].numel() == part.numel:
                    held[name] = BoxTensor(held[name], spec.layout.tensor_shapes[i], part)
            packed["state"][number] = held
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, into the tensors of `state`, which stay the same objects.

        Raises:
            KeyError: if a parameter lacks a tensor of its state.
            ValueError: if a tensor has another shape, or groups differ; see `torch.optim.Optimizer.load_state_dict`.
        """
        own, given = dict(self.state), dict[str, Any]()
        # Values are taken from here: torch would cast all but "step" to the dtype of the parameter.
        first = self.register_load_state_dict_pre_hook(lambda _, state: given.update(state))
        last = self.register_load_state_dict_post_hook(lambda _: self._adopt(own, given), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            first.remove()
            last.remove()

    @torch.no_grad()
    def _adopt(self, own: dict[torch.Tensor, dict[str, torch.Tensor]], given: dict[str, Any]) -> None:
        """Copy the loaded state into `own`, which becomes the state again."""
        self.state.clear()
        self.state.update(own)
        saved = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, param in zip(saved, params, strict=True):
            for name, tensor in own.get(param, {}).items():
                value = _unwrapped(given["state"].get(number, {}).get(name), tensor)
                if value is None or value.shape != tensor.shape:
                    raise (KeyError if value is None else ValueError)(
                        f"TorchOptimizer.load_state_dict: parameter {number} needs {name!r} of shape"
                        f" {tuple(tensor.shape)}, got {'nothing' if value is None else tuple(value.shape)}; load the"
                        " state of an optimizer with the same transformations and layout"
                    )
                copies.append((_local(tensor), _local(value)))
        for tensor, value in copies:
            tensor.copy_(value)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_make": self._make, "_groups": self._groups, "_mesh": self._mesh, "_compile": self._compile}
        return super().__getstate__() | own | {"_indices": self._indices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_compile" in state:
            self._run = _compiled(self._compile)
            _ALL.add(self)

    def _publish(self, made: _Group, params: list[torch.Tensor]) -> dict[str, int]:
        """Let `state` show the state's tensors, each under the parameters to which it belongs.

        Returns:
            Of a flat buffer, name in the state -> tensor index.
        """
        indices: dict[str, int] = {}
        flat = made.spec is not None
        keys = made.tensors([_local(param) for param in params])
        places = {key: 0 if flat else n for n, key in enumerate(keys)}
        leaves = pytree.tree_flatten_with_path(made.state)[0]
        owners: list[tuple[tuple[Any, ...], int]] = []
        shared: list[tuple[tuple[Any, ...], torch.Tensor]] = []
        for path, leaf in leaves:
            key = next((k.key for k in path if isinstance(k, pytree.MappingKey) and k.key in places), None)
            if key is None:
                shared.append((path, leaf))
                continue
            param = params[places[key]]
            owners.append((path, places[key]))
            name = self._show(param, path, _wrapped(leaf, param), f".{key}" if flat else "")
            if flat:
                indices[name] = cast("int", key)
        for path, leaf in shared:  # it belongs to all parameters whose tensors lie beside or below it
            for n in sorted({n for other, n in owners if other[: len(path) - 1] == path[:-1]}):
                self._show(params[n], path, leaf, "")
        return indices

    def _show(self, param: torch.Tensor, path: tuple[Any, ...], leaf: torch.Tensor, suffix: str) -> str:
        """Name a leaf by its field in the state, and where that is taken, by its whole path."""
        fields = ".".join(key.name for key in path if isinstance(key, pytree.GetAttrKey))
        held = self.state[param]
        short = fields + suffix
        name = short if fields and short not in held else pytree.keystr(path)
        held[name] = leaf
        return name

    def _check_gradients(self) -> None:
        """Raise where this rank would leave its peers alone in an exchange."""
        missing = [
            f"{key!r} of group {n}"
            for n, (made, group) in enumerate(zip(self._groups, self.param_groups, strict=True))
            for key, param in zip(made.keys, group["params"], strict=True)
            if param.grad is None and _local(param).numel()
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


def _advance(
    makes: tuple[Make, ...],
    rates: tuple[torch.Tensor, ...],
    params: list[dict[Hashable, torch.Tensor]],
    grads: list[dict[Hashable, torch.Tensor]],
    states: tuple[Any, ...],
) -> None:
    """One step of every group; writes into `params` and `states`."""
    for make, rate, param, grad, state in zip(makes, rates, params, grads, states, strict=True):
        updates, new_state = make(rate).update(grad, state, param)
        new = pytree.tree_leaves((apply_updates(param, updates), new_state))
        for old, value in zip(pytree.tree_leaves((param, state)), new, strict=True):
            old.copy_(value)


def _compiled(compile: bool | str) -> Callable[..., None]:
    if not compile:
        return _advance
    # Compiled code is kept per code object, at most a few variants of it: each optimizer has a code object of its own.
    own = FunctionType(_advance.__code__.replace(), _advance.__globals__, _advance.__name__)
    backend = compile if isinstance(compile, str) else "inductor"
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend)


def _as_groups(params: GroupParams | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(params, (DBuffer, Mapping, torch.Tensor)):
        return [{"params": params}]
    listed: list[Any] = list(params)
    if listed and all(isinstance(group, Mapping) for group in listed):
        return [dict(group) for group in listed]
    return [{"params": listed}]


def _refuse_shards(
    transformation: GradientTransformation[Any],
    tensors: Mapping[Hashable, torch.Tensor],
    spec: BufferSpec | None,
    params: Mapping[Hashable, torch.Tensor],
) -> None:
    if not transformation.whole:
        return
    for key, tensor in tensors.items():
        if transformation.whole is not True and key not in transformation.whole:
            continue
        whole = spec.layout.tensor_shapes[cast("int", key)] if spec is not None else params[key].shape
        if tensor.shape != whole:
            raise ValueError(
                f"TorchOptimizer: tensor {key!r} is a shard of shape {tuple(tensor.shape)} of {tuple(whole)}, but its"
                " transformation needs whole tensors; give muon an owner layout:"
                " lambda lr: muon(lr, owner_layout=owners)"
            )


def _by_key(given: GroupParams) -> dict[Hashable, torch.Tensor]:
    if isinstance(given, DBuffer):
        return {"local_buffer": given.local_buffer}
    if isinstance(given, Mapping):
        return {**cast("Mapping[Hashable, torch.Tensor]", given)}
    listed: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    pairs: Any = listed if listed and isinstance(listed[0], tuple) else enumerate(listed)
    return dict[Hashable, torch.Tensor](pairs)


def storages_written_in_place() -> set[int]:
    """The storages that steps of living `TorchOptimizer`s write into: parameters and states."""
    found: set[int] = set()
    for optimizer in _ALL:
        params = (param for group in optimizer.param_groups for param in group["params"])
        leaves = pytree.tree_leaves([made.state for made in optimizer._groups])
        found |= {_local(tensor).untyped_storage()._cdata for tensor in (*params, *leaves)}
    return found


_ALL: WeakSet["TorchOptimizer"] = WeakSet()


def _unwrapped(value: Any, own: torch.Tensor) -> Any:
    """What `state_dict` wrapped, in the shape of this rank's part."""
    local = getattr(value, "local", None)
    if local is None or local.numel() != own.numel():
        return value
    return local.view(own.shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _gradient(param: torch.Tensor) -> torch.Tensor:
    if param.grad is None:
        return torch.zeros_like(_local(param))
    if isinstance(param.grad, DTensor) and isinstance(param, DTensor) and param.grad.placements != param.placements:
        raise ValueError(
            f"TorchOptimizer.step: a gradient is {param.grad.placements}, its parameter {param.placements};"
            " redistribute the gradient first"
        )
    return _local(param.grad)


def _wrapped(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """State as checkpoints of DTensors expect it."""
    if not isinstance(param, DTensor) or tensor.shape != _local(param).shape:
        return tensor
    return DTensor.from_local(
        tensor, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
