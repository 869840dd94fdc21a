"""Owner compute over many parameter groups, with the messages of other groups under way while one is computed."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

import torch

from mfsdp_func.effects.token import After, Token, as_tokens
from mfsdp_func.operations.gather_scatter import gather, scatter
from mfsdp_func.values.owner_planning import GroupOwnerLayout

Tensors = Mapping[int, torch.Tensor]


def pipeline(
    compute: Callable[[int, dict[int, torch.Tensor]], Tensors],
    sources: Iterable[Tensors],
    owner_layouts: Sequence[GroupOwnerLayout],
    *,
    depth: int = 1,
    include_own: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    after: After = (),
) -> tuple[list[dict[int, torch.Tensor]], Token]:
    """Gather each group to its owners, compute there, and scatter the results. Pure; every rank of the mesh calls.

    While group n is computed, the gathers of groups n + 1 to n + `depth` and the scatters of groups n - `depth` to
    n - 1 are under way: on CPU in the process group's own threads, on CUDA on a side stream. The results are those of
    one group after the other, bit for bit.

    Args:
        compute: ``compute(n, tensors)``, called for every group in order, on every rank, with the full tensors that
            this rank owns (maybe none); returns as many, of the same sizes, under the same indices. Pure.
        sources: for each group, what `gather` takes. An iterator is read only as far as gathers are started. Tensors
            may not be changed until the call returns (CUDA: until the token is waited for).
        owner_layouts: one per group.
        depth: groups gathered ahead, and scattered behind; with 0, one group after the other. Where owners are balanced
            over all groups together, a rank may own nothing of some groups in a row, and more depth keeps it busy.
        include_own: see `scatter`.
        dtype: see `gather`.
        device: see `gather`.
        after: tokens of operations to start after.

    Returns:
        For each group, what `scatter` returns, and a token that links all of them; nothing is left to wait for.

    Raises:
        ValueError: if `depth` is negative, or there is not one source per group: before any communication where
            `sources` has a length, else as soon as an iterator ends, or (after all groups) does not.
        Exception: what `gather`, `scatter` and `compute` raise.

    Effects: the messages of `gather` and `scatter`, in one order on all ranks. Beyond the results, memory holds the
    full tensors of at most ``2 * depth + 1`` groups that this rank owns, and what `compute` allocates.

    >>> from mfsdp_func import GroupOwnerLayout, build_for_row_atomic, simulate
    >>> def program(mesh):
    ...     layout = build_for_row_atomic([(2, 2)], 2)
    ...     owners = [GroupOwnerLayout(mesh, layout, {0: n}) for n in range(2)]
    ...     shards = [{0: torch.ones(1, 2)}] * 2
    ...     results, _ = pipeline(lambda n, tensors: {i: t + n for i, t in tensors.items()}, shards, owners)
    ...     return [result[0].tolist() for result in results]
    >>> simulate(program, 2).results
    {0: [[[1.0, 1.0]], [[2.0, 2.0]]], 1: [[[1.0, 1.0]], [[2.0, 2.0]]]}
    """
    if depth < 0:
        raise ValueError(f"pipeline: depth must not be negative, got {depth}")
    if isinstance(sources, Sized) and len(sources) != len(owner_layouts):
        raise ValueError(
            f"pipeline: {len(owner_layouts)} owner layouts, but {len(sources)} sources; give one per group"
        )
    tokens = as_tokens(after)
    waiting = iter(sources)
    gathered: deque[tuple[dict[int, torch.Tensor], Token]] = deque()
    scattered: deque[Token] = deque()
    results: list[dict[int, torch.Tensor]] = []
    links = list(tokens)
    started = 0
    for n, owners in enumerate(owner_layouts):
        while started < min(len(owner_layouts), n + 1 + depth):
            source = next(waiting, None)
            if source is None:
                raise ValueError(f"pipeline: {len(owner_layouts)} owner layouts, but only {started} sources")
            chosen = owner_layouts[started]
            gathered.append(
                gather(source, owner_layout=chosen, dtype=dtype, device=device, after=tokens, async_op=depth > 0)
            )
            started += 1
        tensors, token = gathered.popleft()
        token.wait()
        computed = compute(n, tensors)
        # The gather's token carries its gradient link to ranks that own nothing of the group.
        result, token = scatter(
            computed,
            owner_layout=owners,
            include_own=include_own,
            dtype=dtype,
            device=device,
            after=token,
            async_op=depth > 0,
        )
        del tensors, computed
        results.append(result)
        links.append(token)
        scattered.append(token)
        if len(scattered) > depth:
            scattered.popleft().wait()
    for token in scattered:
        token.wait()
    if next(waiting, None) is not None:
        raise ValueError(f"pipeline: {len(owner_layouts)} owner layouts, but more sources; give one per group")
    return results, _joined(links)


def _joined(tokens: Sequence[Token]) -> Token:
    """One token for all, with nothing left to wait for."""
    if not tokens:
        return Token(torch.zeros(()))
    link = tokens[0].link
    for token in tokens[1:]:
        link = link + token.link
    dtype = next((token.dtype for token in tokens if token.dtype), None)
    return Token(link, (), dtype)
