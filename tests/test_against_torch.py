"""Every stored result of torch: output, lse, weights, all gradients, forward mode and double backward."""

import fixtures
import numpy as np
import pytest

import numpy_sdpa


def assert_close(got, expected, tolerance, name):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, name
    largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * largest, err_msg=name)


@pytest.mark.parametrize(("family", "case"), fixtures.EVERY, ids=str)
def test_torch(family, case):
    fixture = fixtures.get(family, case)
    inputs = fixture.inputs
    output, residuals = numpy_sdpa.sdpa_forward(*inputs[:3], **inputs.options)
    # both sides compute in float64, with sums of a few dozen terms of order 1 in different orders
    for name, got in (("output", output), ("lse", residuals.lse), ("weights", residuals.weights)):
        assert_close(got, getattr(fixture, name), 1e-13, name)

    upstream = {"grad_output": None, **inputs.upstream}
    grad_output = upstream.pop("grad_output")
    gradients = numpy_sdpa.sdpa_backward(grad_output, residuals, **upstream)
    assert fixture.gradients.keys() >= {"query", "key", "value"}
    for name, expected in fixture.gradients.items():
        assert_close(getattr(gradients, name), expected, 1e-12, f"gradient of {name}")
    if fixture.sdpa_gradients:  # torch's own function, grad_output alone
        gradients = numpy_sdpa.sdpa_backward(grad_output, residuals)
        for name, expected in fixture.sdpa_gradients.items():
            assert_close(getattr(gradients, name), expected, 1e-12, f"gradient of {name} by torch's own function")

    tangents = numpy_sdpa.sdpa_jvp(residuals, **fixture.directions)
    for name, expected in fixture.tangents.items():
        assert_close(getattr(tangents, name), expected, 1e-12, f"tangent of {name}")
    second = numpy_sdpa.sdpa_double_backward(grad_output, residuals, **upstream, **fixture.directions)
    assert fixture.second.keys() >= {"query", "key", "value"}
    for name, expected in fixture.second.items():
        assert_close(getattr(second, name), expected, 1e-11, f"second-order gradient of {name}")
