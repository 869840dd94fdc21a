"""Devices and links as numbers, each with its source; a file may add others or change these."""

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
        source: where the numbers come from.
    """

    name: str
    flops: float
    efficiency: float
    memory: float
    inside_bandwidth: float
    inside_latency: float
    between_bandwidth: float
    between_latency: float
    source: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops / 1e12:,.0f} Tflop/s x {self.efficiency}, {self.memory / 1e9:,.0f} GB; inside a node"
            f" {self.inside_bandwidth / 1e9:,.0f} GB/s + {self.inside_latency * 1e6:,.1f} us, between nodes"
            f" {self.between_bandwidth / 1e9:,.0f} GB/s + {self.between_latency * 1e6:,.1f} us"
        )


_NCCL = (
    "latencies: base latencies of a ring in NCCL's tuning (src/graph/tuning.cc, hwLat: NVLink 3.4 us, network 14 us)"
)

TABLE: Mapping[str, Hardware] = {
    entry.name: entry
    for entry in (
        Hardware(
            *("a100", 312e12, 0.5, 80e9, 300e9, 3.4e-6, 25e9, 14e-6),
            source=f"NVIDIA A100 80GB SXM datasheet (NVLink 600 GB/s both ways); DGX A100: 8 x 200 Gb/s; {_NCCL}",
        ),
        Hardware(
            *("h100", 989e12, 0.5, 80e9, 450e9, 3.4e-6, 50e9, 14e-6),
            source=f"NVIDIA H100 SXM datasheet (NVLink 900 GB/s both ways); DGX H100: 8 x 400 Gb/s; {_NCCL}",
        ),
        Hardware(
            *("h200", 989e12, 0.5, 141e9, 450e9, 3.4e-6, 50e9, 14e-6),
            source=f"NVIDIA H200 SXM datasheet (NVLink 900 GB/s both ways); DGX H200: 8 x 400 Gb/s; {_NCCL}",
        ),
        Hardware(
            *("b200", 2250e12, 0.5, 180e9, 900e9, 3.4e-6, 50e9, 14e-6),
            source=f"NVIDIA DGX B200 datasheet (NVLink 1.8 TB/s both ways, 8 x 400 Gb/s); {_NCCL}",
        ),
        Hardware(
            *("mi300x", 1307e12, 0.5, 192e9, 448e9, 3.4e-6, 50e9, 14e-6),
            source="AMD Instinct MI300X datasheet (7 links of 128 GB/s both ways); 400 Gb/s per device and latencies as for h100",
        ),
        Hardware(
            *("gloo", 50e9, 0.8, 16e9, 1.2e9, 50e-6, 1.2e9, 50e-6),
            source="gloo over loopback on one machine: measured by examples/benchmarks/thresholds.py; flop/s of a core, assumed",
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
    names = {field.name for field in fields(Hardware)}
    for name, entry in entries.items():
        base = entry.pop("like", name)
        start: dict[str, Any] = asdict(table[base]) if base in table else {}
        start |= {"name": name, "source": f"{path}"} | entry
        if wrong := (set(start) ^ names):
            raise ValueError(
                f"hardware: entry {name!r} of {path} has unknown or missing values {sorted(wrong)}; it needs"
                f' {sorted(names - {"name", "source"})}, or "like": one of {sorted(table)}'
            )
        for key in names - {"name", "source"}:
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
