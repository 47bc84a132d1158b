"""Broadcasting and grouped heads, each against its adjoint: ⟨A x, y⟩ = ⟨x, Aᵀ y⟩, exactly, in integers."""

import numpy as np
import pytest

from numpy_sdpa._internal.shapes import fold_groups, repeat_heads, slice_tile, sum_heads, sum_to_shape, unfold_groups


def integers(shape, seed=0):
    return np.random.default_rng(seed).integers(-9, 10, shape)


BROADCASTS = [
    ((), (2, 3)),
    ((3,), (2, 3)),
    ((1,), (2, 3)),
    ((2, 1), (2, 3)),
    ((1, 3), (2, 3)),
    ((1, 1), (4, 2, 3)),
    ((4, 1, 3), (4, 2, 3)),
    ((2, 3), (2, 3)),
    ((1, 1, 1, 1), (2, 1, 3, 1)),
    ((1, 3), (0, 3)),
    ((2, 1), (2, 0)),
    ((0,), (2, 0)),
]


@pytest.mark.parametrize(("shape", "larger"), BROADCASTS)
def test_sum_to_shape_is_the_adjoint_of_broadcasting(shape, larger):
    x, y = integers(shape), integers(larger, 1)
    summed = sum_to_shape(np, y, shape)
    assert summed.shape == shape
    assert np.sum(x * summed) == np.sum(np.broadcast_to(x, larger) * y)


def test_nothing_is_summed_where_nothing_was_repeated():
    y = integers((2, 3))
    assert sum_to_shape(np, y, (2, 3)) is y


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_folding_and_repeating(group, batch):
    """Head h reads key head h // group: the query heads of a group are rows of one matrix, in order."""
    array = integers((*batch, 2 * group, 4, 5))
    folded = fold_groups(np, array, group)
    assert folded.shape == (*batch, 2, group * 4, 5)
    for head in range(2 * group):
        first = head % group * 4
        np.testing.assert_array_equal(folded[..., head // group, first : first + 4, :], array[..., head, :, :])
    np.testing.assert_array_equal(unfold_groups(np, folded, group), array)

    per_key_head = integers((*batch, 2, 4, 5), 1)
    repeated = repeat_heads(np, per_key_head, group)
    np.testing.assert_array_equal(repeated, np.repeat(per_key_head, group, axis=-3))
    summed = sum_heads(np, array, group)
    assert summed.shape == per_key_head.shape
    assert np.sum(repeated * array) == np.sum(per_key_head * summed)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 4, 0), (0, 4, 5)])
def test_folding_of_nothing(group, shape):
    array = integers(shape)
    heads, length, size = shape
    assert fold_groups(np, array, group).shape == (heads // group, group * length, size)
    np.testing.assert_array_equal(unfold_groups(np, fold_groups(np, array, group), group), array)


def test_without_groups_there_is_no_head_axis_to_need():
    """Rank 2 has none."""
    array = integers((4, 5))
    for function in (fold_groups, unfold_groups, repeat_heads, sum_heads):
        assert function(np, array, 1) is array


@pytest.mark.parametrize("shape", [(2, 4, 5), (4, 5), (1, 5), (4, 1), (1, 1), (3, 1, 5)])
def test_slicing_commutes_with_broadcasting(shape):
    """Axes of size 1 stay whole; nothing is expanded."""
    array = integers(shape)
    rows, columns = slice(1, 3), slice(2, 5)
    part = slice_tile(array, rows, columns)
    whole = np.broadcast_to(array, (*shape[:-2], 4, 5))
    np.testing.assert_array_equal(np.broadcast_to(part, (*shape[:-2], 2, 3)), whole[..., rows, columns])
    assert part.shape[-2:] == tuple(1 if size == 1 else cut for size, cut in zip(shape[-2:], (2, 3), strict=True))
