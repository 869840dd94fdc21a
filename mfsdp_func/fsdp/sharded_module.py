"""The pure `apply` of `fully_shard`: a module's forward, in which each unit gathers its parameters while it runs."""

import copy
import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_func.effects.torch_internals import is_transformed
from mfsdp_func.fsdp.absent import AbsentParameter
from mfsdp_func.fsdp.arrangement import Arrangement
from mfsdp_func.fsdp.compiled import call_in_graph
from mfsdp_func.fsdp.forward import Forward
from mfsdp_func.fsdp.guards import PlainState
from mfsdp_func.fsdp.param_group import GatherCache
from mfsdp_func.fsdp.passes import Params, Pass, cast_floats, pass_of_backward
from mfsdp_func.fsdp.sharded_parameters import ShardedParameters
from mfsdp_func.fsdp.table import table
from mfsdp_func.fsdp.torch_internals import hooks_allowed
from mfsdp_func.operations.dbuffer import DBuffer


class ShardedModule(ShardedParameters):
    """A module as a pure function of its sharded parameters: ``apply(sharded_params, *args, **kwargs)``.

    Args and results are those of the module's forward. Every rank of the mesh calls, each with its own batch; the
    gradient of `sharded_params` is that of the mean over ranks of their losses, sharded like the parameters.

    The one state is that of module buffers: running statistics change as they do in the module, on each rank by its
    own batch.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        arrangement: Arrangement,
        frozen_params: Params,
        *,
        prefetch: bool,
        recompute: frozenset[str],
        compiled: frozenset[str],
        compile_options: Mapping[str, Any],
        cast_inputs: bool,
        output_dtype: torch.dtype | None,
        device_mesh: DeviceMesh | None,
    ) -> None:
        super().__init__(arrangement, frozen_params, device_mesh)
        self._recompute = recompute
        self._cast_inputs, self._output_dtype = cast_inputs, output_dtype
        self._cache = GatherCache() if prefetch else None
        self._order: tuple[int, ...] = ()
        self._changing: dict[int, frozenset[str]] = {}
        self._own(skeleton)
        for n, unit in enumerate(self.units):
            if not unit.held:
                sub = skeleton.get_submodule(unit.name)
                options = compile_options if unit.name in compiled else None
                sub.forward = _UnitForward(self, n, sub, options)  # pyright: ignore[reportAttributeAccessIssue]

    def _own(self, skeleton: nn.Module) -> None:
        """Take a module as one's own, with an identity of one's own."""
        self._hold(skeleton)
        self._state = PlainState(skeleton)
        self._hooked = [n for n, sub in skeleton.named_modules() if sub._backward_hooks or sub._backward_pre_hooks]
        self._buffer_places: list[tuple[dict[str, Any], str]] = [
            (sub._buffers, leaf) for sub in skeleton.modules() for leaf, b in sub._buffers.items() if b is not None
        ]
        owners = {key: unit.name for unit in reversed(self.units) for key in unit.groups}
        for param in skeleton.parameters():
            if isinstance(param, AbsentParameter):
                param.unit_name = owners[self.places[param.parameter_name][0]]
                param.find = self._find_held
        self._current: ContextVar[Pass | None] = ContextVar("mfsdp_func_apply", default=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedModule":
        """Another `apply` of the same sharded parameters, with module buffers and modes of its own."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        memo[id(self)] = twin  # the units' forwards refer to it
        twin.frozen_params = {key: DBuffer(b.spec, b.local_buffer.clone()) for key, b in self.frozen_params.items()}
        twin._cache = None if self._cache is None else GatherCache()
        twin._changing = dict(self._changing)
        twin._own(copy.deepcopy(self._skeleton, memo))
        return twin

    def __copy__(self) -> "ShardedModule":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "apply cannot be pickled: it is code over a module, its units and a mesh; save the sharded parameters and"
            " apply.named_buffers(), and call fully_shard again where they are loaded"
        )

    def __call__(self, sharded_params: Params, *args: Any, **kwargs: Any) -> Any:
        """The module's results.

        Raises:
            ValueError: if `sharded_params` are not the buffers that `fully_shard` returned, or others like them.
            TypeError: if one of them is no `DBuffer`, or of another dtype.
            Escape: where it is differentiated, if a tensor enters or leaves a unit other than as an argument or a
                result.
            RuntimeError: if a parameter is used outside of its unit, or written into.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_in_graph("_apply", (sharded_params,), args, kwargs)
        return self._apply(sharded_params, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {type(self._skeleton).__name__}\n{table(self.units, self.groups, self.param_groups)}"

    def train(self, mode: bool = True) -> "ShardedModule":
        """Set the training mode of all modules, as `nn.Module.train` does. Returns itself."""
        self._skeleton.train(mode)
        return self

    def eval(self) -> "ShardedModule":
        """The same as ``train(False)``."""
        return self.train(False)

    def call(self, method: str, sharded_params: Params, *args: Any, **kwargs: Any) -> Any:
        """The results of another method of the module than its forward: ``apply.call("generate", params, tokens)``.

        Units gather their parameters there as in `apply`. Errors: as `apply`, and AttributeError where the module has no
        such method.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_in_graph("_invoke", (sharded_params,), (method, *args), kwargs)
        return self._invoke(sharded_params, method, *args, **kwargs)

    def init_accumulator(self, sharded_params: Params) -> dict[str, DBuffer]:
        """Zeros to add gradients to: a buffer per group, in the reduce dtype, as the `gradient` placements say.

        Along axes that these shard, gradients are reduced in every pass, and a shard is held; along the others
        (``Partial("avg")``, `Replicate`) they are reduced once, by `reduce`, and held whole.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_in_graph("_zeros", (sharded_params,), (), {})
        return self._zeros(sharded_params)

    def _zeros(self, sharded_params: Params) -> dict[str, DBuffer]:
        sharded_params, _ = self._split(sharded_params)
        trainable = {key: group for key, group in self.param_groups.items() if group.trainable}
        return {
            key: DBuffer(
                group.accumulator,
                sharded_params[key].local_buffer.new_zeros(group.accumulator.local_numel, dtype=group.reduce_dtype),
            )
            for key, group in trainable.items()
        }

    def accumulate(self, sharded_params: Params, accumulator: Params, *args: Any, **kwargs: Any) -> Any:
        """Like `apply`, but differentiable in `accumulator` alone: its gradient is reduced only as `init_accumulator` says.

        Add up the gradients of several micro-batches, then reduce what is left:

            zeros = apply.init_accumulator(params)
            gradient = torch.func.grad(lambda zeros: loss(apply.accumulate(params, zeros, batch)))(zeros)
            gradients = apply.reduce(gradient)
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_in_graph("_accumulate", (sharded_params, accumulator), args, kwargs)
        return self._accumulate(sharded_params, accumulator, *args, **kwargs)

    def reduce(self, accumulator: Params) -> dict[str, DBuffer]:
        """The average over all ranks of accumulated gradients, sharded like the parameters. Communicates."""
        if torch.compiler.is_dynamo_compiling():
            reduced = self._call_in_graph("_reduce", (accumulator,), (), {})
        else:
            reduced = self._reduce(accumulator)
        return {key: DBuffer(self.param_groups[key].spec, shard) for key, shard in reduced.items()}

    def _reduce(self, accumulator: Params) -> dict[str, torch.Tensor]:
        self._arrangement.check(accumulator, "accumulator", accumulates=True)
        return {
            key: self.param_groups[key].reduce_accumulated(buffer.local_buffer) for key, buffer in accumulator.items()
        }

    def _call_in_graph(
        self, method: str, trees: Sequence[Params], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        buffers = [*(owner[leaf] for owner, leaf in self._buffer_places), *self._ignored.values()]
        return call_in_graph(method, self._key, self._state, buffers, self.frozen_params, trees, args, kwargs)

    @contextmanager
    def traced(self, buffers: Sequence[torch.Tensor], frozen: Params) -> Generator[None, None, None]:
        """Run as part of a graph, whose inputs are module buffers and parameters that are not sharded, and frozen ones.

        No gather is in flight.
        """
        buffers, whole = buffers[: len(self._buffer_places)], buffers[len(self._buffer_places) :]
        own, self._ignored = self._ignored, dict(zip(self._ignored, whole, strict=True))
        before = [owner[leaf] for owner, leaf in self._buffer_places]
        cache, self._cache = self._cache, None
        kept, self.frozen_params = self.frozen_params, dict(frozen)
        try:
            for (owner, leaf), buffer in zip(self._buffer_places, buffers, strict=True):
                owner[leaf] = buffer
            yield
            for (owner, leaf), buffer in zip(self._buffer_places, buffers, strict=True):
                if owner[leaf] is not buffer:
                    raise RuntimeError(
                        f"apply in a compiled region: the module assigns a new tensor to its buffer {leaf!r}; write"
                        " into the buffer (copy_), or call apply eagerly"
                    )
        finally:
            self._cache, self.frozen_params, self._ignored = cache, kept, own
            for (owner, leaf), buffer in zip(self._buffer_places, before, strict=True):
                owner[leaf] = buffer

    def _invoke(self, sharded_params: Params, method: str, *args: Any, **kwargs: Any) -> Any:
        if not callable(getattr(self._skeleton, method, None)):
            raise AttributeError(f"apply.call: {type(self._skeleton).__name__} has no method {method!r}")
        return self._call(sharded_params, None, args, kwargs, method)

    def _apply(self, sharded_params: Params, *args: Any, **kwargs: Any) -> Any:
        return self._call(sharded_params, None, args, kwargs)

    def _accumulate(self, sharded_params: Params, accumulator: Params, *args: Any, **kwargs: Any) -> Any:
        return self._call(sharded_params, accumulator, args, kwargs)

    def _call(
        self,
        params: Params,
        accumulator: Params | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "__call__",
    ) -> Any:
        if self._hooked and is_transformed():
            raise RuntimeError(
                f"apply under torch.func: module {self._hooked[0]!r} has backward hooks, which torch runs in backward()"
                " alone; remove them, or differentiate by backward()"
            )
        params, ignored = self._split(params)
        if accumulator is not None:
            self._arrangement.check(accumulator, "accumulator", accumulates=True)
        run = Pass(
            self._skeleton,
            self._arrangement,
            {**params, **self.frozen_params},
            ignored,
            accumulator,
            cache=self._cache,
            cast_inputs=self._cast_inputs,
            recompute=self._recompute,
            order=self._order,
            changing=self._changing,
        )
        if self._cache is not None:
            self._cache.drop()
        before = self._current.set(run)
        try:
            with run.held(), hooks_allowed():
                result = getattr(self._skeleton, method)(*args, **kwargs)
        finally:
            self._current.reset(before)
            run.ended = True
        self._order = tuple(run.sequence)
        return result if self._output_dtype is None else cast_floats(result, self._output_dtype)

    def run_unit(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit's own forward as part of the pass that is going on.

        Raises:
            RuntimeError: if there is none.
        """
        run = self._current.get() or pass_of_backward(self._skeleton)
        if run is None:
            raise RuntimeError("this module belongs to fully_shard's apply; call apply(sharded_params, ...) instead")
        return run.run_unit(index, forward, args, kwargs)

    def _find_held(self, name: str) -> torch.Tensor | None:
        """A parameter that is in its place now, or that a pass keeps of which activation checkpointing runs a part again."""
        owner, _, leaf = name.rpartition(".")
        placed = self._skeleton.get_submodule(owner)._parameters[leaf]
        if not isinstance(placed, AbsentParameter):
            return placed
        run = pass_of_backward(self._skeleton)
        return None if run is None else run.find_held(name)


class _UnitForward:
    """Stands in for a unit's forward."""

    def __init__(
        self, owner: ShardedModule, index: int, module: nn.Module, compile_options: Mapping[str, Any] | None
    ) -> None:
        functools.update_wrapper(self, module.forward)  # models look at signatures
        self._owner, self._index = owner, index
        self._forward = Forward(module.forward, compile_options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.run_unit(self._index, self._forward, args, kwargs)
