"""Faults that were reported against published attention functions, each with the right answer."""

import numpy as np
import pytest

from numpy_sdpa import attention, merge_heads, scaled_dot_product_attention, sdpa_backward, sdpa_forward, split_heads

INF = np.inf


def column(*numbers):
    return np.array(numbers, dtype=float)[:, None]


ZERO = column(0.0)  # one query of 0: every key scores 0
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape)


def test_a_row_with_nothing_kept_is_zero():
    output = attention(column(0, 0), column(0, 0), column(1, 5), np.array([[False, False], [True, True]]))
    assert output.tolist() == [[0.0], [3.0]]


def test_a_bias_of_minus_infinity_everywhere_is_a_row_without_keys():
    assert attention(ZERO, column(0, 0), column(1, 5), bias=np.array([-INF, -INF])).tolist() == [[0.0]]


def test_a_large_finite_bias_is_a_bias():
    assert attention(ZERO, column(0, 0), column(1, 5), bias=np.array([-1e30, -1e30])).tolist() == [[3.0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mask": np.array([True, False])}, 1.0),
        ({"mask": np.array([False, True])}, 5.0),
        ({"bias": np.array([1.0, 0.0])}, 2.075766),
    ],
)
def test_true_keeps_and_a_bias_is_added(options, expected):
    assert attention(ZERO, column(0, 0), column(1, 5), **options).item() == pytest.approx(expected, abs=1e-6)


def everything(*inputs, **options):
    """Output, lse, weights and the gradients of query, key and value."""
    output, residuals = sdpa_forward(*inputs, **options)
    upstream = np.random.default_rng(1)
    gradients = sdpa_backward(
        upstream.standard_normal(output.shape),
        residuals,
        grad_lse=upstream.standard_normal(residuals.lse.shape),
        grad_weights=upstream.standard_normal(residuals.weights.shape),
    )
    return output, residuals.lse, residuals.weights, *gradients[:3]


def test_a_mask_is_a_bias_of_minus_infinity_in_values_and_gradients():
    inputs, mask = (normal(2, 4, 3), normal(2, 5, 3), normal(2, 5, 2)), RNG.random((2, 4, 5)) < 0.6
    mask[0, 0] = False
    bias = normal(2, 4, 5)
    for with_mask, as_bias in (
        ({"mask": mask}, {"bias": np.where(mask, 0.0, -INF)}),
        ({"mask": mask, "bias": bias}, {"bias": np.where(mask, bias, -INF)}),
    ):
        for one, other in zip(everything(*inputs, **with_mask), everything(*inputs, **as_bias), strict=True):
            np.testing.assert_array_equal(one, other)


def test_causal_and_mask_compose():
    output, weights = scaled_dot_product_attention(
        column(1, 1), column(1, 1), column(3, 7), np.array([False, True]), is_causal=True
    )
    assert output.tolist() == [[0.0], [7.0]]
    assert weights.tolist() == [[0.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(("alignment", "expected"), [("upper_left", [1.0, 1.5]), ("lower_right", [2.5, 3.0])])
def test_the_two_causal_alignments(alignment, expected):
    output = attention(column(0, 0), column(0, 0, 0, 0, 0), column(1, 2, 3, 4, 5), is_causal=True, alignment=alignment)
    np.testing.assert_allclose(output[:, 0], expected, rtol=1e-15)


def test_lower_right_counts_from_the_key_length():
    output = attention(
        ZERO, column(0, 0, 0, 0, 0), column(1, 2, 3, 4, 5), is_causal=True, alignment="lower_right", key_lengths=3
    )
    assert output.item() == pytest.approx(2.0, rel=1e-15)


def test_scales_of_every_sign():
    weights = scaled_dot_product_attention(column(1), column(1, 0), column(0, 0), scale=-2)[1]
    np.testing.assert_allclose(weights, [[0.119203, 0.880797]], atol=1e-6)
    weights = scaled_dot_product_attention(column(2), column(1, 0), column(0, 0))[1]  # E = 1: scale 1
    np.testing.assert_allclose(weights, [[0.880797, 0.119203]], atol=1e-6)


def test_a_scale_of_zero_is_a_value():
    output, residuals = sdpa_forward(normal(3, 2), normal(4, 2), normal(4, 2), scale=0)
    assert (residuals.weights == 0.25).all()
    gradients = sdpa_backward(normal(*output.shape), residuals)
    assert (gradients.query == 0).all()
    assert (gradients.key == 0).all()
    assert gradients.scale != 0


def test_zero_padding_the_head_size_changes_nothing():
    query, key, value = normal(3, 4), normal(5, 4), normal(5, 2)
    padded = [np.pad(array, ((0, 0), (0, 4))) for array in (query, key)]
    np.testing.assert_allclose(
        attention(*padded, value, scale=0.3), attention(query, key, value, scale=0.3), rtol=1e-14
    )


@pytest.mark.parametrize(("query_heads", "key_heads"), [(3, 4), (4, 0), (4, 3)])
def test_head_counts_that_do_not_divide(query_heads, key_heads):
    query, key = np.ones((1, query_heads, 2, 2)), np.ones((1, key_heads, 2, 2))
    for options in ({}, {"enable_gqa": True}):
        with pytest.raises(ValueError, match=rf"{query_heads}\b.*\b{key_heads}\b"):
            attention(query, key, key, **options)


def test_a_per_head_mask_has_the_query_heads():
    query, key = normal(1, 4, 3, 2), normal(1, 2, 5, 2)
    mask = RNG.random((1, 4, 3, 5)) < 0.6
    repeated = np.repeat(key, 2, axis=1)
    np.testing.assert_allclose(
        attention(query, key, key, mask, enable_gqa=True), attention(query, repeated, repeated, mask), rtol=1e-13
    )
    with pytest.raises(ValueError, match=r"query's heads.*\(1, 2, 3, 5\).*\(1, 4, 3, 5\)"):
        attention(query, key, key, mask[:, :2], enable_gqa=True)


@pytest.mark.parametrize("batch", [2, 3], ids=["B ≠ H", "B = H"])
def test_a_mask_without_the_head_axis_is_ambiguous(batch):
    query = normal(batch, 3, 4, 2)
    with pytest.raises(ValueError, match=r"mask\[\.\.\., None, :, :\] inserts the head axis"):
        attention(query, query, query, np.ones((batch, 4, 4), dtype=bool))


@pytest.mark.parametrize("shape", [(5, 6), (3, 6), (4, 7), (4, 5), (8, 12), (2, 3)])
def test_a_mask_is_never_sliced_and_never_padded(shape):
    with pytest.raises(ValueError, match=rf"\({shape[0]}, {shape[1]}\).*\(1, 2, 4, 6\)"):
        attention(normal(1, 2, 4, 3), normal(1, 2, 6, 3), normal(1, 2, 6, 3), np.ones(shape, dtype=bool))


def test_a_key_of_batch_one_gets_the_sum_over_the_batch():
    query, key, value = normal(3, 2, 4, 3), normal(1, 2, 5, 3), normal(3, 2, 5, 2)
    grad_output = normal(3, 2, 4, 2)
    _, residuals = sdpa_forward(query, key, value)
    _, repeated = sdpa_forward(query, np.repeat(key, 3, axis=0), value)
    gradient = sdpa_backward(grad_output, residuals).key
    assert gradient.shape == (1, 2, 5, 3)
    expected = sdpa_backward(grad_output, repeated).key.sum(axis=0, keepdims=True)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@pytest.mark.parametrize(("head_size", "value_size"), [(3, 4), (3, 1)])
def test_all_ranks_agree(head_size, value_size):
    query, key, value = normal(4, head_size), normal(5, head_size), normal(5, value_size)
    expected = everything(query, key, value, is_causal=True)
    for rank in (3, 4, 5, 6):
        lead = (1,) * (rank - 2)
        got = everything(*(array.reshape(lead + array.shape) for array in (query, key, value)), is_causal=True)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other.reshape(lead + other.shape))


def test_the_two_published_forms_of_alibi():
    """−m (i − j) and m j differ by a constant of the row under a causal mask: in lse, not in the output."""
    slope, positions = 0.3, np.arange(5)
    query, key, value = normal(5, 2), normal(5, 2), normal(5, 3)
    output, residuals = sdpa_forward(query, key, value, is_causal=True, alibi_slopes=np.array(slope))
    other, of_other = sdpa_forward(query, key, value, is_causal=True, bias=slope * positions)
    np.testing.assert_allclose(output, other, rtol=1e-13)
    np.testing.assert_allclose(residuals.lse, of_other.lse - slope * positions, rtol=1e-12)

    def total(m):
        return attention(query, key, value, is_causal=True, alibi_slopes=np.array(m)).sum()

    gradient = sdpa_backward(np.ones_like(output), residuals).alibi_slopes
    assert gradient == pytest.approx((total(slope + 1e-6) - total(slope - 1e-6)) / 2e-6, rel=1e-7)


def test_merging_heads():
    heads = np.arange(8).reshape(1, 2, 2, 2)
    merged = merge_heads(heads)
    assert merged[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    np.testing.assert_array_equal(split_heads(merged, 2), heads)
    for lead in ((), (3,), (5, 3)):
        heads = np.random.default_rng(0).standard_normal((*lead, 2, 7, 4))
        merged = merge_heads(heads)
        assert merged.shape == (*lead, 7, 8)
        for head in range(2):
            np.testing.assert_array_equal(merged[..., 4 * head : 4 * head + 4], heads[..., head, :, :])
        np.testing.assert_array_equal(split_heads(merged, 2), heads)
