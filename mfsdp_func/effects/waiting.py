"""Waiting on a process group: within its timeout, with one error by name for whatever ends the wait, and never again after it.

The first failure of a group ends it. The rank that sees it leaves word in the group's store, keeps the words for its own
later calls, and closes its connections in this group (a gloo wait that times out does), so that whoever waits for this
rank learns of it at once. A call that succeeds pays for none of this.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from mfsdp_func.effects.exchange_error import ExchangeError
from mfsdp_func.effects.torch_internals import device_types_of, name_of, timeout_of
from mfsdp_func.values.mesh import Mesh

_AT_ONCE_SECONDS = 0.25
"""A wait that begins so soon after its call takes the backend's own timeout; a later one, what is left of it."""
_STORE_SECONDS = 0.4
"""How long a store may take to answer: that of a dead rank may never do."""
_HEARSAY = ("closed by peer", "reset by peer", "Broken pipe")
"""What gloo says where another rank has ended, or has given up; one that gave up knows more, and may speak first."""
_HEARSAY_SECONDS = 0.2
_KEY = "mfsdp_func/first_failure"
_WORDS_LENGTH = 500
_CLOSING_TAG = 0x2D667364


class _Began(threading.local):
    at: float = 0.0


BEGAN = _Began()
"""When this thread's outermost call began, by `time.monotonic`; 0 outside of calls."""

FAILED: dict[int, tuple[Callable[[], object], str]] = {}
"""The groups that have failed, by `id`: a weak reference, and the first failure. A group made anew is another one."""


class Waiter(NamedTuple):
    """Who waits: a call of this rank, on a process group.

    Attributes:
        group: the process group.
        operation: the call.
        mesh: its ranks.
        hint: what may be wrong where it waits in vain, for the message.
        blocks: whether a wait holds the host until it is over; on CUDA it only queues, and the backend keeps the time.
    """

    group: dist.ProcessGroup
    operation: str
    mesh: Mesh
    hint: str = ""
    blocks: bool = True

    def check(self) -> None:
        """Refuse a call on a group that has failed.

        Raises:
            ExchangeError: naming the group's first failure.
        """
        if words := _known_failure(self.group):
            raise ExchangeError(
                self.operation,
                self.mesh,
                rank=self.mesh.get_rank(),
                timeout=timeout_of(self.group),
                cause=words,
                reason="its process group has failed before",
                group=name_of(self.group),
            )

    def wait(self, works: Sequence[Any], peers: Sequence[int]) -> None:
        """Wait for `works` in order, no longer than the group's timeout from the beginning of this thread's call.

        Args:
            works: what is waited for.
            peers: the global rank that each of them waits for; the last waits for all that follow, too.

        Raises:
            ExchangeError: if one of them fails.
        """
        start = BEGAN.at or monotonic()
        for n, work in enumerate(works):
            try:
                spent = monotonic() - start
                late = self.blocks and spent >= _AT_ONCE_SECONDS
                if not late or (timeout := timeout_of(self.group)) is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(0.001, timeout - spent)))
            except RuntimeError as error:
                raise self.failure(peers[n:], error, works[n + 1 :], start) from error

    def failure(
        self, awaited: Sequence[int], error: RuntimeError, more: Sequence[Any] = (), start: float = 0.0
    ) -> ExchangeError:
        """The error for what the backend could not do; the group is of no more use from here on.

        Args:
            awaited: the peers; the first is the one of which the backend told.
            error: what it told.
            more: works for the peers after the first; those that are done are not awaited.
            start: when the call began; by default, as `BEGAN` says.
        """
        now, rank, timeout = monotonic(), self.mesh.get_rank(), timeout_of(self.group)
        elapsed = now - (start or BEGAN.at or now)
        mine = f"rank {rank}, {elapsed:.3g} s into {self.operation}, awaiting rank {awaited[0]}: {_line(error)}"
        mine = mine[:_WORDS_LENGTH]
        first = give_up(self.group, mine, hearsay=any(word in str(error) for word in _HEARSAY))
        still = [peer for work, peer in zip(more, awaited[1:], strict=False) if not _is_done(work, self.group)]
        return ExchangeError(
            self.operation,
            self.mesh,
            rank=rank,
            awaited=sorted({awaited[0], *still, *awaited[1 + len(more) :]}),
            elapsed=elapsed,
            timeout=timeout,
            cause=None if first == mine else first,
            reason=f"{self.hint}{_line(error)}",
            group=name_of(self.group),
        )


def give_up(group: dist.ProcessGroup, words: str, *, hearsay: bool = False) -> str:
    """Let no more calls run on a group, and tell its other ranks why.

    Args:
        group: the process group.
        words: why.
        hearsay: whether another rank may know better; it has a moment to say so.

    Returns:
        The first failure: `words`, or what another rank said before.
    """
    first = _known_failure(group)
    if first is None:
        first, key = _leave_word(group, words[:_WORDS_LENGTH], hearsay), id(group)
        FAILED[key] = ref(group, lambda _: FAILED.pop(key, None) and None), first
        _close(group)
    return first


def _known_failure(group: dist.ProcessGroup) -> str | None:
    kept = FAILED.get(id(group))
    return kept[1] if kept is not None and kept[0]() is group else None


def _leave_word(group: dist.ProcessGroup, words: str, hearsay: bool) -> str:
    """Put words into the group's store, where nobody has before; return those that are there then. Never takes long."""
    answers: list[str] = []

    def ask() -> None:
        with suppress(Exception):
            store = group.get_group_store()
            until = monotonic() + _HEARSAY_SECONDS * hearsay
            while monotonic() < until and not store.check([_KEY]):
                sleep(0.02)
            answers.append(store.compare_set(_KEY, "", words).decode())

    asking = threading.Thread(target=ask, name="mfsdp_func leaves word", daemon=True)
    asking.start()
    asking.join(_STORE_SECONDS + _HEARSAY_SECONDS * hearsay)
    return answers[0] if answers else words


def _close(group: dist.ProcessGroup) -> None:
    """Close this rank's connections in a gloo group: a wait for a message that nobody sends does, as it times out."""
    if "cpu" not in device_types_of(group):
        return
    for peer in range(group.size()):
        if peer != group.rank():
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            with suppress(RuntimeError):  # at once, where the connection is closed already
                group.recv([nothing], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))


def _is_done(work: Any, group: dist.ProcessGroup) -> bool:
    """Whether work of a group that was closed had been done before."""
    if "cpu" not in device_types_of(group):
        return False
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True


def _line(error: BaseException) -> str:
    """An error on one line, without gloo's place in its sources and its advice."""
    text = " ".join(str(error).split()).partition(" This is typically caused by")[0].removesuffix(".")
    return text.partition("] ")[2] if text.startswith("[/") else text
