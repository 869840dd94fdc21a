"""Real ranks for tests: processes on the loopback interface, joined by gloo.

A *program* is a module-level function `program(rank, *args)`; it is shipped by name, so that its module must be
importable as `tests....`. Arguments and results are pickled by value. In a rank, `assert` is not rewritten by pytest:
use `torch.testing.assert_close` or a message.
"""

import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from types import TracebackType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import torch
import torch.distributed as dist

Program = Callable[..., Any]

_STARTUP_SECONDS = 120.0
"""How long processes may take to start and to join a process group."""
_GRACE_SECONDS = 3.0
"""How long the other ranks may still run once one has raised and the test wants nothing but that error."""


class RankPool:
    """Processes that stay alive between runs; each run has a process group, a seed and compile caches of its own.

    Processes start at the first run. They are replaced after a run that did not end on every rank; where every rank
    returned or raised, the next run's new process group is enough.

    Args:
        world_size: the number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._context = get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._folder: Path | None = None
        self._runs = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the live ranks; empty before the first run and after one that did not end."""
        return [process.pid for process in self._processes]

    def run(
        self,
        program: Program,
        *args: Any,
        timeout: float = 60.0,
        group_timeout: float = 30.0,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Run ``program(rank, *args)`` on every rank.

        Args:
            program: a module-level function.
            args: its further arguments, the same on every rank.
            timeout: seconds after which the run is given up.
            group_timeout: seconds after which gloo gives up an operation.
            return_exceptions: return what a rank raised in place of its result. The exception keeps its type where
                it can be pickled, and its remote traceback is a note of it. A rank that died is a `RuntimeError`.

        Returns:
            What the ranks returned, in rank order.

        Raises:
            RuntimeError: with the remote tracebacks of all ranks that raised or died.
            TimeoutError: naming the ranks that were still running, with their stacks.
        """
        task = pickle.dumps((program, args))
        try:
            self._join_group(group_timeout)
            self._send(task)
            outcomes = self._collect(timeout, wait_for_all=return_exceptions)
        except BaseException:  # an interrupt too: the ranks may still be at work
            self.close()
            raise
        running = [rank for rank in range(self.world_size) if rank not in outcomes]
        failed = {rank: error for rank, (error, _) in sorted(outcomes.items()) if error is not None}
        report = "\n".join(f"--- rank {rank} ---\n{_describe(error)}" for rank, error in failed.items())
        stacks = self._stacks(running)
        if running or any(not process.is_alive() for process in self._processes):
            self.close()
        if running and (return_exceptions or not failed):
            raise TimeoutError(f"ranks {running} were still running after {timeout} s\n{stacks}{report}")
        if failed and not return_exceptions:
            also = f"\n(ranks {running} were still running)\n{stacks}" if running else ""
            raise RuntimeError(
                f"{program.__qualname__} failed on ranks {list(failed)} of {self.world_size}\n{report}{also}"
            )
        return [result if error is None else error for _, (error, result) in sorted(outcomes.items())]

    def close(self) -> None:
        """End the processes; a later run starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.world_size):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self.world_size, there, self._folder), name=f"rank {rank}", daemon=True
            )
            process.start()
            there.close()  # so that the death of the rank closes the pipe
            self._processes.append(process)
            self._pipes.append(here)
        return self._folder

    def _join_group(self, group_timeout: float) -> None:
        """Give the ranks a new process group, in new processes where the old ones cannot join one."""
        for fresh in (not self._processes, True):
            if fresh:
                self.close()
            folder = self._folder or self._start()
            self._runs += 1
            command = pickle.dumps((str(folder / f"store-{self._runs}"), group_timeout))
            self._send(command)
            outcomes = self._collect(_STARTUP_SECONDS if fresh else 10.0, wait_for_all=False)
            errors = [_describe(error) for error, _ in outcomes.values() if error is not None]
            if len(outcomes) == self.world_size and not errors:
                return
            if fresh:
                raise RuntimeError(f"{self.world_size} ranks could not form a process group\n" + "\n".join(errors))

    def _send(self, message: bytes) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # `_collect` reports a rank that died
                pipe.send_bytes(message)

    def _collect(self, timeout: float, *, wait_for_all: bool) -> dict[int, tuple[BaseException | None, Any]]:
        """Rank -> (what it raised, what it returned), of the ranks that answered in time."""
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        outcomes: dict[int, tuple[BaseException | None, Any]] = {}
        while waiting and (ready := connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    outcomes[rank] = RuntimeError(f"rank {rank} died with exit code {code}"), None
                if outcomes[rank][0] is not None and not wait_for_all:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return outcomes

    def _stacks(self, ranks: list[int]) -> str:
        """Where ranks are, as their own fault handlers tell."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        files = [(rank, self._folder / f"stack-{rank}") for rank in ranks if self._folder]
        return "".join(f"--- rank {rank} is at ---\n{file.read_text()}\n" for rank, file in files if file.exists())


def run_ranks(
    program: Program,
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run ``program(rank, *args)`` in `world_size` new processes; see `RankPool.run`."""
    with RankPool(world_size) as pool:
        return pool.run(
            program, *args, timeout=timeout, group_timeout=group_timeout, return_exceptions=return_exceptions
        )


def _describe(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", None) or [repr(error)])


def _portable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, as a `RuntimeError` where its own type does not survive pickling."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error) or str(copy) != str(error):
            raise TypeError("changed by pickling")
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(text)
    return copy


def _answer(pipe: connection.Connection, call: Callable[[], Any]) -> None:
    """Send what `call` raises and returns."""
    try:
        message = pickle.dumps((None, call()))
    except BaseException as error:  # a program may call sys.exit
        message = pickle.dumps((_portable(error), None))
    pipe.send_bytes(message)


def _serve(rank: int, world_size: int, pipe: connection.Connection, folder: Path) -> None:
    """The life of a rank: by turns join a new process group and run a program in it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks itself

    def join(message: bytes) -> None:
        path, group_timeout = pickle.loads(message)
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(path, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )

    def work(message: bytes) -> Any:
        program, args = pickle.loads(message)
        return program(rank, *args)

    with (folder / f"stack-{rank}").open("w") as stack, contextlib.suppress(EOFError, OSError):
        faulthandler.register(signal.SIGUSR1, file=stack)
        while True:
            for step in (join, work):
                message = pipe.recv_bytes()
                _answer(pipe, lambda step=step, message=message: step(message))
