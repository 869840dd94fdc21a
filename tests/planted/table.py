"""All planted bugs, and the table of what finds each."""

import importlib
import pkgutil
from collections import Counter
from functools import cache
from pathlib import Path

import tests.planted
from tests.planted.bug import TAPES, Bug, Finding, find_bug

TABLE = Path(__file__).with_name("BUGS.md")


def all_bugs() -> list[Bug]:
    """Those of all modules of this folder that have a list `BUGS`."""
    names = sorted(module.name for module in pkgutil.iter_modules(tests.planted.__path__) if module.name != "__main__")
    modules = [importlib.import_module(f"tests.planted.{name}") for name in names if not name.startswith("test_")]
    return [bug for module in modules for bug in getattr(module, "BUGS", ())]


@cache
def findings() -> dict[str, Finding | None]:
    """Name -> how it was found."""
    return {bug.name: find_bug(bug) for bug in all_bugs()}


def table(found: dict[str, Finding | None]) -> str:
    """As Markdown."""
    words = {bug.name: bug.words for bug in all_bugs()}
    counts = Counter(finding.finder if finding else "nothing" for finding in found.values())
    lines = [
        "# Planted bugs, and what finds each",
        "",
        f"{len(found)} programs of this folder, each with its bug and without. Made by `python -m tests.planted` from a run:"
        " settings of `simulate`",
        "are tried in one order, and the first that finds the bug is named. Without the bug, all of them are content.",
        "",
        *(f"- {finder}: {count}" for finder, count in counts.items()),
        "",
        "| bug | found by | which says | deviations of the tape |",
        "| --- | --- | --- | --- |",
    ]
    for name, finding in found.items():
        if finding is None:
            lines.append(f"| {name} | nothing | | |")
            continue
        said = words[name] or "other numbers"
        deviations = finding.deviations if finding.finder == TAPES else ""
        lines.append(f"| {name} | {finding.finder} | {said.replace('|', chr(92) + '|')} | {deviations} |")
    return "\n".join(lines) + "\n"
