"""Waits that streams need: left out of programs, and of the library itself."""

from contextlib import nullcontext
from functools import partial
from typing import Any

from mfsdp_func.values.mesh import Mesh
from tests.planted.bug import Bug
from tests.stream_programs import PLANTS, PROGRAMS, WRONG, Plant, planted


def program_forgets(mesh: Mesh, bug: bool, *, program: partial[Any]) -> None:
    (program if bug else program.func)(mesh, "cpu")


def library_forgets(mesh: Mesh, bug: bool, *, plant: Plant) -> None:
    with planted(plant) if bug else nullcontext():
        PROGRAMS[plant.program](mesh, "cpu")


EARLY = "before its token was waited for"
SEEN_WITHOUT_STREAMS = {
    "a result is read before its token": EARLY,
    "pipeline: a gather is not waited for": EARLY,
    "pipeline: the last scatters are not waited for": EARLY,
    "prefetch: a gather is not waited for": EARLY,
}
"""By poison, which is tried first."""

BUGS = [
    *(
        Bug(
            f"on streams, {name}",
            partial(program_forgets, program=program),
            SEEN_WITHOUT_STREAMS.get(name, "missing wait"),
        )
        for name, program in WRONG.items()
    ),
    *(
        Bug(
            f"in the library, {name}", partial(library_forgets, plant=plant), SEEN_WITHOUT_STREAMS.get(name, plant.kind)
        )
        for name, plant in PLANTS.items()
    ),
]
