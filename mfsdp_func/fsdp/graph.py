"""The graph of one run of a unit: built in the forward pass, kept without its parameters, differentiated with them.

What autograd saves of a parameter is told by its storage, and taken from the gather of the backward pass. So the first
gather's memory is free as soon as the unit has run, and nothing is computed twice. In a `Function`'s forward no
transform is active, so saved-tensor hooks, which `torch.func` and tracing forbid or ignore, are right there.
"""

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from mfsdp_func.fsdp.torch_internals import (
    hooks_above,
    hooks_allowed,
    negative_view,
    storage_of,
    storages_of,
    version_of,
    versions_of,
)
from mfsdp_func.fsdp.watch import Watch, changed_in_place, written
from mfsdp_func.operations.dbuffer import DBuffer

_LOCAL, _DTYPE, _ITEMSIZE = attrgetter("local_buffer"), attrgetter("dtype"), attrgetter("itemsize")
_DATA, _REQUIRES_GRAD = attrgetter("data"), attrgetter("requires_grad")


class _OfParameter:
    """What autograd saved of a parameter: where it lies in the gathered buffer of its group."""

    __slots__ = ("conj", "dtype", "group", "neg", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor, group: int, start: Any) -> None:
        self.group, self.dtype = group, tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset() * tensor.itemsize - start
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()

    def taken_from(self, flat: torch.Tensor) -> torch.Tensor:
        first = flat.storage_offset() * flat.itemsize + self.offset
        if self.dtype == flat.dtype:
            tensor = flat.as_strided(self.size, self.stride, first // flat.itemsize)
        else:
            tensor = torch.empty(0, dtype=self.dtype, device=flat.device)
            tensor.set_(flat.untyped_storage(), first // self.dtype.itemsize, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return negative_view(tensor) if self.neg else tensor


class _Activation:
    """What autograd saved of anything else, and how often it had been written into by then."""

    __slots__ = ("__weakref__", "counter", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, version_of(tensor)
        self.counter: torch.Tensor | None = None

    def settle(self, outside: Mapping[int, torch.Tensor]) -> None:
        """From now on only what others have too can be written into. Lets go of the tensor that it is a view of."""
        written = version_of(self.tensor) != self.version
        shared = outside.get(storage_of(self.tensor))
        self.counter = shared
        self.tensor = self.tensor.data
        self.version = -1 if written else 0 if shared is None else version_of(shared)

    def taken(self, label: str) -> torch.Tensor:
        if self.version < 0 or (self.counter is not None and version_of(self.counter) != self.version):
            raise RuntimeError(
                f"unit {label!r}: one of the variables needed for gradient computation has been modified by an inplace"
                f" operation: a {tuple(self.tensor.shape)} of {self.tensor.dtype}; write into a clone of it"
            )
        return self.tensor


class _Packed:
    """What a caller's hooks made of anything else."""

    __slots__ = ("__weakref__", "packed", "tensor")

    def __init__(self, packed: Any) -> None:
        self.packed, self.tensor = packed, None


class _Saved:
    """What the unit's saved-tensor hooks know. It knows nothing of the graph, which holds the hooks."""

    def __init__(self, label: str, wholes: Sequence[DBuffer], *, traced: bool) -> None:
        self._label, self._traced = label, traced
        self.flats = [*map(_LOCAL, wholes)]
        self.groups = dict(zip(storages_of(self.flats), range(len(self.flats)), strict=True))
        self._starts = [*map(operator.mul, map(torch.Tensor.storage_offset, self.flats), map(_ITEMSIZE, self.flats))]
        self._dtypes = [*map(_DTYPE, self.flats)]
        self._above: Any = hooks_above()
        self._entries: list[weakref.ref[_Activation]] = []
        self._packed: list[weakref.ref[_Packed]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Pass parameters by, and give the rest to the caller's hooks."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        group = self.groups.get(storage_of(tensor))
        if group is not None and (not self._traced or tensor.dtype == self._dtypes[group]):
            return _OfParameter(tensor, group, self._starts[group])
        if self._above is not None:
            packed = _Packed(self._above[0](tensor if self._traced else tensor.data))
            self._packed.append(weakref.ref(packed))
            return packed
        if self._traced:
            return tensor
        saved = _Activation(tensor)
        self._entries.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _OfParameter):
            return saved.taken_from(self.flats[saved.group])
        if isinstance(saved, _Packed):
            tensor, saved.tensor = saved.tensor, None
            return self._above[1](saved.packed) if tensor is None else tensor
        return saved.taken(self._label) if isinstance(saved, _Activation) else saved

    def unpack(self) -> None:
        """Ask the caller's hooks for everything: before autograd enters the graph, where they would not know the pass.

        Activation checkpointing recomputes once for each pass of autograd.
        """
        for ref in self._packed:
            if (saved := ref()) is not None:
                saved.tensor = self._above[1](saved.packed)

    def settle(self, outside: Sequence[torch.Tensor]) -> None:
        """See `_Activation.settle`."""
        storages = dict(zip(storages_of(outside), outside, strict=True))
        for ref in self._entries:
            if (saved := ref()) is not None:
                saved.settle(storages)
        self._entries = []


class UnitGraph:
    """The graph of one run of a unit.

    Args:
        label: the unit's name.
        names: of the parameters of each group.
        wholes: the gathered buffers, one for each group.
        params: the parameters of each group, as views of them.
        wanted: for each group, whether gradients of its parameters may be asked for.
        inputs: tensors that the unit computes with.
        wanted_inputs: for each of them, whether its gradient may be asked for.
        traced: whether a compiler looks on.
    """

    def __init__(
        self,
        label: str,
        names: Sequence[Sequence[str]],
        wholes: Sequence[DBuffer],
        params: Sequence[Sequence[torch.Tensor]],
        wanted: Sequence[bool],
        inputs: Sequence[torch.Tensor],
        wanted_inputs: Sequence[bool],
        *,
        traced: bool,
    ) -> None:
        self._label, self._traced, self._names = label, traced, names
        self.leaves = [
            [_leaf(param, needed, traced) for param in group] for group, needed in zip(params, wanted, strict=True)
        ]
        self.inputs = [
            tensor.detach().requires_grad_() if needed else tensor.detach()
            for tensor, needed in zip(inputs, wanted_inputs, strict=True)
        ]
        self._outputs: list[GradientEdge | None] = []
        self.carries: tuple[bool, ...] = ()
        """Of each output, whether it depends on what is wanted; known once it has run."""
        self._saved = _Saved(label, wholes, traced=traced)

    def run(
        self,
        compute: Callable[[Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor]], list[torch.Tensor]],
        outside: Sequence[torch.Tensor],
        *,
        watched: bool,
    ) -> list[torch.Tensor]:
        """The unit's outputs, without a graph; it stays here. Parameters are there until `empty` is called.

        Args:
            compute: gives the outputs.
            outside: other tensors that the unit may have saved, and others may write into.
            watched: whether to look on at each operation; compiled code would not run then.

        Raises:
            Escape: if a tensor enters or leaves other than as an argument or an output.
            RuntimeError: if the unit writes into a parameter.
        """
        names, leaves = [*chain(*self._names)], [*chain(*self.leaves)]
        watch = None if self._traced else Watch(self._label, names, leaves, self.inputs)
        versions = versions_of(self.inputs)
        with torch.enable_grad(), hooks_allowed(), self._saved.hooks():
            try:
                with watch if watch is not None and watched else nullcontext():
                    outputs = compute(self.leaves, self.inputs)
            except RuntimeError as error:
                if "leaf Variable that requires grad is being used in an in-place operation" in str(error):
                    raise changed_in_place(self._label) from error
                raise
            if watch is not None:
                if any(counts := versions_of(leaves)):
                    raise written(self._label, [*compress(names, counts)])
                if versions != versions_of(self.inputs):
                    raise changed_in_place(self._label)
                watch.check_graph(outputs)
            # An output may be an argument, or an alias of one or of a parameter: Functions return new tensors.
            own = {*self._saved.groups, *storages_of(self.inputs)}
            for n, storage in enumerate(storages_of(outputs)):
                if storage in own:
                    outputs[n] = outputs[n].clone()
        self.carries = (*map(_REQUIRES_GRAD, outputs),)
        self._outputs = [None] * len(outputs)
        for n in compress(range(len(outputs)), self.carries):
            self._outputs[n] = get_gradient_edge(outputs[n])
        # A result will hold the node that holds this graph; what counts the writes into it must not hold the result.
        plain = [*map(torch.Tensor.detach if self._traced else _DATA, outputs)]
        outputs.clear()
        self._saved.settle([*outside, *self.inputs, *plain])
        results = plain if self._traced else [*map(torch.Tensor.detach, plain)]
        if watch is not None:
            watch.check_alive()
        return results

    def empty(self) -> None:
        """Let go of the memory of parameters and inputs. Whoever reads one of them now, reads NaN."""
        for leaf in () if self._traced else chain(*self.leaves, self.inputs):
            value = torch.nan if leaf.is_floating_point() or leaf.is_complex() else 0
            leaf.data = torch.full((), value, dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
        self._saved.flats = []

    def fill(
        self, wholes: Sequence[DBuffer], params: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Have them again."""
        if not self._traced:
            for leaf, value in zip(self.inputs, inputs, strict=True):
                leaf.data = value.detach()
        self._saved.flats = [*map(_LOCAL, wholes)]
        for leaf, value in () if self._traced else zip(chain(*self.leaves), chain(*params), strict=True):
            leaf.data = value

    def differentiate(
        self,
        cotangents: Sequence[torch.Tensor | None],
        groups: Sequence[bool],
        inputs: Sequence[bool],
        *,
        keep: bool,
        placed: Callable[[Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor]], AbstractContextManager[None]],
    ) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        """Gradients of the parameters of some groups, and of some inputs; frees activations on the way.

        Args:
            cotangents: of all outputs; None where nobody used one.
            groups: which groups are asked for.
            inputs: which inputs are.
            keep: whether the graph shall serve again.
            placed: puts parameters and inputs into the module, for what runs again inside (activation checkpointing).
        """
        used: list[GradientEdge] = []
        given: list[torch.Tensor] = []
        for edge, cotangent in zip(self._outputs, cotangents, strict=True):
            if edge is not None and cotangent is not None:
                used.append(edge)
                given.append(cotangent)
        asked = [*compress(self.leaves, groups)]
        wanted = [*chain(*asked), *compress(self.inputs, inputs)]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if used and wanted:
            self._saved.unpack()
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(hooks_allowed())
                if not self._traced:
                    stack.enter_context(placed(self.leaves, self.inputs))
                found = torch.autograd.grad(
                    used,
                    wanted,
                    given,
                    retain_graph=keep,
                    allow_unused=True,
                )
        ids = {*map(id, given)}
        each: list[torch.Tensor] = []
        for leaf, gradient in zip(wanted, found, strict=True):
            new = torch.zeros_like(leaf) if gradient is None else gradient
            each.append(new.clone() if id(new) in ids else new)
        of_groups: list[list[torch.Tensor]] = []
        for group in asked:
            of_groups.append(each[: len(group)])
            del each[: len(group)]
        return of_groups, each


def _leaf(param: torch.Tensor, wanted: bool, traced: bool) -> torch.Tensor:
    # `data` counts writes for each parameter apart; a trace has no such counters.
    leaf = param.detach() if traced else (param.clone() if param.is_inference() else param).data
    return leaf.requires_grad_() if wanted and (leaf.is_floating_point() or leaf.is_complex()) else leaf
