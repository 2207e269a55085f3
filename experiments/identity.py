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


def code_fingerprint(roots: Iterable[str], packages: tuple[str, ...] = ("ffd", "eval")) -> str:
    """Hash of modules and of what they import from ``packages``, lazily imported modules included.

    Parameters
    ----------
    roots
        Dotted module names to start from.
    packages
        Top-level packages whose modules count; others are covered by their versions.
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
        pending.extend(m for m in _imports(tree, name) if m.split(".")[0] in packages)
        trees[name] = ast.dump(_without_docstrings(tree))
    return digest(trees)


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, AttributeError):  # "module.attribute" from an import statement
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _imports(tree: ast.Module, module: str) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            # "from package import module" names a module as often as an attribute
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        # Field docstrings are expression statements too; none of them does anything.
        kept = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree
