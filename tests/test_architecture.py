"""The shape of the code: layers, and what may lie where."""

import ast
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mfsdp_func"

LAYERS = (
    ("values", ("values",)),
    ("plans", ("plans",)),
    ("effects", ("effects",)),
    ("simulation", ("simulation",)),
    ("operations", ("operations",)),
    ("training", ("fsdp", "optim", "checkpoint")),
    ("edges", ("faults", "inplace", "preflight", "report", "streams", "testing", "__main__", "__init__")),
)
"""A module may import from its own layer and from those above it in this list."""

TOP_LEVEL = {
    "mfsdp_func",
    "tests",
    "examples",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    ".ci",
    ".gitignore",
}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    """The module's name within the package: ``effects.exchange``; a folder's own is ``effects``."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(file) for file in FILES}


def layer_of(module: str) -> int | None:
    head = module.partition(".")[0]
    return next((level for level, (_, modules) in enumerate(LAYERS) if head in modules), None)


def imports_of(tree: ast.Module) -> Iterator[str]:
    """The modules of the package that are imported, also inside functions and for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            package, _, rest = target.partition(".")
            if package == PACKAGE.name:
                while rest and rest not in MODULES:  # the tail is a name inside a module
                    rest = rest.rpartition(".")[0]
                yield rest or "__init__"


def find_wrong_imports(module: str, tree: ast.Module) -> list[str]:
    level = layer_of(module)
    return [target for target in imports_of(tree) if (layer_of(target) or 0) > (level or 0)]


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_module_has_a_layer(file: Path) -> None:
    assert layer_of(name_of(file)) is not None, f"{file} is in no layer: add it to LAYERS"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_upwards(file: Path) -> None:
    module = name_of(file)
    assert find_wrong_imports(module, ast.parse(file.read_text())) == []


def find_circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The modules that reach one another, each set once, in order."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        seen: set[str] = set()
        ahead = [*imports[module]]
        while ahead:
            target = ahead.pop()
            if target not in seen:
                seen.add(target)
                ahead += imports.get(target, ())
        reached[module] = seen
    circles = {frozenset(m for m in reached[module] if module in reached.get(m, ())) for module in imports}
    return sorted(sorted(circle) for circle in circles if circle)


def test_no_circle() -> None:
    imports = {name_of(file): set(imports_of(ast.parse(file.read_text()))) for file in FILES}
    assert find_circles({module: targets - {module} for module, targets in imports.items()}) == []


def test_circles_are_seen() -> None:
    assert find_circles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["e"]}) == [["b", "c"], ["e"]]
    assert find_circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_every_name_in_the_table_is_a_module() -> None:
    assert [head for _, heads in LAYERS for head in heads if head not in MODULES] == []


def test_wrong_imports_are_seen() -> None:
    tree = ast.parse(
        "def f():\n    from mfsdp_func.plans import plan\n    import mfsdp_func\nimport mfsdp_func.values.layout as x\n"
    )
    assert sorted(find_wrong_imports("values.ranges", tree)) == ["__init__", "plans.plan"]
    assert find_wrong_imports("operations.dbuffer", tree) == ["__init__"]
    assert find_wrong_imports("inplace", tree) == []


@pytest.mark.parametrize("file", [file for file in FILES if layer_of(name_of(file)) == 0], ids=name_of)
def test_values_know_no_process_group(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
        origin = node.module if isinstance(node, ast.ImportFrom) else ""
        for name in names:
            full = f"{origin}.{name}".strip(".")
            assert not full.startswith("torch.distributed") or full.startswith("torch.distributed.tensor.")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_assert_and_no_relative_import(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        assert not isinstance(node, ast.Assert), f"{file}:{node.lineno}: raise an error that a caller can read"
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{file}:{node.lineno}: import by full name"


def test_no_utils() -> None:
    assert [file for file in FILES if file.stem in ("utils", "util", "helpers", "misc", "common")] == []


def test_top_level_holds_the_agreed_entries() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert {line.partition("/")[0] for line in listed.stdout.splitlines()} <= TOP_LEVEL
