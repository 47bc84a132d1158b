"""The steps at the edges: rows without keys, infinities, and differences that rounding could swallow."""

import numpy as np
import pytest

from numpy_sdpa import sdpa_backward, sdpa_double_backward, sdpa_forward, sdpa_jvp, steps


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


def test_softcap_far_into_saturation():
    """1 − tanh² has no digits where tanh rounds to 1; 1 / cosh² has. In float32, 6 % and more of the gradient."""
    scores = np.array([[-40.0, -9.0, -3.0, -0.1, 0.0, 0.5, 8.0, 20.0]], dtype=np.float32)
    options = {"scale": 1.0, "softcap": 1.0}
    upstream = {"grad_lse": np.array([0.75], dtype=np.float32)}
    _, residuals = sdpa_forward(np.ones((1, 1), np.float32), scores.T, scores.T, **options)
    gradients = sdpa_backward(None, residuals, **upstream)
    weights = np.exp(np.tanh(scores.astype(float)))
    slope = 1 / np.cosh(scores.astype(float)) ** 2
    expected = 0.75 * weights / weights.sum() * slope
    np.testing.assert_allclose(gradients.key, expected.T, rtol=4 * np.finfo(np.float32).eps)


def test_softcap_of_scores_that_overflow():
    """The capped scores are finite, and so are all derivatives: those of the scores 0, that of the softcap ±1."""
    query, key = np.array([[1e30]], np.float32), np.array([[1e30], [-1e30]], np.float32)
    value = np.array([[1.0], [2.0]], np.float32)
    output, residuals = sdpa_forward(query, key, value, softcap=0.5)
    assert np.isinf(residuals.scores).all()
    weights = np.exp([0.5, -0.5]) / np.exp([0.5, -0.5]).sum()
    row_dot = weights @ [1.0, 2.0]
    by_softcap = weights * ([1.0, 2.0] - row_dot) @ [1.0, -1.0]
    gradients = sdpa_backward(np.ones_like(output), residuals)
    np.testing.assert_allclose(gradients.softcap, by_softcap, rtol=1e-6)
    for gradient in (gradients.query, gradients.key, gradients.scale):
        np.testing.assert_array_equal(gradient, 0)
    directions = {"softcap": np.ones(()), "value": np.ones_like(value)}
    np.testing.assert_allclose(sdpa_jvp(residuals, **directions).output, [[1 + by_softcap]], rtol=1e-6)
    second = sdpa_double_backward(np.ones_like(output), residuals, **directions)
    for gradient in (second.query, second.key, second.scale):
        np.testing.assert_array_equal(gradient, 0)
    assert np.isfinite(second.softcap)


@pytest.mark.parametrize("cap", [1.0, 1e-3])
def test_the_softcap_s_slope_by_a_complex_step(cap):
    """At every size of the scores, saturated ones on both sides included: t, u d and d change as u does."""
    scores = cap * np.array([-np.inf, -1e200, -900.0, -349.0, -3.0, -0.1, 0.0, 0.2, 5.0, 351.0, 800.0, np.inf])
    step = 1e-100
    u, t, d = steps.softcap_slope(np, scores, np.asarray(cap))
    for of_scores, of_cap in ((1.0, 0.0), (0.0, 1.0)):
        moved = scores + 1j * step * of_scores, np.asarray(cap + 1j * step * of_cap)
        with np.errstate(invalid="ignore"):  # ∞ / a complex number
            slope = steps.softcap_slope(np, *moved)
        u_tangent = np.where(np.abs(u) < 350, (of_scores - u * of_cap) / cap, 0)
        tangents = u_tangent, d * u_tangent, -2 * t * d * u_tangent
        seen = np.isfinite(scores)
        for got, real, tangent in zip(slope, (u, t, d), tangents, strict=True):
            np.testing.assert_allclose(got.real[seen], real[seen], rtol=1e-12)  # exp(2u) loses 2u eps
            np.testing.assert_allclose(got.imag[seen] / step, tangent[seen], rtol=1e-12, atol=1e-290)
    assert (np.abs(u) <= 350).all()
    assert np.isfinite(u * d).all()


def with_sink(entries, sink_entry):
    return np.append(entries, np.full((*entries.shape[:-1], 1), sink_entry), axis=-1)


def single(array):
    return np.asarray(array, dtype=np.float32)


@pytest.mark.parametrize("gap", [5.0, 15.0, 30.0, 60.0])
@pytest.mark.parametrize("to_sink", [False, True])
def test_a_row_that_is_nearly_one_weight_has_all_digits(gap, to_sink):
    """float32 against Σ_k p_j p_k (x_j − x_k) in float64: D rounded to eps · |gP| would leave noise."""
    logits, sink = np.array([[0.0 if to_sink else gap, -0.5, 0.25, 1.0]]), gap if to_sink else -1.0
    exponentials = np.exp(with_sink(logits, sink) - gap)
    exact = exponentials / exponentials.sum()
    weights, sink_weight = single(exact[:, :-1]), single(exact[:, -1:])
    upstream, upstream_tangent = np.array([[3.0, -7.0, 2.5, 4.0]]), np.array([[8.0, 1.0, -2.0, 0.5]])
    direction, sink_direction = np.array([[-1.0, 5.0, 9.0, 2.0]]), np.asarray(6.0)

    def mean_difference(x, p):
        """Σ_k p_k (x_j − x_k) for each j."""
        return ((x[:, :, None] - x[:, None, :]) * p[:, None, :]).sum(axis=-1)

    def assert_right(got, got_of_sink, expected):
        np.testing.assert_allclose(with_sink(got, got_of_sink), expected, rtol=20 * np.finfo(np.float32).eps)

    x, x_tangent = with_sink(upstream, 0.0), with_sink(upstream_tangent, 0.0)
    no_lse = single([[0.0]])
    gradients = steps.softmax_backward(np, single(upstream), no_lse, weights, sink_weight)
    assert_right(*gradients, exact * mean_difference(x, exact))
    tangents = steps.softmax_tangent(np, weights, sink_weight, single(direction), single(sink_direction), None)
    exact_tangent = exact * mean_difference(with_sink(direction, sink_direction), exact)
    assert_right(tangents.weights, tangents.sink_weight, exact_tangent)
    second = steps.softmax_backward_tangent(
        np, single(upstream), single(upstream_tangent), no_lse, weights, sink_weight, tangents
    )
    of_weights = exact_tangent * mean_difference(x, exact) + exact * mean_difference(x, exact_tangent)
    assert_right(*second, of_weights + exact * mean_difference(x_tangent, exact))


@pytest.mark.parametrize("keys", [7, 100, 1000])
def test_lse_moves_with_all_logits_to_the_last_bit(keys):
    """The weights sum to 1 within some eps only, and so would the tangent, were the mean's own rest not added."""
    logits = single(np.random.default_rng(1).standard_normal((200, keys)))
    weights = steps.softmax_forward(np, logits, None, None).weights
    shift = np.float32(1.2345)
    assert np.abs(np.sum(weights * shift, axis=-1) - shift).max() > 0
    tangents = steps.softmax_tangent(np, weights, None, np.full_like(logits, shift), None, None)
    np.testing.assert_array_equal(tangents.lse, shift)
    np.testing.assert_allclose(tangents.weights, 0, atol=(2 * np.finfo(np.float32).eps) ** 2)  # one mean leaves eps


def test_an_infinite_sink_has_derivatives():
    """+∞ takes the whole row: lse moves with it, and nothing else does. −∞ is no sink, whatever its direction."""
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, 2, 4, 3))
    upstream = {"grad_lse": rng.standard_normal((2, 4)), "grad_weights": rng.standard_normal((2, 4, 4))}
    sinks, mask = np.array([-np.inf, np.inf]), np.tri(4, dtype=bool)
    mask[1] = False
    output, residuals = sdpa_forward(*arrays, mask, sinks=sinks)
    gradients = sdpa_backward(np.ones_like(output), residuals, **upstream)
    _, without = sdpa_forward(*arrays, mask)
    expected = sdpa_backward(np.ones_like(output), without, **upstream)
    np.testing.assert_array_equal(gradients.sinks, [0, upstream["grad_lse"][1].sum()])
    directions = {"query": arrays[1], "key": arrays[2], "value": arrays[0]}
    tangents = sdpa_jvp(residuals, **directions, sinks=np.array([5.0, 7.0]))
    expected_tangents = sdpa_jvp(without, **directions)
    second = sdpa_double_backward(np.ones_like(output), residuals, **upstream, **directions, sinks=np.array([5.0, 7.0]))
    expected_second = sdpa_double_backward(np.ones_like(output), without, **upstream, **directions)
    pairs = [(gradients, expected), (tangents, expected_tangents), (second, expected_second)]
    for got, wanted in pairs:
        for name in {"query", "key", "value", "output", "lse", "weights"} & set(got._fields):
            np.testing.assert_array_equal(getattr(got, name)[0], getattr(wanted, name)[0], err_msg=name)
            np.testing.assert_array_equal(getattr(got, name)[1], 7.0 if name == "lse" else 0.0, err_msg=name)
    np.testing.assert_array_equal(second.sinks, 0)
