"""A planted bug, the ladder of settings that may find it, and the search for a short tape."""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh

Program = Callable[[Mesh, bool], Any]


@dataclass(frozen=True)
class Bug:
    """A program of a mesh, ``program(mesh, bug)``: the bug is there or is not.

    Attributes:
        name: what is wrong, in words.
        program: the program.
        words: part of what the finder says; empty where numbers tell.
        shape: of the mesh.
        keywords: of `simulate`, whatever else is tried.
        fresh: makes what the ranks of one run share besides messages (a folder, say): ``program(mesh, bug, shared)``.
    """

    name: str
    program: Callable[..., Any]
    words: str = ""
    shape: int | tuple[int, ...] = 2
    keywords: Mapping[str, Any] = field(default_factory=dict)
    fresh: Callable[[], Any] | None = None

    def run(self, planted: bool, check: bool = False, **keywords: Any) -> Any:
        """One run; what each rank returned, as plain values."""
        shared = () if self.fresh is None else (self.fresh(),)
        with mf.agreement_check() if check else nullcontext():
            program = partial(_on_rank, program=self.program, args=(planted, *shared))
            run = mf.simulate(program, self.shape, **{**self.keywords, **keywords})
        return _plain(run.results), {rank: type(error) for rank, error in run.errors.items()}

    def complaint(self, **keywords: Any) -> str:
        """What a run with the bug says that one without does not; empty where it is not noticed."""
        try:
            found = self.run(True, **keywords)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "" if found == self.run(False) else NUMBERS


def _on_rank(mesh: Mesh, *, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return program(mesh, *args)


def _plain(value: Any) -> Any:
    if isinstance(value, mf.DBuffer):
        value = value.local_buffer
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


NUMBERS = "numbers differ from those of the program without it"

LADDER: dict[str, dict[str, Any]] = {
    "a plain run": {},
    "poison": {"poison": True},
    "rendezvous": {"carrier": "rendezvous"},
    "nccl": {"carrier": "nccl"},
    "the agreement check": {"check": True},
    "live memory": {"memory": "live"},
    "simulated streams": {"streams": True},
}
"""Settings, in the order in which they are tried; after them, tapes."""
TAPES = "a tape"
TAPE_SETTINGS: dict[str, Any] = {"memory": "live", "poison": True}
DEVIATIONS = 3


class Finding(NamedTuple):
    """How a bug was found.

    Attributes:
        finder: a key of `LADDER`, or `TAPES`.
        complaint: what it said.
        tape: the shortest tape that finds it; empty where none is needed.
    """

    finder: str
    complaint: str
    tape: tuple[int, ...] = ()

    @property
    def deviations(self) -> int:
        return sum(number > 0 for number in self.tape)


def find_bug(bug: Bug) -> Finding | None:
    """The first settings that find it; None where nothing does."""
    for name, keywords in LADDER.items():
        if complaint := bug.complaint(**keywords):
            return Finding(name, complaint)
    tape = shortest_tape(bug)
    if tape is None:
        return None
    return Finding(TAPES, bug.complaint(**TAPE_SETTINGS, choices=tape), tuple(tape))


def shortest_tape(bug: Bug) -> list[int] | None:
    """hypothesis draws the list, and shrinks it."""
    try:
        return find(
            st.lists(st.integers(0, 4), max_size=40),
            lambda tape: bool(bug.complaint(**TAPE_SETTINGS, choices=tape)),
            settings=settings(max_examples=200, database=None, phases=(Phase.generate, Phase.shrink)),
            random=random.Random(0),
        )
    except NoSuchExample:
        return None
