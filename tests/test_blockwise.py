"""The blockwise engine: dense's results on many ragged tiles, whatever the block size and the number of workers."""

import cases
import loops
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import numpy_sdpa

# float64 on both sides; sums here have at most a few dozen terms of order 1, in another order.
TOLERANCE = 1e-12


def assert_close(got, expected, name, tolerance=TOLERANCE):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, name
    largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * largest, err_msg=name)


def run(inputs, upstream=None, **options):
    """Output, residuals and gradients; grad_weights, which blockwise has not, left out."""
    options = {**inputs.options, **options}
    output, residuals = numpy_sdpa.sdpa_forward(*inputs[:3], **options)
    given = inputs.upstream if upstream is None else upstream
    given = {"grad_output": None, "grad_lse": None, **{n: a for n, a in given.items() if n != "grad_weights"}}
    if all(array is None for array in given.values()):
        return output, residuals, None
    return output, residuals, numpy_sdpa.sdpa_backward(given.pop("grad_output"), residuals, **given)


def check_against_loops(case, block_size, workers):
    inputs = cases.make(case)
    expected = loops.forward(*inputs[:3], **inputs.options)
    output, residuals, gradients = run(inputs, method="blockwise", block_size=block_size, workers=workers)
    assert_close(output, expected.output, "output")
    assert_close(residuals.lse, expected.lse, "lse")
    with np.errstate(divide="ignore"):
        assert_close(residuals.row_shift + np.log(residuals.row_sum), expected.lse, "row_shift + log(row_sum)")
    if gradients is None:
        return
    grad_output, grad_lse = inputs.upstream.get("grad_output"), inputs.upstream.get("grad_lse")
    wanted = loops.backward(grad_output, *inputs[:3], grad_lse=grad_lse, **inputs.options)
    for name in cases.DIFFERENTIABLE:
        if getattr(wanted, name) is None:
            assert getattr(gradients, name) is None, name
        else:
            assert_close(getattr(gradients, name), getattr(wanted, name), f"gradient of {name}")


@pytest.mark.parametrize("block_size", [1, (2, 3), (3, 2), None], ids=str)
@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_every_case(case, block_size):
    check_against_loops(case, block_size, workers=2)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases.case_strategy(), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_random_combinations(case, tile):
    check_against_loops(case, tile, workers=3)
