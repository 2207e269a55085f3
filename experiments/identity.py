"""Identity of a run: a hash of everything that decides its results, and of nothing else.

Code enters as syntax trees without docstrings, so that a changed kernel never reuses old results and
a changed comment does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def digest(value: Any) -> str:
    """Hex sha256 of a JSON-serialisable value, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def run_id(parts: dict[str, Any]) -> str:
    """Short identity of a run: method and task to read, sixteen hex digits to be sure."""
    return f"{parts['method']['name'].rpartition(':')[2]}-{parts['task']['name']}-{digest(parts)[:16]}"


PACKAGES = ("ffd", "eval")
"""Top-level packages whose modules count; others are covered by their versions."""
_ROOT = Path(__file__).resolve().parent.parent


def code_fingerprint(roots: Iterable[str]) -> str:
    """Hash of modules and of what they import from `PACKAGES`, lazily imported modules included.

    Parameters
    ----------
    roots
        Dotted module names to start from.
    """
    trees: dict[str, str] = {}
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in trees:
            continue
        path = _source(name)
        if path is None:
            continue
        tree = ast.parse(path.read_text())
        pending.extend(m for m in _imports(tree) if m.split(".")[0] in PACKAGES)
        trees[name] = ast.dump(_without_docstrings(tree))
    return digest(trees)


def _source(module: str) -> Path | None:
    package, _, rest = module.partition(".")
    if package in PACKAGES:  # without importlib, which would import every parent
        base = _ROOT / module.replace(".", "/")
        found = (base.with_suffix(".py") if rest else base, base / "__init__.py")
        return next((path for path in found if path.is_file()), None)  # none for "module.attribute"
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _statements(node: ast.AST) -> Iterable[ast.AST]:
    """The node and all statements inside it; expressions, most of a tree, hold none."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, ())
        for statement in inner if isinstance(inner, list) else ():
            yield from _statements(statement)


def _imports(tree: ast.Module) -> Iterable[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            # "from package import module" names a module as often as an attribute
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in _statements(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        # Field docstrings are expression statements too; none of them does anything.
        kept = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree
