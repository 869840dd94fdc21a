"""One tape of choices: whatever a simulated run is free to do, it asks here."""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class PCT:
    """Probabilistic concurrency testing: random priorities, changed at few random moments.

    Whatever has the highest priority goes first: ranks, and messages that may arrive. A bug that needs `depth` events in
    one order among n actors is found with a probability of at least ``1 / (n * steps ** (depth - 1))`` per run (Burckhardt,
    Kothari, Musuvathi, Nagarakatte: A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010).

    Attributes:
        seed: of the priorities and of the moments.
        depth: one more than the number of moments at which the first one becomes the last.
        steps: the number of choices among which these moments are drawn.

    >>> from mfsdp_func import simulate
    >>> simulate(lambda mesh: mesh.get_rank(), 3, choices=PCT(seed=7, depth=2)).results
    {0: 0, 1: 1, 2: 2}
    """

    seed: int
    depth: int
    steps: int = 100


Choices: TypeAlias = int | PCT | Sequence[int] | None
"""Where choices come from: a seed, `PCT`, a tape of numbers; None for first in, first out."""


class _Policy(Protocol):
    def pick(self, actors: Sequence[Hashable]) -> int: ...


class _Random:
    """Any of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, actors: Sequence[Hashable]) -> int:
        return self._random.randrange(len(actors))


class _Replay:
    """As a tape says; the first one past its end."""

    def __init__(self, tape: Sequence[int]) -> None:
        self._numbers = iter(tape)

    def pick(self, actors: Sequence[Hashable]) -> int:
        return next(self._numbers, 0) % len(actors)


class _Priorities:
    """See `PCT`."""

    def __init__(self, pct: PCT) -> None:
        self._random = random.Random(pct.seed)
        changes = self._random.sample(range(1, pct.steps), min(pct.steps - 1, max(0, pct.depth - 1)))
        self._lowered = {step: -1.0 - n for n, step in enumerate(changes)}
        self._priorities: dict[Hashable, float] = {}
        self._step = 0

    def pick(self, actors: Sequence[Hashable]) -> int:
        for actor in actors:
            if actor not in self._priorities:
                self._priorities[actor] = self._random.random()
        first = max(actors, key=self._priorities.__getitem__)
        if (lower := self._lowered.get(self._step)) is not None:
            self._priorities[first] = lower
            first = max(actors, key=self._priorities.__getitem__)
        self._step += 1
        return actors.index(first)


class Tape:
    """Gives the choices of a run, and remembers them.

    Attributes:
        free: whether there is anything to choose; else everything is first in, first out.
    """

    def __init__(self, choices: Choices) -> None:
        self.free = choices is not None
        self._policy = _policy(choices)
        self._taken: list[int] = []

    def choose(self, actors: Sequence[Hashable]) -> int:
        """The number of the one that goes first; asked only where there are two or more."""
        if not self.free or len(actors) < 2:
            return 0
        taken = self._policy.pick(actors)
        self._taken.append(taken)
        return taken

    @property
    def taken(self) -> tuple[int, ...]:
        """The choices made so far, without the zeros at the end: as a tape they give the same run."""
        end = len(self._taken)
        while end and not self._taken[end - 1]:
            end -= 1
        return tuple(self._taken[:end])


def _policy(choices: Choices) -> _Policy:
    if isinstance(choices, PCT):
        return _Priorities(choices)
    if isinstance(choices, int):
        return _Random(choices)
    tape = () if choices is None else tuple(choices)
    for number in tape:
        if not isinstance(number, int) or number < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"choices: a tape holds integers from 0 on, got {number!r}")
    return _Replay(tape)
