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
