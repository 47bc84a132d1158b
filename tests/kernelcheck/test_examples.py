"""The examples run: the C kernel is built here, the JAX one is called, the torch one (without torch) compiled."""

import shutil
from pathlib import Path

import pytest

from numpy_sdpa.kernelcheck import check_kernel

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"query_length": 13, "key_length": 30, "head_size": 6}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name):
        return __import__(name)

    return load


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on this machine")
@pytest.mark.parametrize("flags", [[], ["-DFORGET_ROW_DOT"]], ids=["right", "wrong"])
def test_the_c_kernel(example, tmp_path, flags):
    c = example("check_c_kernel")
    kernel = c.kernel_of(c.build(tmp_path, *flags))
    report = check_kernel(kernel, features=["causal", "gqa", "scale", "odd_sizes", "strided"])
    ran = [case for case in report.cases if case.skipped is None]
    assert len(ran) == len(report.cases)
    if flags:
        assert not any(case.passed for case in ran)
        assert report.mistakes == {"row-dot-missing": len(ran)}
    else:
        assert report.passed, str(report)


def test_the_jax_kernel(example):
    pytest.importorskip("jax")
    report = check_kernel(example("check_jax_kernel").kernel, features=["odd_sizes", "huge_logits", "causal"], **SMALL)
    assert report.passed, str(report)
    assert sum(case.skipped is None for case in report.cases) >= 4


def test_the_torch_kernel_compiles():
    source = (EXAMPLES / "check_torch_kernel.py").read_text(encoding="utf-8")
    compile(source, "check_torch_kernel.py", "exec")
