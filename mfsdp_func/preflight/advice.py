"""Which other setting would make the worst line better, found by trying, as a command."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mfsdp_func.preflight.result import Answer, Line, gigabytes, seconds
from mfsdp_func.preflight.settings import Settings
from mfsdp_func.values.placement import ShardLayout

_WORTH = 0.98
"""An improvement by less than a fiftieth is none."""


@dataclass(frozen=True)
class Advice:
    """One setting that improves the worst line.

    Attributes:
        line: the line as it is.
        better: the line as it would be.
        command: what shows it.
        step: seconds of a step, before and after, by the model.
        peak: bytes of the fullest rank, before and after.
    """

    line: Line
    better: Line
    command: str
    step: tuple[float, float]
    peak: tuple[int, int]

    def __str__(self) -> str:
        return (
            f"{self.line.name}: {self.line.text} -> {self.better.text} ({self.better.value / self.line.value - 1:+.0%});"
            f" step {seconds(self.step[0])} -> {seconds(self.step[1])}, memory {gigabytes(self.peak[0])} ->"
            f" {gigabytes(self.peak[1])}"
        )


def worst_lines(result: Answer) -> list[Line]:
    """The worst first: memory where it does not fit; else what takes longest of a step."""
    lines = result.lines()
    times = [line for line in lines if line.name.startswith("time: ") and "step" not in line.name and line.value]
    times.sort(key=lambda line: -line.value)
    return [*times, lines[0]] if result.fits else [lines[0]]


def advise(result: Answer, run: Callable[[Settings], Answer]) -> list[Advice]:
    """Try other settings, one change at a time; those that make the worst line better, the best first.

    Where nothing that was tried improves the worst line, it is about the worst one that something improves. Where the
    present setting fits, one that does not, or whose step takes longer, is no advice.

    Args:
        result: what is to be improved.
        run: gives the result of other settings.
    """
    tried: list[Answer] = []
    for settings in _others(result):
        try:
            tried.append(run(settings))
        except ValueError:
            continue  # such a layout is refused
    if result.fits:
        tried = [other for other in tried if other.fits and other.timing.step <= result.timing.step]
    for line in worst_lines(result):
        found = [advice for other in tried if (advice := _improvement(result, other, line)) is not None]
        if found:
            return sorted(found, key=lambda advice: (advice.better.value, advice.step[1]))
    return []


def _improvement(result: Answer, other: Answer, line: Line) -> Advice | None:
    better = next((each for each in other.lines() if each.name == line.name), Line(line.name, 0.0, "nothing"))
    if better.value >= line.value * _WORTH:
        return None
    step, peak = (result.timing.step, other.timing.step), (result.peak, other.peak)
    return Advice(line, better, other.command, step, peak)


def _others(result: Answer) -> Iterator[Settings]:
    """Settings that differ in one choice."""
    settings = result.settings
    entries = [entry for group in result.parts.model.groups.values() for entry in group.entries]
    deep = {re.sub(r"\b\d+\b", "*", entry.name): None for entry in entries if len(entry.shape) > 2}
    if deep and not settings.finer_rows:
        yield from _changed(settings, finer_rows=tuple(deep))
    for layout in ShardLayout:
        yield from _changed(settings, layout=layout)
    if settings.optimizer == "muon":
        for owners in ("planned", "per group"):
            yield from _changed(settings, owners=owners)
    for dtype in (torch.bfloat16,):
        if dtype.itemsize < settings.gather_dtype.itemsize:
            yield from _changed(settings, param_dtype=dtype)
    shards = settings.node
    while shards < settings.world:  # whole nodes, and multiples
        if settings.world % shards == 0:
            yield from _changed(settings, mesh=(settings.world // shards, shards))
        shards *= 4
    yield from _changed(settings, mesh=(settings.world,))
    if settings.batch is not None:
        yield from _changed(settings, recompute=not settings.recompute)
    if settings.batch is not None and settings.batch[0] > 1:
        yield from _changed(settings, batch=(settings.batch[0] // 2, settings.batch[1]))


def _changed(settings: Settings, **changes: Any) -> Iterator[Settings]:
    other = settings.but(**changes)
    if other != settings:
        yield other
