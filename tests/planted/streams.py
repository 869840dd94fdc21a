"""Waits that are missing on streams, and memory that is given away too early; most are planted in the library itself."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from mfsdp_func.values.mesh import Mesh
from tests.planted.bug import Bug
from tests.stream_programs import PLANTS, PROGRAMS, on_a_stream, planted, read_on_another_stream


def with_plant(mesh: Mesh, bug: bool, *, name: str) -> None:
    with planted(PLANTS[name]) if bug else nullcontext():
        PROGRAMS[PLANTS[name].program](mesh, "cpu")


def without_wait(mesh: Mesh, bug: bool, *, program: Callable[..., Any]) -> None:
    program(mesh, "cpu", waits=not bug)


def is_of_streams_alone(name: str) -> bool:
    """Elsewhere what a result holds before its token is waited for is chance."""
    return not name.startswith(("pipeline", "prefetch"))


BUGS = [
    Bug("a stream does not wait for its inputs", partial(without_wait, program=on_a_stream), "missing wait"),
    Bug("a token waited for on another stream", partial(without_wait, program=read_on_another_stream), "missing wait"),
    *(
        Bug(f"planted in the library: {name}", partial(with_plant, name=name), plant.kind)
        for name, plant in PLANTS.items()
        if is_of_streams_alone(name)
    ),
]
