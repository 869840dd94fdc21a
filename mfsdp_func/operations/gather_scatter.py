"""Owner compute: `gather` brings whole tensors to their owners, `scatter` brings the owners' results back."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from mfsdp_func.effects.call import check_tensors, faults_reported, run, run_traced
from mfsdp_func.effects.move import Options
from mfsdp_func.effects.move_operator import remember
from mfsdp_func.effects.token import After, AnyStream, Token, as_tokens
from mfsdp_func.plans.joint_plan import join_plans
from mfsdp_func.plans.plan import Plan, gather_plan, scatter_plan
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
    """
    (results,), token = _run("gather", (source,), (owner_layout,), True, (dtype, device), (after, stream, async_op))
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
    """
    said, how = (dtype, device), (after, stream, async_op)
    (results,), token = _run("scatter", (source,), (owner_layout,), include_own, said, how)
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
    return _run("gather", sources, owner_layouts, True, (dtype, device), (after, stream, async_op))


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
    return _run("scatter", sources, owner_layouts, include_own, (dtype, device), (after, stream, async_op))


class Wiring(NamedTuple):
    """What one rank gives and gets of one group, as constants: tensor indices."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    empty: tuple[tuple[int, tuple[int, ...]], ...]
    """Owned tensors without elements, and their shapes: results that nobody sends."""


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


def plans_of(operation: str, owners: Sequence[GroupOwnerLayout], include_own: bool) -> tuple[Plan, ...]:
    """The plans of groups that move together.

    Raises:
        ValueError: if there is no group.
        TypeError: see `plan_of`.
    """
    plans = tuple([plan_of(operation, group, include_own) for group in owners])
    if not plans:
        raise ValueError(f"{operation}: no owner layout was given; give at least one group")
    return plans


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
    return Wiring(tuple(slot.tensor for slot in view.inputs), tuple(slot.tensor for slot in view.outputs), tuple(empty))


@lru_cache(maxsize=2048)
def names_of(plans: tuple[Plan, ...]) -> tuple[object, ...]:
    """How errors call the inputs: by index, and of several groups also by group."""
    if len(plans) == 1:
        return tuple(slot.tensor for slot in plans[0].local.inputs)
    return tuple(
        f"{slot.tensor} of group {plan.name or f'number {n}'}"
        for n, plan in enumerate(plans)
        for slot in plan.local.inputs
    )


def _run(
    operation: str,
    sources: Sequence[Mapping[int, torch.Tensor]],
    owners: Sequence[GroupOwnerLayout],
    include_own: bool,
    said: tuple[torch.dtype | None, torch.device | str | None],
    how: tuple[After, AnyStream | None, bool],
) -> tuple[list[dict[int, torch.Tensor]], Token]:
    if torch.compiler.is_compiling():
        return _run_traced(operation, sources, owners, include_own, said, how[0])
    plans = plans_of(operation, owners, include_own)
    with faults_reported(plans[0]):
        plan = join_plans(plans)
        wirings = tuple(map(wiring_of, plans, owners))
        tokens, device = as_tokens(how[0]), torch.device(said[1]) if said[1] is not None else None
        inputs = given_tensors(plans, wirings, sources)
        dtype, says = dtype_of(operation, said[0], [group.dtype for group in owners])
        options = check_tensors(plan, names_of(plans), inputs, dtype, device, tokens, says)
        if options.dtype is None and any(wiring.empty for wiring in wirings):
            raise TypeError(_unknown_dtype(plan.label, [i for wiring in wirings for i, _ in wiring.empty]))
    outputs, token = run(plan, options, inputs, tokens, how[1], how[2])
    return _results(wirings, outputs, options), token


def dtype_of(
    operation: str, said: torch.dtype | None, dtypes: Sequence[torch.dtype | None]
) -> tuple[torch.dtype | None, str]:
    """The dtype of a call: what the caller says, else what its groups say, if any; and in words, who does.

    Raises:
        TypeError: if groups say different ones.
    """
    if said is not None:
        return said, "dtype={} was asserted"
    known = [dtype for dtype in dtypes if dtype is not None]
    for dtype in known:
        if dtype != known[0]:
            raise TypeError(
                f"{operation}: one group is of {known[0]}, another of {dtype}; one call moves one dtype: make one call per"
                " dtype, or pass dtype="
            )
    return known[0] if known else None, "the group is of {}"


def given_tensors(
    plans: Sequence[Plan], wirings: Sequence[Wiring], sources: Sequence[Mapping[int, torch.Tensor]]
) -> list[torch.Tensor]:
    """The tensors that this rank must give, in the order of the plans.

    Raises:
        KeyError: if one is missing.
        TypeError: if one of `sources` is no mapping.
        ValueError: if there is not one source per plan.
    """
    if len(sources) != len(plans):
        raise ValueError(
            f"{plans[0].operation}: {len(sources)} dicts of tensors for {len(plans)} owner layouts; give one per group"
        )
    found: list[torch.Tensor] = []
    for plan, wiring, source in zip(plans, wirings, sources, strict=True):
        if not isinstance(source, Mapping):
            raise TypeError(
                f"{plan.label}: source must be a dict, tensor index -> tensor, got {type(source).__name__}; of a DBuffer,"
                " pass buffer.tensor_views()"
            )
        try:
            found += [source[i] for i in wiring.inputs]
        except KeyError:
            raise KeyError(_missing_entry(plan, wiring, tuple(source))) from None
    return found


def _unknown_dtype(label: str, empty: Sequence[int]) -> str:
    return (
        f"{label}: this rank owns tensor {empty[0]}, which has no elements, and gives no tensor, so its dtype is unknown;"
        " pass dtype=, or the token of the operation before with after=, or make the GroupOwnerLayout with dtype="
    )


def _missing_entry(plan: Plan, wiring: Wiring, given: tuple[int, ...]) -> str:
    missing = [i for i in wiring.inputs if i not in given]
    what = "shards of every participating tensor it holds" if plan.operation == "gather" else "every tensor it owns"
    return (
        f"{plan.label}: source has no entry for tensor {missing[0]} ({len(missing)} missing in all); rank"
        f" {plan.mesh.rank} must give {what}: tensors {_some(wiring.inputs)}, but gave {_some(sorted(given))}"
    )


def _some(items: Sequence[int]) -> str:
    return f"{list(items[:8])}{f' and {len(items) - 8} more' if len(items) > 8 else ''}"


def _results(
    wirings: Sequence[Wiring], outputs: Sequence[torch.Tensor], options: Options
) -> list[dict[int, torch.Tensor]]:
    remaining = iter(outputs)
    found: list[dict[int, torch.Tensor]] = []
    for wiring in wirings:
        results = dict(zip(wiring.outputs, islice(remaining, len(wiring.outputs)), strict=True))
        if wiring.empty:
            dtype = outputs[0].dtype if outputs else options.dtype
            results |= {i: torch.empty(shape, dtype=dtype, device=options.device) for i, shape in wiring.empty}
            results = dict(sorted(results.items()))
        found.append(results)
    return found


# Inside a compiled region: constants come from the keys of the owner layouts, on which alone the compiled code guards.


@torch.compiler.assume_constant_result
def _constants(operation: str, keys: tuple[str, ...], include_own: bool) -> tuple[Any, ...]:
    owners = [GroupOwnerLayout.from_key(key) for key in keys]
    plans = plans_of(operation, owners, include_own)
    wirings = tuple(map(wiring_of, plans, owners))
    return (remember(join_plans(plans)), names_of(plans), tuple(map(tuple, wirings)), [group.dtype for group in owners])


@torch.compiler.assume_constant_result
def _missing_constant(operation: str, key: str, include_own: bool, given: tuple[int, ...]) -> str:
    owners = GroupOwnerLayout.from_key(key)
    plan = plan_of(operation, owners, include_own)
    return _missing_entry(plan, wiring_of(plan, owners), given)


def _run_traced(
    operation: str,
    sources: Sequence[Mapping[int, torch.Tensor]],
    owners: Sequence[GroupOwnerLayout],
    include_own: bool,
    said: tuple[torch.dtype | None, torch.device | str | None],
    after: After,
) -> tuple[list[dict[int, torch.Tensor]], Token]:
    for group in owners:
        if not isinstance(group, GroupOwnerLayout):
            raise TypeError(f"{operation}: owner_layout must be a GroupOwnerLayout")
    if len(sources) != len(owners) or not owners:
        raise ValueError(
            f"{operation}: {len(sources)} dicts of tensors for {len(owners)} owner layouts; give one per group"
        )
    plan, names, wirings, dtypes = _constants(operation, tuple([group.key for group in owners]), include_own)
    inputs: list[torch.Tensor] = []
    for group, source, (needed, _, _) in zip(owners, sources, wirings, strict=True):
        for i in needed:
            if i not in source:
                raise KeyError(_missing_constant(operation, group.key, include_own, tuple(source)))
            inputs.append(source[i])
    dtype, says = dtype_of(operation, said[0], dtypes)
    outputs, token = run_traced(plan, names, inputs, (dtype, said[1], says), after)
    found: list[dict[int, torch.Tensor]] = []
    at = 0
    for _, given, empty in wirings:
        if empty and token.dtype is None:
            raise TypeError(_unknown_dtype(operation, [i for i, _ in empty]))
        results = dict(zip(given, outputs[at : at + len(given)], strict=True))
        at += len(given)
        for i, shape in empty:
            results[i] = token.link.new_empty(shape, dtype=token.dtype)
        found.append({i: results[i] for i in sorted(results)})
    return found, token
