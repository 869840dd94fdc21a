"""Devices and links as numbers, each with its source; a file may add others or change these.

Each number is what its maker states as a peak ("peak"), what was measured ("measured"), or what is assumed here
("assumed"). The documents and the code named were remembered, not at hand, when the table was written: compare a number with its
document before money depends on it, and overrule it by a file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Hardware:
    """One device and the links that it sends through, each way.

    Attributes:
        name: how it is chosen.
        flops: floating-point operations per second of dense bfloat16 matrix products, as the maker states them.
        efficiency: the share of `flops` that products of a training step reach: an assumption.
        memory: bytes of one device.
        inside_bandwidth: bytes per second that a device sends to others of its node.
        inside_latency: seconds that a message inside a node takes beyond its bytes.
        between_bandwidth: bytes per second that a device sends to other nodes.
        between_latency: seconds that a message between nodes takes beyond its bytes.
        sources: name of a number -> of which kind it is ("peak", "measured", "assumed"), and where it comes from.
    """

    name: str
    flops: float
    efficiency: float
    memory: float
    inside_bandwidth: float
    inside_latency: float
    between_bandwidth: float
    between_latency: float
    sources: Mapping[str, str]

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops / 1e12:,.0f} Tflop/s x {self.efficiency}, {self.memory / 1e9:,.0f} GB; inside a node"
            f" {self.inside_bandwidth / 1e9:,.0f} GB/s + {self.inside_latency * 1e6:,.1f} us, between nodes"
            f" {self.between_bandwidth / 1e9:,.0f} GB/s + {self.between_latency * 1e6:,.1f} us"
        )

    def table(self) -> str:
        """Every number with its source, a line each."""
        return "\n".join(f"  {name} = {getattr(self, name):g}: {source}" for name, source in self.sources.items())


NUMBERS = tuple(field.name for field in fields(Hardware) if field.type in ("float", float))

_NCCL = "measured by its authors: NCCL 2.18 (2023), src/graph/tuning.cc, hwLat, ring, protocol Simple, "
_EFFICIENCY = "assumed: what well-tuned products of training reach; measure your own"


def _device(
    name: str, numbers: tuple[float, float, float, float], sheet: str, notes: tuple[str, str, str], network: str
) -> Hardware:
    """A device of 8 a node, from its maker's sheet.

    Args:
        name: see `Hardware`.
        numbers: flops, memory, bandwidth inside a node, and between nodes.
        sheet: the document and its date.
        notes: how it states the first three.
        network: what it says of the fourth, and where.
    """
    flops, memory, inside, between = numbers
    of_flops, of_memory, of_inside = notes
    return Hardware(
        *(name, flops, 0.5, memory, inside, 3.4e-6, between, 14e-6),
        sources={
            "flops": f"peak: {sheet}: {of_flops}",
            "efficiency": _EFFICIENCY,
            "memory": f"peak: {sheet}: {of_memory}",
            "inside_bandwidth": f"peak: {sheet}: {of_inside}",
            "inside_latency": f"{_NCCL}NVLink" + (" (assumed alike here)" if name == "mi300x" else ""),
            "between_bandwidth": network,
            "between_latency": f"{_NCCL}network" + (" (assumed alike here)" if name == "mi300x" else ""),
        },
    )


TABLE: Mapping[str, Hardware] = {
    entry.name: entry
    for entry in (
        _device(
            "a100",
            (312e12, 80e9, 300e9, 25e9),
            "NVIDIA A100 Tensor Core GPU, datasheet, June 2021 (80GB SXM)",
            ("bfloat16 312 Tflop/s, dense", "80 GB", "NVLink 600 GB/s, both directions together"),
            "peak: NVIDIA DGX A100, datasheet, 2021: 8 single-port 200 Gb/s adapters for 8 devices",
        ),
        _device(
            "h100",
            (989e12, 80e9, 450e9, 50e9),
            "NVIDIA H100 Tensor Core GPU, datasheet, 2023 (SXM)",
            (
                "bfloat16 1,979 Tflop/s with sparsity, half of it dense",
                "80 GB",
                "NVLink 900 GB/s, both directions together",
            ),
            "peak: NVIDIA DGX H100, datasheet, 2023: 8 400 Gb/s ports for 8 devices",
        ),
        _device(
            "h200",
            (989e12, 141e9, 450e9, 50e9),
            "NVIDIA H200 Tensor Core GPU, datasheet, 2024 (SXM)",
            (
                "bfloat16 1,979 Tflop/s with sparsity, half of it dense",
                "141 GB",
                "NVLink 900 GB/s, both directions together",
            ),
            "peak: NVIDIA DGX H200, datasheet, 2024: 8 400 Gb/s ports for 8 devices",
        ),
        _device(
            "b200",
            (2250e12, 180e9, 900e9, 50e9),
            "NVIDIA DGX B200, datasheet, 2024",
            (
                "8-bit 72 Pflop/s of 8 devices with sparsity; bfloat16 dense a quarter",
                "1,440 GB of 8 devices",
                "NVLink 14.4 TB/s of 8 devices, both directions together",
            ),
            "peak: NVIDIA DGX B200, datasheet, 2024: 8 400 Gb/s ports for 8 devices",
        ),
        _device(
            "mi300x",
            (1307e12, 192e9, 448e9, 50e9),
            "AMD Instinct MI300X Accelerator, data sheet, December 2023",
            ("bfloat16 1,307 Tflop/s, dense", "192 GB", "7 links of 128 GB/s, both directions together"),
            "assumed: a 400 Gb/s adapter for each device",
        ),
        Hardware(
            *("gloo", 50e9, 0.8, 16e9, 1.2e9, 50e-6, 1.2e9, 50e-6),
            sources={
                "flops": "assumed: one core of a server",
                "efficiency": _EFFICIENCY,
                "memory": "assumed: what one process of several may take of a machine",
                **dict.fromkeys(
                    ("inside_bandwidth", "inside_latency", "between_bandwidth", "between_latency"),
                    "measured: two ranks of gloo over loopback, examples/benchmarks/thresholds.py: 40 to 60 us a"
                    " message, 1 to 1.4 GB/s",
                ),
            },
        ),
    )
}
"""Name -> numbers."""


def read_hardware(path: str | Path | None = None) -> dict[str, Hardware]:
    """The table, with entries of a JSON file in front: ``{"name": {"flops": ..., ...}}``.

    An entry of a known name changes what it lists; a new one may start from another: ``{"mine": {"like": "h100", ...}}``.

    Raises:
        ValueError: on a file that does not exist or is no such JSON, unknown or missing numbers, or one that is not
            positive.

    >>> read_hardware()["h100"].memory
    80000000000.0
    """
    table = dict(TABLE)
    if path is None:
        return table
    try:
        given = json.loads(Path(path).read_text())
        entries = {str(name): dict(entry) for name, entry in given.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f'hardware: {path} is no JSON file of {{"name": {{"flops": ...}}}} ({type(error).__name__}: {error})'
        ) from None
    names = set(NUMBERS) | {"name", "sources"}
    for name, entry in entries.items():
        base = entry.pop("like", name)
        start: dict[str, Any] = asdict(table[base]) if base in table else {}
        told = dict.fromkeys(entry, f"{path}") | dict(entry.pop("sources", {}))
        start = {**start, "name": name, **entry, "sources": {**start.get("sources", {}), **told}}
        if wrong := (set(start) ^ names):
            raise ValueError(
                f"hardware: entry {name!r} of {path} has unknown or missing values {sorted(wrong)}; it needs"
                f' {sorted(NUMBERS)}, or "like": one of {sorted(table)}'
            )
        for key in NUMBERS:
            value = start[key]
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"hardware: {key} of {name!r} in {path} must be a positive number, got {value!r}")
        table[name] = Hardware(**start)
    return table


def hardware_named(name: str, path: str | Path | None = None) -> Hardware:
    """One entry.

    Raises:
        ValueError: if there is none of that name.
    """
    table = read_hardware(path)
    if name not in table:
        raise ValueError(f"hardware: {name!r} is unknown; known are {', '.join(table)}, and what --hardware-file adds")
    return table[name]
