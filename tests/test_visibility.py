"""Who may see whom, tile by tile: a tile says what the whole plane says, and stays silent where it hides nothing."""

import dataclasses

import cases
import numpy as np
import pytest
from reach import visible_plane

from numpy_sdpa import sdpa_forward
from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.chain import tile_of_bias
from numpy_sdpa.visibility import (
    Tile,
    alibi_distance,
    band_edges,
    hides_nothing,
    key_positions,
    query_positions,
    visible_in,
    visible_part,
    whole_plane,
)

HIDING = {"mask", "bias", "is_causal", "window", "query_lengths", "key_lengths", "query_segments"}
CASES = [case for case in cases.ALL if 0 not in case.weights_shape]


def options_and_bias(case):
    inputs = cases.make(case)
    mask = inputs.options.get("mask")
    given = {name: option for name, option in inputs.options.items() if name != "mask"}
    resolved, options = resolve(*inputs[:3], mask, given)
    return inputs, options, resolved.bias


def tiles(options):
    """Every tile of up to three rows and three columns, and the whole."""
    L, S = options.query_length, options.key_length
    for row in range(L):
        for column in range(S):
            for height in range(1, min(3, L - row) + 1):
                for width in range(1, min(3, S - column) + 1):
                    yield Tile(slice(row, row + height), slice(column, column + width))
    yield whole_plane(options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tile_says_what_the_plane_says(case):
    inputs, options, bias = options_and_bias(case)
    expected = visible_plane(inputs)
    for tile in tiles(options):
        got = visible_in(options, tile, tile_of_bias(bias, tile))
        part = expected[..., tile.rows, tile.columns]
        if got is None:
            assert part.all(), tile
        else:
            assert got.dtype == bool
            assert got.shape[-2:] == tile.shape
            np.testing.assert_array_equal(np.broadcast_to(got, part.shape), part, err_msg=str(tile))


@pytest.mark.parametrize("case", [case for case in CASES if not case.option_names & HIDING], ids=str)
def test_without_rules_there_is_no_mask(case):
    _, options, bias = options_and_bias(case)
    assert all(visible_in(options, tile, bias) is None for tile in tiles(options))


BANDS = [
    {"is_causal": True},
    {"window": (1, 1)},
    {"window": (2, None)},
    {"window": (None, 1)},
    {"window": (1, 2), "is_causal": True},
    {"window": (0, 0)},
]


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("offset", [-3, -1, 0, 2, 5])
def test_a_band_is_silent_exactly_where_it_hides_nothing(options, offset):
    """With one offset for all rows: a mask appears in a tile if and only if an edge of the band runs through it."""
    query, key = np.zeros((5, 2)), np.zeros((6, 2))
    resolved = resolve(query, key, key, None, options | {"query_offset": offset})[1]
    case = cases.Case("band", (5, 2), (6, 2), (6, 2), (*options.items(), ("query_offset", offset)))
    expected = visible_plane(cases.make(case))
    for tile in tiles(resolved):
        hides_nothing = expected[tile.rows, tile.columns].all()
        assert (visible_in(resolved, tile, None) is None) == hides_nothing, tile


LENGTHS = [{}, {"query_lengths": 3}, {"key_lengths": 4}, {"query_lengths": 4, "key_lengths": 2}, {"key_lengths": 0}]


@pytest.mark.parametrize("options", [{}, *BANDS], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_visible_part_is_the_smallest_that_holds_what_is_visible(options, lengths):
    """With an offset and lengths that are known on the host, as a part of a batch has them."""
    query, key = np.zeros((5, 2)), np.zeros((6, 2))
    for offset in (-6, -3, -1, 0, 2, 5, 7):
        given = options | lengths | {"query_offset": offset}
        resolved = dataclasses.replace(resolve(query, key, key, None, given)[1], **lengths)
        expected = visible_plane(cases.make(cases.Case("part", (5, 2), (6, 2), (6, 2), tuple(given.items()))))
        for tile in tiles(resolved):
            inside = expected[tile.rows, tile.columns]
            part = visible_part(resolved, tile)
            if not inside.any():
                assert part is None, (offset, tile)
                continue
            rows, columns = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
            assert part == Tile(
                slice(tile.rows.start + rows[0], tile.rows.start + rows[-1] + 1),
                slice(tile.columns.start + columns[0], tile.columns.start + columns[-1] + 1),
            ), (offset, tile)
            # and there a mask appears exactly where a length or an edge of the band still runs through
            hides_nothing = expected[part.rows, part.columns].all()
            assert (visible_in(resolved, part, None) is None) == hides_nothing, (offset, tile)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_that_are_known_on_the_host_hide_in_every_tile(lengths):
    """And are silent where they do not cut."""
    x = np.zeros((6, 2))
    options = dataclasses.replace(resolve(x[:5], x, x, None, lengths)[1], **lengths)
    expected = visible_plane(cases.make(cases.Case("lengths", (5, 2), (6, 2), (6, 2), tuple(lengths.items()))))
    for tile in tiles(options):
        got, part = visible_in(options, tile, None), expected[tile.rows, tile.columns]
        assert (got is None) == part.all(), tile
        if got is not None:
            np.testing.assert_array_equal(got, part, err_msg=str(tile))


@pytest.mark.parametrize("case", cases.ALONE, ids=str)
def test_what_hides_nothing(case):
    _, options, _ = options_and_bias(case)
    assert hides_nothing(options) == (not case.option_names & (HIDING - {"bias"}))


@pytest.mark.parametrize("case", [case for case in CASES if case.option_names & HIDING], ids=str)
def test_the_visible_part_loses_nothing(case):
    inputs, options, _ = options_and_bias(case)
    expected = visible_plane(inputs)
    for tile in tiles(options):
        part = visible_part(options, tile)
        seen = expected[..., tile.rows, tile.columns].sum()
        assert seen == (0 if part is None else expected[..., part.rows, part.columns].sum()), tile


def test_packed_documents():
    """Tiles of strangers are nobody's, tiles within one document need no mask; a range that overlaps is no match."""
    x = np.zeros((6, 2))
    query_segments, key_segments = np.array([0, 0, 1, 1, 3, 3]), np.array([0, 0, 0, 2, 2, 3])
    options = resolve(x, x, x, None, {"query_segments": query_segments, "key_segments": key_segments})[1]
    expected = query_segments[:, None] == key_segments
    for tile in tiles(options):
        queries, keys = query_segments[tile.rows], key_segments[tile.columns]
        apart = queries.max() < keys.min() or keys.max() < queries.min()
        assert (visible_part(options, tile) is None) == apart, tile
        inside = expected[tile.rows, tile.columns]
        assert (visible_in(options, tile, None) is None) == inside.all(), tile
    of_nothing = resolve(x[:0], x, x, None, {"query_segments": query_segments[:0], "key_segments": key_segments})[1]
    assert visible_in(of_nothing, whole_plane(of_nothing), None).shape == (0, 6)


@pytest.mark.parametrize(
    ("options", "edges"),
    [
        ({}, (None, None)),
        ({"is_causal": True}, (None, 0)),
        ({"window": (3, 2)}, (3, 2)),
        ({"window": (3, None)}, (3, None)),
        ({"window": (3, 2), "is_causal": True}, (3, 0)),
        ({"window": (3, None), "is_causal": True}, (3, 0)),
        ({"window": (None, 0), "is_causal": True}, (None, 0)),
    ],
)
def test_the_edges_of_the_band(options, edges):
    x = np.zeros((2, 2))
    assert band_edges(resolve(x, x, x, None, options)[1]) == edges


def test_positions_and_distances():
    x = np.zeros((2, 3, 5, 2))
    options = resolve(x, x, x, None, {"query_offset": np.array([2, -1])})[1]
    tile = Tile(slice(1, 4), slice(2, 4))
    positions = query_positions(options, tile.rows)
    np.testing.assert_array_equal(positions, np.array([[3, 4, 5], [0, 1, 2]])[:, None, :, None])
    np.testing.assert_array_equal(key_positions(options, tile.columns), [2, 3])
    distances = [[[1, 0], [2, 1], [3, 2]], [[2, 3], [1, 2], [0, 1]]]
    np.testing.assert_array_equal(alibi_distance(options, tile), np.array(distances)[:, None])
    assert tile.shape == (3, 2)
    assert whole_plane(options) == Tile(slice(0, 5), slice(0, 5))


@pytest.mark.parametrize("offset", [-3, [-3, -3], [4, 4]], ids=str)
@pytest.mark.parametrize("side", [2**31 - 1, 2**63 - 1, 2**63, 2**100])
def test_a_side_that_reaches_everything_is_unbounded(offset, side):
    """Also where it fits no integer, or its distance from a query's position does not."""
    query = np.zeros((2, 1, 5, 2))
    for window in ((side, 1), (1, side), (side, side)):
        unbounded = tuple(None if part == side else part for part in window)
        expected = sdpa_forward(query, query, query, query_offset=offset, window=unbounded)[1].lse
        for method in ("dense", "blockwise"):
            residuals = sdpa_forward(query, query, query, query_offset=offset, window=window, method=method)[1]
            np.testing.assert_array_equal(residuals.lse, expected)
