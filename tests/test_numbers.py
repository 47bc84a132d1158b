"""Numbers of every size: logits from 1e-30 to 1e30, shifts by any constant, products past a dtype's range."""

import cases
import loops
import numpy as np
import pytest
from results import assert_same_bits, everything

import numpy_sdpa

DTYPES = {"float32": np.float32, "float64": np.float64}
MAGNITUDES = [10.0**exponent for exponent in range(-30, 31, 5)]


def eps(dtype):
    return np.finfo(dtype).eps


# -- rows of weights ---------------------------------------------------------------------------------------------------


def check_weights(residuals, sinks=None):
    """The weights are the softmax of the residuals' own logits, and rows sum to 1 less the sink's share."""
    dtype = residuals.weights.dtype
    logits = residuals.logits.astype(np.longdouble)
    lse = np.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        lse = np.maximum(lse, sinks[:, None, None])
    total = np.sum(np.exp(logits - lse), axis=-1, keepdims=True)
    share = np.zeros(()) if sinks is None else np.exp(sinks[:, None, None] - lse)
    exact = np.exp(logits - lse) / (total + share)
    # exp, the sum of S + 1 terms, the division: a relative error; and |d| e^−d ≤ 1/e times what d = z − shift loses
    bound = eps(dtype) * (logits.shape[-1] + 4) * exact + eps(dtype)
    assert (np.abs(residuals.weights - exact) <= bound).all()
    sums = np.sum(residuals.weights.astype(np.longdouble), axis=-1, keepdims=True)
    assert np.max(np.abs(sums - total / (total + share))) <= 4 * eps(dtype)
    finite = np.isfinite(residuals.lse)
    assert finite.all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("magnitude", MAGNITUDES, ids="{:.0e}".format)
@pytest.mark.parametrize("source", ["bias", "query", "scale", "softcap", "alibi_slopes"])
def test_rows_of_weights_at_any_magnitude(source, magnitude, dtype):
    rng = np.random.default_rng(7)
    query, key, value = (rng.normal(size=(3, 17, 8)).astype(dtype) for _ in range(3))
    options = {"mask": rng.random((3, 17, 17)) < 0.8}
    options["mask"][..., 0] = True
    if source == "bias":
        options["bias"] = (magnitude * rng.normal(size=(3, 17, 17))).astype(dtype)
    elif source == "query":
        query = (magnitude * query).astype(dtype)
    elif source == "scale":
        options["scale"] = magnitude
    elif source == "softcap":  # scores of the magnitude; capped, then, at a hundredth of it
        options |= {"scale": magnitude, "softcap": magnitude / 100}
    else:
        options["alibi_slopes"] = np.array([magnitude, -magnitude, 0], dtype)
    for sinks in (None, (magnitude * np.array([0.5, -0.5, 0])).astype(dtype)):
        residuals = numpy_sdpa.sdpa_forward(query, key, value, sinks=sinks, **options)[1]
        check_weights(residuals, sinks)
        gradients = numpy_sdpa.sdpa_backward(rng.normal(size=(3, 17, 8)).astype(dtype), residuals)
        assert all(np.isfinite(gradient).all() for gradient in gradients[:3])


def test_rows_that_hold_every_magnitude_at_once():
    """One row with logits from −1e30 to 1e30: the largest takes all, and nothing is NaN."""
    logits = np.concatenate([-np.array(MAGNITUDES), [0.0], MAGNITUDES])
    for dtype in DTYPES.values():
        zeros, value = np.zeros((1, 2), dtype), np.arange(float(len(logits)), dtype=dtype)[:, None]
        for bias in (logits, logits[::-1], -np.abs(logits)):
            residuals = numpy_sdpa.sdpa_forward(zeros, np.zeros((len(bias), 2), dtype), value, bias=bias.astype(dtype))[
                1
            ]
            check_weights(residuals)
            assert residuals.weights[0, np.argmax(bias)] == pytest.approx(
                1 / np.sum(bias >= np.max(bias) - 1e-3), rel=0.1
            )


# -- a shift of all logits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [2.0**10, -(2.0**10), 2.0**19, -(2.0**19)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_shift_of_all_logits_changes_lse_alone(dtype, shift):
    """Bit for bit, where the shifted logits are exact: multiples of 1/8 below 2²⁰ fit into float32's 24 bits."""
    rng = np.random.default_rng(8)
    bias = (rng.integers(-64, 64, (2, 5, 7)) / 8).astype(dtype)
    zeros, value = np.zeros((2, 5, 4), dtype), rng.normal(size=(2, 7, 3)).astype(dtype)
    key, sinks = rng.normal(size=(2, 7, 4)).astype(dtype), np.array([0.5, -1.25], dtype)
    upstream = {"grad_output": rng.normal(size=(2, 5, 3)).astype(dtype), "grad_lse": np.ones((2, 5), dtype)}
    for sink in (None, sinks):
        expected = everything(zeros, key, value, {"bias": bias, "sinks": sink}, upstream)
        shifted_sink = None if sink is None else sink + dtype(shift)
        got = everything(zeros, key, value, {"bias": bias + dtype(shift), "sinks": shifted_sink}, upstream)
        np.testing.assert_allclose(got["lse"] - shift, expected["lse"], rtol=0, atol=abs(shift) * eps(dtype))
        for results in (got, expected):
            for name in ("lse", "logits", "row_shift"):
                del results[name]
        assert_same_bits(got, expected)


@pytest.mark.parametrize(
    "case", [case for case in cases.ALONE + cases.PAIRS if "sinks" not in case.option_names], ids=str
)
def test_a_constant_bias_changes_lse_alone(case):
    inputs = cases.make(case)
    bias = inputs.options.get("bias", np.zeros(()))
    expected = everything(*inputs)
    got = everything(*inputs[:3], inputs.options | {"bias": bias + 300.0}, inputs.upstream)
    assert got["grad_bias"].shape == bias.shape
    for name in expected:
        shift = 300 if name in ("lse", "logits") else 0
        if name not in ("row_shift", "row_sum", "grad_bias"):
            # the logits lose what 300 has more digits than they: eps · 300, some 1e-13, in each
            np.testing.assert_allclose(got[name] - shift, expected[name], rtol=1e-11, atol=1e-11, err_msg=name)


# -- no overflow where the true result is finite -----------------------------------------------------------------------


def test_logits_of_1e5_in_float32():
    query = np.array([[1e5, 0], [-1e5, 0], [0, 1e5]], np.float32)
    key, value = np.array([[1, 0], [-1, 0], [0, 1]], np.float32), np.array([[1], [2], [4]], np.float32)
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, scale=1.0)
    np.testing.assert_array_equal(output[:, 0], [1, 2, 4])
    np.testing.assert_array_equal(residuals.weights, np.eye(3))
    np.testing.assert_array_equal(residuals.lse, [1e5] * 3)
    gradients = numpy_sdpa.sdpa_backward(np.ones((3, 1), np.float32), residuals, grad_lse=np.ones(3, np.float32))
    np.testing.assert_array_equal(gradients.query, key)  # lse is the one visible score
    np.testing.assert_array_equal(gradients.key, query)


def test_float16_products_past_65504():
    query = np.full((1, 4), 200, np.float16)
    key = np.array([[200] * 4, [199] * 4, [-200] * 4], np.float16)
    value = np.array([[1], [2], [3]], np.float16)
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, scale=1 / 200)
    assert residuals.scores[0, 0] == 800
    unscaled = numpy_sdpa.sdpa_forward(query, key, value, scale=1.0)[1]
    assert unscaled.scores[0, 0] == 160000  # float16 ends at 65504
    expected = loops.forward(query, key, value, scale=1 / 200)
    np.testing.assert_allclose(residuals.weights, expected.weights, rtol=1e-4)  # logits of 800: 800 · eps
    assert output[0, 0] == np.float16(expected.output[0, 0])
    gradients = numpy_sdpa.sdpa_backward(np.ones((1, 1), np.float16), residuals)
    assert all(np.isfinite(gradient).all() for gradient in gradients[:3])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_small_scale_prevents_overflow(dtype):
    """(c Q) Kᵀ, not c (Q Kᵀ): q · k is past the range of the dtype, c q · k is 1."""
    large = np.sqrt(np.finfo(dtype).max) * 4
    query, key = np.full((1, 2), large, dtype), np.array([[large] * 2, [0] * 2], dtype)
    value = np.array([[1], [0]], dtype)
    scale = 0.5 / float(large) / float(large)
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, scale=scale)
    assert residuals.scores[0, 0] == pytest.approx(1, rel=1e-6)
    assert output[0, 0] == pytest.approx(np.e / (np.e + 1), rel=1e-6)
    gradients = numpy_sdpa.sdpa_backward(np.ones((1, 1), dtype), residuals)
    assert all(np.isfinite(gradient).all() for gradient in gradients[:3])


@pytest.mark.parametrize("seen", [None, [True, True, True], [True, False, True]], ids=str)
@pytest.mark.parametrize("method", ["dense", "blockwise"])
def test_a_row_of_nothing_but_minus_infinity_is_a_row_of_nothing(method, seen):
    """Whatever the logits come from: a bias of −∞ on every key, and scores past the range of the dtype."""
    query, key = np.array([[1e200, 0], [0, 1]]), np.array([[-1e200, 0], [-1e200, 1], [-1e200, 2]])
    value = np.array([[1.0], [2.0], [4.0]])
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, seen, method=method)
    expected = loops.forward(query, key, value, seen)
    assert expected.logits[0, 0] == -np.inf
    assert output[0] == 0 == expected.output[0]
    assert residuals.lse[0] == -np.inf == expected.lse[0]
    assert np.isfinite(residuals.lse[1])
    gradients = numpy_sdpa.sdpa_backward(np.array([[1.0], [0.0]]), residuals)
    for name in ("query", "key", "value", "scale"):
        np.testing.assert_array_equal(getattr(gradients, name), 0, err_msg=name)
    if method == "dense":
        np.testing.assert_array_equal(residuals.weights[0], 0)
        assert residuals.row_shift[0] == 0


@pytest.mark.parametrize("seen", [None, [True, True, True], [True, False, True]], ids=str)
@pytest.mark.parametrize("first", [1e200, -np.inf])
def test_a_row_of_nothing_but_minus_infinity_remains_one(first, seen):
    """Its lse has no change, also along directions in which the change of its scores is past the range of the dtype."""
    query, value = np.array([[first, 0], [0, 1]]), np.array([[1.0], [2.0], [4.0]])
    key = np.array([[-1e200, 0], [-1e200, 1], [-1e200, 2]]) if first > 0 else np.ones((3, 2))
    residuals = numpy_sdpa.sdpa_forward(query, key, value, seen)[1]
    assert residuals.lse[0] == -np.inf
    directions = {"query": np.nan_to_num(query), "key": key, "value": value}
    tangents = numpy_sdpa.sdpa_jvp(residuals, **directions)
    for array in tangents:
        np.testing.assert_array_equal(array[0], 0)
        assert np.isfinite(array[1]).all()
    second = numpy_sdpa.sdpa_double_backward(np.ones((2, 1)), residuals, **directions)
    np.testing.assert_array_equal(second.grad_output, tangents.output)
    if np.isfinite(first):  # 0 · ∞ is NaN in the gradients of keys that it sees
        alone = numpy_sdpa.sdpa_double_backward(np.array([[0.0], [1.0]]), residuals, **directions)
        for name in ("query", "key", "value", "scale"):
            np.testing.assert_array_equal(getattr(second, name), getattr(alone, name), err_msg=name)
            assert np.isfinite(getattr(second, name)).all()


def test_values_near_the_largest_number():
    """A mean of values is no larger than they: weights are normalised before the product."""
    largest = np.finfo(np.float32).max
    value = np.full((4, 1), largest, np.float32)
    output = numpy_sdpa.attention(np.zeros((1, 2), np.float32), np.zeros((4, 2), np.float32), value)
    assert output[0, 0] == largest


def test_subnormal_inputs():
    tiny = np.float32(1e-40)
    query, key = np.full((1, 2), tiny), np.full((3, 2), tiny)
    value = np.array([[tiny], [tiny], [tiny]])
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value)
    np.testing.assert_allclose(residuals.weights, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(output, tiny, rtol=0, atol=2 * np.finfo(np.float32).smallest_subnormal)


# -- infinite sinks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [cases.BY_NAME[name] for name in ("mask + sinks", "causal + sinks", "sinks + gqa")], ids=str
)
@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_infinite_sinks(case, infinity):
    """+∞ takes everything: output 0, lse +∞; −∞ is no sink, bit for bit. Beside heads with finite sinks."""
    inputs = cases.make(case)
    inputs.options["sinks"][0] = infinity
    directions = cases.directions(case)
    got = everything(*inputs, directions)
    upstream = {"grad_output": None, **inputs.upstream}
    exact = loops.backward(upstream.pop("grad_output"), *inputs[:3], **upstream, **inputs.options)
    forward = loops.forward(*inputs[:3], **inputs.options)
    for name in ("output", "lse", "weights"):
        np.testing.assert_allclose(got[name], getattr(forward, name), rtol=1e-12, atol=1e-12)
    for name in ("query", "key", "value", "sinks", "scale"):
        np.testing.assert_allclose(got[f"grad_{name}"], getattr(exact, name), rtol=1e-12, atol=1e-12, err_msg=name)
    if infinity > 0:
        assert (got["output"][:, 0] == 0).all()
        assert (got["lse"][:, 0] == np.inf).all()
        assert all(
            np.isfinite(array).all() for name, array in got.items() if name.startswith(("grad", "tang", "second"))
        )
        return
    sinkless = {name: option for name, option in inputs.options.items() if name != "sinks"}
    without = everything(*inputs[:3], sinkless, inputs.upstream)
    assert (got["grad_sinks"][0] == 0).all()
    for name in ("output", "lse", "weights"):
        np.testing.assert_array_equal(got[name][:, 0], without[name][:, 0])
