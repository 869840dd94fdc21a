"""What goes wrong with checkpoints."""

from collections.abc import Sequence


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or trusted. Raised alike on all ranks; nothing has changed.

    Attributes:
        problems: every single fault that was found, in words.
    """

    problems: tuple[str, ...]

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.problems)


def listed(problems: Sequence[str], most: int = 8) -> str:
    """Problems as lines of one message."""
    rest = [f"... and {len(problems) - most} more"] if len(problems) > most else []
    return "".join(f"\n  {problem}" for problem in [*problems[:most], *rest])
