"""The house stays as it is drawn: imports run one way, nothing optional is imported early, no assert in the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import numpy_sdpa

PACKAGE = Path(numpy_sdpa.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))

# From the ground up: a file imports only what stands in the lines above its own, or on its own line.
FLOORS = [
    ["_version", "plain", "data", "gradcheck"],
    ["_internal.namespace"],
    ["_internal.shapes", "_internal.options"],
    ["_internal.validation"],
    ["visibility"],
    ["dropout", "residuals"],
    ["steps"],
    ["chain"],
    ["merge", "dense", "blockwise"],
    ["attention", "heads"],
    ["jacobians", "varlen", "verify", "why_scale", "benchmark", "distributed"],
    ["kernelcheck"],
    ["why_scale_figure"],
    ["__init__"],
    ["cli", "__main__"],
]
OPTIONAL = {"cupy", "jax", "torch", "ml_dtypes", "safetensors", "matplotlib", "tqdm", "rich", "dask", "distributed"}


def room(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def floor(module: str) -> int:
    for level, rooms in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in rooms):
            return level
    raise AssertionError(f"numpy_sdpa.{module} has no floor: say in FLOORS where it stands")


def imported(path: Path, tree: ast.AST):
    """Modules of the package that a file imports, without the package's name."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            package = node.module == "numpy_sdpa"
            names = [f"numpy_sdpa.{alias.name}" for alias in node.names] if package else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("numpy_sdpa."):
                rest = name.removeprefix("numpy_sdpa.")
                known = (PACKAGE / rest.replace(".", "/")).with_suffix(".py").exists() or (
                    PACKAGE / rest.replace(".", "/")
                ).is_dir()
                yield rest if known else "__init__"


@pytest.mark.parametrize("path", FILES, ids=room)
def test_imports_run_one_way(path):
    here = room(path).removesuffix(".__init__") or "__init__"
    for module in imported(path, ast.parse(path.read_text(encoding="utf-8"))):
        assert floor(module) <= floor(here), f"{here} imports {module}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=room)
def test_no_assert_and_no_early_import_of_what_is_optional(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module or ""}
            assert not {name.partition(".")[0] for name in names} & (OPTIONAL | {"scipy"}), ast.unparse(node)


def test_import_brings_nothing_but_numpy():
    script = (
        "import sys; import numpy; before = set(sys.modules); import numpy_sdpa; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy_sdpa" in loaded
    assert not set(loaded) & (OPTIONAL | {"scipy", "threadpoolctl", "argparse", "json"})


def test_all_names_are_there_and_documented():
    for name in numpy_sdpa.__all__:
        thing = getattr(numpy_sdpa, name)
        assert name.startswith("__") or thing.__doc__, name
