"""Step time by the alpha-beta model: latency per message, bytes over bandwidth, operations over speed. A model, no measurement.

Assumed: both directions of a link work at once; links inside a node and between nodes work side by side, and the slower
one counts; a ring of several nodes has all their network links; the slowest rank decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mfsdp_func.preflight.hardware import Hardware
from mfsdp_func.preflight.settings import Settings
from mfsdp_func.preflight.traffic import Operation


@dataclass(frozen=True)
class Span:
    """A stretch of the step's timeline.

    Attributes:
        lane: "compute" or "communication".
        name: what happens.
        start: in seconds from the start of the step.
        seconds: how long it takes.
    """

    lane: str
    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Timing:
    """What the model says of one step.

    Attributes:
        seconds: operation -> seconds of the slowest rank.
        compute: "forward", "backward", "optimizer" -> seconds of the busiest rank.
        spans: the timeline: gathers run ahead of the unit that needs them, reductions behind it.
    """

    seconds: dict[str, float]
    compute: dict[str, float]
    spans: tuple[Span, ...]

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return max((span.start + span.seconds for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds of the step in which nothing is computed."""
        return self.step - sum(span.seconds for span in self.spans if span.lane == "compute")


def seconds_of(operation: Operation, settings: Settings, hardware: Hardware) -> float:
    """Seconds of all calls of an operation, on the slowest rank."""
    if operation.schedule == "ring":
        far = bool(operation.sent[1].any())
        bandwidth, latency = hardware.inside_bandwidth, hardware.inside_latency
        if far:
            # Each node's share of a ring leaves through the links of all of its ranks that are on the ring.
            together = (
                min(settings.node, settings.shards)
                if not operation.label.startswith("allreduce")
                else _on_a_node(settings)
            )
            bandwidth = min(bandwidth, together * hardware.between_bandwidth)
            latency = hardware.between_latency
        rounds = int(operation.sent_messages.sum(0).max())
        return rounds * latency + int(operation.sent.sum(0).max()) / bandwidth
    messages = torch.maximum(operation.sent_messages, operation.received_messages)
    nbytes = torch.maximum(operation.sent, operation.received)
    latency = torch.tensor([hardware.inside_latency, hardware.between_latency], dtype=torch.float64)
    bandwidth = torch.tensor([hardware.inside_bandwidth, hardware.between_bandwidth], dtype=torch.float64)
    each = messages * latency[:, None] + nbytes / bandwidth[:, None]
    return float(each.max())


def _on_a_node(settings: Settings) -> int:
    """How many ranks of a line of replicas share a node."""
    return max(1, settings.node // settings.shards)


def time_step(
    operations: Sequence[Operation],
    loads: Sequence[float],
    settings: Settings,
    hardware: Hardware,
    forward_flops: float,
    units: int,
) -> Timing:
    """The model's times.

    Args:
        operations: of one step.
        loads: work of each owner in the optimizer, in floating-point operations.
        settings: the mesh.
        hardware: devices and links.
        forward_flops: of one rank's forward pass; 0 where no batch is given. A backward pass takes twice as many,
            and those once more where units run again.
        units: into how many equal units the passes are cut, for the timeline.
    """
    seconds = {operation.name: seconds_of(operation, settings, hardware) for operation in operations}
    speed = hardware.flops * hardware.efficiency
    compute = {
        "forward": forward_flops / speed,
        "backward": (3 if settings.recompute else 2) * forward_flops / speed,
        "optimizer": max(loads, default=0.0) / speed,
    }
    return Timing(seconds, compute, _timeline(seconds, compute, max(1, units)))


def _timeline(seconds: dict[str, float], compute: dict[str, float], units: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    line = now = 0.0  # until when the link, and the device, are busy

    def send(name: str, total: float, after: float, count: int = units) -> float:
        nonlocal line
        if total:
            start = max(line, after)
            spans.append(Span("communication", name, start, total / count))
            line = start + total / count
        return max(line, after) if total else after

    def work(name: str, total: float, after: float, count: int = units) -> float:
        nonlocal now
        start = max(now, after)
        if total:
            spans.append(Span("compute", name, start, total / count))
        now = start + total / count
        return now

    began = 0.0  # when the unit before began: then the next gather may start
    ready = send("gather for forward", seconds.get("gather for forward", 0.0), 0.0)
    for unit in range(units):
        began = max(now, ready)
        following = ready
        if unit + 1 < units:
            following = send("gather for forward", seconds.get("gather for forward", 0.0), began)
        work("forward", compute["forward"], ready)
        ready = following
    reductions = [(name, value) for name, value in seconds.items() if name.startswith("reduce")]
    ready = send("gather for backward", seconds.get("gather for backward", 0.0), now)
    for unit in range(units):
        began = max(now, ready)
        following = ready
        if unit + 1 < units:
            following = send("gather for backward", seconds.get("gather for backward", 0.0), began)
        done = work("backward", compute["backward"], ready)
        for name, total in reductions:
            done = send(name, total, done)
        ready = following
    now = max(now, line)
    ready = send("optimizer gather", seconds.get("optimizer gather", 0.0), now, 1)
    done = work("optimizer", compute["optimizer"], ready, 1)
    send("optimizer scatter", seconds.get("optimizer scatter", 0.0), done, 1)
    return tuple(spans)
