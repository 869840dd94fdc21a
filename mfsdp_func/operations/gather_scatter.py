"""Owner compute: `gather` brings whole tensors to their owners, `scatter` brings the owners' results back."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from mfsdp_func.effects.call import Order, Wanted, check_tensors, run, run_traced, tell_fault
from mfsdp_func.effects.here import check_place
from mfsdp_func.effects.move_operator import remember
from mfsdp_func.effects.streams import AnyStream
from mfsdp_func.effects.token import After, Token, as_tokens
from mfsdp_func.plans.plan import Plan, gather_plan, join_plans, scatter_plan
from mfsdp_func.values.owner_planning import GroupOwnerLayout


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
        dtype: of the elements; by default that of the group, if it has one. A rank that holds nothing but owns something
            must know it: from here, from the group, or from a token in `after`.
        device: where results lie on a rank that gives no tensor; by default where the token's link is, or the CPU.
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

    >>> from mfsdp_func import build_for_row_atomic_unpadding, simulate
    >>> layout = build_for_row_atomic_unpadding([(4, 1)], 2)  # two rows on each rank
    >>> def program(mesh):
    ...     owners = GroupOwnerLayout(mesh, layout, {0: 1})
    ...     rows = torch.full((2, 1), float(mesh.get_rank()))
    ...     matrices, token = gather({0: rows}, owner_layout=owners)
    ...     return {i: matrix.flatten().tolist() for i, matrix in matrices.items()}
    >>> simulate(program, 2).results
    {0: {}, 1: {0: [0.0, 0.0, 1.0, 1.0]}}
    """
    (results,), token = _run(
        "gather", (source,), (owner_layout,), True, Wanted(dtype, device), Order(after, stream, async_op)
    )
    return results, token


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
        dtype: see `gather`; the gather's token in `after` says it to a rank that owns nothing.
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

    >>> from mfsdp_func import build_for_row_atomic_unpadding, simulate
    >>> layout = build_for_row_atomic_unpadding([(4, 1)], 2)  # two rows on each rank
    >>> def program(mesh):
    ...     owners = GroupOwnerLayout(mesh, layout, {0: 1}, dtype=torch.float32)
    ...     results = {0: torch.arange(4.0)} if mesh.get_rank() == 1 else {}
    ...     rows, token = scatter(results, owner_layout=owners)
    ...     return rows[0].flatten().tolist()
    >>> simulate(program, 2).results
    {0: [0.0, 1.0], 1: [2.0, 3.0]}
    """
    wanted, order = Wanted(dtype, device), Order(after, stream, async_op)
    (results,), token = _run("scatter", (source,), (owner_layout,), include_own, wanted, order)
    return results, token


def gather_coalesced(
    sources: Sequence[Mapping[int, torch.Tensor]],
    *,
    owner_layouts: Sequence[GroupOwnerLayout],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    after: After = (),
    stream: AnyStream | None = None,
    async_op: bool = False,
) -> tuple[list[dict[int, torch.Tensor]], Token]:
    """`gather` of several groups of one mesh in one exchange: bit for bit what a call for each returns.

    Messages of all groups are under way together, and small pieces of different groups share messages; where a call is
    mostly latency, or its owners are few, that is faster than one call after the other. All results are alive together.

    Args:
        sources: one per group; see `gather`. All tensors of all groups share one dtype and device.
        owner_layouts: one per group, all of one mesh.
        dtype: see `gather`.
        device: see `gather`.
        after: see `gather`.
        stream: see `gather`.
        async_op: see `gather`.

    Returns:
        For each group, what `gather` returns, and one token.

    Raises:
        ValueError: if there is not one source per group, or groups lie on different meshes; and see `gather`.
        KeyError, TypeError: see `gather`.

    >>> from mfsdp_func import build_for_row_atomic, simulate
    >>> def program(mesh):
    ...     layout = build_for_row_atomic([(2, 2)], 2)
    ...     owners = [GroupOwnerLayout(mesh, layout, {0: n}) for n in range(2)]
    ...     shards = [{0: torch.full((1, 2), 2.0 * n + mesh.get_rank())} for n in range(2)]
    ...     full, _ = gather_coalesced(shards, owner_layouts=owners)
    ...     return [{i: tensor.tolist() for i, tensor in group.items()} for group in full]
    >>> simulate(program, 2).results
    {0: [{0: [[0.0, 0.0], [1.0, 1.0]]}, {}], 1: [{}, {0: [[2.0, 2.0], [3.0, 3.0]]}]}
    """
    return _run("gather", sources, owner_layouts, True, Wanted(dtype, device), Order(after, stream, async_op))


def scatter_coalesced(
    sources: Sequence[Mapping[int, torch.Tensor]],
    *,
    owner_layouts: Sequence[GroupOwnerLayout],
    include_own: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    after: After = (),
    stream: AnyStream | None = None,
    async_op: bool = False,
) -> tuple[list[dict[int, torch.Tensor]], Token]:
    """`scatter` of several groups of one mesh in one exchange; the transpose of `gather_coalesced`, see there.

    Args:
        sources: one per group; see `scatter`.
        owner_layouts: one per group, all of one mesh.
        include_own: see `scatter`.
        dtype: see `scatter`.
        device: see `scatter`.
        after: see `scatter`.
        stream: see `scatter`.
        async_op: see `scatter`.

    Returns:
        For each group, what `scatter` returns, and one token.

    Raises:
        ValueError, KeyError, TypeError: see `gather_coalesced`.
    """
    return _run("scatter", sources, owner_layouts, include_own, Wanted(dtype, device), Order(after, stream, async_op))


def plan_of(operation: str, owners: GroupOwnerLayout, include_own: bool = True) -> Plan:
    """The plan of "gather" or "scatter": who sends what to whom. Print it to see a table.

    Raises:
        TypeError: if `owners` is no `GroupOwnerLayout`.
    """
    return plan_of_groups(operation, (owners,), include_own)


def plan_of_groups(operation: str, owners: Sequence[GroupOwnerLayout], include_own: bool) -> Plan:
    """The plan of several groups that move together.

    Raises:
        ValueError: if there is no group, or not all lie on one mesh.
        TypeError: if one of `owners` is no `GroupOwnerLayout`.
    """
    for group in owners:
        if not isinstance(group, GroupOwnerLayout):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{operation}: owner_layout must be a GroupOwnerLayout, got {type(group).__name__}")
    if not owners:
        raise ValueError(f"{operation}: no owner layout was given; give at least one group")
    return _plan_of_keys(operation, tuple(map(_KEY, owners)), include_own)


_KEY = attrgetter("key")


@lru_cache(maxsize=1024)
def _plan_of_keys(operation: str, keys: tuple[str, ...], include_own: bool) -> Plan:
    owners = [GroupOwnerLayout.from_key(key) for key in keys]
    if operation == "gather":
        return join_plans(tuple(gather_plan(group, group.name) for group in owners))
    return join_plans(tuple(scatter_plan(group, group.name, include_own) for group in owners))


def _run(
    operation: str,
    sources: Sequence[Mapping[int, torch.Tensor]],
    owners: Sequence[GroupOwnerLayout],
    include_own: bool,
    wanted: Wanted,
    order: Order,
) -> tuple[list[dict[int, torch.Tensor]], Token]:
    if torch.compiler.is_compiling():
        return _run_traced(operation, sources, owners, include_own, wanted, order.after)
    plan = plan_of_groups(operation, owners, include_own)
    try:
        check_place(plan.mesh, plan.label)
        tokens, inputs = as_tokens(order.after), given_tensors(plan, sources)
        options = check_tensors(plan, inputs, wanted, tokens, groups=owners)
    except Exception as error:
        tell_fault(plan, error)
        raise
    outputs, token = run(plan, options, inputs, tokens, order)
    remaining = iter(outputs)  # which `zip` takes last, so that it takes none too many
    return [*map(dict, map(zip, plan.local.output_tensors, repeat(remaining)))], token


def given_tensors(plan: Plan, sources: Sequence[Mapping[int, torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors that this rank must give, in the order of the plan.

    Raises:
        KeyError: if one is missing.
        TypeError: if one of `sources` is no mapping.
        ValueError: if there is not one source per group.
    """
    needed = plan.local.input_tensors
    if len(sources) != len(needed):
        raise ValueError(_uneven(plan.operation, len(sources), len(needed)))
    found: list[torch.Tensor] = []
    for k, (tensors, source) in enumerate(zip(needed, sources, strict=True)):
        if not isinstance(source, Mapping):
            raise TypeError(
                f"{plan.label_of(k)}: source must be a dict, tensor index -> tensor, got {type(source).__name__}; of a"
                " DBuffer, pass buffer.tensor_views()"
            )
        try:
            found += map(source.__getitem__, tensors)
        except KeyError:
            raise KeyError(_missing_entry(plan, k, tuple(source))) from None
    return found


def _uneven(operation: str, sources: int, groups: int) -> str:
    return f"{operation}: {sources} dicts of tensors for {groups} owner layouts; give one per group"


def _missing_entry(plan: Plan, group: int, given: tuple[int, ...]) -> str:
    needed = plan.local.input_tensors[group]
    missing = [i for i in needed if i not in given]
    what = "shards of every participating tensor it holds" if plan.operation == "gather" else "every tensor it owns"
    return (
        f"{plan.label_of(group)}: source has no entry for tensor {missing[0]} ({len(missing)} missing in all); rank"
        f" {plan.mesh.rank} must give {what}: tensors {_some(needed)}, but gave {_some(sorted(given))}"
    )


def _some(items: Sequence[int]) -> str:
    return f"{list(items[:8])}{f' and {len(items) - 8} more' if len(items) > 8 else ''}"


# Inside a compiled region: constants come from the keys of the owner layouts, on which alone the compiled code guards.


@torch.compiler.assume_constant_result
def _constants(operation: str, keys: tuple[str, ...], include_own: bool) -> tuple[Any, ...]:
    """The key of the plan, the tensors that go in and come out of each group, and the dtype of the groups."""
    plan = _plan_of_keys(operation, keys, include_own)
    dtypes = {group.dtype for group in plan.groups} - {None}
    return (
        remember(plan),
        plan.local.input_tensors,
        plan.local.output_tensors,
        dtypes.pop() if len(dtypes) == 1 else None,
    )


@torch.compiler.assume_constant_result
def _missing_constant(
    operation: str, keys: tuple[str, ...], include_own: bool, group: int, given: tuple[int, ...]
) -> str:
    return _missing_entry(_plan_of_keys(operation, keys, include_own), group, given)


def _run_traced(
    operation: str,
    sources: Sequence[Mapping[int, torch.Tensor]],
    owners: Sequence[GroupOwnerLayout],
    include_own: bool,
    wanted: Wanted,
    after: After,
) -> tuple[list[dict[int, torch.Tensor]], Token]:
    for group in owners:
        if not isinstance(group, GroupOwnerLayout):
            raise TypeError(f"{operation}: owner_layout must be a GroupOwnerLayout")
    if len(sources) != len(owners) or not owners:
        raise ValueError(_uneven(operation, len(sources), len(owners)))
    keys = tuple([group.key for group in owners])
    key, needed, given, dtype = _constants(operation, keys, include_own)
    inputs: list[torch.Tensor] = []
    for k, tensors in enumerate(needed):
        source = sources[k]
        for i in tensors:
            if i not in source:
                raise KeyError(_missing_constant(operation, keys, include_own, k, tuple(source)))
            inputs.append(source[i])
    outputs, token = run_traced(key, inputs, wanted, dtype, after)
    found: list[dict[int, torch.Tensor]] = []
    at = 0
    for tensors in given:
        found.append(dict(zip(tensors, outputs[at : at + len(tensors)], strict=True)))
        at += len(tensors)
    return found, token
