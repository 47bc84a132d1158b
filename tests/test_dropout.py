"""Dropout by a seed: the generator's published answers, its statistics, and one mask for whatever the tiles."""

import dataclasses

import numpy as np
import pytest
from arrays import JAX
from scipy import stats

import numpy_sdpa
from numpy_sdpa import dropout
from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.dropout import kept_in, threefry
from numpy_sdpa.visibility import Tile, whole_plane

# "threefry2x32 20" of kat_vectors, the known answers of Random123 1.09 (https://github.com/DEShawResearch/random123):
# counter, key, result.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


def words(*values):
    return tuple(np.array([value], np.uint32) for value in values)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result):
    np.testing.assert_array_equal(np.concatenate(threefry(words(*key), words(*counter))), result)


def test_the_same_generator_as_jax():
    rng = np.random.default_rng(9)
    key, counter = rng.integers(0, 2**32, (2, 1), np.uint32), rng.integers(0, 2**32, (2, 1000), np.uint32)
    with JAX.installed():
        import jax.extend.random

        expected = jax.extend.random.threefry_2x32(tuple(key[:, 0]), counter.ravel())
    np.testing.assert_array_equal(np.concatenate(threefry(tuple(key), tuple(counter))), JAX.to_numpy(expected))


# -- the documented scheme ---------------------------------------------------------------------------------------------


def options_of(shape=(2, 3, 7, 9), p=0.4, seed=11, **options):
    *lead, L, S = shape
    query, key = np.zeros((*lead, L, 2)), np.zeros((*lead, S, 2))
    return resolve(query, key, key, None, {"dropout_p": p, "dropout_seed": seed, **options})[1]


def kept(*arguments, **options):
    resolved = options_of(*arguments, **options)
    return kept_in(resolved, whole_plane(resolved))


@pytest.mark.parametrize("seed", [0, 11, 2**32 - 1, 2**32, 2**63 + 5, 2**64 - 1])
def test_the_scheme_position_by_position(seed):
    """The docstring's three lines, with one call of the generator for each position."""
    shape, p = (2, 3, 4, 5), 0.4
    got = kept(shape, p, seed)
    threshold = round(p * 2**32)
    for batch, head, i, j in np.ndindex(shape):
        key = threefry(words(seed % 2**32, seed // 2**32), words(batch, head))
        word = threefry(key, words(i, j // 2))[j % 2]
        assert got[batch, head, i, j] == (word[0] >= threshold)


def test_a_word_at_the_threshold_is_kept():
    """p = w / 2³² drops the words below w, which are w of 2³²: that makes the probability p exactly."""
    key = threefry(words(11, 0), words(1, 2))
    word = threefry(key, words(3, 2))[1]  # of batch 1, head 2, row 3, column 5
    for p, is_kept in ((word[0] / 2**32, True), ((word[0] + 1) / 2**32, False)):
        assert kept((2, 3, 4, 6), float(p), seed=11)[1, 2, 3, 5] == is_kept


def test_no_more_words_than_the_tile_needs(monkeypatch):
    counted = []

    def counting(key, counter):
        counted.append(np.broadcast(*counter).size)
        return threefry(key, counter)

    monkeypatch.setattr(dropout, "threefry", counting)
    options = options_of()
    for first in range(9):
        for last in range(first + 1, 10):
            counted.clear()
            kept_in(options, Tile(slice(2, 5), slice(first, last)))
            assert counted == [2 * 3, 3 * len({column // 2 for column in range(first, last)})]


def test_batch_axes_are_numbered_flat():
    whole = kept((6, 3, 4, 5))
    np.testing.assert_array_equal(kept((2, 3, 3, 4, 5)), whole.reshape(2, 3, 3, 4, 5))
    np.testing.assert_array_equal(kept((3, 4, 5)), whole[0])
    np.testing.assert_array_equal(kept((4, 5)), whole[0, 0])


def test_a_longer_plane_begins_with_the_shorter():
    np.testing.assert_array_equal(kept((2, 3, 9, 12))[..., :7, :9], kept((2, 3, 7, 9)))


def test_a_tile_is_a_part_of_the_whole():
    options = options_of()
    whole = kept_in(options, whole_plane(options))
    for rows in (slice(0, 7), slice(0, 3), slice(3, 7), slice(5, 6)):
        for first in range(9):  # odd and even first columns, odd and even widths
            for last in range(first + 1, 10):
                tile = kept_in(options, Tile(rows, slice(first, last)))
                np.testing.assert_array_equal(tile, whole[..., rows, first:last])


def test_a_plane_may_be_a_part_of_a_larger_one():
    """As of a chunk in `numpy_sdpa.distributed`: its own rows and columns are numbered from its first in the whole."""
    whole = kept((2, 3, 9, 12))
    options = options_of((2, 3, 4, 5))
    for row in range(6):
        for column in range(8):  # odd and even
            part = dataclasses.replace(options, dropout=options.dropout._replace(first_row=row, first_column=column))
            for tile in (whole_plane(part), Tile(slice(1, 3), slice(1, 5)), Tile(slice(2, 4), slice(2, 5))):
                rows = slice(row + tile.rows.start, row + tile.rows.stop)
                columns = slice(column + tile.columns.start, column + tile.columns.stop)
                np.testing.assert_array_equal(kept_in(part, tile), whole[..., rows, columns])


def test_a_mask_is_sliced_by_tiles_too():
    rng = np.random.default_rng(10)
    for shape in [(2, 3, 7, 9), (7, 9), (1, 9), (7, 1), (1, 1), (9,), ()]:
        mask = rng.random(shape) < 0.5
        options = options_of(seed=None, dropout_mask=mask)
        tile = np.broadcast_to(kept_in(options, Tile(slice(2, 5), slice(4, 9))), (2, 3, 3, 5))
        np.testing.assert_array_equal(tile, np.broadcast_to(mask, (2, 3, 7, 9))[..., 2:5, 4:9])


# -- statistics --------------------------------------------------------------------------------------------------------

SIGNIFICANCE = 1e-4  # of each test; the seeds are fixed, so a test that passes does so always


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_weights(p):
    dropped = ~kept((4, 4, 128, 128), p, seed=12)
    assert stats.binomtest(int(dropped.sum()), dropped.size, p).pvalue > SIGNIFICANCE
    for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):  # each batch, head, row and column by itself
        counts = dropped.sum(axis=axes)
        expected = dropped.size / counts.size * p
        statistic = np.sum((counts - expected) ** 2) / (expected * (1 - p))
        assert stats.chi2.sf(statistic, counts.size) > SIGNIFICANCE


def test_neighbours_are_independent():
    """Pairs along each axis, and between seeds: a fair share of each of the four combinations."""
    first, second = kept((4, 4, 64, 64), 0.5, seed=13), kept((4, 4, 64, 64), 0.5, seed=14)
    pairs = [(first, second)]
    for axis in range(4):
        one, other = (np.take(first, range(start, first.shape[axis], 2), axis=axis) for start in (0, 1))
        pairs.append((one, other))
    for one, other in pairs:
        table = np.bincount((2 * one + other).ravel(), minlength=4).reshape(2, 2)
        assert stats.chi2_contingency(table).pvalue > SIGNIFICANCE


def test_the_expected_output_is_the_output_without_dropout():
    rng = np.random.default_rng(15)
    query, key, value = rng.normal(size=(5, 4)), rng.normal(size=(6, 4)), rng.normal(size=(6, 3))
    expected, weights = numpy_sdpa.scaled_dot_product_attention(query, key, value)
    seeds = 1000
    outputs = np.stack(
        [numpy_sdpa.attention(query, key, value, dropout_p=0.3, dropout_seed=seed) for seed in range(seeds)]
    )
    # variance of Σ w v kept / (1 − p): Σ (w v)² p / (1 − p)
    deviation = np.sqrt(weights**2 @ value**2 * 0.3 / 0.7 / seeds)
    assert np.max(np.abs(outputs.mean(axis=0) - expected) / deviation) < stats.norm.isf(SIGNIFICANCE / 2)


@pytest.mark.parametrize(("p", "share"), [(0.0, 1.0), (1.0, 0.0), (2.0**-33, 1.0), (1 - 2.0**-40, 0.0)])
def test_extreme_probabilities(p, share):
    x = np.ones((3, 5, 4))
    output, residuals = numpy_sdpa.sdpa_forward(x, x, x, dropout_p=p, dropout_seed=1)
    if residuals.dropout_mask is not None:
        assert residuals.dropout_mask.mean() == share
    np.testing.assert_allclose(output, share, rtol=1e-9)


def test_the_seed_is_a_mask():
    """The same results, forward and backward, as with the seed's mask given outright."""
    rng = np.random.default_rng(16)
    query, key, value = (rng.normal(size=(2, 2, 5, 4)) for _ in range(3))
    for options in ({}, {"is_causal": True, "sinks": np.ones(2)}):
        output, by_seed = numpy_sdpa.sdpa_forward(query, key, value, dropout_p=0.4, dropout_seed=17, **options)
        mask = by_seed.dropout_mask
        expected, by_mask = numpy_sdpa.sdpa_forward(query, key, value, dropout_p=0.4, dropout_mask=mask, **options)
        np.testing.assert_array_equal(output, expected)
        got, wanted = (numpy_sdpa.sdpa_backward(value, residuals) for residuals in (by_seed, by_mask))
        for name, gradient in wanted._asdict().items():
            np.testing.assert_array_equal(getattr(got, name), gradient, err_msg=name)
