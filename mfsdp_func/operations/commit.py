"""A step that all ranks take, or that leaves no trace on any of them."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.effects.exchange_error import ExchangeError
from mfsdp_func.effects.groups import flat_mesh
from mfsdp_func.effects.here import carrier_of
from mfsdp_func.effects.token import work_begun
from mfsdp_func.effects.torch_internals import is_untransformed
from mfsdp_func.operations.norm import sum_spec, summed_over
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh

State = TypeVar("State")


class CommitError(ExchangeError):
    """A vote on a step that did not end on this rank, and may have ended on others: it keeps the old state and the new one.

    Attributes:
        step: how many steps led to `old`; one more led to `new`.
        old: the state before the step, bitwise as it was.
        new: the state after it.
    """

    step: int
    old: Any
    new: Any

    def __init__(self, error: ExchangeError, *, step: int, old: Any, new: Any) -> None:
        self.step, self.old, self.new = step, old, new
        super().__init__(
            f"the vote on step {step}",
            error.mesh,
            rank=error.rank,
            awaited=error.awaited,
            elapsed=error.elapsed,
            timeout=error.timeout,
            cause=error.cause,
            reason=error.reason,
            group=error.group,
        )

    def _message(self) -> str:
        return (
            f"{super()._message()}. Others may have taken the step, so this error has the states after {self.step} steps"
            f" (`old`) and after {self.step + 1} (`new`): the new group goes on from the lowest of its ranks' last ones"
        )


class Commit(Generic[State]):
    """A step with a vote behind it; see `commit`.

    Attributes:
        mesh: the ranks that take steps together.
        number: how many steps they have taken.
    """

    def __init__(self, step: Callable[..., State], mesh: Mesh, number: int) -> None:
        self.mesh, self.number, self._step = mesh, number, step

    def __call__(self, state: State, *batch: Any) -> State:
        """Take a step on all ranks.

        Args:
            state: a pytree of tensors and buffers.
            *batch: what else the step takes.

        Returns:
            What the step returns.

        Raises:
            ExchangeError: if another rank ended, stalled or raised during the step; `state` is bitwise as it was.
            CommitError: if that happened during the vote.
            ValueError: if the step wrote into `state`, or the ranks count their steps differently.
            RuntimeError: under a `torch.func` transform or in a compiled region.
            Exception: what the step raises on this rank. The others are told, and the process groups of the mesh are of
                no more use.
        """
        if torch.compiler.is_compiling() or not is_untransformed():
            raise RuntimeError(
                "commit: a step is committed outside of torch.func transforms and compiled regions; put those into the step"
            )
        try:
            versions = [(leaf, leaf._version) for leaf in _tensors(state)]  # pyright: ignore[reportPrivateUsage]
            with work_begun() as begun:
                new = self._step(state, *batch)
                for work in begun:
                    work.wait()
            self._check_unwritten(versions)
        except Exception as error:
            rank = self.mesh.get_rank()
            words = f"rank {rank}, in step {self.number}: {type(error).__name__}: {' '.join(str(error).split())}"
            for mesh in {self.mesh, flat_mesh(self.mesh)}:
                carrier_of(mesh).give_up(mesh, words)
            error.add_note(f"in step {self.number}, which is not taken: the old state stands on rank {rank}")
            raise
        try:
            self._vote()
        except ExchangeError as error:
            raise CommitError(error, step=self.number, old=state, new=new) from error.__cause__
        self.number += 1
        return new

    def _vote(self) -> None:
        """End on a rank only after all ranks have begun it."""
        mesh, n = flat_mesh(self.mesh), self.number
        device = carrier_of(mesh).device(mesh)
        with torch.no_grad():
            mine = torch.tensor([n, n * n], dtype=torch.int64, device=device)
            total, squares = summed_over(sum_spec(mesh, 2), mine).tolist()
        if total != n * mesh.size() or squares != n * n * mesh.size():
            raise ValueError(
                f"commit over {mesh}: rank {mesh.get_rank()} has taken {n} steps, the ranks together {total}; all must have"
                " taken equally many: give number= where training goes on"
            )

    def _check_unwritten(self, versions: list[tuple[torch.Tensor, int]]) -> None:
        written = [leaf for leaf, version in versions if leaf._version != version]  # pyright: ignore[reportPrivateUsage]
        if written:
            raise ValueError(
                f"commit: the step wrote into {len(written)} tensors of its state, the first of shape"
                f" {tuple(written[0].shape)}; a step that can be taken back returns a new state"
            )


def commit(step: Callable[..., State], *, mesh: Mesh | MeshLike, number: int = 0) -> Commit[State]:
    """Make a step transactional: all ranks take it, or none of them leaves a trace of it.

        committed = mf.commit(step, mesh=mesh)
        for batch in batches:
            state = committed(state, batch)

    After the step, when all work that it left in flight is done, the ranks vote: one reduction of two integers, which
    ends on a rank only after all of them have begun it. Whoever raises before leaves the old state to everybody, and the
    others learn why. A rank that ends *inside* the vote may leave the others one step apart: where the vote does not end,
    `CommitError` has both states. In either case make a new process group of the ranks that are left; let it go on from
    the lowest of its ranks' last steps (``committed.number``, or ``error.step + 1``), which each of them has; or load.

    Args:
        step: ``step(state, *batch) -> state``, a function that writes into nothing of its state.
        mesh: all ranks that take steps together.
        number: how many steps they have taken before.

    >>> import torch
    >>> from mfsdp_func import simulate
    >>> def program(mesh):
    ...     committed = commit(lambda state, batch: {"x": state["x"] + batch}, mesh=mesh)
    ...     state = {"x": torch.zeros(())}
    ...     for batch in (1.0, 2.0):
    ...         state = committed(state, batch)
    ...     return float(state["x"]), committed.number
    >>> simulate(program, 2).results
    {0: (3.0, 2), 1: (3.0, 2)}
    """
    return Commit(step, as_mesh(mesh), number)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state that count what is written into them."""
    for leaf in pytree.tree_leaves(state):
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
            yield leaf
