"""The kernel with replaceable steps is the reference, on the whole plane and on any part of it."""

import cases
import numpy as np
import pytest

from numpy_sdpa.kernelcheck.gold import Gold
from numpy_sdpa.kernelcheck.kernel import RIGHT, Kernel, Part
from numpy_sdpa.kernelcheck.problem import INPUTS, Problem
from numpy_sdpa.kernelcheck.sample import Whole

ARRAYS = ("mask", "dropout_mask", "query_lengths", "key_lengths", "query_segments", "key_segments", "query_offset")


def problem_of(case):
    """A case of the common grid, as a dump would give it (with a head axis)."""
    inputs = cases.make(case)
    options = dict(inputs.options)
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    names = [name for name, option in options.items() if isinstance(option, np.ndarray)]
    arrays |= {name: options.pop(name) for name in names if name in (*ARRAYS, *INPUTS)}
    upstream = {name: array for name, array in inputs.upstream.items() if name != "grad_weights"}
    return Problem(arrays, options, upstream, {}, "float64")


@pytest.fixture(autouse=True)
def _no_warnings():
    """Infinities and NaN are results here: `diagnose` computes so as well."""
    with np.errstate(all="ignore"):
        yield


SUITABLE = [case for case in cases.ALL if len(case.query) > 2 and np.prod(case.weights_shape) > 0 and case.upstream]


def assert_close(got, expected, name):
    assert got.shape == expected.shape, name
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected), err_msg=name)
    finite = np.isfinite(expected)
    # float64 on both sides: sums of a few dozen terms in another order
    size = np.max(np.abs(expected[finite]), initial=1.0)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=0, atol=1e-12 * size, err_msg=name)


@pytest.mark.parametrize("case", SUITABLE, ids=str)
def test_it_is_the_reference(case):
    problem = problem_of(case)
    gold = Gold(problem)
    whole = Whole(gold.as_results())
    kernel = Kernel(problem)
    results = whole._forward_results(kernel, kernel.forward())
    results |= whole.gradients(RIGHT, RIGHT, RIGHT)
    for name, expected in gold.results.items():
        assert_close(results[name], expected, name)


@pytest.mark.parametrize("case", SUITABLE[::7], ids=str)
def test_a_backward_from_statistics_is_the_same(case):
    problem = problem_of(case)
    whole = Whole(Gold(problem).as_results())
    kernel = Kernel(problem)
    forward = kernel.forward()
    statistics = kernel.statistics(forward)
    for own_row_dot in (False, True):
        given = statistics._replace(row_dot=None) if own_row_dot else statistics
        gradients = whole._gradient_results(kernel, kernel.backward(forward, given))
        for name, expected in whole.gold.items():
            if name.startswith("grad_"):
                assert_close(gradients[name], expected, name)


@pytest.mark.parametrize("case", SUITABLE[::5], ids=str)
def test_a_part_is_a_part_of_the_whole(case):
    problem = problem_of(case)
    *_, heads, rows, columns = problem.plane
    some_rows = (slice(0, 1), slice(max(1, rows - 2), rows)) if rows > 1 else (slice(0, 1),)
    some_columns = (slice(0, 1), slice(max(1, columns - 2), columns)) if columns > 1 else (slice(0, 1),)
    some_heads = np.arange(heads)[-2:]
    whole = Kernel(problem).forward()
    full = Kernel(problem)
    gradients = full.backward(whole)

    row_part = Part(some_heads, some_rows, (slice(0, columns),))
    kernel = Kernel(problem, RIGHT, row_part)
    forward = kernel.forward()
    index = row_part.row_indices()
    assert_close(forward.output, whole.output[..., some_heads, :, :][..., index, :], "output")
    assert_close(forward.lse, whole.lse[..., some_heads, :, :][..., index, :], "lse")
    assert_close(kernel.backward(forward)["query"], gradients["query"][..., some_heads, :, :][..., index, :], "query")

    column_part = Part(some_heads, (slice(0, rows),), some_columns)
    kernel = Kernel(problem, RIGHT, column_part)
    statistics = full.statistics(whole)
    statistics = statistics._replace(
        lse=statistics.lse[..., some_heads, :, :], row_dot=statistics.row_dot[..., some_heads, :, :]
    )
    got = kernel.backward(kernel.forward(), statistics)
    for name in ("key", "value"):
        expected = gradients[name][..., some_heads, :, :][..., column_part.column_indices(), :]
        assert_close(got[name], expected, name)


def test_gold_is_the_public_reference():
    """Also beside the plain definition, on one problem without options."""
    rng = np.random.default_rng(0)
    query, key, value, grad_output = (rng.standard_normal((1, 2, n, 3)) for n in (4, 5, 5, 4))
    gold = Gold(Problem({"query": query, "key": key, "value": value}, {}, {"grad_output": grad_output}, {}, "float32"))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(3)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(gold.results["output"], weights @ value, rtol=1e-13)
    np.testing.assert_allclose(gold.results["grad_value"], weights.swapaxes(-1, -2) @ grad_output, rtol=1e-12)
