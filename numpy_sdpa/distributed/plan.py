"""How the plane is cut into tiles, which of them anybody sees, and in which order strips meet."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from numpy_sdpa._internal.options import Options
from numpy_sdpa._internal.shapes import slice_tile
from numpy_sdpa.blockwise.slabs import part_of_plane, slabs_of
from numpy_sdpa.distributed.tasks import Call, Place
from numpy_sdpa.visibility import Tile, visible_part

Chunks = tuple[int, ...]
Index = tuple[int, ...]


class Plan:
    """The cuts of a call's plane (B…, Hq, L, S), made when the graph is built. It holds no array of L × S.

    `chunks` are those of every axis of the plane. `known` says what is known by then: mask, offset, lengths and
    segments that are no Dask arrays.
    """

    def __init__(self, call: Call, known: Options, chunks: tuple[Chunks, ...], token: str) -> None:
        self.call = call
        self.chunks = chunks
        self.token = token
        self.options = dataclasses.replace(known, mask=None, dropout=None)
        self.rows, self.columns = len(chunks) - 2, len(chunks) - 1  # axes of the plane
        self.axes_of_rows = (*range(self.columns), None)  # of what belongs to queries, (B…, Hq, L, X)
        self.row_count, self.column_count = len(chunks[-2]), len(chunks[-1])
        self._starts = [list(itertools.accumulate(sizes, initial=0)) for sizes in chunks]
        # With many more keys than queries (decoding), the keys of a chunk of queries are shared out among several
        # strips, so that there is work for several workers; together these hold no more numbers than the keys. And so
        # the other way round.
        queries, keys = known.plane[-2:]
        self.row_strips = _shares(keys, queries, self.column_count)
        self.column_strips = _shares(queries, keys, self.row_count)
        self._tiles = self._seen_tiles(known.mask)

    def leads(self) -> Iterator[Index]:
        """Which chunk of every batch axis and of the heads."""
        return itertools.product(*(range(len(sizes)) for sizes in self.chunks[:-2]))

    def lead_shape(self, lead: Index) -> tuple[int, ...]:
        return tuple(sizes[number] for sizes, number in zip(self.chunks[:-2], lead, strict=True))

    def place(self, lead: Index, row: int, column: int) -> Place:
        *before, first_row, first_column = (
            starts[number] for starts, number in zip(self._starts, (*lead, row, column), strict=True)
        )
        return Place(tuple(before[:-1]), before[-1] if before else 0, first_row, first_column)

    def tiles(self, lead: Index) -> list[tuple[int, int]]:
        """The tiles (row, column) in which somebody sees something, in the order in which their results are added."""
        return [] if 0 in self.lead_shape(lead) else self._tiles[lead[:-1]]

    def row_strip(self, column: int) -> int:
        """Which strip of a chunk of queries meets this chunk of keys."""
        return column * self.row_strips // self.column_count

    def column_strip(self, row: int) -> int:
        """Which strip of a chunk of keys meets this chunk of queries."""
        return row * self.column_strips // self.row_count

    def _seen_tiles(self, mask: np.ndarray | None) -> dict[Index, list[tuple[int, int]]]:
        """For every chunk of the batch.

        Strips meet as in a ring: in step t row r meets column r − t. As many tiles as there are strips can be worked
        on at once, and no tile waits for one of a later step.
        """
        steps = max(self.row_count, self.column_count)
        plane = itertools.product(range(self.row_count), range(self.column_count))
        ring = sorted(plane, key=lambda tile: ((tile[0] - tile[1]) % steps, tile))
        elements = self._elements()
        seen = {}
        for batch in itertools.product(*(range(len(sizes)) for sizes in self.chunks[:-3])):
            parts = tuple(self._slice(axis, number) for axis, number in enumerate(batch))
            here = itertools.product(*(range(part.start, part.stop) for part in parts))
            different = list({id(elements[element]): elements[element] for element in here}.values())
            mask_here = None if mask is None else part_of_plane(mask, (*parts, slice(None)))
            seen[batch] = [(row, column) for row, column in ring if self._is_seen(row, column, different, mask_here)]
        return seen

    def _elements(self) -> dict[Index, Options]:
        """What holds in each element of the batch: one object for those in which the same holds."""
        *lead, queries, keys = self.options.plane
        one_head = dataclasses.replace(self.options, plane=(*lead[:-1], *([1] if lead else []), queries, keys), group=1)
        objects: dict[object, Options] = {}
        elements = {}
        for slab in slabs_of(one_head):
            options, index = slab.options, slab.query_index[:-1]
            has_segments = options.query_segments is not None
            holds = index if has_segments else (options.offset, options.query_lengths, options.key_lengths)
            elements[index] = objects.setdefault(holds, options)
        return elements

    def _is_seen(self, row: int, column: int, elements: list[Options], mask: np.ndarray | None) -> bool:
        tile = Tile(self._slice(self.rows, row), self._slice(self.columns, column))
        if 0 in tile.shape or not any(visible_part(options, tile) is not None for options in elements):
            return False
        return mask is None or bool(slice_tile(mask, tile.rows, tile.columns).any())

    def _slice(self, axis: int, number: int) -> slice:
        return slice(self._starts[axis][number], self._starts[axis][number + 1])


def _shares(many: int, few: int, most: int) -> int:
    return max(1, min(most, many // max(1, few)))
