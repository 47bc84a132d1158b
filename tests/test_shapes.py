"""Each way of reading an array more than once, against its adjoint: ⟨A x, y⟩ = ⟨x, Aᵀ y⟩."""

import numpy as np
import pytest

from numpy_sdpa._internal.shapes import fold_groups, repeat_heads, sum_heads, sum_to_shape, unfold_groups


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize(
    ("shape", "whole"),
    [
        ((), (2, 3)),
        ((3,), (2, 3)),
        ((1,), (2, 3)),
        ((2, 1), (2, 3)),
        ((1, 3, 1), (4, 3, 5)),
        ((1, 5), (4, 3, 5)),
        ((4, 3, 5), (4, 3, 5)),
        ((1, 3), (0, 3)),
    ],
)
def test_broadcasting(shape, whole):
    x, y = normal(*shape), normal(*whole)
    adjoint = sum_to_shape(np, y, shape)
    assert adjoint.shape == shape
    np.testing.assert_allclose(np.sum(np.broadcast_to(x, whole) * y), np.sum(x * adjoint), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_grouped_heads(group):
    """Query head h reads key head h // group; a product over the folded rows sums over the group."""
    x, y = normal(2, 2, 4, 3), normal(2, 2 * group, 4, 3)
    repeated = repeat_heads(np, x, group)
    for head in range(2 * group):
        np.testing.assert_array_equal(repeated[:, head], x[:, head // group])
    np.testing.assert_allclose(np.sum(repeated * y), np.sum(x * sum_heads(np, y, group)), rtol=1e-12)
    np.testing.assert_array_equal(unfold_groups(np, fold_groups(np, y, group), group), y)
    tile = normal(2, 2 * group, 4, 5)
    folded = fold_groups(np, tile, group).mT @ fold_groups(np, y, group)
    np.testing.assert_allclose(folded, sum_heads(np, tile.mT @ y, group), rtol=1e-12, atol=1e-12)
