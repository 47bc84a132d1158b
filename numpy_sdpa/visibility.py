"""Who may attend to whom: "may query i see key j" for any tile of the L × S plane, and where query i stands.

Every rule that hides a position is here and only here: it cannot mean one thing forward and another backward.
A rule answers for a tile with a bool array that broadcasts to it, or with None where it hides nothing there.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa._internal.namespace import Array, arange, astype, real_part
from numpy_sdpa._internal.options import Options
from numpy_sdpa._internal.shapes import slice_tile


class Tile(NamedTuple):
    """A rectangle of the plane: rows are queries, columns are keys."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def whole_plane(options: Options) -> Tile:
    return Tile(slice(0, options.query_length), slice(0, options.key_length))


def query_positions(options: Options, rows: slice) -> Array:
    """p(i) = i + offset, (rows, 1) or (B…, 1, rows, 1): where query i stands among the keys."""
    return arange(options.xp, rows.start, rows.stop, options.like)[:, None] + options.offset


def key_positions(options: Options, columns: slice) -> Array:
    """j, (columns,)."""
    return arange(options.xp, columns.start, columns.stop, options.like)


def alibi_distance(options: Options, tile: Tile) -> Array:
    """|p(i) − j|, integers that broadcast to the tile."""
    return options.xp.abs(query_positions(options, tile.rows) - key_positions(options, tile.columns))


def visible_in(options: Options, tile: Tile, bias: Array | None) -> Array | None:
    """True where a query of the tile may see a key, broadcasting to (B…, Hq, rows, columns); None where all see all.

    `bias` is the tile's part of the bias: its −∞ entries mask. The last two axes of the result are whole.
    """
    visible = None
    if tile.shape[1] == 0:  # a row without columns sees nothing, and only a mask can say so
        visible = astype(key_positions(options, tile.columns), options.xp.bool)
    for rule in _rules(options, tile, bias):
        visible = rule if visible is None else visible & rule
    if visible is None:
        return None
    return options.xp.broadcast_to(visible, (*visible.shape[:-2], *tile.shape))


def hides_nothing(options: Options) -> bool:
    """Whether every query sees every key, save for what a bias hides."""
    rules = (options.mask, options.query_lengths, options.key_lengths, options.query_segments, *band_edges(options))
    return all(rule is None for rule in rules)


def _rules(options: Options, tile: Tile, bias: Array | None) -> Iterator[Array]:
    """Each rule that hides something in the tile."""
    if options.mask is not None:
        yield slice_tile(options.mask, tile.rows, tile.columns)
    if bias is not None:
        yield real_part(options.xp, bias) != -options.xp.inf
    yield from _band(options, tile)
    if not _within(tile.rows, options.query_lengths):
        rows = arange(options.xp, tile.rows.start, tile.rows.stop, options.like)
        yield rows[:, None] < options.query_lengths
    if not _within(tile.columns, options.key_lengths):
        yield key_positions(options, tile.columns) < options.key_lengths
    segments = segments_in(options, tile)
    if segments is not None and not _is_one_id(options, *segments):
        yield segments[0] == segments[1]


def _within(part: slice, lengths: Any) -> bool:
    """Whether no length cuts into the part; where lengths are arrays, nobody looks at them."""
    return lengths is None or (isinstance(lengths, int) and part.stop <= lengths)


def segments_in(options: Options, tile: Tile) -> tuple[Array, Array] | None:
    """The tile's segment ids of queries, (…, rows, 1), and of keys, (…, 1, columns)."""
    if options.query_segments is None:
        return None
    return options.query_segments[..., tile.rows, :], options.key_segments[..., tile.columns]


def _is_one_id(options: Options, queries: Array, keys: Array) -> bool:
    """Whether the tile lies within one segment. Asked of NumPy only: elsewhere a look costs more than a mask."""
    if options.xp is not np or 0 in (*queries.shape, *keys.shape):
        return False
    return bool(queries.min() == queries.max() == keys.min() == keys.max())


def visible_part(options: Options, tile: Tile) -> Tile | None:
    """A part of the tile outside of which band and lengths hide everything; None where nobody sees anything.

    Only what is known on the host is asked: an offset or lengths that differ within the batch cut nothing off here, and
    hide what they hide in `visible_in`. So does a mask.
    """
    first, last = tile.rows.start, tile.rows.stop  # last: one past it, and so below
    left_most, right_most = tile.columns.start, tile.columns.stop
    if isinstance(options.query_lengths, int):
        last = min(last, options.query_lengths)
    if isinstance(options.key_lengths, int):
        right_most = min(right_most, options.key_lengths)
    if isinstance(options.offset, int):
        left, right = band_edges(options)
        if right is not None:  # j ≤ p(i) + right
            right_most = min(right_most, last + options.offset + right)
            first = max(first, left_most - options.offset - right)
        if left is not None:  # p(i) − left ≤ j
            left_most = max(left_most, first + options.offset - left)
            last = min(last, right_most - options.offset + left)
    if first >= last or left_most >= right_most:
        return None
    part = Tile(slice(first, last), slice(left_most, right_most))
    return None if _are_strangers(options, part) else part


def _are_strangers(options: Options, tile: Tile) -> bool:
    """Whether the ranges of the tile's segment ids do not even overlap. Asked of NumPy only."""
    segments = segments_in(options, tile)
    if segments is None or options.xp is not np:
        return False
    queries, keys = segments
    return bool(queries.max() < keys.min() or keys.max() < queries.min())


def band_edges(options: Options) -> tuple[int | None, int | None]:
    """(left, right): key j is inside iff p(i) − left ≤ j ≤ p(i) + right. Causal is a right edge of 0."""
    left, right = options.window
    return left, (0 if options.is_causal else right)


def _band(options: Options, tile: Tile) -> Iterator[Array]:
    left, right = band_edges(options)
    if isinstance(options.offset, int):  # an edge outside the tile hides nothing in it
        first, last = tile.rows.start + options.offset, tile.rows.stop - 1 + options.offset
        left = None if left is not None and tile.columns.start >= last - left else left
        right = None if right is not None and tile.columns.stop - 1 <= first + right else right
    if left is None and right is None:
        return
    position = query_positions(options, tile.rows)
    key = key_positions(options, tile.columns)
    if left is not None:
        yield key >= position - left
    if right is not None:
        yield key <= position + right
