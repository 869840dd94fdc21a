"""The pure `apply` of `fully_shard`: a module's forward, in which each unit gathers its parameters while it runs."""

import copy
import functools
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mfsdp_func.effects.torch_internals import is_transformed
from mfsdp_func.fsdp.absent import AbsentParameter
from mfsdp_func.fsdp.arrangement import Arrangement
from mfsdp_func.fsdp.compiled import call_in_graph, register
from mfsdp_func.fsdp.forward import Forward
from mfsdp_func.fsdp.freezing import frozen_names, moved_to, named_parameters, with_frozen
from mfsdp_func.fsdp.grouping import Group, ParameterNames, Places, Unit
from mfsdp_func.fsdp.guards import PlainState
from mfsdp_func.fsdp.interop import from_dtensors, to_dtensors
from mfsdp_func.fsdp.param_group import GatherCache, ParamGroup
from mfsdp_func.fsdp.passes import Params, Pass, cast_floats, pass_of_backward
from mfsdp_func.fsdp.state import full_parameters, loaded, persistent_buffers, whole_parameters
from mfsdp_func.fsdp.table import table
from mfsdp_func.fsdp.torch_internals import hooks_allowed
from mfsdp_func.operations.dbuffer import DBuffer


class ShardedModule:
    """A module as a pure function of its sharded parameters: ``apply(sharded_params, *args, **kwargs)``.

    Args and results are those of the module's forward. Every rank of the mesh calls, each with its own batch; the
    gradient of `sharded_params` is that of the mean over ranks of their losses, sharded like the parameters.

    The one state is that of module buffers: running statistics change as they do in the module, on each rank by its
    own batch.

    Attributes:
        frozen_params: buffers of parameters that are not trained; constants of `apply`.
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
        self._base = self._arrangement = arrangement
        self.frozen_params = dict(frozen_params)
        self._device_mesh = device_mesh
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

    @property
    def units(self) -> tuple[Unit, ...]:
        """Which modules gather their parameters while they run."""
        return self._arrangement.units

    @property
    def groups(self) -> Mapping[str, Group]:
        """Which parameters share a buffer."""
        return self._arrangement.groups

    @property
    def param_groups(self) -> Mapping[str, ParamGroup]:
        """How each group lies on the mesh, by its key."""
        return self._arrangement.param_groups

    @property
    def places(self) -> Places:
        """Every name of a parameter (tied ones have several) -> its group and its index there."""
        return self._arrangement.places

    @property
    def names(self) -> ParameterNames:
        """Key of a group -> the first name of each of its parameters, by index in the buffer; see `ParameterNames`."""
        return self._arrangement.names

    @property
    def ignored_params(self) -> dict[str, torch.Tensor]:
        """Parameters that are whole on every rank, by their first names; see `FsdpContext.ignored`.

        They are leaves of their own: `backward()` leaves this rank's gradient in their `grad`. For `torch.func`, pass
        them among the parameters, ``apply(params | apply.ignored_params, ...)``, or others in their places; left out,
        they are constants. Nobody averages their gradients.
        """
        return dict(self._ignored)

    def _own(self, skeleton: nn.Module) -> None:
        """Take a module as one's own, with an identity of one's own."""
        self._skeleton = skeleton
        self._ignored = {
            name: skeleton.get_parameter(name) for name in dict.fromkeys(self._arrangement.ignored.values())
        }
        self._key = uuid.uuid4().hex
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
        register(self._key, self)
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

    def freeze(self, sharded_params: Params, names: Iterable[str]) -> dict[str, DBuffer]:
        """Train some parameters no longer: no gradient of theirs is computed or reduced, and no optimizer sees them.

        Nothing is sharded anew and nothing is communicated: every rank keeps its rows. A buffer of which only some
        parameters are frozen becomes two; the frozen one, like a buffer that is frozen whole, moves to `frozen_params`.
        Optimizer states of the buffers that change have to be made anew. What was compiled is compiled again.

        Args:
            sharded_params: the trainable parameters, which `apply` takes no longer.
            names: of parameters, or of modules for all parameters inside. Every rank gives the same.

        Returns:
            The parameters that are still trained, in new buffers where these have changed, without a gradient history.

        Raises:
            ValueError: on an unknown name, or buffers that are not those of `apply`.
        """
        return self._with_frozen(sharded_params, lambda frozen: frozen | self._named(names, "apply.freeze"))

    def thaw(self, sharded_params: Params, names: Iterable[str]) -> dict[str, DBuffer]:
        """Train parameters that are frozen: by `freeze`, which this undoes, or since `fully_shard`. See `freeze`."""
        return self._with_frozen(sharded_params, lambda frozen: frozen - self._named(names, "apply.thaw"))

    def _named(self, names: Iterable[str], where: str) -> frozenset[str]:
        return named_parameters(self._arrangement, names, where)

    def _with_frozen(
        self, sharded_params: Params, change: Callable[[frozenset[str]], frozenset[str]]
    ) -> dict[str, DBuffer]:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "apply.freeze and apply.thaw change what apply is; call them outside of compiled regions"
            )
        sharded_params, _ = self._split(sharded_params)
        old, new = self._arrangement, with_frozen(self._base, change(frozen_names(self._arrangement)))
        made = moved_to(new, old, {**sharded_params, **self.frozen_params})
        self._arrangement = new
        self.frozen_params = {key: buffer for key, buffer in made.items() if not new.groups[key].trainable}
        frozen = frozen_names(new)
        for param in self._skeleton.parameters():
            if isinstance(param, AbsentParameter):
                param.train(param.parameter_name not in frozen)
        self._key = uuid.uuid4().hex  # what is compiled is of the old one
        register(self._key, self)
        return {key: buffer for key, buffer in made.items() if new.groups[key].trainable}

    def load(self, state_dict: Mapping[str, torch.Tensor], sharded_params: Params, *, cast: bool = False) -> Params:
        """Sharded parameters with the values of a plain state dict, of which each rank reads its own parts.

        Args:
            state_dict: whole tensors (memory-mapped or not) or DTensors, by any name of a parameter or a module buffer;
                some of them, or all. Alike on all ranks.
            sharded_params: values of the others.
            cast: whether other dtypes are converted.

        Returns:
            New buffers for the trainable parameters. Frozen parameters and module buffers change inside `apply`.

        Raises:
            ValueError: on a name that is unknown, or another shape.
            TypeError: on another dtype. In both cases before anything has changed.
        """
        sharded_params, _ = self._split(sharded_params)
        others = {**self.named_buffers(), **{n: self._ignored[first] for n, first in self._arrangement.ignored.items()}}
        made = loaded(self._arrangement, {**sharded_params, **self.frozen_params}, others, state_dict, cast=cast)
        self.frozen_params |= {key: made[key] for key in self.frozen_params}
        return {key: made[key] for key in sharded_params}

    def state_dict(self, sharded_params: Params, whole: bool = False) -> dict[str, torch.Tensor]:
        """All parameters and persistent module buffers by name.

        Args:
            sharded_params: the trainable parameters.
            whole: whether to give whole tensors, on the first rank of the mesh alone (the others get an empty dict); else
                parameters are DTensors, see `to_dtensors`.

        Effects: every rank calls. Whole tensors are gathered to that rank one at a time.
        """
        sharded_params, ignored = self._split(sharded_params)
        copies = {name: ignored[first].detach().clone() for name, first in self._arrangement.ignored.items()}
        others = {**copies, **persistent_buffers(self._skeleton)}
        if not whole:
            return {**self.to_dtensors(sharded_params), **others}
        found = whole_parameters(self._arrangement, {**sharded_params, **self.frozen_params})
        return {**found, **others} if found else {}

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """The module's own buffers, such as running statistics: whole on every rank, by qualified name."""
        return dict(self._skeleton.named_buffers())

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

    def gather_parameters(self, sharded_params: Params) -> dict[str, torch.Tensor]:
        """All parameters in full, by every name (tied ones under each of theirs), on every rank. Communicates."""
        sharded_params, ignored = self._split(sharded_params)
        found = full_parameters(self._arrangement, {**sharded_params, **self.frozen_params})
        return {**found, **{name: ignored[first] for name, first in self._arrangement.ignored.items()}}

    def to_dtensors(self, sharded_params: Params) -> dict[str, DTensor]:
        """All parameters as DTensors, by every name: `Shard(0)` where buffers are sharded, else `Replicate`.

        They lie on the DeviceMesh that was given to `fully_shard`, with the logical shapes of the parameters: what the
        state dict of an FSDP2 model holds. Every rank calls; elements move only where DTensor's chunks are cut
        otherwise.

        Raises:
            NotImplementedError: on a mesh that lists ranks in descending order; see `DBuffer.get_dtensor`.
            RuntimeError: on a mesh without process groups.
        """
        sharded_params, _ = self._split(sharded_params)
        return to_dtensors(self._arrangement, {**sharded_params, **self.frozen_params}, self._device_mesh)

    def from_dtensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, DBuffer]:
        """The inverse of `to_dtensors`: sharded parameters from DTensors on the same mesh.

        Args:
            tensors: every parameter, by any of its names; ``dict(model.named_parameters())`` of an FSDP2 model. Those of
                `ignored_params`, as plain tensors, may be left out.

        Raises:
            ValueError: on names that are unknown or missing, or other shapes, meshes or placements.
            TypeError: on another dtype, or what is no DTensor.

        Effects: every rank calls; communicates like `to_dtensors`. Values of frozen parameters are put into
        `frozen_params`.
        """
        made = from_dtensors(
            self._arrangement, {n: t for n, t in tensors.items() if n not in self._arrangement.ignored}
        )
        with torch.no_grad():
            for name in tensors.keys() & self._arrangement.ignored.keys():
                self._ignored[self._arrangement.ignored[name]].copy_(tensors[name])
        self.frozen_params |= {key: made[key] for key in self.frozen_params}
        return {key: buffer for key, buffer in made.items() if key not in self.frozen_params}

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

    def _split(self, params: Mapping[str, Any], what: str = "sharded_params") -> tuple[Params, dict[str, torch.Tensor]]:
        """Sharded parameters and the others, which may be given with them; checked."""
        sharded, ignored = dict(params), dict[str, torch.Tensor]()
        for name, param in self._ignored.items():
            value = sharded.pop(name, None)
            if value is None:  # a constant for transforms, which know what they are given alone
                value = param.detach() if is_transformed() else param
            if not isinstance(value, torch.Tensor) or isinstance(value, DBuffer):
                raise TypeError(f"apply: {what}[{name!r}] is a {type(value).__name__}, expected a torch.Tensor")
            if value.shape != param.shape or value.dtype != param.dtype:
                raise ValueError(
                    f"apply: {what}[{name!r}] is {tuple(value.shape)} of {value.dtype}, expected {tuple(param.shape)} of"
                    f" {param.dtype}, as in apply.ignored_params"
                )
            ignored[name] = value
        self._arrangement.check(sharded, what)
        return sharded, ignored

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
