"""The package's text asks CuPy for nothing that it lacks; and a planted NumPy-only call is found, twice."""

from pathlib import Path

import cupy_standin
import numpy as np
import pytest
from cupy_static import Finding, findings

import numpy_sdpa

PACKAGE = Path(numpy_sdpa.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# Files, and folders, where NumPy may do the arithmetic.
NUMPY_ONLY = {
    "plain.py": "attention for a newcomer, in NumPy",
    "benchmark.py": "measures NumPy",
    "blockwise/folded.py": "the fast form of the plain tile, for NumPy",
    "blockwise/workers.py": "threads and scratch memory, for NumPy",
    "_internal/validation.py": "lengths, offsets and numbers of Python or NumPy are checked on the host",
    "_internal/namespace.py": "lists become NumPy arrays",
    "gradcheck/": "difference quotients are computed on the host",
    "kernelcheck/": "dumps are compared on the host",
    "cli/": "reads files and prints",
    "verify.py": "checks this machine's results in NumPy",
    "data/": "ships NumPy's files",
    "why_scale.py": "an experiment in NumPy",
    "why_scale_figure.py": "draws it",
    "distributed/arguments.py": "checks lengths and offsets on the host, where the graph is built",
    "distributed/graph.py": "lays out tasks on the host",
    "distributed/plan.py": "places of chunks, on the host",
    "distributed/tasks.py": "stand-ins that have a shape and a dtype only",
}
# In the one file that tells modules apart: what CuPy never gets to.
OTHER_MODULES = {
    "_internal/namespace.py": ["xp.asarray(device=…) is not in CuPy", "xp.arange(device=…) is not in CuPy"],
}


def is_numpy_only(file: str) -> bool:
    return any(file == name or (name.endswith("/") and file.startswith(name)) for name in NUMPY_ONLY)


@pytest.mark.parametrize("file", FILES)
def test_nothing_that_cupy_lacks(file):
    found = findings((PACKAGE / file).read_text(encoding="utf-8"), is_numpy_only(file))
    expected = OTHER_MODULES.get(file, [])
    unexpected = [finding for finding in found if finding.problem not in expected]
    assert not unexpected, "\n".join(f"{file}:{finding.line}: {finding.problem}" for finding in unexpected)
    assert [finding.problem for finding in found] == expected


def test_the_mathematics_is_not_exempt():
    for file in ("steps.py", "chain.py", "dense.py", "visibility.py", "attention.py", "dropout.py"):
        assert file in FILES
        assert not is_numpy_only(file)


# ---- planted

PLANTED = {
    "xp.max(scores, axis=-1, initial=-xp.inf)": "xp.max(initial=…) is not in CuPy",
    "xp.sum(scores, axis=-1, where=scores > 0)": "xp.sum(where=…) is not in CuPy",
    "xp.exp(scores, out=None, where=scores > 0)": "xp.exp(where=…) is not in CuPy",
    "xp.zeros_like(scores, device=None)": "xp.zeros_like(device=…) is not in CuPy",
    "xp.vecdot(scores, scores)": "xp.vecdot is not in CuPy",
    "xp.max(scores, -1, None, True, 0)": "xp.max takes at most 4 positional arguments in CuPy",
    "scores.max(axis=-1, initial=0)": "initial= is NumPy's alone",
    "scores.to_device('cpu')": "CuPy's arrays have no .to_device",
    "np.maximum(scores, np.zeros(1))": "np.maximum(…) where any module's arrays may come",
    "np.asarray(scores)": "np.asarray(…) where any module's arrays may come",
}


@pytest.mark.parametrize("expression", PLANTED)
def test_a_planted_call_is_found_in_the_text(expression):
    source = f"def step(xp, scores):\n    return {expression}\n"
    assert Finding(2, PLANTED[expression]) in findings(source)


@pytest.mark.parametrize("expression", PLANTED)
def test_a_planted_call_runs_on_numpy_and_is_refused_by_the_stand_in(expression):
    scores = np.ones((2, 3))
    eval(expression, {"xp": np, "np": np, "scores": scores})
    with cupy_standin.installed() as xp, pytest.raises((TypeError, AttributeError)):
        eval(expression, {"xp": xp, "np": np, "scores": xp.asarray(scores)})


@pytest.mark.parametrize("module", ["options.xp", "self._xp", "view.xp"])
def test_the_module_is_known_under_each_of_its_names(module):
    assert findings(f"{module}.nextafter2(x)") == [Finding(1, "xp.nextafter2 is not in CuPy")]


def test_a_call_planted_into_the_mathematics_is_found():
    source = (PACKAGE / "steps.py").read_text(encoding="utf-8")
    assert source.count("xp.max(real, axis=-1, keepdims=True)") == 1
    planted = source.replace("xp.max(real, axis=-1, keepdims=True)", "xp.max(real, axis=-1, initial=0)")
    assert [finding.problem for finding in findings(planted)] == ["xp.max(initial=…) is not in CuPy"]


@pytest.mark.parametrize(
    "harmless",
    [
        "xp.where(visible, scores, 0)",
        "xp.sum(scores, axis=-1, keepdims=True)",
        "xp.copyto(scores, 0, where=visible)",
        "xp.exp(scores, out=scores)",
        "np.dtype(np.float32)",
        "np.errstate(all='ignore')",
        "isinstance(x, np.ndarray)",
        "xp.float32",
        "xp.sum(scores, **options)",
    ],
)
def test_what_cupy_has_is_no_finding(harmless):
    assert findings(harmless) == []
