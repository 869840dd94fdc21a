"""What compiled code takes for granted of a module's Python state, and how every call looks whether that still holds.

Dynamo does not look into `apply`, so it cannot guard on what the modules inside read. Their plain state comes from here:
one guard, checked by the first code that a compiled function runs.
"""

import enum
import types
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from mfsdp_func.fsdp.torch_internals import Guarded, guard_on_facts

_PLAIN = (
    *(
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        enum.Enum,
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
    ),
    *(torch.dtype, torch.device, torch.memory_format),
)
_GLOBAL_HOOKS: Sequence[dict[Any, Any]] = [
    value for name, value in vars(nn_module).items() if name.startswith("_global_") and isinstance(value, dict)
]
_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What every module has."""


class PlainState(Guarded):
    """The plain state of a module and of all modules inside, as it is whenever somebody asks.

    That is: training flags; the number of hooks of each kind, of attributes, of submodules; and attributes whose values
    are numbers, strings, dtypes, devices, enumerations, functions, None, or tuples of these. Of the others, their types:
    what is inside of containers, closures and other objects is not seen.
    """

    def __init__(self, module: nn.Module) -> None:
        self._spaces = [vars(sub) for sub in module.modules()]
        self._numbers: dict[Hashable, int] = {}
        self._look()

    def number(self) -> int:
        """A number of the present state: the same as long as the state is, or when it is so again."""
        try:
            values = chain.from_iterable([get(space) for get, space in self._plain])
            kinds = map(type, chain.from_iterable([get(space) for get, space in self._others]))
            if (
                [*map(len, self._dicts)] == self._lengths
                and all(map(is_, values, self._values))
                and all(map(is_, kinds, self._kinds))
            ):
                return self._number
        except KeyError:
            pass  # one attribute has gone, and another has come
        self._look()
        return self._number

    def _look(self) -> None:
        inner = [found for space in self._spaces for name, found in space.items() if _is_dict(name, found)]
        self._dicts = [*_GLOBAL_HOOKS, *self._spaces, *inner]
        self._lengths = [*map(len, self._dicts)]
        self._plain: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        self._others: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        names: list[str] = []
        for space in self._spaces:
            for group, wanted in ((self._plain, True), (self._others, False)):
                chosen = [name for name, value in space.items() if name not in _OWN and is_plain(value) is wanted]
                if chosen:  # twice the first, so that there is a tuple of values also where there is but one
                    group.append((itemgetter(chosen[0], *chosen), space))
                names += chosen
        self._values = [value for get, space in self._plain for value in get(space)]
        self._kinds = [type(value) for get, space in self._others for value in get(space)]
        state = *names, *self._lengths, *map(type, self._values), *self._values, *self._kinds
        self._number = self._numbers.setdefault(state, len(self._numbers))


def _is_dict(name: str, value: Any) -> bool:
    return name in _OWN and isinstance(value, dict)


def is_plain(value: Any) -> bool:
    """Whether a value is compared by itself, and not by its type alone."""
    return isinstance(value, _PLAIN) or (type(value) in (tuple, torch.Size) and all(map(is_plain, value)))


guard_on_facts(PlainState, PlainState.number)
