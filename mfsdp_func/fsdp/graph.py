"""The graph of one run of a unit: built in the forward pass, kept without its parameters, differentiated with them.

What autograd saves of a parameter is told by its storage, and taken from the gather of the backward pass. So the first
gather's memory is free as soon as the unit has run, and nothing is computed twice. In a `Function`'s forward no
transform is active, so saved-tensor hooks, which `torch.func` and tracing forbid or ignore, are right there.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from mfsdp_func.fsdp.torch_internals import hooks_above, hooks_allowed, negative_view, storage_of, version_of
from mfsdp_func.fsdp.watch import Watch, changed_in_place, written
from mfsdp_func.operations.dbuffer import DBuffer


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
        self.flats = [whole.local_buffer for whole in wholes]
        self.groups = {storage_of(flat): n for n, flat in enumerate(self.flats)}
        self._starts = [flat.storage_offset() * flat.itemsize for flat in self.flats]
        self._dtypes = [flat.dtype for flat in self.flats]
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
        storages = {storage_of(tensor): tensor for tensor in outside}
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
        self._saved = _Saved(label, wholes, traced=traced)

    @property
    def carries(self) -> tuple[bool, ...]:
        """Of each output, whether it depends on what is wanted."""
        return tuple(edge is not None for edge in self._outputs)

    def run(
        self,
        compute: Callable[[Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor]], list[torch.Tensor]],
        outside: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The unit's outputs, without a graph; it stays here. Parameters are there until `empty` is called.

        Args:
            compute: gives the outputs.
            outside: other tensors that the unit may have saved, and others may write into.

        Raises:
            Escape: if a tensor enters or leaves other than as an argument or an output.
            RuntimeError: if the unit writes into a parameter.
        """
        flat_names = [name for group in self._names for name in group]
        flat_leaves = [leaf for group in self.leaves for leaf in group]
        pairs = list(zip(flat_names, flat_leaves, strict=True))
        watch = None if self._traced else Watch(self._label, pairs, self.inputs)
        versions = [version_of(tensor) for tensor in self.inputs]
        try:
            with torch.enable_grad(), hooks_allowed(), self._saved.hooks(), watch or nullcontext():
                outputs = compute(self.leaves, self.inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad is being used in an in-place operation" in str(error):
                raise changed_in_place(self._label) from error
            raise
        if watch is not None:
            touched = [n for n, leaf in pairs if version_of(leaf)]
            if touched:
                raise written(self._label, touched)
            if versions != [version_of(tensor) for tensor in self.inputs]:
                raise changed_in_place(self._label)
            watch.check_graph(outputs)
        with torch.enable_grad(), hooks_allowed(), self._saved.hooks():
            # An output may be an argument, or an alias of one or of a parameter: Functions return new tensors.
            storages = {*self._saved.groups, *map(storage_of, self.inputs)}
            outputs = [output.clone() if storage_of(output) in storages else output for output in outputs]
        self._outputs = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        # A result will hold the node that holds this graph; what counts the writes into it must not hold the result.
        plain = [output.detach() if self._traced else output.data for output in outputs]
        del outputs
        self._saved.settle([*outside, *self.inputs, *plain])
        results = plain if self._traced else [output.detach() for output in plain]
        if watch is not None:
            watch.check_alive()
        return results

    def empty(self) -> None:
        """Let go of the memory of parameters and inputs. Whoever reads one of them now, reads NaN."""
        for leaf in [] if self._traced else [*(leaf for group in self.leaves for leaf in group), *self.inputs]:
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
        self._saved.flats = [whole.local_buffer for whole in wholes]
        for group, values in zip([] if self._traced else self.leaves, params, strict=False):
            for leaf, value in zip(group, values, strict=True):
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
        pairs = [
            (edge, cotangent)
            for edge, cotangent in zip(self._outputs, cotangents, strict=True)
            if edge is not None and cotangent is not None
        ]
        asked = [group for group, needed in zip(self.leaves, groups, strict=True) if needed]
        wanted = [leaf for group in asked for leaf in group]
        wanted += [tensor for tensor, needed in zip(self.inputs, inputs, strict=True) if needed]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            self._saved.unpack()
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(hooks_allowed())
                if not self._traced:
                    stack.enter_context(placed(self.leaves, self.inputs))
                found = torch.autograd.grad(
                    [edge for edge, _ in pairs],
                    wanted,
                    [cotangent for _, cotangent in pairs],
                    retain_graph=keep,
                    allow_unused=True,
                )
        given = {id(cotangent) for cotangent in cotangents}
        each = iter(
            torch.zeros_like(leaf) if gradient is None else gradient.clone() if id(gradient) in given else gradient
            for leaf, gradient in zip(wanted, found, strict=True)
        )
        of_groups = [[next(each) for _ in group] for group in asked]
        return of_groups, list(each)


def _leaf(param: torch.Tensor, wanted: bool, traced: bool) -> torch.Tensor:
    # `data` counts writes for each parameter apart; a trace has no such counters.
    leaf = param.detach() if traced else (param.clone() if param.is_inference() else param).data
    return leaf.requires_grad_() if wanted and (leaf.is_floating_point() or leaf.is_complex()) else leaf
