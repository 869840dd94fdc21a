"""The answer: a printable value, its lines one by one, and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mfsdp_func.fsdp.context import FsdpContext
from mfsdp_func.preflight.activations import Activations
from mfsdp_func.preflight.hardware import Hardware
from mfsdp_func.preflight.memory import MOMENTS, Memory
from mfsdp_func.preflight.parts import Parts, finer_rows
from mfsdp_func.preflight.settings import Settings
from mfsdp_func.preflight.timing import Timing
from mfsdp_func.preflight.traffic import LINKS, Operation
from mfsdp_func.report import format_table
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout


class Line(NamedTuple):
    """One figure that settings can be compared by.

    Attributes:
        name: what it is.
        value: the figure; less is better.
        text: the same for people.
    """

    name: str
    value: float
    text: str


@dataclass(frozen=True, eq=False)
class Answer:
    """What a training step will move, store and take, on every rank. Print it; or see `to_json`.

    Attributes:
        settings: what was asked.
        parts: layout, padding and owners of every buffer.
        operations: what each operation of a step sends.
        memory: bytes of every rank, by kind.
        timing: the alpha-beta model.
        hardware: its numbers.
        activations: of one rank's batch; None where none was given.
    """

    settings: Settings
    parts: Parts
    operations: tuple[Operation, ...]
    memory: Memory
    timing: Timing
    hardware: Hardware
    activations: Activations | None

    @property
    def command(self) -> str:
        """The command that prints this."""
        words = " ".join(self.parts.model.words) or "MODEL"
        return f"python -m mfsdp_func preflight {words} {self.settings.options()}"

    @cached_property
    def fits(self) -> bool:
        """Whether the fullest rank's peak fits into a device."""
        return self.peak <= self.hardware.memory

    @cached_property
    def peak(self) -> int:
        """Bytes of the fullest rank at its fullest moment, in a functional step."""
        return int(self.memory.peak().max())

    @property
    def imbalance(self) -> float:
        """Owner load, max over mean; 1 where there is no work."""
        loads = self.parts.loads
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

    @property
    def imbalance_bound(self) -> float:
        """No choice of owners has a smaller `imbalance`."""
        loads = self.parts.loads
        return self.parts.load_bound * len(loads) / sum(loads) if sum(loads) else 1.0

    @property
    def padding(self) -> float:
        """Elements stored per element needed, over all buffers."""
        reports = [part.padding for part in self.parts.parts.values()]
        return sum(report.stored for report in reports) / max(1, sum(report.needed for report in reports))

    def operation(self, name: str) -> Operation | None:
        """The operation of a name; None where it moves nothing."""
        return next((operation for operation in self.operations if operation.name == name), None)

    @property
    def context(self) -> FsdpContext:
        """What `fully_shard` is given for a run like this."""
        return FsdpContext(
            shard_layout=self.settings.layout,
            finer_rows=finer_rows(self.parts.model, self.settings),
            param_dtype=self.settings.param_dtype,
            reduce_dtype=self.settings.reduce_dtype,
            recompute=self.settings.recompute,
        )

    def owner_layouts(self, mesh: Mesh | MeshLike) -> dict[str, GroupOwnerLayout]:
        """The owners that were planned, by group, for the optimizer of a run on `mesh`.

        Raises:
            ValueError: if the mesh has another shape.
        """
        value = as_mesh(mesh)
        if value.shape != self.settings.mesh:
            raise ValueError(f"owner_layouts: planned for a mesh of shape {self.settings.mesh}, got {value}")
        axes = (value.ndim - 1,)
        ranks = value.shard_ranks(axes, value.ranks[0])
        return {
            key: GroupOwnerLayout(
                value, part.fine, {i: ranks[k] for i, k in part.owners.items()}, self.settings.placements, key
            )
            for key, part in self.parts.parts.items()
            if part.owners
        }

    def lines(self) -> list[Line]:
        """The figures that decide, worst rank each."""
        found = [
            Line("memory, functional step", self.peak, gigabytes(self.peak)),
            Line("memory, step in place", peak := int(self.memory.peak(in_place=True).max()), gigabytes(peak)),
            Line("padding, stored / needed", self.padding, f"{self.padding:.3f}"),
        ]
        if self.parts.matrices:
            mean = sum(self.parts.loads) / len(self.parts.loads)
            found += [
                Line(
                    "owner load, max / mean", self.imbalance, f"{self.imbalance:.3f} (bound {self.imbalance_bound:.3f})"
                ),
                Line("owner work, busiest", max(self.parts.loads), f"{max(self.parts.loads) / 1e12:,.2f} Tflop"),
                Line("owner work, mean", mean, f"{mean / 1e12:,.2f} Tflop"),
            ]
        gather = self.operation("optimizer gather")
        if gather is not None:
            found += [
                Line("optimizer gather, all ranks", gather.nbytes, gigabytes(gather.nbytes)),
                Line("optimizer gather, between nodes", gather.between, f"{gather.between:.1%}"),
                Line("optimizer gather, busiest rank", gather.busiest, gigabytes(gather.busiest)),
                Line("optimizer gather, peers", most := int(gather.peers.max()), f"{most:,}"),
            ]
        found += [Line(f"time: {name}", value, seconds(value)) for name, value in self.timing.seconds.items()]
        found += [
            Line(f"time: compute {n}", value, seconds(value)) for n, value in self.timing.compute.items() if value
        ]
        found.append(Line("time: step (model)", self.timing.step, seconds(self.timing.step)))
        return found

    def __str__(self) -> str:
        return "\n\n".join([self._heading(), self._memory(), self._traffic(), self._owners(), self._time()])

    def __repr__(self) -> str:
        return f"<Preflight of {self.parts.model.label}, {self.settings.options()}>"

    def _heading(self) -> str:
        model, mesh = self.parts.model, "x".join(map(str, self.settings.mesh))
        needed = self.peak / self.hardware.memory
        verdict = "fits" if self.fits else "does NOT fit"
        return "\n".join(
            [
                f"{model.label}: {model.numel:,} parameters in {model.tensors:,} tensors, {len(model.groups)} buffers,"
                f" {len(model.units)} units",
                f"mesh {mesh} ({self.settings.world:,} ranks, {self.settings.shards:,} shards, {self.settings.node} a node),"
                f" {self.settings.optimizer}, layout {self.settings.layout.value}, owners {self.settings.owners}",
                f"{verdict}: {gigabytes(self.peak)} on the fullest rank, {needed:.0%} of {gigabytes(self.hardware.memory)}"
                f" ({self.hardware.name})"
                + ("" if self.activations else "; activations are left out, add --batch SEQUENCESxTOKENS"),
            ]
        )

    def _memory(self) -> str:
        rows: list[list[str]] = []
        for in_place in (False, True):
            moment, rank = self.memory.worst(in_place=in_place)
            kinds = (self.memory.in_place if in_place else self.memory.moments)[moment]
            what = "step in place" if in_place else "functional step"
            rows.append(
                [
                    f"{what}: rank {rank}, {MOMENTS[moment]}",
                    *(gigabytes(int(kinds[k][rank])) if k in kinds else "-" for k in _kinds(self.memory)),
                    gigabytes(int(self.memory.total(moment, in_place=in_place)[rank])),
                ]
            )
        return "MEMORY of the fullest rank\n" + format_table(["", *_kinds(self.memory), "all"], rows)

    def _traffic(self) -> str:
        rows = [
            [
                op.name,
                op.schedule,
                f"{op.calls:,}",
                *(f"{gigabytes(int(op.sent[link].sum()))}" for link in range(2)),
                f"{op.between:.1%}",
                gigabytes(op.busiest),
                f"{op.messages:,}",
                f"{int(op.sent_messages.sum(0).max()):,}",
                f"{int(op.peers.max()):,}",
            ]
            for op in self.operations
        ]
        header = ["operation", "way", "calls", *LINKS, "between", "busiest rank", "messages", "of a rank", "peers"]
        whose = (
            "as the simulated mesh packs them"
            if self.settings.carrier == "simulated"
            else "as process groups pack them; 'ring' is what their native collectives send at least"
        )
        return f"BYTES AND MESSAGES of one step, all ranks ({whose})\n" + format_table(header, rows)

    def _owners(self) -> str:
        reports = [part.padding for part in self.parts.parts.values()]
        stored, needed = sum(r.stored for r in reports), sum(r.needed for r in reports)
        words = [f"PADDING: {stored:,} elements stored for {needed:,} ({stored / max(1, needed):.3f} times)"]
        worst = max(self.parts.parts.items(), key=lambda item: item[1].padding.times)
        words.append(f"  most in {worst[0]!r}: {worst[1].padding}")
        if self.parts.matrices:
            loads = self.parts.loads
            words.append(
                f"OWNERS: {self.parts.matrices:,} matrices on {len(loads):,} shards"
                + (
                    f", in each of {self.settings.world // len(loads):,} replica groups"
                    if len(loads) < self.settings.world
                    else ""
                )
                + f"; load max/mean {self.imbalance:.3f}, bound {self.imbalance_bound:.3f}; busiest"
                f" {max(loads) / 1e12:,.2f} Tflop, {sum(1 for load in loads if not load):,} shards own nothing"
            )
        return "\n".join(words)

    def _time(self) -> str:
        rows = [[name, seconds(value)] for name, value in self.timing.seconds.items()]
        rows += [[f"compute {name}", seconds(value)] for name, value in self.timing.compute.items() if value]
        rows.append(["step, overlapped", seconds(self.timing.step)])
        rows.append(["  in which nothing is computed", seconds(self.timing.exposed)])
        return (
            f"TIME by the alpha-beta model, no measurement ({self.hardware})\n"
            + format_table(["slowest rank", "seconds"], rows)
            + f"\nnumbers of {self.hardware.name}, and their sources, as remembered: compare before you rely on one\n"
            + self.hardware.table()
        )

    def compare(self, *others: "Answer") -> str:
        """A table of this beside others; ``*`` marks the better one of each line.

        Raises:
            ValueError: if there is no other.
        """
        return comparison([self, *others])

    def to_json(self) -> str:
        """All figures, those of ranks as lists by rank."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """What `to_json` writes."""
        model = self.parts.model
        return {
            "model": {"label": model.label, "parameters": model.numel, "tensors": model.tensors},
            "settings": self.settings.as_json(),
            "command": self.command,
            "fits": self.fits,
            "lines": [line._asdict() for line in self.lines()],
            "hardware": asdict(self.hardware),
            "memory": {
                way: {m: {kind: v.tolist() for kind, v in kinds.items()} for m, kinds in moments.items()}
                for way, moments in (("functional", self.memory.moments), ("in place", self.memory.in_place))
            },
            "operations": [
                {
                    "name": op.name,
                    "schedule": op.schedule,
                    "calls": op.calls,
                    "links": list(LINKS),
                    "sent": op.sent.tolist(),
                    "received": op.received.tolist(),
                    "sent messages": op.sent_messages.tolist(),
                    "received messages": op.received_messages.tolist(),
                    "peers": op.peers.tolist(),
                }
                for op in self.operations
            ],
            "owner load": list(self.parts.loads),
            "owner load bound": self.parts.load_bound,
            "padding": {key: asdict(part.padding) for key, part in self.parts.parts.items()},
            "time": {
                "operations": self.timing.seconds,
                "compute": self.timing.compute,
                "step": self.timing.step,
                "spans": [asdict(span) for span in self.timing.spans],
            },
        }


def _kinds(memory: Memory) -> Sequence[str]:
    return list(dict.fromkeys(kind for kinds in memory.moments.values() for kind in kinds))


def gigabytes(nbytes: float) -> str:
    """Bytes for people, in powers of 1000.

    >>> gigabytes(1234), gigabytes(5.6e9)
    ('1.2 kB', '5.60 GB')
    """
    for unit, size, digits in (("PB", 1e15, 2), ("TB", 1e12, 2), ("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if nbytes >= size:
            return f"{nbytes / size:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """Seconds for people.

    >>> seconds(0.0123), seconds(2)
    ('12.3 ms', '2.00 s')
    """
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{value * 1e3:,.1f} ms" if value >= 1e-3 else f"{value * 1e6:,.1f} us"


def comparison(results: Sequence[Answer], names: Sequence[str] | None = None) -> str:
    """A table of settings side by side; ``*`` marks the better one of each line, where they differ.

    Raises:
        ValueError: if there are fewer than two.
    """
    if len(results) < 2:
        raise ValueError(f"compare: needs at least two settings, got {len(results)}")
    columns = [{line.name: line for line in result.lines()} for result in results]
    heads = list(names) if names else labels_of(results)
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for column in columns for name in column):
        found = [column.get(name) for column in columns]
        values = [line.value for line in found if line is not None]
        best = min(values) if len(set(values)) > 1 else None
        rows.append([name, *(("* " if line.value == best else "") + line.text if line else "-" for line in found)])
    return format_table(["* is better", *heads], rows)


def labels_of(results: Sequence[Answer]) -> list[str]:
    """What tells settings apart, in a few words each."""
    each: list[Mapping[str, Any]] = [result.settings.as_json() for result in results]
    differing = [name for name in each[0] if any(other[name] != each[0][name] for other in each)]
    labels: list[str] = []
    for values in each:
        words = ["x".join(map(str, v)) if isinstance(v := values[name], list) else str(v) for name in differing]
        labels.append(", ".join(words) or "same")
    return labels
