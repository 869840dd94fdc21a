"""Owner compute: `gather` brings whole tensors to their owners, `scatter` brings the owners' results back."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mfsdp_func.move_operator import remember
from mfsdp_func.movement import Options
from mfsdp_func.operation import check_tensors, faults_reported, run, run_traced
from mfsdp_func.owner_planning import GroupOwnerLayout
from mfsdp_func.plan import Plan, gather_plan, scatter_plan
from mfsdp_func.tokens import After, AnyStream, Token, as_tokens


def gather(
    source: Mapping[int, torch.Tensor],
    *,
    owner_layout: GroupOwnerLayout,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    after: After = (),
    stream: AnyStream | None = None,
    async_op: bool = False,
) -> tuple[dict[int, torch.Tensor], Token]:
    """Bring each participating tensor's shards to its owner. Pure; every rank of the mesh calls.

    Args:
        source: tensor index -> this rank's shard, in any shape with the right number of elements, contiguous or not,
            for every participating tensor of which this rank holds an element. Other entries are never read. All
            share one dtype and device, across ranks too.
        owner_layout: who owns what, and where the shards lie.
        dtype: asserts the dtype; where this rank holds nothing but owns something, says it (on CPU it may be left
            out: a holder tells it).
        device: likewise.
        after: tokens of operations to start after; their gradient links are threaded through this one.
        stream: CUDA only: the stream to run on; the token must be waited for.
        async_op: return with work in flight; the token must be waited for before the results are used, and inputs may
            not be changed until then. Ranks wait for their tokens in the same order.

    Returns:
        A new dict, tensor index -> the full tensor in its logical shape, for the tensors that this rank owns, in
        ascending order; and the token. Results never share memory with inputs or with one another (they may share a
        storage). The default leaves nothing to wait for: on CUDA, results are ordered on the current stream.

    Raises:
        KeyError, ValueError, TypeError: before any communication, on an entry missing or of the wrong size, mixed
            dtypes or devices, or a rank outside the mesh.

    Effects: sends each element that is not on its owner once, receives straight into the result; allocates the result
    and, for packed small pieces, at most a few MiB.
    """
    return _run("gather", source, owner_layout, True, (dtype, device), (after, stream, async_op))


def scatter(
    source: Mapping[int, torch.Tensor],
    *,
    owner_layout: GroupOwnerLayout,
    include_own: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    after: After = (),
    stream: AnyStream | None = None,
    async_op: bool = False,
) -> tuple[dict[int, torch.Tensor], Token]:
    """Send each owned tensor's parts back to the ranks that hold them. Pure; the transpose of `gather`.

    Args:
        source: tensor index -> the full result, in any shape with the right number of elements, for every tensor that
            this rank owns. Other entries are never read.
        owner_layout: who owns what, and where the shards lie.
        include_own: whether the result holds this rank's own parts of tensors that it owns.
        dtype: see `gather`; a rank that owns nothing may also learn it from a token in `after`.
        device: likewise.
        after: see `gather`.
        stream: see `gather`.
        async_op: see `gather`.

    Returns:
        A new dict, tensor index -> this rank's part of each participating tensor it holds, in ascending order; and
        the token. A part has shape ``(rows, *shape[1:])`` where no boundary of the tensor splits a row, else it is
        flat, alike on all ranks.

    Raises:
        KeyError, ValueError, TypeError: see `gather`.
    """
    return _run("scatter", source, owner_layout, include_own, (dtype, device), (after, stream, async_op))


class Wiring(NamedTuple):
    """What one rank gives and gets, as constants: tensor indices, and for results their shapes."""

    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    empty: tuple[tuple[int, tuple[int, ...]], ...]
    """Owned tensors without elements: results that nobody sends."""


def plan_of(operation: str, owners: GroupOwnerLayout, include_own: bool = True) -> Plan:
    """The plan of "gather" or "scatter": who sends what to whom. Print it to see a table.

    Raises:
        TypeError: if `owners` is no `GroupOwnerLayout`.
    """
    if not isinstance(owners, GroupOwnerLayout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{operation}: owner_layout must be a GroupOwnerLayout, got {type(owners).__name__}")
    if operation == "gather":
        return gather_plan(owners, owners.name)
    return scatter_plan(owners, owners.name, include_own)


@lru_cache(maxsize=2048)
def wiring_of(plan: Plan, owners: GroupOwnerLayout) -> Wiring:
    """See `Wiring`."""
    empty: list[tuple[int, tuple[int, ...]]] = []
    if plan.operation == "gather":
        me = plan.mesh.shard_index(plan.axes)
        empty = [
            (i, tuple(plan.shapes[i]))
            for i, owner in owners.tensor_to_owner.items()
            if not plan.shapes[i].numel() and plan.mesh.shard_index(plan.axes, owner) == me
        ]
    view = plan.local
    return Wiring(
        tuple(slot.tensor for slot in view.inputs),
        tuple((slot.tensor, slot.shape) for slot in view.outputs),
        tuple(empty),
    )


def _run(
    operation: str,
    source: Mapping[int, torch.Tensor],
    owners: GroupOwnerLayout,
    include_own: bool,
    said: tuple[torch.dtype | None, torch.device | str | None],
    how: tuple[After, AnyStream | None, bool],
) -> tuple[dict[int, torch.Tensor], Token]:
    if torch.compiler.is_compiling():
        return _run_traced(operation, source, owners, include_own, said, how[0])
    plan = plan_of(operation, owners, include_own)
    with faults_reported(plan):
        wiring = wiring_of(plan, owners)
        tokens, device = as_tokens(how[0]), torch.device(said[1]) if said[1] is not None else None
        inputs = given_tensors(plan, wiring, source)
        options = check_tensors(plan, wiring.inputs, inputs, said[0], device, tokens)
    outputs, token = run(plan, options, inputs, tokens, how[1], how[2])
    return _results(wiring, outputs, options), token


def given_tensors(plan: Plan, wiring: Wiring, source: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """The entries of `source` that this rank must give, in the plan's order.

    Raises:
        KeyError: if one is missing.
        TypeError: if `source` is no mapping.
    """
    if not isinstance(source, Mapping):
        raise TypeError(
            f"{plan.label}: source must be a dict, tensor index -> tensor, got {type(source).__name__}; of a DBuffer, pass"
            " buffer.tensor_views()"
        )
    try:
        return [source[i] for i in wiring.inputs]
    except KeyError:
        raise KeyError(_missing_entry(plan, wiring, tuple(source))) from None


def _missing_entry(plan: Plan, wiring: Wiring, given: tuple[int, ...]) -> str:
    missing = [i for i in wiring.inputs if i not in given]
    what = "shards of every participating tensor it holds" if plan.operation == "gather" else "every tensor it owns"
    return (
        f"{plan.label}: source has no entry for tensor {missing[0]} ({len(missing)} missing in all); rank"
        f" {plan.mesh.rank} must give {what}: tensors {_some(wiring.inputs)}, but gave {_some(sorted(given))}"
    )


def _some(items: Sequence[int]) -> str:
    return f"{list(items[:8])}{f' and {len(items) - 8} more' if len(items) > 8 else ''}"


def _results(wiring: Wiring, outputs: Sequence[torch.Tensor], options: Options) -> dict[int, torch.Tensor]:
    results = {i: flat.view(shape) for (i, shape), flat in zip(wiring.outputs, outputs, strict=True)}
    if wiring.empty:
        dtype = outputs[0].dtype if outputs else options.dtype
        results |= {i: torch.empty(shape, dtype=dtype, device=options.device) for i, shape in wiring.empty}
        results = dict(sorted(results.items()))
    return results


# Inside a compiled region: constants come from the key of the owner layout, on which alone the compiled code guards.


@torch.compiler.assume_constant_result
def _constants(operation: str, key: str, include_own: bool) -> tuple[Any, ...]:
    owners = GroupOwnerLayout.from_key(key)
    plan = plan_of(operation, owners, include_own)
    return (remember(plan), *wiring_of(plan, owners))


@torch.compiler.assume_constant_result
def _missing_constant(operation: str, key: str, include_own: bool, given: tuple[int, ...]) -> str:
    owners = GroupOwnerLayout.from_key(key)
    plan = plan_of(operation, owners, include_own)
    return _missing_entry(plan, wiring_of(plan, owners), given)


def _run_traced(
    operation: str,
    source: Mapping[int, torch.Tensor],
    owners: GroupOwnerLayout,
    include_own: bool,
    said: tuple[torch.dtype | None, torch.device | str | None],
    after: After,
) -> tuple[dict[int, torch.Tensor], Token]:
    if not isinstance(owners, GroupOwnerLayout):
        raise TypeError(f"{operation}: owner_layout must be a GroupOwnerLayout")
    plan, needed, given, empty = _constants(operation, owners.key, include_own)
    for i in needed:
        if i not in source:
            raise KeyError(_missing_constant(operation, owners.key, include_own, tuple(source)))
    outputs, token = run_traced(plan, needed, [source[i] for i in needed], said, after)
    results = {i: flat.view(shape) for (i, shape), flat in zip(given, outputs, strict=True)}
    for i, shape in empty:
        results[i] = token.link.new_empty(shape, dtype=token.dtype)
    return {i: results[i] for i in sorted(results)}, token
