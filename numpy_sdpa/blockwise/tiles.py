"""Into which tiles a slab is cut. The sizes depend on shapes alone, never on workers: tiles decide how sums round."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Options
from numpy_sdpa.chain import tile_of_bias
from numpy_sdpa.visibility import Tile, band_edges, hides_nothing, visible_in, visible_part

# A tile of 512 × 512 float32 scores is 1 MiB: more would leave the caches, less would cost more calls for each score.
# Along a band (causal, window) shorter tiles waste less. Measured fastest, forward and backward, among 64 … 1024 rows
# and 128 … 512 columns (docs/performance.md).
_ROWS, _COLUMNS, _BAND_COLUMNS = 512, 512, 256
# Few rows (decoding): as many scores in longer tiles, so that a tile's calls cost little beside reading its keys; but
# 8192 keys and values (4 MiB at head size 64) stay in the last cache between their two products.
_FEW_ROWS, _FEW_SCORES, _MOST_COLUMNS = 64, 2**17, 8192
# On a GPU a tile holds all heads: 2²⁴ scores are enough to fill it, and 64 MiB in float32.
_GPU_TILE = 2**24


class Grid(NamedTuple):
    """The cuts of one slab along queries and keys."""

    row_blocks: list[slice]
    column_blocks: list[slice]


def grid_of(options: Options) -> Grid:
    rows, columns = options.block_size or _default_size(options)
    return Grid(_cut(options.query_length, rows), _cut(options.key_length, columns))


def _default_size(options: Options) -> tuple[int, int]:
    if options.xp is not np:
        side = math.isqrt(_GPU_TILE // max(1, math.prod(options.plane[:-2])))
        return max(_ROWS, side), max(_COLUMNS, side)
    if has_few_rows(options):
        count = max(1, math.prod(options.plane[:-1]))
        return _FEW_ROWS, min(_FEW_SCORES // count, _MOST_COLUMNS)
    columns = _COLUMNS if band_edges(options) == (None, None) else _BAND_COLUMNS
    return max(1, _ROWS // options.plane[-3]), columns


def has_few_rows(options: Options) -> bool:
    """Whether a slab is a decoder's: its rows, of all heads that share a key head, are rows of one tile."""
    return options.block_size is None and math.prod(options.plane[:-1]) <= _FEW_ROWS


def _cut(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def in_groups(blocks: list[slice], count: int) -> list[list[slice]]:
    """Lists of `count` neighbours; the last may be shorter."""
    return [blocks[start : start + count] for start in range(0, len(blocks), count)]


def seen_tiles(
    options: Options, rows: slice, column_blocks: list[slice], bias: Array | None
) -> Iterator[tuple[Tile, Array | None]]:
    """The parts of a row of tiles where some query sees some key, each with what is visible (None: everything)."""
    if hides_nothing(options) and bias is None:
        yield from ((Tile(rows, columns), None) for columns in column_blocks)
        return
    for columns in column_blocks:
        tile = visible_part(options, Tile(rows, columns))
        if tile is None:
            continue
        visible = visible_in(options, tile, tile_of_bias(bias, tile))
        if visible is None or options.xp is not np:  # on a GPU, looking at a mask costs more than using it
            yield tile, visible
        elif visible.all():
            yield tile, None
        elif visible.any():
            yield tile, visible


def counted_from(part: slice, whole: slice) -> slice:
    """`part`, counted from the start of `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)
