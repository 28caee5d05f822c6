"""Modules of kernels that say `import tilelang`, loaded with nothing but their imports changed.

Comes in: the path of a Python file. Goes out: its names, TileLang's modules having become ours. What else it imports
beside Python's own library (torch, for a driver around its kernels) is replaced by a name that has every attribute, and
statements of the module that would run such a driver are left out.
"""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

OURS = {"tilelang": "tilecore", "tilelang.language": "tilecore.language", "tvm.tirx": "tilecore.language"}
FROM = {
    ("tilelang.autotuner", "*"): ("tilecore", "autotune"), ("tilelang.autotuner", "autotune"): ("tilecore", "autotune"),
    ("tilelang", "jit"): ("tilecore", "jit"), ("tilelang", "language"): ("tilecore", "language"),
    ("tvm", "tirx"): ("tilecore", "language"),
}  # fmt: skip


class _Anything:
    """Stands for a library that kernels do not need."""

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: object, **named: object) -> "_Anything":
        return self

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)


ANYTHING = _Anything()


def load(path: Path, folder: Path) -> ModuleType:
    """The module of `path`, whose text with other imports is written to `folder`. Lines keep their numbers."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            changed = "; ".join(_import(node, alias) for alias in node.names)
        elif _defines(node):
            continue
        else:
            changed = "pass"
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = [changed] + [""] * (node.end_lineno - node.lineno)
    copy = folder / f"{path.stem}_changed_imports.py"
    copy.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["ANYTHING"] = ANYTHING
    spec.loader.exec_module(module)
    return module


def _defines(node: ast.stmt) -> bool:
    """Whether a statement defines a function or a class, or names a constant or what the language makes."""
    if isinstance(node, ast.Assign):
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        names = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)} <= {"T"}
        return names and all(ast.unparse(call.func).startswith("T.") for call in calls)
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


def _import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    source = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
    name = alias.asname or alias.name.partition(".")[0]
    if source.partition(".")[0] in sys.stdlib_module_names:
        called = f" as {alias.asname}" if alias.asname else ""
        return (
            f"import {alias.name}{called}"
            if isinstance(node, ast.Import)
            else f"from {source} import {alias.name}{called}"
        )
    if isinstance(node, ast.Import) and source in OURS:
        return f"import {OURS[source]} as {name}"
    if isinstance(node, ast.ImportFrom) and (source, alias.name) in FROM:
        module, what = FROM[source, alias.name]
        return f"from {module} import {what} as {what if alias.name == '*' else name}"
    known = isinstance(node, ast.Import) and name in ("tilelang", "T")  # `import tilelang.testing`
    return "pass" if alias.name == "*" or known else f"{name} = ANYTHING"
