"""The settings of a simulated run, and the line that replays it."""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from mfsdp_func.effects.faults import Corrupt, Fault, Kill, Raise, Stall
from mfsdp_func.simulation.choices import Choices
from mfsdp_func.values.mesh import Mesh

CarrierName: TypeAlias = Literal["eager", "rendezvous", "nccl"]
MemoryName: TypeAlias = Literal["copied", "live"]


@dataclass(frozen=True)
class Settings:
    """The keywords of `simulate` that say how the ranks run; see there."""

    seed: int = 0
    carrier: CarrierName = "eager"
    memory: MemoryName = "copied"
    faults: tuple[Fault, ...] = ()
    choices: Choices = None
    timeout: float = 1800.0
    poison: bool = False
    streams: bool = False
    torch_distributed: bool = False
    warn_after: float | None = 60.0

    def check(self, mesh: Mesh) -> None:
        """Refuse settings that cannot be.

        Raises:
            ValueError: on an unknown carrier or kind of memory, streams with live memory, or a fault of a rank that is not there.
            TypeError: on something that is no fault.
        """
        for name, value, known in (
            ("carrier", self.carrier, get_args(CarrierName)),
            ("memory", self.memory, get_args(MemoryName)),
        ):
            if value not in known:
                raise ValueError(f"simulate: {name}={value!r} is not known; take one of {', '.join(map(repr, known))}")
        if self.streams and self.memory != "copied":
            raise ValueError(f"simulate: streams=True goes with memory='copied', got {self.memory!r}")
        for fault in self.faults:
            if not isinstance(fault, Kill | Stall | Raise | Corrupt):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"simulate: faults= takes values of mfsdp_func.faults, got {fault!r}")
            if fault.rank not in mesh.ranks or fault.at < 0:
                raise ValueError(f"simulate: {fault} is of a rank or a point that {mesh} does not have")

    def replay(self, tape: tuple[int, ...]) -> str:
        """The call that gives the same run again, in one line; empty where everything is as usual."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        told["choices"] = list(tape) or None
        usual = {field.name: field.default for field in fields(self)} | {"warn_after": told["warn_after"]}
        changed: dict[str, Any] = {name: value for name, value in told.items() if value != usual[name]}
        if set(changed) <= {"seed", "poison", "streams", "torch_distributed"} and self.choices is None:
            return ""
        return f"replay with simulate({', '.join(['program, shape', *(f'{n}={v!r}' for n, v in changed.items())])})"
