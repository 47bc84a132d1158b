"""Every case of the grid against scalar Python loops: values, gradients, and both second-order functions."""

import dataclasses

import cases
import loops
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import numpy_sdpa

# float64 on both sides; sums here have at most a few dozen terms of order 1, in another order.
TOLERANCE = 1e-12


def assert_close(got, expected, name):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, name
    largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * largest, err_msg=name)


def check_first_order(case):
    inputs = cases.make(case)
    arrays = inputs[:3]
    output, residuals = numpy_sdpa.sdpa_forward(*arrays, **inputs.options)
    expected = loops.forward(*arrays, **inputs.options)
    assert_close(output, expected.output, "output")
    for name in ("lse", "weights", "scores", "capped_scores", "logits"):
        assert_close(getattr(residuals, name), getattr(expected, name), name)
    assert residuals.row_shift.shape == residuals.row_sum.shape == expected.lse.shape
    with np.errstate(divide="ignore"):
        assert_close(residuals.row_shift + np.log(residuals.row_sum), expected.lse, "row_shift + log(row_sum)")
    upstream = {"grad_output": None, **inputs.upstream}
    got = numpy_sdpa.sdpa_backward(upstream.pop("grad_output"), residuals, **upstream)
    wanted = loops.backward(inputs.upstream.get("grad_output"), *arrays, **upstream, **inputs.options)
    for name in cases.DIFFERENTIABLE:
        if getattr(wanted, name) is None:
            assert getattr(got, name) is None, name
        else:
            assert_close(getattr(got, name), getattr(wanted, name), f"gradient of {name}")


def check_second_order(case):
    inputs = cases.make(case)
    arrays = inputs[:3]
    directions = cases.directions(case)
    _, residuals = numpy_sdpa.sdpa_forward(*arrays, **inputs.options)
    got = numpy_sdpa.sdpa_jvp(residuals, **directions)
    expected = loops.jvp(directions, *arrays, **inputs.options)
    for name in got._fields:
        assert_close(getattr(got, name), getattr(expected, name), f"tangent of {name}")
    upstream = {"grad_output": None, **inputs.upstream}
    got = numpy_sdpa.sdpa_double_backward(upstream.pop("grad_output"), residuals, **upstream, **directions)
    gradients, tangents = loops.double_backward(
        directions, inputs.upstream.get("grad_output"), *arrays, **upstream, **inputs.options
    )
    expected = gradients._asdict()
    for name in cases.UPSTREAM:
        expected[name] = getattr(tangents, name.removeprefix("grad_")) if name in inputs.upstream else None
    for name in got._fields:
        if expected[name] is None:
            assert getattr(got, name) is None, name
        else:
            assert_close(getattr(got, name), expected[name], f"second-order gradient of {name}")


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_first_order(case):
    check_first_order(case)


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_second_order(case):
    check_second_order(case)


@pytest.mark.parametrize("upstream", cases.UPSTREAM)
@pytest.mark.parametrize("name", ["bare", "GQA 6/2, most options"])
def test_one_upstream_gradient_alone(name, upstream):
    case = dataclasses.replace(cases.BY_NAME[name], upstream=(upstream,))
    check_first_order(case)
    check_second_order(case)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases.case_strategy())
def test_random_combinations(case):
    check_first_order(case)
    check_second_order(case)
