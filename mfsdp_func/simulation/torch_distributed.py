"""``torch.distributed`` on simulated ranks: ``init_process_group`` in each rank's thread, with whatever backend it names.

torch keeps what it knows of process groups in one object per process, a registry by name, and a store that ranks meet
in. Here each rank has a world of its own, the registry is kept by thread, and the store hands the turn on while it waits.

Private names of torch that this takes (2.13; ``tests/test_simulated_torch.py`` fails when one changes): the world,
``distributed_c10d._world``; the making of a group, ``_new_process_group_helper``; the registry by thread,
``_set_thread_isolation_mode``; the store, ``rendezvous`` as `distributed_c10d` imports it.
"""

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d  # pyright: ignore[reportMissingModuleSource]
from torch.distributed import distributed_c10d

from mfsdp_func.simulation.baton import Baton, Rank, Wait
from mfsdp_func.simulation.carrier import SimulatedCarrier
from mfsdp_func.simulation.process_group import SimulatedGroup
from mfsdp_func.values.mesh import Mesh

BACKEND = "simulated"


class RankWorld:
    """What torch knows of process groups, of one rank."""

    def __init__(self, carrier: SimulatedCarrier, baton: Baton, rank: Rank, shared: dict[str, bytes]) -> None:
        self.carrier, self.rank, self.size = carrier, rank.id, len(baton.ranks)
        self.store = SimulatedStore(baton, rank, shared)
        self.default_pg: Any = None
        self.group_count = 0
        self.pg_map, self.pg_names, self.pg_group_ranks = dict[Any, Any](), dict[Any, str](), dict[Any, Any]()
        self.pg_backend_config, self.pg_to_tag, self.pg_coalesce_state = {}, {}, {}  # pyright: ignore[reportUnannotatedClassAttribute]
        self.tags_to_pg, self.comms = dict[str, list[Any]](), list[Any]()

    @property
    def pg_config_info(self) -> Any:
        """As torch tells it."""
        return distributed_c10d._World.pg_config_info.fget(self)  # pyright: ignore[reportPrivateUsage, reportOptionalCall]


RANK_WORLD: ContextVar[RankWorld | None] = ContextVar("mfsdp_func_torch_world", default=None)
"""That of this thread's rank."""


class _Worlds:
    """The world of whoever asks."""

    def __init__(self, outside: Any) -> None:
        self.__dict__["outside"] = outside

    def __getattr__(self, name: str) -> Any:
        return getattr(RANK_WORLD.get() or self.__dict__["outside"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(RANK_WORLD.get() or self.__dict__["outside"], name, value)


class SimulatedStore(dist.Store):
    """A store in this process; who waits for a key lets other ranks run."""

    def __init__(self, baton: Baton, rank: Rank, values: dict[str, bytes]) -> None:
        super().__init__()
        self._baton, self._rank, self._values = baton, rank, values

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        words = [value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired)]
        if self._values.get(key, b"") == words[0]:
            self._values[key] = words[1]
        return self._values.get(key, words[0])

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._baton.wait_until(
            self._rank, Wait(lambda: self.check(keys), lambda: f"for keys {list(keys)} of the store")
        )


@contextmanager
def simulated_distributed(mesh: Mesh) -> Generator[None, None, None]:
    """Let ``torch.distributed`` find the world of the rank that asks.

    Raises:
        ValueError: if the ranks are not ``0, 1, 2, ...``, as torch numbers them.
    """
    if sorted(mesh.ranks) != list(range(mesh.size())):
        raise ValueError(f"simulate: torch_distributed=True needs ranks 0 to {mesh.size() - 1}, got {mesh.ranks}")
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])
    before = distributed_c10d._default_pg_init_method, sys.excepthook
    c10d._set_thread_isolation_mode(True)  # pyright: ignore
    rendezvous, helper = distributed_c10d.rendezvous, distributed_c10d._new_process_group_helper
    try:
        with (
            mock.patch.object(distributed_c10d, "_world", _Worlds(distributed_c10d._world)),
            mock.patch.object(distributed_c10d, "rendezvous", _met(rendezvous)),
            mock.patch.object(distributed_c10d, "_new_process_group_helper", _with_backend(helper)),
        ):
            yield
    finally:
        distributed_c10d._default_pg_init_method, sys.excepthook = before
        c10d._set_thread_isolation_mode(False)  # pyright: ignore


def _met(rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    def met(url: str, rank: int = -1, world_size: int = -1, **keywords: Any) -> Iterator[tuple[dist.Store, int, int]]:
        world = RANK_WORLD.get()
        if world is None:
            return rendezvous(url, rank, world_size, **keywords)
        return iter([(world.store, world.rank, world.size)])

    return met


def _with_backend(helper: Callable[..., Any]) -> Callable[..., Any]:
    def make(size: int, rank: int, ranks: Sequence[int], backend: Any, *others: Any, **keywords: Any) -> Any:
        if RANK_WORLD.get() is None:
            return helper(size, rank, ranks, backend, *others, **keywords)
        keywords.update(backend_options=None, device_id=None)
        return helper(size, rank, ranks, dist.Backend(BACKEND), *others, **keywords)

    return make


def _make_group(options: Any, _: Any) -> SimulatedGroup:
    world = RANK_WORLD.get()
    if world is None:
        raise RuntimeError("the backend 'simulated' is there inside simulate(..., torch_distributed=True)")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return SimulatedGroup(world.carrier, ranks, options.group_rank, options.group_id)
