"""merge_attention is attention over the union, its gradients are derivatives, and (0, −inf) is its identity."""

import itertools

import numpy as np
import pytest

from numpy_sdpa import merge_attention, merge_attention_backward, sdpa_backward, sdpa_forward

ROUNDING = {"rtol": 1e-12, "atol": 1e-13}


def parts(seed=0, shape=(2, 3, 4), size=5):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((*shape, size)),
        rng.standard_normal(shape),
        rng.standard_normal((*shape, size)),
        rng.standard_normal(shape),
    )


@pytest.mark.parametrize("sinks", [None, np.array([0.3, -1.0])], ids=["no sink", "sink in one part"])
@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_the_union_of_two_key_sets(cut, sinks):
    rng = np.random.default_rng(1)
    query, key, value = rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 7, 3)), rng.standard_normal((2, 7, 4))
    whole, of_whole = sdpa_forward(query, key, value, sinks=sinks)
    _, a = sdpa_forward(query, key[:, :cut], value[:, :cut], sinks=sinks)
    _, b = sdpa_forward(query, key[:, cut:], value[:, cut:])
    output, lse = merge_attention(a.output, a.lse, b.output, b.lse)
    np.testing.assert_allclose(output, whole, **ROUNDING)
    np.testing.assert_allclose(lse, of_whole.lse, **ROUNDING)

    upstream, upstream_lse = rng.standard_normal(whole.shape), rng.standard_normal(lse.shape)
    expected = sdpa_backward(upstream, of_whole, grad_lse=upstream_lse)
    output_a, lse_a, output_b, lse_b = merge_attention_backward(
        upstream, upstream_lse, a.output, a.lse, b.output, b.lse
    )
    of_a, of_b = sdpa_backward(output_a, a, grad_lse=lse_a), sdpa_backward(output_b, b, grad_lse=lse_b)
    np.testing.assert_allclose(of_a.query + of_b.query, expected.query, **ROUNDING)
    np.testing.assert_allclose(np.concatenate([of_a.key, of_b.key], axis=1), expected.key, **ROUNDING)
    np.testing.assert_allclose(np.concatenate([of_a.value, of_b.value], axis=1), expected.value, **ROUNDING)
    if sinks is not None:
        np.testing.assert_allclose(of_a.sinks, expected.sinks, **ROUNDING)


def test_gradients_against_differences():
    arrays = parts(2)
    rng = np.random.default_rng(3)
    upstream, upstream_lse = rng.standard_normal(arrays[0].shape), rng.standard_normal(arrays[1].shape)

    def loss(*arrays):
        output, lse = merge_attention(*arrays)
        return (upstream * output).sum() + (upstream_lse * lse).sum()

    gradients = merge_attention_backward(upstream, upstream_lse, *arrays)
    for number, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        moved = [[a + sign * 1e-6 * direction if n == number else a for n, a in enumerate(arrays)] for sign in (1, -1)]
        difference = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
        assert (gradient * direction).sum() == pytest.approx(difference, rel=1e-7)


def test_the_identity_is_exact_on_either_side_whatever_its_output_holds():
    output, lse, _, _ = parts(4)
    for nothing in (0.0, np.nan, np.inf):
        empty = np.full_like(output, nothing), np.full_like(lse, -np.inf)
        for merged in (merge_attention(output, lse, *empty), merge_attention(*empty, output, lse)):
            np.testing.assert_array_equal(merged[0], output)
            np.testing.assert_array_equal(merged[1], lse)
        merged = merge_attention(*empty, *empty)
        assert (merged[0] == 0).all()
        assert np.isneginf(merged[1]).all()
        upstream = np.ones_like(output), np.ones_like(lse)
        gradients = merge_attention_backward(*upstream, output, lse, *empty)
        on_the_other_side = merge_attention_backward(*upstream, *empty, output, lse)
        for got in (gradients, (*on_the_other_side[2:], *on_the_other_side[:2])):
            assert (got[0] == 1).all()
            assert (got[1] == 1).all()
            assert all((gradient == 0).all() for gradient in got[2:])
        gradients = merge_attention_backward(np.full_like(output, np.nan), np.full_like(lse, np.nan), *empty, *empty)
        assert all((gradient == 0).all() for gradient in gradients)


def test_the_order_does_not_matter():
    sets = [parts(seed)[:2] for seed in range(3)]
    results = []
    for a, b, c in itertools.permutations(sets):
        results += [merge_attention(*merge_attention(*a, *b), *c), merge_attention(*a, *merge_attention(*b, *c))]
    for output, lse in results:
        np.testing.assert_allclose(output, results[0][0], **ROUNDING)
        np.testing.assert_allclose(lse, results[0][1], **ROUNDING)


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_nothing_overflows(shift):
    output_a, lse_a, output_b, lse_b = parts(5)
    expected = merge_attention(output_a, lse_a, output_b, lse_b)
    got = merge_attention(output_a, lse_a + shift, output_b, lse_b + shift)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(got[1], expected[1] + shift, rtol=1e-12)


def test_an_infinite_sink_takes_its_share():
    """Beside lse = +∞ a finite one has no share; two of the same infinity share alike."""
    (a, finite, b, _), infinite = parts(14), np.full((2, 3, 4), np.inf)
    for given, expected in (
        ((a, infinite, b, finite), a),
        ((a, finite, b, infinite), b),
        ((a, infinite, b, infinite), (a + b) / 2),
    ):
        output, lse = merge_attention(*given)
        np.testing.assert_array_equal(output, expected)
        np.testing.assert_array_equal(lse, infinite)


def test_a_small_share_keeps_its_digits():
    """g_lse = ±w_a w_b ⟨gO, O_a − O_b⟩: with w_b = 2e-9 the difference from the merged output would be rounding."""
    output_a, output_b = np.float32([[3.0, -7.0]]), np.float32([[2.5, 1.0]])
    lse_a, lse_b, upstream = np.float32([20.0]), np.float32([0.0]), np.float32([[1.5, 4.0]])
    _, grad_lse_a, _, grad_lse_b = merge_attention_backward(upstream, None, output_a, lse_a, output_b, lse_b)
    expected = (upstream * (output_a - output_b)).sum() / (2 + 2 * np.cosh(20.0))
    np.testing.assert_allclose(grad_lse_a, [expected], rtol=1e-6)
    np.testing.assert_allclose(grad_lse_b, [-expected], rtol=1e-6)


def test_one_upstream_gradient_may_be_missing():
    arrays = parts(6)
    zeros, zeros_lse = np.zeros_like(arrays[0]), np.zeros_like(arrays[1])
    upstream, upstream_lse = parts(7)[:2]
    for given, full in (((upstream, None), (upstream, zeros_lse)), ((None, upstream_lse), (zeros, upstream_lse))):
        for got, expected in zip(
            merge_attention_backward(*given, *arrays), merge_attention_backward(*full, *arrays), strict=True
        ):
            np.testing.assert_array_equal(got, expected)


def test_half_outputs_are_merged_in_float32_and_rounded_once():
    output_a, lse_a, output_b, lse_b = (array.astype(np.float32) for array in parts(8))
    halves = output_a.astype(np.float16), output_b.astype(np.float16)
    output, lse = merge_attention(halves[0], lse_a, halves[1], lse_b)
    expected, _ = merge_attention(halves[0].astype(np.float32), lse_a, halves[1].astype(np.float32), lse_b)
    assert output.dtype == np.float16
    assert lse.dtype == np.float32
    np.testing.assert_array_equal(output, expected.astype(np.float16))
    gradients = merge_attention_backward(output, lse, halves[0], lse_a, halves[1], lse_b)
    assert [gradient.dtype.name for gradient in gradients] == ["float16", "float32"] * 2

    half_lse = lse_a.astype(np.float16), lse_b.astype(np.float16)
    output, lse = merge_attention(halves[0], half_lse[0], halves[1], half_lse[1])
    in_float32 = [array.astype(np.float32) for array in (halves[0], half_lse[0], halves[1], half_lse[1])]
    expected, expected_lse = merge_attention(*in_float32)
    assert lse.dtype == np.float32
    np.testing.assert_array_equal(lse, expected_lse)
    np.testing.assert_array_equal(output, expected.astype(np.float16))


def test_every_result_has_its_own_dtype():
    dtypes = ("float16", "float64", "float32", "float32")
    arrays = [array.astype(dtype) for array, dtype in zip(parts(11), dtypes, strict=True)]
    for given in (arrays, [*arrays[2:], *arrays[:2]]):
        output, lse = merge_attention(*given)
        assert output.dtype == np.float32
        assert lse.dtype == np.float64
        gradients = merge_attention_backward(np.float16(output), np.float16(lse), *given)
        assert [gradient.dtype for gradient in gradients] == [array.dtype for array in given]
        in_float64 = [array.astype(np.float64) for array in (np.float16(output), np.float16(lse), *given)]
        for got, expected in zip(gradients, merge_attention_backward(*in_float64), strict=True):
            np.testing.assert_array_equal(got, expected.astype(got.dtype))


def test_lists_are_arrays():
    arrays, upstream = parts(12), parts(13)[:2]
    in_lists = [array.tolist() for array in (*upstream, *arrays)]
    for got, expected in zip(
        merge_attention_backward(*in_lists), merge_attention_backward(*upstream, *arrays), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_every_array_module(array_module):
    arrays = tuple(map(array_module.to_module, parts(9)))
    upstream = tuple(map(array_module.to_module, parts(10)[:2]))
    results = (*merge_attention(*arrays), *merge_attention_backward(*upstream, *arrays))
    array_module.assert_same_module_and_device(results, arrays[0])
    expected = (*merge_attention(*parts(9)), *merge_attention_backward(*parts(10)[:2], *parts(9)))
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(array_module.to_numpy(got), wanted, **ROUNDING)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({0: np.zeros((2, 3, 4, 6))}, ValueError, ["output_a", "(2, 3, 4, 6)", "output_b", "(2, 3, 4, 5)"]),
        ({1: np.zeros((2, 3, 4, 1))}, ValueError, ["lse_a", "(2, 3, 4, 1)"]),
        (
            {0: np.zeros(5), 1: np.zeros(()), 2: np.zeros(5), 3: np.zeros(())},
            ValueError,
            ["(…, L, Ev)", "output_b (5,)"],
        ),
        ({3: np.zeros((2, 3, 4), int)}, TypeError, ["lse_b must be floating, got int64"]),
        ({1: None}, TypeError, ["lse_a must be an array, got None"]),
    ],
)
def test_bad_input(change, error, words):
    arrays = list(parts())
    for number, array in change.items():
        arrays[number] = array
    with pytest.raises(error) as caught:
        merge_attention(*arrays)
    for word in words:
        assert word in str(caught.value)


def test_bad_upstream():
    with pytest.raises(ValueError, match="twice None"):
        merge_attention_backward(None, None, *parts())
    with pytest.raises(ValueError, match=r"grad_lse must have shape \(2, 3, 4\), got \(1,\)"):
        merge_attention_backward(None, np.zeros(1), *parts())
    with pytest.raises(TypeError, match="grad_lse must be floating, got int64"):
        merge_attention_backward(None, np.zeros((2, 3, 4), int), *parts())
    with pytest.raises(ValueError, match="grad_lse must be an array, got a list with rows of different lengths"):
        merge_attention_backward(None, [[1.0], [1.0, 2.0]], *parts())

    import array_api_strict

    with pytest.raises(TypeError, match="one array module: output_a numpy, grad_output array_api_strict"):
        merge_attention_backward(array_api_strict.zeros((2, 3, 4, 5)), None, *parts())


def test_a_part_that_underflows_is_still_read():
    """Only a part without keys may hold anything: a NaN with a share too small to be a number is a NaN."""
    seen, unseen = np.array([[np.nan]]), np.array([[1.0]])
    output, lse = merge_attention(seen, np.array([-2000.0]), unseen, np.array([0.0]))
    assert np.isnan(output).all()
    assert lse == 0
    output, _ = merge_attention(seen, np.array([-np.inf]), unseen, np.array([0.0]))
    assert output == 1
