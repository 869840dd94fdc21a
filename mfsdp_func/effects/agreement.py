"""The agreement check: before they communicate, ranks compare what they are about to do."""

import ctypes
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from mfsdp_func.effects.carrier import Call, Carrier
from mfsdp_func.values.mesh import Mesh

ENVIRONMENT_VARIABLE = "MFSDP_FUNC_CHECK"
_RECORD_NBYTES = 1024
_ENABLED: ContextVar[bool | None] = ContextVar("mfsdp_func_agreement_check", default=None)


@contextmanager
def agreement_check(enabled: bool = True) -> Generator[None, None, None]:
    """Switch the agreement check on (or off) for this thread; all ranks must do the same.

    While it is on, every operation begins with one all-gather of 1 KiB per rank, and where a rank sees a fault in its
    own inputs, or ranks disagree (operation, layout, owners, name, dtype), *all* ranks raise before any data moves
    and the message names the ranks that differ. The environment variable ``MFSDP_FUNC_CHECK=1`` switches it on for
    the whole process.
    """
    before = _ENABLED.set(enabled)
    try:
        yield
    finally:
        _ENABLED.reset(before)


def checking() -> bool:
    """Whether the agreement check is on."""
    enabled = _ENABLED.get()
    return os.environ.get(ENVIRONMENT_VARIABLE, "0") not in ("", "0") if enabled is None else enabled


def agree(carrier: Carrier, call: Call) -> None:
    """Compare this call with those of all other ranks.

    Raises:
        ValueError: on every rank, if ranks disagree or one of them reports a fault.
    """
    records = _share(carrier, call.mesh, call.facts)
    faults = {rank: record["fault"] for rank, record in records.items() if "fault" in record}
    if faults:
        listing = "; ".join(f"rank {rank}: {fault}" for rank, fault in faults.items())
        raise ValueError(f"{call.label}: nothing was sent, because of a fault on another rank: {listing}")
    compare_facts(call.label, records)


def compare_facts(label: str, records: dict[int, dict[str, str]]) -> None:
    """Check that the facts of all ranks agree where they are known.

    Raises:
        ValueError: naming the facts, the ranks and the remedy.
    """
    differences = []
    for fact in next(iter(records.values())):
        ranks_by_word: dict[str, list[int]] = {}
        for rank, record in records.items():
            if word := record.get(fact, ""):
                ranks_by_word.setdefault(word, []).append(rank)
        if len(ranks_by_word) > 1:
            sides = ", ".join(f"{word} on ranks {ranks}" for word, ranks in ranks_by_word.items())
            differences.append(f"{fact}: {sides}")
    if differences:
        raise ValueError(
            f"{label}: nothing was sent, because the ranks disagree. {'; '.join(differences)}. Every rank of the mesh must"
            f" make the same calls in the same order, with equal layouts, owners and names{_hint(differences)}"
        )


def _hint(differences: list[str]) -> str:
    if any(difference.startswith("differentiated") for difference in differences):
        return "; where a rank has no tensor to differentiate, thread the token of the operation before with after="
    if any(difference.startswith("batch size") for difference in differences):
        return "; torch.func.vmap must map over equally many elements on all ranks"
    return ""


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A copy of a tensor's memory; without NumPy, which torch's own ways to bytes need."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def report_fault(carrier: Carrier, mesh: Mesh, label: str, error: Exception) -> None:
    """Tell the other ranks, who are about to call `agree`, that this rank raises `error`."""
    _share(carrier, mesh, {"operation": label, "fault": f"{type(error).__name__}: {error}"})


def _share(carrier: Carrier, mesh: Mesh, record: dict[str, str]) -> dict[int, dict[str, str]]:
    text = json.dumps(record).encode()
    while len(text) > _RECORD_NBYTES:
        longest = max(record, key=lambda fact: len(record[fact]))
        record = record | {longest: record[longest][: len(record[longest]) // 2] + "..."}
        text = json.dumps(record).encode()
    with temporarily_clear_interpreter_stack():  # records are plain bytes, under a `torch.func` transform too
        records = carrier.all_gather_bytes(mesh, text.ljust(_RECORD_NBYTES))
    return {rank: json.loads(other) for rank, other in zip(mesh.ranks, records, strict=True)}
