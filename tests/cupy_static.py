"""What in a source file would not run on CuPy, as far as the text shows.

The package names the array module ``xp``. A finding is an ``xp.NAME`` that CuPy lacks, a call of it with
parameters that CuPy's function lacks, and, outside the files that are NumPy's alone, what only NumPy has:
``where=`` and ``initial=``, functions of ``np`` called on what may be an array, attributes that
``numpy.ndarray`` has and ``cupy.ndarray`` has not.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from cupy_standin.api import FUNCTIONS, NAMES, NDARRAY, most_positional, unlisted_keywords

# Of the functions of NumPy, those that look at dtypes, shapes and settings, never at an array's elements.
HARMLESS = frozenset({"broadcast_shapes", "can_cast", "dtype", "errstate", "finfo", "iinfo", "promote_types"})
NUMPY_ONLY_PARAMETERS = frozenset({"where", "initial"})
# NumPy's own, and not names that anything else could have.
NUMPY_ONLY_ATTRIBUTES = frozenset(name for name in dir(np.ndarray) if not name.startswith("_")) - NDARRAY


class Finding(NamedTuple):
    line: int
    problem: str


def findings(source: str, numpy_only: bool = False) -> list[Finding]:
    """The findings in a file's text; ``numpy_only`` for files where ``np`` may do the arithmetic."""
    found = []
    for node in ast.walk(ast.parse(source)):
        problems = [*_of_module(node), *([] if numpy_only else _of_numpy(node))]
        found += [Finding(node.lineno, problem) for problem in problems]
    return sorted(found)


def _of_module(node: ast.AST) -> Iterator[str]:
    """Uses of ``xp`` that CuPy does not have."""
    if (name := _attribute_of(node, "xp")) and name not in NAMES and not name.startswith("__"):
        yield f"xp.{name} is not in CuPy"
    if isinstance(node, ast.Call) and (name := _attribute_of(node.func, "xp")) in FUNCTIONS:
        for keyword in unlisted_keywords(name, [k.arg for k in node.keywords if k.arg is not None]):
            yield f"xp.{name}({keyword}=…) is not in CuPy"
        limit = most_positional(name)
        if limit is not None and len(node.args) > limit:
            yield f"xp.{name} takes at most {limit} positional arguments in CuPy"


def _of_numpy(node: ast.AST) -> Iterator[str]:
    """What NumPy alone has, in a file for every module."""
    if isinstance(node, ast.Attribute) and node.attr in NUMPY_ONLY_ATTRIBUTES:
        yield f"CuPy's arrays have no .{node.attr}"
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        if keyword.arg in NUMPY_ONLY_PARAMETERS and _attribute_of(node.func, "xp") is None:
            yield f"{keyword.arg}= is NumPy's alone"
    for alias in ("np", "numpy"):
        if (name := _attribute_of(node.func, alias)) and name not in HARMLESS:
            yield f"{alias}.{name}(…) where any module's arrays may come"


def _attribute_of(node: ast.AST, module: str) -> str | None:
    """NAME, where the node reads ``module.NAME``, ``anything.module.NAME`` or ``anything._module.NAME``."""
    if not isinstance(node, ast.Attribute):
        return None
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id == module:
        return node.attr
    if isinstance(owner, ast.Attribute) and owner.attr in (module, f"_{module}"):
        return node.attr
    return None
