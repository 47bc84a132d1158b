"""The backward: groups of key columns, each against all its queries."""

from typing import NamedTuple

import numpy as np

from numpy_sdpa import steps
from numpy_sdpa._internal.namespace import Array, DType, astype
from numpy_sdpa._internal.options import Options
from numpy_sdpa._internal.shapes import slice_tile, sum_to_shape
from numpy_sdpa.blockwise import folded, running
from numpy_sdpa.blockwise.parts import (
    Results,
    RowStatistics,
    inputs_of_slab,
    operands_of_tile,
    workers_of,
)
from numpy_sdpa.blockwise.progress import Progress
from numpy_sdpa.blockwise.running import Rows
from numpy_sdpa.blockwise.slabs import Slab
from numpy_sdpa.blockwise.tiles import counted_from, grid_of, in_groups, seen_tiles
from numpy_sdpa.blockwise.workers import Buffers, OnceEach
from numpy_sdpa.chain import Differentiable
from numpy_sdpa.residuals import Upstream
from numpy_sdpa.visibility import Tile

# Column blocks of one backward task: rows are made ready once for all of them.
_COLUMN_BLOCKS_A_TASK = 4


def backward_slabs(
    slabs: list[Slab], arrays: Differentiable, results: Results, upstream: Upstream, options: Options
) -> Differentiable:
    """The gradients of a call's inputs."""
    gradients, statistics = Backward(slabs, arrays, options).from_results(results, upstream)
    if arrays.sinks is None:
        return gradients
    return gradients._replace(sinks=sinks_backward(slabs, arrays, statistics, options))


def sinks_backward(slabs: list[Slab], arrays: Differentiable, statistics: RowStatistics, options: Options) -> Array:
    """g_sink = −p_sink (D − g_lse), p_sink = exp(sink − shift) / row_sum, summed over the rows of a head: (B…, Hq)."""
    xp = options.xp
    gradient = xp.zeros(options.plane[:-2], dtype=options.compute_dtype)
    for slab in slabs:
        sinks = astype(slab.per_head(arrays.sinks), options.compute_dtype)
        row_shift, row_sum, row_term = (slab.rows(array)[..., None] for array in statistics)
        sink_weight = steps.sink_weight(xp, sinks, row_shift, row_sum)
        slab.per_head(gradient)[...] = -xp.sum(sink_weight * row_term, axis=(-2, -1))
    return gradient


class _ColumnTask(NamedTuple):
    numbers: list[int]  # of slabs
    place: int  # among the groups of column blocks: contributions to a row are added in this order


class _SmallGradients(NamedTuple):
    """What one task adds to the gradients that every tile has a part in."""

    slopes: list[tuple[int, Array]]  # by slab
    scale: list[Array]
    softcap: list[Array]
    bias: Array | None  # the call's, or the task's own where no task has columns of its own: a bias (…, 1)


class Backward:
    """One task is a group of column blocks, of one slab: it alone adds to the gradients of its keys and values.

    The tasks of a slab take turns at the gradient of each block of queries. A bias that several slabs share is met by
    one task in all of them.
    """

    def __init__(self, slabs: list[Slab], arrays: Differentiable, options: Options) -> None:
        self._slabs = slabs
        self._arrays = arrays
        self._options = options
        self._inputs = [inputs_of_slab(slab, arrays) for slab in slabs]
        self._grids = [grid_of(slab.options) for slab in slabs]
        self._workers = workers_of(options)
        self._output: Array | None = None  # where D is still to be found

    def from_results(self, results: Results, upstream: Upstream) -> tuple[Differentiable, RowStatistics]:
        """The gradients, and the numbers of every row that were found on the way."""
        xp, lse = self._options.xp, results.lse
        row_term = xp.zeros_like(lse)
        if upstream.lse is not None:
            row_term = steps.only_where(xp, lse != -xp.inf, -upstream.lse)
        statistics = RowStatistics(results.row_shift, results.row_sum, row_term)
        if upstream.output is None:
            return self.from_rows(xp.zeros_like(results.output), statistics), statistics
        self._output = results.output
        return self.from_rows(self._reaching(upstream.output), statistics), statistics

    def _reaching(self, grad_output: Array) -> Array:
        """0 in rows that see nothing. Finite numbers may stay: the weights there are 0."""
        xp = self._options.xp
        if bool(xp.all(xp.isfinite(grad_output))):
            return grad_output
        grad_output = xp.asarray(grad_output, copy=True)
        for slab, inputs, grid in zip(self._slabs, self._inputs, self._grids, strict=True):
            for rows in grid.row_blocks:
                part = slab.queries(grad_output)[..., rows, :]
                sees = xp.zeros((*part.shape[:-1], 1), dtype=bool)
                for tile, visible in seen_tiles(slab.options, rows, grid.column_blocks, inputs.bias):
                    some = True if visible is None else xp.any(visible, axis=-1, keepdims=True)
                    sees[..., counted_from(tile.rows, rows), :] |= some
                part[...] = steps.only_where(xp, sees, part)
        return grad_output

    def from_rows(self, grad_output: Array, statistics: RowStatistics) -> Differentiable:
        """The gradients save that of sinks. `grad_output` is 0 in rows that see nothing."""
        options, arrays = self._options, self._arrays
        xp, dtype = options.xp, options.compute_dtype

        def zeros_like(array: Array) -> Array:
            return xp.zeros(array.shape, dtype=dtype)

        self._grad_output = grad_output
        self._statistics = statistics
        self._gradients = Differentiable(
            query=zeros_like(arrays.query),
            key=zeros_like(arrays.key),
            value=zeros_like(arrays.value),
            bias=None if arrays.bias is None else xp.zeros(_at_least_2d(arrays.bias.shape), dtype=dtype),
            alibi_slopes=None if arrays.alibi_slopes is None else xp.zeros(options.plane[:-2], dtype=dtype),
        )
        self._plain = OnceEach(len(self._slabs), self._look_at_slab)
        tasks = self._tasks()
        with Progress(options.progress, "backward", len(tasks)) as progress:
            small = self._workers.run(self._add_columns, tasks, progress)
        return self._with_small(small)

    def _look_at_slab(self, number: int) -> "_Plain | None":
        slab, inputs, grid = self._slabs[number], self._inputs[number], self._grids[number]
        if self._output is not None:
            self._add_row_dots(slab, self._output)
        keys = folded.plain_keys(slab.options, inputs)
        if keys is None:
            return None
        every_row = slice(0, slab.options.query_length)
        rows = folded.is_foldable(inputs.query, self._rows_of(number, every_row), slab.options.compute_dtype)
        if keys.is_spoilt is not None:
            for block in grid.row_blocks:
                rows[:, block] &= ~folded.sees_some(slab.options, block, grid.column_blocks, keys.is_spoilt)
        return _Plain(keys, rows)

    def _add_row_dots(self, slab: Slab, output: Array) -> None:
        """D = Σ gO ∘ O, which is Σ P ∘ gP; by einsum, which makes no array of the products."""
        row_term = slab.rows(self._statistics.row_term)
        row_term += self._options.xp.einsum("...e,...e->...", slab.queries(self._grad_output), slab.queries(output))

    def _tasks(self) -> list[_ColumnTask]:
        """The groups of columns, the first of every slab first: under a causal mask they are the longest."""
        numbers = list(range(len(self._slabs)))
        bundles = [numbers] if numbers and self._shares_bias() else [[number] for number in numbers]
        counts = [len(self._column_groups(bundle[0])) for bundle in bundles]
        return [
            _ColumnTask(bundle, place)
            for place in range(max(counts, default=0))
            for bundle, count in zip(bundles, counts, strict=True)
            if place < count
        ]

    def _shares_bias(self) -> bool:
        bias = self._gradients.bias
        return bias is not None and bias.shape[:-2] != self._options.plane[:-2]

    def _column_groups(self, number: int) -> list[list[slice]]:
        return in_groups(self._grids[number].column_blocks, 1 if self._shares_bias() else _COLUMN_BLOCKS_A_TASK)

    def _add_columns(self, task: _ColumnTask, buffers: Buffers) -> _SmallGradients:
        bias = self._gradients.bias
        if bias is not None and bias.shape[-1] == 1:
            bias = self._options.xp.zeros_like(bias)
        small = _SmallGradients([], [], [], bias)
        for number in task.numbers:
            self._add_columns_of_slab(number, task.place, small, buffers)
        return small

    def _add_columns_of_slab(self, number: int, place: int, small: _SmallGradients, buffers: Buffers) -> None:
        slab, inputs = self._slabs[number], self._inputs[number]
        in_order = self._workers.in_order
        column_blocks = self._column_groups(number)[place]
        columns = slice(column_blocks[0].start, column_blocks[-1].stop)
        keys = _KeyGradients(
            slab.keys(self._gradients.key)[..., columns, :], slab.keys(self._gradients.value)[..., columns, :]
        )
        plain = self._plain[number]
        columns_ready = plain and plain.columns(columns, self._options.compute_dtype, buffers)
        for block, rows in enumerate(self._grids[number].row_blocks):
            self._workers.check()
            tiles = list(seen_tiles(slab.options, rows, column_blocks, inputs.bias))
            if tiles:
                part = _Block(number, rows, columns, tiles, keys)
                if plain is None or columns_ready is None:
                    grad_query = self._running(part, None, small)
                else:
                    grad_query = self._folded(part, columns_ready, plain.rows[:, rows], small, buffers)
                in_order.wait((number, block), place)
                slab.queries(self._gradients.query)[..., rows, :] += grad_query
            in_order.finish((number, block), place)

    def _folded(
        self,
        block: "_Block",
        columns: folded.Columns,
        is_foldable: np.ndarray,
        small: _SmallGradients,
        buffers: Buffers,
    ) -> Array:
        """The gradient of the block's queries; those of keys and values are added to."""
        rows, keys = block.rows, block.keys
        inputs, of_rows = self._inputs[block.number], self._rows_of(block.number, block.rows)
        folded_rows = folded.BackwardRows(inputs.query[:, rows], inputs.scale, of_rows, is_foldable, buffers)
        for tile, visible in block.tiles:
            part = counted_from(tile.columns, block.columns)
            folded_rows.add(
                counted_from(tile.rows, rows), visible, columns, part, keys.key[0, part], keys.value[0, part]
            )
        grad_query, grad_scale = folded_rows.finish()
        small.scale.append(grad_scale)
        others = ~is_foldable & (of_rows.row_sum[..., 0] != 0)  # a row of nothing gives nothing
        if not others.any():
            return grad_query
        return self._options.xp.where(others[..., None], self._running(block, others, small), grad_query)

    def _running(self, block: "_Block", among: np.ndarray | None, small: _SmallGradients) -> Array:
        """The same by the steps, for all rows of the block or those where `among` (heads, rows) is True."""
        number, keys = block.number, block.keys
        slab, inputs, xp = self._slabs[number], self._inputs[number], self._options.xp
        of_rows = self._rows_of(number, block.rows)
        grad_query = xp.zeros(inputs.query[..., block.rows, :].shape, dtype=self._options.compute_dtype)
        for tile, visible in block.tiles:
            rows, columns = counted_from(tile.rows, block.rows), counted_from(tile.columns, block.columns)
            if among is not None:  # the others see nothing here
                visible = among[:, rows, None] & (True if visible is None else visible)
                visible = xp.broadcast_to(visible, (len(among), *tile.shape))
            operands, view = operands_of_tile(slab.options, inputs, tile, visible)
            grads, grad_value = running.backward_of_tile(of_rows.part(rows), operands, view)
            grad_query[..., rows, :] += grads.query
            keys.key[..., columns, :] += grads.key
            keys.value[..., columns, :] += grad_value
            self._add_small(number, tile, grads, small)
        return grad_query

    def _add_small(self, number: int, tile: Tile, grads: Differentiable, small: _SmallGradients) -> None:
        small.scale.append(grads.scale)
        if grads.softcap is not None:
            small.softcap.append(grads.softcap)
        if grads.alibi_slopes is not None:
            small.slopes.append((number, grads.alibi_slopes))
        if grads.bias is not None:
            target = slice_tile(self._slabs[number].plane(small.bias), tile.rows, tile.columns)
            target += sum_to_shape(self._options.xp, grads.bias, target.shape)

    def _rows_of(self, number: int, rows: slice) -> Rows:
        slab = self._slabs[number]
        numbers = (slab.rows(array)[..., rows, None] for array in self._statistics)
        return Rows(slab.queries(self._grad_output)[..., rows, :], *numbers)

    def _with_small(self, tasks: list[_SmallGradients]) -> Differentiable:
        """Add up, task by task, what every tile had a part in."""
        xp, dtype = self._options.xp, self._options.compute_dtype
        gradients = self._gradients
        scale, softcap = xp.zeros((), dtype=dtype), xp.zeros((), dtype=dtype)
        for small in tasks:
            scale = scale + sum(small.scale)
            softcap = softcap + sum(small.softcap)
            for number, slopes in small.slopes:
                self._slabs[number].per_head(gradients.alibi_slopes)[...] += slopes
            if small.bias is not None and small.bias is not gradients.bias:
                gradients = gradients._replace(bias=gradients.bias + small.bias)
        return gradients._replace(scale=scale, softcap=None if self._arrays.softcap is None else softcap)


class _Plain(NamedTuple):
    """What of a slab may be folded."""

    keys: folded.Keys
    rows: np.ndarray  # bool (heads, L)

    def columns(self, columns: slice, dtype: DType, buffers: Buffers) -> folded.Columns:
        return folded.Columns(self.keys.key[0, columns], self.keys.value[0, columns], dtype, buffers)


class _KeyGradients(NamedTuple):
    """Views of the gradients of a range of columns."""

    key: Array
    value: Array


class _Block(NamedTuple):
    """One row block of a task."""

    number: int  # of the slab
    rows: slice
    columns: slice
    tiles: list[tuple[Tile, Array | None]]
    keys: _KeyGradients


def _at_least_2d(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (2 - len(shape)) + tuple(shape)
