"""How ranks agree: small records, one all-gather each, over the carrier that serves them (simulated ranks too)."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.effects.here import carrier_of, world
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh

Result = TypeVar("Result")

_FIRST_NBYTES = 1024


def all_ranks(mesh: Mesh | MeshLike | None) -> Mesh:
    """The ranks that save or load together: those of `mesh`, by default all that there are."""
    return world() if mesh is None else as_mesh(mesh)


def share(mesh: Mesh, record: Any) -> dict[int, Any]:
    """The JSON records of all ranks. One all-gather of 1 KiB, and one more where a record is longer."""
    text = json.dumps(record).encode()
    carrier, head = carrier_of(mesh), len(text).to_bytes(8, "big")
    first = carrier.all_gather_bytes(mesh, (head + text[: _FIRST_NBYTES - 8]).ljust(_FIRST_NBYTES))
    lengths = [int.from_bytes(other[:8], "big") for other in first]
    most = max(lengths) + 8
    full = first if most <= _FIRST_NBYTES else carrier.all_gather_bytes(mesh, (head + text).ljust(most))
    return {
        rank: json.loads(other[8 : 8 + length]) for rank, other, length in zip(mesh.ranks, full, lengths, strict=True)
    }


def together(mesh: Mesh, what: str, act: Callable[[], Result]) -> Result:
    """Do something that may fail on some ranks; where it fails on one, it fails on all with the same message.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why.
    """
    result, error = attempt(act)
    agree(mesh, what, error)
    return result  # pyright: ignore[reportReturnType]


def attempt(act: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """What an action returns, or what it raises."""
    try:
        return act(), None
    except Exception as error:
        return None, error


def agree(mesh: Mesh, what: str, error: BaseException | None) -> None:
    """Raise alike on all ranks where one of them has an error; it is the cause on the ranks that have one.

    Raises:
        CheckpointError: see `together`.
    """
    mine = None
    if isinstance(error, CheckpointError):
        mine = [str(error), list(error.problems)]
    elif error is not None:
        mine = [f"{type(error).__name__}: {error}", []]
    failed = {rank: record for rank, record in share(mesh, mine).items() if record is not None}
    if not failed:
        return
    ranks_by_text: dict[str, list[int]] = {}
    problems: dict[str, None] = {}
    for rank, (text, found) in failed.items():
        ranks_by_text.setdefault(text, []).append(rank)
        problems |= dict.fromkeys(found or [text])
    if len(failed) == mesh.size() and len(ranks_by_text) == 1:
        message = next(iter(ranks_by_text))
        message = message if message.startswith(what) else f"{what}: {message}"
    else:
        lines = "; ".join(f"on rank {_join(ranks)}: {text}" for text, ranks in ranks_by_text.items())
        message = f"{what}: {lines}"
    raise CheckpointError(message, list(problems)) from error


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
