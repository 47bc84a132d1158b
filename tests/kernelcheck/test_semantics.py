"""What other systems mean: the data, its page, and what `compare` makes of it."""

import math
from pathlib import Path

import numpy as np
import pytest
import wrong_kernels
from test_diagnosis import CAUSAL, EMPTY, GROUPED, first_ties, lengths, problem

from numpy_sdpa.kernelcheck import check_kernel, compare
from numpy_sdpa.kernelcheck.semantics import SYSTEMS, as_markdown, system

ROOT = Path(__file__).parents[2]


def test_the_page_is_printed_from_the_data():
    page = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "python scripts/print_semantics.py > docs/semantics.md"
    assert {"torch", "flash-attention", "jax", "onnx"} <= set(SYSTEMS)
    assert all(s.source and s.checked and s.version for s in SYSTEMS.values())


def test_the_diagonal_is_the_systems_unless_the_caller_says_where_it_is():
    arrays, options = problem(**CAUSAL)
    lower_right = wrong_kernels.run(arrays, {**options, "alignment": "lower_right"})
    given = {**arrays, **lower_right}
    assert not compare(given, **options).passed
    assert not compare(given, semantics="torch", **options).passed
    del given["lse"]  # flash-attention's lse of an empty row is +inf; here S > L and there is none
    assert compare(given, semantics="flash-attention", layout="bhld", **options).passed
    upper_left = wrong_kernels.run(arrays, options)
    assert compare(
        {**arrays, **upper_left}, semantics="flash-attention", layout="bhld", query_offset=0, **options
    ).passed


def test_onnx_moves_the_diagonal_with_key_lengths():
    arrays, options = problem(**CAUSAL, key_lengths=lengths(7, 11))
    results = wrong_kernels.run(arrays, {**options, "alignment": "lower_right"})
    del results["lse"]
    assert compare({**arrays, **results}, semantics="onnx", **options).passed
    assert not compare({**arrays, **results}, semantics="torch", **options).passed
    assert system("onnx").options({}) == {}


def test_the_layout_is_the_systems():
    arrays, options = problem()
    given = {**arrays, **wrong_kernels.run(arrays, options)}
    swapped = {name: np.swapaxes(array, 1, 2) for name, array in given.items()}  # jax's lse is (B, L, H) too
    assert compare(swapped, semantics="jax", **options).passed
    assert compare(given, semantics="jax", layout="bhld", **options).arrays["output"].passed


@pytest.mark.parametrize(("name", "value"), [("flash-attention", math.inf), ("numpy-sdpa", -math.inf)])
def test_lse_where_nothing_is_visible(name, value):
    arrays, options = problem(**EMPTY)
    results = wrong_kernels.run(arrays, options)
    results["lse"] = np.where(np.isneginf(results["lse"]), np.float32(value), results["lse"])
    given = {**arrays, **results}
    assert compare(given, semantics=name, layout="bhld", **options).passed
    others = [other for other in ("flash-attention", "numpy-sdpa") if other != name]
    assert not compare(given, semantics=others[0], layout="bhld", **options).passed


@pytest.mark.parametrize("extra", [EMPTY, EMPTY | GROUPED], ids=["heads", "grouped heads"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_of_values_where_nothing_is_visible(extra, dtype):
    arrays, options = problem(dtype=dtype, **extra)
    given = {**arrays, **wrong_kernels.run(arrays, options, {"fully-masked-mean"})}
    del given["lse"]
    report = compare(given, semantics="jax", layout="bhld", **options)
    assert report.passed, str(report)
    assert not compare(given, semantics="torch", **options).passed
    zeros = {**arrays, **wrong_kernels.run(arrays, options)}
    del zeros["lse"]
    assert not compare(zeros, semantics="jax", layout="bhld", **options).passed


@pytest.mark.parametrize("mistake", ["scale-missing", "mask-inverted", "row-dot-missing"])
def test_mistakes_are_named_under_another_meaning(mistake):
    arrays, options = problem(**EMPTY)
    given = {**arrays, **wrong_kernels.run(arrays, options, {"fully-masked-mean", mistake})}
    given["lse"] = given["lse"].swapaxes(1, 2)  # as jax's is
    report = compare(given, semantics="jax", layout="bhld", **options)
    assert mistake in first_ties(report), str(report)


@pytest.mark.parametrize("feature", ["empty_rows", "window"])
def test_jax_is_as_its_row_says(feature):
    pytest.importorskip("jax")
    from check_semantics import jax_kernel

    report = check_kernel(jax_kernel, semantics="jax", features=[feature], query_length=9, key_length=12, head_size=8)
    assert report.passed, str(report)
    assert len(report.cases) == 2


def test_onnx_is_as_its_row_says():
    pytest.importorskip("onnx")
    from check_semantics import onnx_kernel

    features = ["causal", "key_lengths", "softcap", "bias"]
    sizes = {"query_length": 9, "key_length": 12, "head_size": 8}
    report = check_kernel(onnx_kernel, semantics="onnx", features=features, backward=False, **sizes)
    assert report.passed, str(report)
