"""Which name of a file each entry of a state is read from, and what does not fit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mfsdp_func.checkpoint.boxes import find_fault
from mfsdp_func.checkpoint.consensus import share
from mfsdp_func.checkpoint.dcp import Wanted, box_of
from mfsdp_func.checkpoint.entry import Entry
from mfsdp_func.checkpoint.error import CheckpointError, listed
from mfsdp_func.checkpoint.manifest import Manifest
from mfsdp_func.checkpoint.saving import Progress, per_rank
from mfsdp_func.values.mesh import Mesh

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""A name in the file -> the name in the state. Of a mapping, a key may also be the first words of names."""


Only: TypeAlias = str | Iterable[str] | Callable[[str], bool]
"""Which names of the state are loaded: names, their first words, patterns with ``*``, or a function of the name."""


class Found(NamedTuple):
    """Where an entry's value is in the file.

    Attributes:
        names: in the file; several, if the file has the value under each parameter, where they must be equal.
        shape: in the file; None for a plain value.
    """

    names: tuple[str, ...]
    shape: torch.Size | None


class Readable(Protocol):
    """Where values are read from: a checkpoint, or a Hugging Face folder."""

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    @property
    def manifest(self) -> Manifest | None:
        """Its hashes."""
        ...

    @property
    def metadata(self) -> Metadata:
        """What is in it."""
        ...

    def read_into(self, wanted: Sequence[Wanted], objects: Sequence[str], progress: Progress | None) -> dict[str, Any]:
        """See `dcp.read_into`."""
        ...


class Options(NamedTuple):
    """Arguments of `load`."""

    names: Any
    rename: Rename | None
    only: Only | None
    cast: bool
    device: torch.device | str | None
    progress: Progress | None


def match(
    metadata: Metadata,
    entries: Sequence[Entry],
    rename: Rename | None,
    wanted: Callable[[str], bool],
    cast: bool,
    mesh: Mesh,
) -> tuple[dict[str, Found], list[str]]:
    """Where each wanted entry is in a file, and which names of the file are no entry's.

    Raises:
        CheckpointError: naming all that is missing, of another shape or dtype, or broken.
    """
    stored: Mapping[str, Any] = metadata.state_dict_metadata
    called = _renamed(stored, rename)
    problems: list[str] = []
    found: dict[str, Found] = {}
    known: set[str] = set()
    for entry in entries:
        if not wanted(entry.name):
            known |= {entry.name, *entry.aliases}
            continue
        sources = _sources(entry, called, mesh, problems)
        known |= {entry.name, *entry.aliases, *(name for name in called if _is_per_rank(name, entry.name))}
        if sources is None:
            continue
        shapes = [_check(entry, stored[name], cast, problems) for name in sources]
        found[entry.name] = Found(tuple(sources), shapes[0])
    if problems:
        raise CheckpointError(f"the state and the file do not fit:{listed(problems)}", problems)
    return found, [name for name in called if name not in known and wanted(name)]


def _sources(entry: Entry, called: Mapping[str, str], mesh: Mesh, problems: list[str]) -> list[str] | None:
    if entry.name in called:
        return [called[entry.name]]
    aliases = [called[alias] for alias in entry.aliases if alias in called]
    if aliases and not entry.shared:
        return aliases[:1]
    if aliases and len(aliases) == len(entry.aliases):
        return aliases
    if entry.shared and not entry.aliases and entry.shape == torch.Size(()):
        # A rank that holds none of the parameters beside it takes the number that all of them have.
        parent, _, field = entry.name.rpartition(".")
        if beside := [source for name, source in called.items() if _is_beside(name, parent, field)]:
            return beside
    if not entry.shared:
        problems.append(f"{entry.name!r}: is missing in the file{_hint(entry.name, called)}")
        return None
    count = sum(_is_per_rank(name, entry.name) for name in called)
    if not count:
        problems.append(f"{entry.name!r}: is missing in the file{_hint(entry.name, called)}")
    elif count != mesh.size():
        problems.append(
            f"{entry.name!r}: each of {count} ranks saved a value of its own, and there are {mesh.size()} ranks now; leave"
            " it out, or rename one of them"
        )
    else:
        return [called[per_rank(entry.name, mesh.ranks.index(mesh.get_rank()))]]
    return None


def _is_beside(name: str, parent: str, field: str) -> bool:
    return name.startswith(f"{parent}." if parent else "") and name.endswith(f".{field}")


def _hint(name: str, called: Mapping[str, str]) -> str:
    last = name.rpartition(".")[2]
    near = [other for other in called if other.endswith(name) or name.endswith(other)] or [
        other for other in called if other.rpartition(".")[2] == last
    ]
    return f" (it has {near[0]!r}: see rename)" if near else ""


def _is_per_rank(name: str, base: str) -> bool:
    return name.startswith(f"{base}.rank") and name[len(base) + 5 :].isdecimal()


def _check(entry: Entry, stored: Any, cast: bool, problems: list[str]) -> torch.Size | None:
    """The shape in the file; what is wrong with it goes to `problems`."""
    if not isinstance(stored, TensorStorageMetadata):
        if entry.is_tensor:
            problems.append(
                f"{entry.name!r}: is no tensor in the file, expected {entry.dtype} {tuple(entry.shape or ())}"
            )
        return None
    if not entry.is_tensor:
        problems.append(f"{entry.name!r}: is a tensor in the file, expected a {type(entry.value).__name__}")
        return None
    shape, size = entry.shape or torch.Size(()), torch.Size(stored.size)
    if size != shape and not (entry.loose and _same_rows(size, shape)):
        problems.append(f"{entry.name!r}: has shape {tuple(size)} in the file, expected {tuple(shape)}")
    elif fault := find_fault(size, [box_of(chunk) for chunk in stored.chunks]):
        problems.append(f"{entry.name!r}: {fault}")
    if stored.properties.dtype != entry.dtype and not cast:
        problems.append(
            f"{entry.name!r}: is {stored.properties.dtype} in the file, expected {entry.dtype}; cast=True converts"
        )
    return size


def _same_rows(logical: torch.Size, laid_out: torch.Size) -> bool:
    """Whether a layout may have written a logical shape so: 0-D as one row, or all dims but the last as rows."""
    if not logical or not laid_out:
        return {logical, laid_out} == {torch.Size(()), torch.Size((1,))}
    return logical.numel() == laid_out.numel() and logical[-1] == laid_out[-1]


def _renamed(stored: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """Name in the state -> name in the file.

    Raises:
        CheckpointError: on a key that is no name in the file, or two names that become one.
    """
    called: dict[str, str] = {}
    used: set[str] = set()
    for name in stored:
        new = name
        if isinstance(rename, Mapping):
            words = name.split(".")
            heads = (".".join(words[:count]) for count in range(len(words), 0, -1))
            head = next((head for head in heads if head in rename), None)
            if head is not None:
                used.add(head)
                new = (rename[head] + name[len(head) :]).strip(".")
        elif rename is not None:
            new = rename(name)
        if new in called:
            raise CheckpointError(f"rename: {called[new]!r} and {name!r} both become {new!r}")
        called[new] = name
    if isinstance(rename, Mapping) and (unused := [key for key in rename if key not in used]):
        raise CheckpointError(
            f"rename: {unused[0]!r} is no name in the file, nor the first words of one; keys are names in the file, values"
            " names in the state"
        )
    return called


def chooser_of(only: Only | None) -> Callable[[str], bool]:
    """Whether a name is asked for."""
    if only is None:
        return lambda name: True
    if callable(only):
        return only
    listed_ = (only,) if isinstance(only, str) else tuple(only)

    def chosen(name: str) -> bool:
        return any(name == word or name.startswith(f"{word}.") or fnmatchcase(name, word) for word in listed_)

    return chosen


def refuse_surplus(mesh: Mesh, what: str, surplus: Sequence[str], folder: Readable) -> None:
    """Raise on all ranks if the file holds what no rank asks for, or ranks see different files."""
    stored = sorted(folder.metadata.state_dict_metadata)
    places = {name: place for place, name in enumerate(stored)}
    seen = folder.manifest.encode()[-65:-1].decode() if folder.manifest else str(len(stored))
    records = share(mesh, [seen, sorted(places.get(name, -1) for name in surplus)])
    if len({record[0] for record in records.values()}) > 1:
        raise CheckpointError(f"{what}: ranks see different checkpoints there; the folder must be shared by all ranks")
    common = set.intersection(*(set(record[1]) for record in records.values()))
    problems = [f"{stored[place]!r}: is in the file, but not in the state" for place in sorted(common)]
    if problems:
        raise CheckpointError(
            f"{what}: the file holds more than the state, see only= and rename=:{listed(problems)}", problems
        )
