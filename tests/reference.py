"""The reference of all public names, made from docstrings: `python -m tests.reference` writes it into the package's README.

A name's line is the first sentence of its docstring; of a type alias or a constant, of the string below it.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "mfsdp_func" / "README.md"
MARKS = ("<!-- reference -->", "<!-- end of the reference -->")
NAMESPACES = (
    "mfsdp_func",
    "mfsdp_func.inplace",
    "mfsdp_func.optim",
    "mfsdp_func.checkpoint",
    "mfsdp_func.faults",
    "mfsdp_func.streams",
    "mfsdp_func.testing",
)
ROOMS = {
    "values": "Values: where everything lies, and who owns what",
    "plans": "Plans: what moves",
    "effects": "Effects: tokens, checks, faults",
    "simulation": "The simulated mesh",
    "operations": "Operations on tensors",
    "fsdp": "Fully-sharded modules",
}


@cache
def strings_of(path: Path) -> dict[str, str]:
    """Name -> docstring, of everything that a module defines at its top level."""
    body, found = ast.parse(path.read_text()).body, {}
    for n, node in enumerate(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            after = body[n + 1] if n + 1 < len(body) else None
            if isinstance(target, ast.Name):
                string = after.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
                found[target.id] = inspect.cleandoc(str(string.value)) if string is not None else ""
    return found


def home_of(namespace: str, name: str) -> Path:
    """The file that defines a public name, or where it comes into the package."""
    here = Path(inspect.getfile(importlib.import_module(namespace)))
    for node in ast.parse(here.read_text()).body:
        imported = node.names if isinstance(node, ast.ImportFrom) else ()
        if any((alias.asname or alias.name) == name for alias in imported) and node.module.startswith("mfsdp_func"):
            return home_of(node.module, name)
    return here


def public_names(module: Any) -> list[str]:
    """What ``__all__`` lists; without it, the functions of the module itself."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    own = inspect.getmembers(module, inspect.isfunction)
    return sorted(name for name, value in own if value.__module__ == module.__name__ and not name.startswith("_"))


def lines_of(namespace: str) -> Iterator[tuple[str, str]]:
    """Room and line of each public name of a namespace."""
    module = importlib.import_module(namespace)
    for name in public_names(module):
        if inspect.ismodule(getattr(module, name)):
            continue
        path = home_of(namespace, name)
        home = str(getattr(getattr(module, name), "__module__", ""))
        text = strings_of(path).get(name) or (f"PyTorch's own: `{home}.{name}`." if home.startswith("torch.") else "")
        sentence = re.split(r"(?<=[.!?])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
        shown = f"mf{namespace.removeprefix('mfsdp_func')}.{name}"
        room = path.relative_to(ROOT / "mfsdp_func").parts[0]
        link = path.relative_to(ROOT / "mfsdp_func").as_posix()
        yield room if namespace == "mfsdp_func" else namespace, f"| [`{shown}`]({link}) | {sentence} |"


def reference() -> str:
    """All tables, in Markdown."""
    tables: dict[str, list[str]] = {}
    for namespace in NAMESPACES:
        for room, line in lines_of(namespace):
            tables.setdefault(room, []).append(line)
    order = [room for room in ROOMS if room in tables] + [room for room in tables if room not in ROOMS]
    parts = []
    for room in order:
        title = ROOMS.get(room) or f"`{room.replace('mfsdp_func', 'mf', 1)}`"
        parts.append("\n".join([f"### {title}", "", "| name | what it is |", "| --- | --- |", *tables[room]]))
    return "\n\n".join(parts)


def written(text: str) -> str:
    """A document with the reference as it is now between its marks."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{reference()}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
