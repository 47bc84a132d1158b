"""Who may attend to whom: "may query i see key j" for any tile of the L × S plane, and where query i stands.

Every rule that hides a position is here and only here: it cannot mean one thing forward and another backward.
A rule answers for a tile with a bool array that broadcasts to it, or with None where it hides nothing there.
"""

from collections.abc import Iterator
from typing import NamedTuple

from numpy_sdpa._internal.namespace import Array, arange
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
    for rule in _rules(options, tile, bias):
        visible = rule if visible is None else visible & rule
    if visible is None or visible.shape[-2:] == tile.shape:
        return visible
    return options.xp.broadcast_to(visible, (*visible.shape[:-2], *tile.shape))


def _rules(options: Options, tile: Tile, bias: Array | None) -> Iterator[Array]:
    """Each rule that hides something in the tile."""
    if options.mask is not None:
        yield slice_tile(options.mask, tile.rows, tile.columns)
    if bias is not None:
        yield bias != -options.xp.inf
    yield from _band(options, tile)
    if options.query_lengths is not None:
        rows = arange(options.xp, tile.rows.start, tile.rows.stop, options.like)
        yield rows[:, None] < options.query_lengths
    if options.key_lengths is not None:
        yield key_positions(options, tile.columns) < options.key_lengths
    if options.query_segments is not None and options.key_segments is not None:
        yield options.query_segments[..., tile.rows, :] == options.key_segments[..., tile.columns]


def band_edges(options: Options) -> tuple[int | None, int | None]:
    """(left, right): key j is inside iff p(i) − left ≤ j ≤ p(i) + right. Causal is a right edge of 0."""
    left, right = options.window
    if options.is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _band(options: Options, tile: Tile) -> Iterator[Array]:
    left, right = band_edges(options)
    if left is None and right is None:
        return
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
