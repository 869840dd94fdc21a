"""The parameters of a sharded module: which are trained, which are sharded, and how they come in and go out."""

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mfsdp_func.effects.torch_internals import is_transformed
from mfsdp_func.fsdp.absent import AbsentParameter
from mfsdp_func.fsdp.arrangement import Arrangement
from mfsdp_func.fsdp.compiled import register
from mfsdp_func.fsdp.freezing import frozen_names, moved_to, named_parameters, with_frozen
from mfsdp_func.fsdp.grouping import Group, ParameterNames, Places, Unit
from mfsdp_func.fsdp.interop import from_dtensors, to_dtensors
from mfsdp_func.fsdp.param_group import ParamGroup
from mfsdp_func.fsdp.passes import Params
from mfsdp_func.fsdp.state import (
    changed_by_hooks,
    full_parameters,
    loaded,
    persistent_buffers,
    renamed_by_hooks,
    tell_asked,
    tell_loaded,
    whole_parameters,
)
from mfsdp_func.operations.dbuffer import DBuffer


class ShardedParameters:
    """What `ShardedModule` is apart from running.

    Attributes:
        frozen_params: buffers of parameters that are not trained; constants of `apply`.
    """

    def __init__(self, arrangement: Arrangement, frozen_params: Params, device_mesh: DeviceMesh | None) -> None:
        self._base = self._arrangement = arrangement
        self.frozen_params = dict(frozen_params)
        self._device_mesh = device_mesh

    def _hold(self, skeleton: nn.Module) -> None:
        """Take the module of the parameters, and an identity of one's own."""
        self._skeleton = skeleton
        first = dict.fromkeys(self._arrangement.ignored.values())
        self._ignored: dict[str, torch.Tensor] = {name: skeleton.get_parameter(name) for name in first}
        self._renew()

    def _renew(self) -> None:
        """Take another identity: what is compiled is of the old one."""
        self._key = uuid.uuid4().hex
        register(self._key, self)

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
        self._renew()
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
            The modules' own hooks on loading run, those before on a copy of the dict.

        Raises:
            ValueError: on a name that is unknown, or another shape.
            TypeError: on another dtype. In both cases before anything has changed.
        """
        sharded_params, _ = self._split(sharded_params)
        others = {**self.named_buffers(), **{n: self._ignored[first] for n, first in self._arrangement.ignored.items()}}
        state_dict = renamed_by_hooks(self._skeleton, state_dict)
        made = loaded(self._arrangement, {**sharded_params, **self.frozen_params}, others, state_dict, cast=cast)
        self.frozen_params |= {key: made[key] for key in self.frozen_params}
        tell_loaded(self._skeleton)
        return {key: made[key] for key in sharded_params}

    def state_dict(self, sharded_params: Params, whole: bool = False) -> dict[str, torch.Tensor]:
        """All parameters and persistent module buffers by name.

        Args:
            sharded_params: the trainable parameters.
            whole: whether to give whole tensors, on the first rank of the mesh alone (the others get an empty dict); else
                parameters are DTensors, see `to_dtensors`.

        Effects: every rank calls. Whole tensors are gathered to that rank one at a time. The modules' own hooks on
        state dicts run where there is one.
        """
        sharded_params, ignored = self._split(sharded_params)
        tell_asked(self._skeleton)
        copies = {name: ignored[first].detach().clone() for name, first in self._arrangement.ignored.items()}
        others = {**copies, **persistent_buffers(self._skeleton)}
        if not whole:
            return changed_by_hooks(self._skeleton, {**self.to_dtensors(sharded_params), **others})
        found = whole_parameters(self._arrangement, {**sharded_params, **self.frozen_params})
        return changed_by_hooks(self._skeleton, {**found, **others}) if found else {}

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """The module's own buffers, such as running statistics: whole on every rank, by qualified name."""
        return dict(self._skeleton.named_buffers())

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
