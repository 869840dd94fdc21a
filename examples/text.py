"""Real text as bytes: the Python standard library's own source files, or files of one's own."""

import sysconfig
from pathlib import Path

import torch

LIMIT = 4 * 1024 * 1024
"""How many bytes are read at most."""


class TextError(Exception):
    """There is no text to train on; says why and what to do."""


def load_text(path: Path | None, needed: int) -> torch.Tensor:
    """The bytes of all files, one after the other, at most `LIMIT`.

    Args:
        path: a file, or a folder whose files are read in sorted order (hidden ones are left out); by default the
            modules at the top of Python's standard library.
        needed: how many bytes there must be.

    Returns:
        Shape (bytes,), uint8.

    Raises:
        TextError: if a path does not exist or cannot be read, or there are too few bytes.
    """
    files = _standard_library() if path is None else _files_at(path)
    chunks: list[bytes] = []
    size = 0
    for file in files:
        if size >= LIMIT:
            break
        try:
            with file.open("rb") as stream:
                chunks.append(stream.read(LIMIT - size))
        except OSError as error:
            raise TextError(f"cannot read {file}: {error.strerror}") from None
        size += len(chunks[-1])
    if not size:
        raise TextError(f"{path} is empty; give a file or a folder with at least {needed} bytes of text")
    if size < needed:
        raise TextError(f"{path} has {size} bytes, but a batch needs {needed}; give more text, or a smaller --context")
    return torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)


def _standard_library() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TextError(f"no Python sources in {folder}; give a text with --data PATH")
    return files


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TextError(f"there is no file or folder {path}; give an existing one with --data PATH")
    hidden = [file for file in path.rglob("*") if file.is_file()]
    return sorted(file for file in hidden if not any(part.startswith(".") for part in file.relative_to(path).parts))


def batch_at(text: torch.Tensor, step: int, rank: int, *, size: int, context: int, seed: int) -> torch.Tensor:
    """The windows of text that `rank` sees in a step; a pure function, the same on every machine.

    Returns:
        Shape (size, context + 1), int64.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 65_537 + rank)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()
