"""The steps at the edges: rows without keys, infinities, and differences that rounding could swallow."""

import numpy as np

from numpy_sdpa import sdpa_backward, sdpa_double_backward, sdpa_forward


def test_queries_without_keys_are_never_read():
    """S = 0: 0 · NaN in gc = Σ q · (gS K)."""
    query = np.array([[np.nan, 1.0], [np.inf, 2.0]])
    output, residuals = sdpa_forward(query, np.ones((0, 2)), np.ones((0, 3)), sinks=np.zeros(()))
    gradients = sdpa_backward(np.full_like(output, np.nan), residuals)
    second = sdpa_double_backward(np.ones_like(output), residuals, query=query, scale=np.ones(()))
    for result in (gradients, second):
        assert result.scale == 0
        assert result.sinks == 0
        np.testing.assert_array_equal(result.query, 0)


def test_infinities_are_told_by_their_real_parts():
    """A complex step from a bias of −∞ still hides, one from a sink of +∞ still takes everything."""
    key, value = np.array([[1.0], [np.nan]]), np.array([[1.0], [np.inf]])
    bias = np.array([0.0, -np.inf]) + 1e-100j
    options = {"bias": bias, "compute_dtype": "complex128"}
    output, residuals = sdpa_forward(np.ones((1, 1)), key, value, **options)
    np.testing.assert_array_equal(output, [[1.0]])
    np.testing.assert_array_equal(residuals.weights, [[1.0, 0.0]])
    sinks = np.asarray(np.inf + 1e-100j)
    output, residuals = sdpa_forward(np.ones((1, 1)), key, value, sinks=sinks, **options)
    np.testing.assert_array_equal(output, [[0.0]])
    np.testing.assert_array_equal(residuals.lse, [np.inf])
