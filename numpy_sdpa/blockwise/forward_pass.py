"""The forward: blocks of query rows, each against all its keys."""

from typing import NamedTuple

import numpy as np

from numpy_sdpa import steps
from numpy_sdpa._internal.namespace import astype
from numpy_sdpa._internal.options import Options
from numpy_sdpa.blockwise import folded, running
from numpy_sdpa.blockwise.parts import (
    Results,
    inputs_of_slab,
    operands_of_tile,
    workers_of,
)
from numpy_sdpa.blockwise.progress import Progress
from numpy_sdpa.blockwise.running import Partial
from numpy_sdpa.blockwise.slabs import Slab
from numpy_sdpa.blockwise.tiles import counted_from, grid_of, in_groups, seen_tiles
from numpy_sdpa.blockwise.workers import Buffers, OnceEach
from numpy_sdpa.chain import Differentiable

# With fewer blocks of rows than this, long rows are cut too, so that there is work for as many threads; each piece
# has at least so many tiles, to be worth a join.
_FEW_TASKS, _TILES_A_PIECE = 16, 2


class _RowTask(NamedTuple):
    number: int  # of the slab
    rows: slice
    column_blocks: list[slice]
    is_whole: bool  # whether these are all columns


def forward_slabs(slabs: list[Slab], arrays: Differentiable, results: Results, options: Options) -> None:
    """Fill the results of every slab."""
    _Forward(slabs, arrays, results, options).run()


class _Forward:
    def __init__(self, slabs: list[Slab], arrays: Differentiable, results: Results, options: Options) -> None:
        self._slabs = slabs
        self._results = results
        self._options = options
        self._grids = [grid_of(slab.options) for slab in slabs]
        self._inputs = [inputs_of_slab(slab, arrays) for slab in slabs]
        self._plain_keys = OnceEach(len(slabs), self._look_at_keys)

    def run(self) -> None:
        workers = workers_of(self._options)
        tasks = self._tasks()
        with Progress(self._options.progress, "forward", len(tasks)) as progress:
            partials = workers.run(self._attend, tasks, progress)
        self._join_pieces(tasks, partials)

    def _look_at_keys(self, number: int) -> folded.Keys | None:
        return folded.plain_keys(self._slabs[number].options, self._inputs[number])

    def _tasks(self) -> list[_RowTask]:
        """Blocks of rows, the last first: under a causal mask they are the longest."""
        blocks = sum(len(grid.row_blocks) for grid in self._grids)
        return [
            _RowTask(number, rows, piece, len(piece) == len(grid.column_blocks))
            for number, grid in enumerate(self._grids)
            for rows in reversed(grid.row_blocks)
            for piece in _pieces(grid.column_blocks, blocks)
        ]

    def _attend(self, task: _RowTask, buffers: Buffers) -> Partial | None:
        """Attention of a block of rows over the task's columns, written to the results where these are all."""
        slab, inputs, keys = self._slabs[task.number], self._inputs[task.number], self._plain_keys[task.number]
        if keys is None:
            return self._written(task, _running_rows(slab, inputs, task, self._options))
        block, is_right = _folded_rows(slab, inputs, keys, task, buffers)
        if not is_right.all():
            right, other = is_right[..., None], _running_rows(slab, inputs, task, self._options)
            pairs = zip(block.partial(), other, strict=True)
            return self._written(task, Partial(*(self._options.xp.where(right, *pair) for pair in pairs)))
        if inputs.sinks is not None or not task.is_whole:
            return self._written(task, block.partial())
        results, rows = self._results, (..., task.rows, slice(None))
        slab.rows(results.row_shift)[..., task.rows] = 0
        block.write(
            slab.queries(results.output)[rows],
            slab.rows(results.row_sum)[..., None][rows],
            slab.rows(results.lse)[..., None][rows],
        )
        return None

    def _written(self, task: _RowTask, partial: Partial) -> Partial | None:
        """Kept for the other pieces where the task is one of several."""
        if task.is_whole:
            self._write(task, partial)
            return None
        return Partial(*(self._options.xp.asarray(array, copy=True) for array in partial))

    def _join_pieces(self, tasks: list[_RowTask], partials: list[Partial | None]) -> None:
        xp = self._options.xp
        open_rows: dict[tuple[int, int], tuple[_RowTask, Partial]] = {}
        for task, partial in zip(tasks, partials, strict=True):
            if partial is not None:
                place = task.number, task.rows.start
                joined = running.join(xp, open_rows[place][1], partial) if place in open_rows else partial
                open_rows[place] = task, joined
        for task, partial in open_rows.values():
            self._write(task, partial)

    def _write(self, task: _RowTask, partial: Partial) -> None:
        xp, slab, rows, results = self._options.xp, self._slabs[task.number], task.rows, self._results
        sinks = self._inputs[task.number].sinks
        if sinks is not None:
            sinks = astype(sinks, self._options.compute_dtype)
            partial = running.join(xp, partial, running.of_sinks(xp, sinks, partial))
        row_shift = steps.finite_shift(xp, partial.row_shift)
        row_sum = partial.row_sum
        xp.divide(partial.sums, steps.divisor(xp, row_sum), out=slab.queries(results.output)[..., rows, :])
        slab.rows(results.row_shift)[..., rows] = row_shift[..., 0]
        slab.rows(results.row_sum)[..., rows] = row_sum[..., 0]
        slab.rows(results.lse)[..., rows] = steps.log_sum_exp(xp, row_shift, row_sum)[..., 0]


def _pieces(column_blocks: list[slice], row_blocks: int) -> list[list[slice]]:
    wanted = 1 if row_blocks >= _FEW_TASKS else -(-_FEW_TASKS // max(1, row_blocks))
    size = max(_TILES_A_PIECE, -(-len(column_blocks) // wanted))
    return in_groups(column_blocks, size) or [[]]


def _folded_rows(
    slab: Slab, inputs: Differentiable, keys: folded.Keys, task: _RowTask, buffers: Buffers
) -> tuple[folded.ForwardRows, np.ndarray]:
    """And for which rows (heads, rows) they are right."""
    block = folded.ForwardRows(inputs.query[:, task.rows], inputs.scale, inputs.value.shape[-1], buffers)
    for tile, visible in seen_tiles(slab.options, task.rows, task.column_blocks, None):
        rows = counted_from(tile.rows, task.rows)
        block.add(rows, visible, keys.key[0, tile.columns], keys.value[0, tile.columns])
    is_right = block.is_right()
    if keys.is_spoilt is not None:
        is_right &= ~folded.sees_some(slab.options, task.rows, task.column_blocks, keys.is_spoilt)
    return block, is_right


def _running_rows(slab: Slab, inputs: Differentiable, task: _RowTask, options: Options) -> Partial:
    xp = options.xp
    rows = (*inputs.query.shape[:-2], task.rows.stop - task.rows.start)
    partial = running.nothing(options, rows, inputs.value.shape[-1])
    for tile, visible in seen_tiles(slab.options, task.rows, task.column_blocks, inputs.bias):
        operands, view = operands_of_tile(slab.options, inputs, tile, visible)
        part = (..., counted_from(tile.rows, task.rows), slice(None))
        before = Partial(*(array[part] for array in partial))
        for array, joined in zip(partial, running.join(xp, before, running.of_tile(operands, view)), strict=True):
            array[part] = joined
    return partial
