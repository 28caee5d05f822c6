"""The shape of the source tree: who imports whom, no cycles, no hidden imports, no file too long, none without a word.

The table of layers is the one of docs/architecture.md.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 600  # lines of a file
LONGEST_FUNCTION = 60

# Of the rows that its name starts with, a module follows the longest: what of ours it may import.
LAYERS: dict[str, tuple[str, ...]] = {
    "tilecore.contract": ("tilecore.contract",),  # the vocabulary of both halves rests on nothing
    "tilecore": ("tilecore",),
    "fuser": ("fuser", "tilecore.contract"),
    "proto": ("proto",),
    "models": ("models",),
    "runtime": ("runtime", "fuser", "tilecore", "proto"),
    "runtime.demo": ("runtime", "models"),  # a program on top of everything
    "tilefuse": ("runtime", "fuser", "tilecore", "proto", "models"),
}
OURS = frozenset(name.partition(".")[0] for name in LAYERS)
GENERATED = "_pb2"


@dataclass(frozen=True)
class Import:
    """One import of a module of ours: where it stands and what it names."""

    line: int
    target: str
    at_top: bool


@cache
def modules() -> dict[str, Path]:
    """Every module of the product that is written by hand, by its dotted name."""
    paths = [ROOT / "tilefuse.py"]
    for package in sorted(OURS - {"tilefuse"}):
        paths += sorted((ROOT / package).rglob("*.py"))
    found: dict[str, Path] = {}
    for path in paths:
        if GENERATED not in path.name:
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[Import]:
    """Imports of ours in a file; `from a import b` names a.b where that is a module, else a."""
    top = set(map(id, tree(path).body))
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.append(inner if inner in modules() else str(node.module))
        for name in names:
            if name.partition(".")[0] in OURS:
                assert isinstance(node, ast.stmt)
                yield Import(node.lineno, name, id(node) in top)


def inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def allowed(name: str) -> tuple[str, ...]:
    return LAYERS[max((prefix for prefix in LAYERS if inside(name, prefix)), key=len)]


def test_the_walk_finds_the_product() -> None:
    """A wrong root would make every other test here pass."""
    assert {"tilefuse", "fuser.scan", "tilecore.contract.expr", "runtime.compile", "runtime.cli"} <= modules().keys()
    assert "tilecore.compile" in {entry.target for entry in imports(modules()["runtime.compile"])}


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_follow_the_layers(name: str) -> None:
    path = modules()[name]
    wrong = [
        f"{path.relative_to(ROOT)}:{entry.line}: imports {entry.target}; may import {', '.join(allowed(name))}"
        for entry in imports(path)
        if not any(inside(entry.target, prefix) for prefix in allowed(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_import_cycles() -> None:
    needs = {name: {entry.target for entry in imports(path)} - {name} for name, path in modules().items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


def test_no_function_imports_a_module_of_ours() -> None:
    hidden = [
        f"{path.relative_to(ROOT)}:{entry.line}: imports {entry.target} below the top of the file"
        for path in modules().values()
        for entry in imports(path)
        if not entry.at_top
    ]
    assert not hidden, "\n".join(hidden)


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        name
        for name, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os"
    }
    own_kernels = "tilecore.toolchain"  # where they are kept, which nothing of runtime tells them
    assert readers <= {"runtime.options", own_kernels}


def test_every_module_says_what_it_is() -> None:
    silent = [str(path.relative_to(ROOT)) for path in modules().values() if not ast.get_docstring(tree(path))]
    assert not silent, f"without a docstring: {', '.join(silent)}"


def test_no_file_is_too_long() -> None:
    sources = [path for folder in (*OURS - {"tilefuse"}, "tests", "benchmarks") for path in (ROOT / folder).rglob("*")]
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in [*sources, ROOT / "tilefuse.py"]
        if path.suffix in (".py", ".c", ".h", ".proto") and GENERATED not in path.name and "golden" not in path.parts
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST
    ]
    assert not long, "\n".join(long)


def test_no_function_is_too_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {lines} lines"
        for path in modules().values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert not long, "\n".join(long)
