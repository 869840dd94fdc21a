"""A process whose children are killed while they save: ``python -m tests.checkpoint_victim FOLDER EVERY``.

Points of a save are its calls of the operating system: folders made, values written, files brought to the disk, renamed,
removed. A child stops at one of them and is killed there, by its id. Prints one JSON line per point.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mfsdp_func as mf
from mfsdp_func import checkpoint
from mfsdp_func.checkpoint import saving
from tests.checkpoint_cases import Way, assert_same, state_of

WAY = Way((3,), "unpadded", 1)


def count_points(reached: Any) -> None:
    """Call `reached` before each point."""

    def count(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def before(*args: Any, **kwargs: Any) -> Any:
            reached(name)
            return call(*args, **kwargs)

        setattr(owner, name, before)

    count(os, "fsync")
    count(saving, "_write_entry")
    for name in ("mkdir", "rename", "replace", "unlink"):
        count(Path, name)


def save(folder: Path, stop: int, pipe: int, in_background: bool) -> None:
    """Save step 2; say where it stops, and stop."""
    passed = 0

    def reached(what: str) -> None:
        nonlocal passed
        passed += 1
        if passed == stop:
            os.write(pipe, f"{what}\n".encode())
            time.sleep(600)

    count_points(reached)

    def program(mesh: mf.Mesh) -> None:
        if in_background:
            checkpoint.save_async(folder / "step2", state_of(mesh, WAY, 2), names=WAY.names).wait()
        else:
            checkpoint.save(folder / "step2", state_of(mesh, WAY, 2), names=WAY.names)

    mf.simulate(program, WAY.shape)
    os.write(pipe, b"done\n")


def kill_at(folder: Path, stop: int, in_background: bool) -> str:
    """Where the child was killed; "done" where it has not so many points."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            save(folder, stop, writer, in_background)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as words:
        what = words.readline().strip()
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return what or "nothing"


def main() -> None:
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    mf.simulate(lambda mesh: checkpoint.save(folder / "step1", state_of(mesh, WAY, 1), names=WAY.names), WAY.shape)
    for in_background in (False, True):
        for stop in range(1, 1000, every):
            what = kill_at(folder, stop, in_background)
            found = checkpoint.latest(folder)
            step = int(found.name[-1])

            def load(mesh: mf.Mesh, found: Any = found, step: int = step) -> None:
                got = checkpoint.load(found, state_of(mesh, WAY, 9), names=WAY.names)
                assert_same(got, state_of(mesh, WAY, step))

            mf.simulate(load, WAY.shape)
            if step == 1:  # a later save of the same name clears what was left
                mf.simulate(
                    lambda mesh: checkpoint.save(folder / "step2", state_of(mesh, WAY, 2), names=WAY.names), WAY.shape
                )
            left = sorted(path.name for path in folder.iterdir())
            print(json.dumps([stop, what, step, left]), flush=True)
            shutil.rmtree(folder / "step2")
            if what == "done":
                break


if __name__ == "__main__":
    main()
