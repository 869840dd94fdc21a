"""The agreement check: before they communicate, ranks compare what they are about to do."""

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from mfsdp_func.effects.carrier import Call, Carrier
from mfsdp_func.effects.details import details_of
from mfsdp_func.effects.origin import LABEL
from mfsdp_func.effects.torch_internals import outside_transforms
from mfsdp_func.values.mesh import Mesh

ENVIRONMENT_VARIABLE = "MFSDP_FUNC_CHECK"
_RECORD_NBYTES = 1024
_ENABLED: ContextVar[bool | None] = ContextVar("mfsdp_func_agreement_check", default=None)


@contextmanager
def agreement_check(enabled: bool = True, *, label: object = None) -> Generator[None, None, None]:
    """Switch the agreement check on (or off) for this thread; all ranks must do the same.

    While it is on, every operation begins with one all-gather of 1 KiB per rank. Where a rank sees a fault in its own
    inputs, or ranks disagree, *all* ranks raise before any data moves, and the message names what differs and on which
    ranks. The environment variable ``MFSDP_FUNC_CHECK=1`` switches the check on for the whole process; ranks compare it
    when they first use a mesh. A simulated mesh compares all calls, check or no check.

    Compared are the operation and its group's name, layout, owners, dtype, the batch of `torch.func.vmap`, whether the
    call is differentiated; and in eager code the name of a buffer (`fully_shard` names them by unit), the line of the
    program, the caller's label, and for groups without a name the order in which they were first used while the check was
    on. A call that autograd makes is compared by the number of its forward call.

    What nobody can tell apart, so that data of different calls mixes:

    - with the check on: equal calls of unnamed buffers or groups on one line without a label, such as a step of a loop
      that one rank leaves out: the k-th call always meets the k-th. In compiled code, which has neither lines nor labels,
      equal calls of buffers, and the backward passes of equal calls.
    - with the check off: calls that are alike in operation, group name, layout, owners, reduction and dtype, in all of
      that code, and their backward passes. Messages are tagged with these facts, and on gloo collectives are led by a tag
      or made of such messages: where ranks differ in them, nothing mixes, and all end at the timeout of the process group.
    - with the check off, on NCCL: native collectives and messages without tags. Ranks that disagree mix bytes or hang.

    Args:
        enabled: on or off.
        label: words for the calls inside, compared as text; say the step, and a call that one rank left out is told.

    >>> from mfsdp_func import simulate
    >>> def program(mesh):
    ...     for step in range(3):
    ...         with agreement_check(label=step):
    ...             pass  # gather, compute, scatter
    >>> simulate(program, 2).results
    {0: None, 1: None}
    """
    before = _ENABLED.set(enabled)
    label_before = LABEL.set(LABEL.get() if label is None else str(label))
    try:
        yield
    finally:
        LABEL.reset(label_before)
        _ENABLED.reset(before)


def checking() -> bool:
    """Whether the agreement check is on."""
    enabled = _ENABLED.get()
    return os.environ.get(ENVIRONMENT_VARIABLE, "0") not in ("", "0") if enabled is None else enabled


def is_set() -> bool:
    """Whether the environment variable switches it on."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "0") not in ("", "0")


def agree(carrier: Carrier, call: Call) -> bool:
    """Compare this call with those of all other ranks.

    Returns:
        Whether all ranks know the origins of their calls.

    Raises:
        ValueError: on every rank, if ranks disagree or one of them reports a fault.
    """
    records = _share(carrier, call.mesh, call.facts | {_KNOWN: "yes" if call.origin is not None else ""})
    faults = {rank: record["fault"] for rank, record in records.items() if "fault" in record}
    if faults:
        listing = "; ".join(f"rank {rank}: {fault}" for rank, fault in faults.items())
        raise ValueError(f"{call.label}: nothing was sent, because of a fault on another rank: {listing}")
    known = all(record.get(_KNOWN) for record in records.values())

    def details() -> dict[int, dict[str, str]]:
        return share_all(carrier, call.mesh, details_of(call.linear))

    compare_facts(call.label, records, details)
    return known


_KNOWN = "origin"


def compare_calls(calls: dict[int, Call]) -> None:
    """Check that calls agree, of which all facts are here.

    Raises:
        ValueError: if they do not.
    """
    label = next(iter(calls.values())).label
    facts = {rank: call.facts for rank, call in calls.items()}
    compare_facts(label, facts, lambda: {rank: details_of(call.linear) for rank, call in calls.items()})


def compare_facts(
    label: str, records: dict[int, dict[str, str]], details: Callable[[], dict[int, dict[str, str]]] | None = None
) -> None:
    """Check that the facts of all ranks agree where they are known.

    Args:
        label: of the call.
        records: rank -> facts in words; an empty word agrees with everything.
        details: gives the facts of the ranks' plans; asked only where nothing but the plans differ.

    Raises:
        ValueError: naming the facts, the ranks and the remedy.
    """
    differences = {fact: f"{fact}: {sides}" for fact, sides in _differing(records).items()}
    if not differences:
        return
    if "operation" in differences:
        differences.pop("plan", None)  # other operations have other plans, whose hashes tell nobody anything
    elif "plan" in differences and details is not None:
        found = [f"{fact} {sides}" for fact, sides in _differing(details()).items()]
        if found:
            more = f"; and {len(found) - 3} more differences" if len(found) > 3 else ""
            differences["plan"] = f"plan: {'; '.join(found[:3])}{more}"
    raise ValueError(
        f"{label}: nothing was sent, because the ranks disagree. {'; '.join(differences.values())}. Every rank of the mesh"
        f" must make the same calls in the same order, with equal layouts, owners and names{_hint([*differences])}"
    )


def _differing(records: dict[int, dict[str, str]]) -> dict[str, str]:
    """The facts that differ, and who says what."""
    found: dict[str, str] = {}
    for fact in dict.fromkeys(fact for record in records.values() for fact in record):
        ranks_by_word: dict[str, list[int]] = {}
        for rank, record in records.items():
            if fact != _KNOWN and (word := record.get(fact, "")):
                ranks_by_word.setdefault(word, []).append(rank)
        if len(ranks_by_word) > 1:
            found[fact] = ", ".join(f"{word} on ranks {ranks}" for word, ranks in ranks_by_word.items())
    return found


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
    with outside_transforms():  # records are plain bytes, under a `torch.func` transform too
        records = carrier.all_gather_bytes(mesh, encoded(record))
    return {rank: json.loads(other) for rank, other in zip(mesh.ranks, records, strict=True)}


def encoded(record: dict[str, str]) -> bytes:
    """A record as 1 KiB of JSON, its longest words cut short where they do not fit."""
    text = json.dumps(record).encode()
    while len(text) > _RECORD_NBYTES:
        longest = max(record, key=lambda fact: len(record[fact]))
        word = record[longest]
        digest = hashlib.sha256(word.encode()).hexdigest()[:8]  # what was cut away still counts
        record = record | {longest: f"{word[: len(word) // 2 - 12]}... ({digest})"}
        text = json.dumps(record).encode()
    return text.ljust(_RECORD_NBYTES)


def decoded(text: bytes) -> dict[str, str]:
    """The record that was encoded."""
    return json.loads(text)


def share_all(carrier: Carrier, mesh: Mesh, record: dict[str, str]) -> dict[int, dict[str, str]]:
    """The records of all ranks, of any length."""
    text = json.dumps(record).encode()
    with outside_transforms():
        lengths = map(int, carrier.all_gather_bytes(mesh, str(len(text)).encode().ljust(16)))
        records = carrier.all_gather_bytes(mesh, text.ljust(max(lengths)))
    return {rank: json.loads(other) for rank, other in zip(mesh.ranks, records, strict=True)}
