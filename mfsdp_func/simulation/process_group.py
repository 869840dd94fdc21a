"""A process group of ``torch.distributed`` whose ranks are simulated.

The n-th collectives of a group meet, are compared, and are computed on each rank from copies of what all have brought,
in the order of ranks. Whoever waits, waits as the calls of this library do: deadlocks, faults, timeouts and the tape of
choices are theirs.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mfsdp_func.effects.agreement import compare_facts
from mfsdp_func.effects.blocks import as_bytes
from mfsdp_func.simulation.carrier import SimulatedCarrier
from mfsdp_func.values.mesh import Mesh

Tensors = Sequence[torch.Tensor]

_REDUCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class Brought(NamedTuple):
    """What a rank brings to a call: its facts in words, and copies of its tensors."""

    facts: dict[str, str]
    tensors: list[torch.Tensor]


class SimulatedWork(dist.Work):
    """A call that is under way; it ends when somebody waits for it, or asks whether it has ended."""

    def __init__(self, finish: Callable[[], None], outputs: Tensors, under_way: "set[SimulatedWork]") -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._outputs, self._under_way = list(outputs), under_way
        under_way.add(self)

    def wait(self, timeout: Any = None) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
            self._under_way.discard(self)
        return True

    def is_completed(self) -> bool:
        return self.wait()

    def is_success(self) -> bool:
        return self._finish is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class SimulatedGroup(dist.ProcessGroup):
    """See the module. Ranks and roots are those of the group."""

    def __init__(self, carrier: SimulatedCarrier, ranks: Sequence[int], rank: int, name: str) -> None:
        super().__init__(rank, len(ranks))  # pyright: ignore[reportCallIssue, reportArgumentType]
        self._carrier, self._ranks, self._name = carrier, tuple(ranks), name
        self._mesh = Mesh(len(ranks), ranks=ranks, rank=ranks[rank])
        self._under_way: set[SimulatedWork] = set()
        """torch's C++ may hold a work whose Python half nobody holds."""

    def getBackendName(self) -> str:  # torch's own name for it
        return "simulated"

    @property
    def group_name(self) -> Any:
        return self._name

    # Collectives: what is brought, and what each rank makes of what all have brought.

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        return self._reduced("all_reduce", _list(tensors), opts, range(self.size()))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> SimulatedWork:
        return self._reduced("reduce", _list(tensors), opts, (opts.rootRank,), root=opts.rootRank)

    def _reduced(self, name: str, tensors: Tensors, opts: Any, takers: Iterable[int], **facts: Any) -> SimulatedWork:
        op = _op(opts)

        def deliver(brought: list[Tensors]) -> None:
            if self.rank() in takers:
                _copy(tensors, [_fold(op, terms) for terms in zip(*brought, strict=True)])

        return self._collective(name, tensors, tensors, deliver, reduction=op, sizes=_sizes(tensors), **facts)

    def broadcast(self, tensors: Any, opts: Any) -> SimulatedWork:
        room, root = _list(tensors), opts.rootRank

        def deliver(brought: list[Tensors]) -> None:
            _copy(room, brought[root])

        given = room if self.rank() == root else []
        return self._collective("broadcast", given, room, deliver, root=root, sizes=_sizes(room))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        rooms, given = [_list(room) for room in outputs], _list(inputs)

        def deliver(brought: list[Tensors]) -> None:
            for n, room in enumerate(rooms):
                _copy(room, [tensors[n] for tensors in brought])

        return self._collective("all_gather", given, rooms[0], deliver, sizes=_sizes(given))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> SimulatedWork:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        given, rooms = _list(inputs), _list(outputs)

        def deliver(brought: list[Tensors]) -> None:
            for room, pieces in zip(rooms, zip(*brought, strict=True), strict=True):
                _copy([room], [torch.cat([piece.reshape(-1) for piece in pieces])])

        return self._collective("all_gather_into_tensor", given, rooms, deliver, sizes=_sizes(given))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        (room,), (given,) = _list(outputs), inputs

        def deliver(brought: list[Tensors]) -> None:
            _copy([room], [_fold(_op(opts), [tensors[self.rank()] for tensors in brought])])

        return self._collective("reduce_scatter", given, [room], deliver, reduction=_op(opts), sizes=_sizes(given))

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        given, rooms, op = _list(inputs), _list(outputs), _op(opts)

        def deliver(brought: list[Tensors]) -> None:
            for room, terms in zip(rooms, zip(*brought, strict=True), strict=True):
                parts = [term.reshape(self.size(), -1)[self.rank()] for term in terms]
                _copy([room], [_fold(op, parts)])

        return self._collective("reduce_scatter_tensor", given, rooms, deliver, reduction=op, sizes=_sizes(given))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        root, given = opts.rootRank, _list(inputs)
        rooms = outputs[0] if outputs else []

        def deliver(brought: list[Tensors]) -> None:
            if self.rank() == root:
                _copy(rooms, [tensors[0] for tensors in brought])

        return self._collective("gather", given, rooms, deliver, root=root, sizes=_sizes(given))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        root, rooms = opts.rootRank, _list(outputs)

        def deliver(brought: list[Tensors]) -> None:
            _copy(rooms, [brought[root][self.rank()]])

        given = inputs[0] if self.rank() == root else []
        return self._collective("scatter", given, rooms, deliver, root=root, sizes=_sizes(rooms))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        def deliver(brought: list[Tensors]) -> None:
            _copy(outputs, [tensors[self.rank()] for tensors in brought])

        return self._collective("all_to_all", inputs, outputs, deliver)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, to: Any, of: Any, opts: Any = None
    ) -> SimulatedWork:
        rooms = output.split(list(to) if to else output.shape[0] // self.size())
        pieces = given.split(list(of) if of else given.shape[0] // self.size())

        def deliver(brought: list[Tensors]) -> None:
            _copy(rooms, [tensors[self.rank()] for tensors in brought])

        return self._collective("all_to_all_single", pieces, [output], deliver)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._collective("barrier", [], [], lambda brought: None)

    # Messages.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> SimulatedWork:
        given, pair = _list(tensors), (self.rank(), dst)
        awaited = pair if self._carrier.holds_senders else pair[:1]
        return self._call(f"send to rank {self._ranks[dst]}", (*pair, tag), awaited, given, [], lambda met: None)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> SimulatedWork:
        rooms, pair = _list(tensors), (src, self.rank())
        name = f"recv from rank {self._ranks[src]}"
        return self._call(name, (*pair, tag), pair, [], rooms, lambda met: _copy(rooms, met[0].tensors))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        raise NotImplementedError("recv: on a simulated mesh, say the rank that it comes from")

    # Names of torch before 2.13.

    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    alltoall_base: Any = all_to_all_single

    def _label(self, name: str) -> str:
        some = ", ".join(map(str, self._ranks[:8])) + (", ..." if len(self._ranks) > 8 else "")
        return f"{name} of process group {self._name!r} over ranks {some}"

    def _collective(
        self, name: str, given: Tensors, outputs: Tensors, deliver: Callable[[list[Tensors]], None], **facts: Any
    ) -> SimulatedWork:
        everybody = tuple(range(self.size()))

        def finish(met: list[Brought]) -> None:
            facts = {rank: brought.facts for rank, brought in zip(self._ranks, met, strict=True)}
            compare_facts(self._label(name), facts)
            deliver([brought.tensors for brought in met])

        return self._call(name, None, everybody, given, outputs, finish, **facts)

    def _call(
        self,
        name: str,
        kind: Hashable,
        partners: Sequence[int],
        given: Tensors,
        outputs: Tensors,
        finish: Callable[[list[Brought]], None],
        **facts: Any,
    ) -> SimulatedWork:
        """Make a call that meets the same one of all partners."""
        words = {"operation": name, **{fact: str(value) for fact, value in facts.items()}}
        label, ranks = self._label(name), [self._ranks[n] for n in partners]
        flips = self._carrier.begin(label, self._mesh)
        with torch.no_grad():
            brought = Brought(words, [_copied(tensor) for tensor in given])
            _flip(brought.tensors, flips)
        meeting, wait = self._carrier.meet(label, self._mesh, (self._name, kind), brought, ranks, queued=kind is None)

        def end() -> None:
            wait()
            with torch.no_grad():
                finish([meeting.entries[rank] for rank in ranks])

        return SimulatedWork(end, outputs, self._under_way)


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _flip(tensors: Tensors, bits: Sequence[int]) -> None:
    """Flip bits on the way, counted over all tensors."""
    total = sum(tensor.nbytes for tensor in tensors)
    for bit in bits if total else ():
        byte, place = divmod(bit % (8 * total), 8)
        for tensor in tensors:
            if byte < tensor.nbytes:
                as_bytes(tensor)[byte] ^= 1 << place
                break
            byte -= tensor.nbytes


def _sizes(tensors: Tensors) -> str:
    return ", ".join(f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def _op(opts: Any) -> Any:
    op = dist.ReduceOp.SUM if opts is None else getattr(opts.reduceOp, "op", opts.reduceOp)
    if op not in _REDUCTIONS:
        raise NotImplementedError(f"reductions by {op} are not simulated")
    return op


def _fold(op: Any, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction, from the first rank to the last."""
    total = reduce(_REDUCTIONS[op], terms)
    return total / len(terms) if op == dist.ReduceOp.AVG else total


def _copy(rooms: Tensors, values: Tensors) -> None:
    for room, value in zip(rooms, values, strict=True):
        # Not as torch's autograd would see it: collectives do not count as changes of their outputs.
        room.detach().copy_(value.reshape(room.shape))
