"""Different transformations, or none, for different tensors of one dict."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.views import has_buffers, joined, shapes_of, tensors_of
from mfsdp_func.optim.facts import NOWHERE, Count, Facts, Needs, Where
from mfsdp_func.optim.transformation import GradientTransformation, needs_of, refuse_count, run_part

Mask: TypeAlias = Mapping[Any, bool] | Callable[[dict[Any, torch.Tensor]], Mapping[Any, bool]]
"""Which tensors: a bool per key, or a function from tensors without memory (of full shape, by key) to such a dict.

Keys are those of the dict; of the tensors in a dict of buffers, ``(name, index)``, or ``name`` for all of a buffer.
"""


class MaskedState(NamedTuple):
    """State of `masked`."""

    inner_state: Any
    """Of the tensors that the mask chooses."""


def masked(inner: GradientTransformation[Any], mask: Mask) -> GradientTransformation[MaskedState]:
    """Apply `inner` to the tensors that a mask chooses; updates of the others pass as they are.

    What `inner` decides for all ranks, such as a clip, it decides from its own tensors.

    Raises:
        KeyError: in `init` and `update`, if the mask leaves out a tensor, or names one that a buffer does not have.

    >>> from mfsdp_func.optim import scale
    >>> optimizer = masked(scale(-1.0), lambda params: {key: param.dim() > 1 for key, param in params.items()})
    >>> params = {"w": torch.ones(1, 2), "b": torch.ones(2)}
    >>> optimizer.update(params, optimizer.init(params), params)[0]
    {'w': tensor([[-1., -1.]]), 'b': tensor([1., 1.])}
    """
    asks = inner.needs.facts or inner.needs.count
    needs = Needs(count=asks, where=inner.needs.where, host_count=inner.needs.host_count)

    def chosen(tree: Any, params: Any) -> dict[Any, torch.Tensor]:
        shares = choose(mask, params)
        return {key: tensor for key, tensor in tensors_of(tree).items() if shares[key]}

    def init(params: Any) -> MaskedState:
        return MaskedState(inner.init(chosen(params, params)))

    def update(
        updates: Any,
        state: MaskedState,
        params: Any,
        *,
        facts: Facts | None = None,
        count: Count | None = None,
        where: Where = NOWHERE,
    ) -> tuple[Any, MaskedState]:
        refuse_count("masked", needs, count)
        own = chosen(updates, params), state.inner_state, chosen(params, params)
        some, new = run_part(inner, *own, None, count, where + where_of(params))
        return joined(tensors_of(updates) | some, updates), MaskedState(new)

    whole = inner.whole
    if whole is True and isinstance(mask, Mapping):
        whole = frozenset([key for key, share in mask.items() if share])
    return GradientTransformation(init, update, whole, needs)


def partition(
    *parts: tuple[Iterable[Hashable], GradientTransformation[Any]],
) -> GradientTransformation[tuple[Any, ...]]:
    """One transformation for a dict of tensors or buffers, each part of its keys handled by one of its own.

    A rank may hold tensors of some keys only; every part is called on every rank. The state is the tuple of the
    parts' states. One buffer may serve several parts: of a dict of buffers, keys are ``(name, index)``, or ``name`` for
    all tensors of a buffer; of a single buffer, the index.

    Args:
        parts: the keys of a part, and its transformation.

    Raises:
        ValueError: if two parts claim one key.
        KeyError: in `init` and `update`, on a tensor that no part claims, or for which its part returns no update.
    """
    claims = [frozenset(keys) for keys, _ in parts]
    _check_claims(claims)
    transformations = [part for _, part in parts]
    inner = needs_of(transformations)
    needs = Needs(count=inner.facts or inner.count, where=inner.where, host_count=inner.host_count)

    def split(tensors: Mapping[Any, torch.Tensor]) -> list[dict[Any, torch.Tensor]]:
        owns: list[dict[Any, torch.Tensor]] = [{} for _ in claims]
        for key, tensor in tensors.items():
            claimed = [n for n, claim in enumerate(claims) if covers(claim, key)]
            if not claimed:
                raise KeyError(f"partition: no part claims tensor {key!r}; list its key in one of the parts")
            owns[claimed[0]][key] = tensor
        return owns

    def init(params: Any) -> tuple[Any, ...]:
        own = split(tensors_of(params))
        return tuple([part.init(some) for part, some in zip(transformations, own, strict=True)])

    def update(
        grads: Any,
        state: tuple[Any, ...],
        params: Any,
        *,
        facts: Facts | None = None,
        count: Count | None = None,
        where: Where = NOWHERE,
    ) -> tuple[Any, tuple[Any, ...]]:
        refuse_count("partition", needs, count)
        known = where + where_of(params)
        updates: dict[Any, torch.Tensor] = {}
        states: list[Any] = []
        given, own = split(tensors_of(grads)), split(tensors_of(params))
        for part, some_grads, old, some in zip(transformations, given, state, own, strict=True):
            results, new = run_part(part, some_grads, old, some, None, count, known)
            updates.update(results)
            states.append(new)
        for key in tensors_of(params) if has_buffers(params) else params:
            if key not in updates:
                raise KeyError(
                    f"partition: the part of tensor {key!r} has no update for it; does its owner layout have it?"
                )
        return joined(updates, params), tuple(states)

    keys: frozenset[Any] = frozenset()
    for claim, part in zip(claims, transformations, strict=True):
        keys = keys | (claim if part.whole is True else part.whole or frozenset())
    return GradientTransformation(init, update, keys, needs)


def covers(claim: frozenset[Any], key: Any) -> bool:
    """Whether a set of keys has a tensor: by its key, or by the name of its buffer."""
    return key in claim or (isinstance(key, tuple) and len(key) == 2 and key[0] in claim)


def choose(mask: Mask, params: Any) -> dict[Any, bool]:
    """A bool for every tensor of `params`, by the keys of `tensors_of`.

    Raises:
        KeyError: see `masked`.
    """
    shapes = shapes_of(params)
    given = mask({key: torch.empty(shape, device="meta") for key, shape in shapes.items()}) if callable(mask) else mask
    result: dict[Any, bool] = {}
    for key in shapes:
        if key in given:
            result[key] = bool(given[key])
        elif isinstance(key, tuple) and len(key) == 2 and key[0] in given:
            result[key] = bool(given[key[0]])
        else:
            raise KeyError(f"mask: tensor {key!r} has no entry; give True or False for every tensor")
    if has_buffers(params):
        for key in given:
            if key not in result and not (isinstance(params, Mapping) and key in params):
                raise KeyError(f"mask: there is no tensor {key!r}; keys are {list(shapes)[:3]} and so on")
    return result


def where_of(tree: Any) -> Where:
    """The buffers of which `tensors_of` makes tensors."""
    if isinstance(tree, DBuffer):
        return Where(specs=((None, tree.spec),))
    if not isinstance(tree, Mapping):
        return NOWHERE
    specs: list[Any] = [(name, leaf.spec) for name, leaf in tree.items() if isinstance(leaf, DBuffer)]
    return Where(specs=tuple(specs))


def _check_claims(claims: list[frozenset[Any]]) -> None:
    for n, claim in enumerate(claims):
        for other in claims[n + 1 :]:
            if [key for key in claim if covers(other, key)] or [key for key in other if covers(claim, key)]:
                raise ValueError("partition: two parts claim the same key; give each tensor to one transformation")
