"""Forward and backward over the tiles of all slabs."""

from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa import chain, steps
from numpy_sdpa._internal.namespace import Array, Namespace, astype, computing
from numpy_sdpa._internal.options import Inputs, Options
from numpy_sdpa._internal.shapes import slice_tile, sum_to_shape
from numpy_sdpa.blockwise import folded, running
from numpy_sdpa.blockwise.progress import Progress
from numpy_sdpa.blockwise.running import Partial
from numpy_sdpa.blockwise.slabs import Slab, slabs_of
from numpy_sdpa.blockwise.tiles import grid_of, has_few_rows, in_groups, seen_tiles
from numpy_sdpa.blockwise.workers import Buffers, Workers, blas, default_workers
from numpy_sdpa.chain import Differentiable
from numpy_sdpa.residuals import SDPAResiduals, Upstream
from numpy_sdpa.visibility import Tile

# With fewer blocks of rows than this, long rows are cut too, so that there is work for as many threads; each piece has at
# least so many tiles, to be worth a join.
_FEW_TASKS, _TILES_A_PIECE = 16, 2
# Column blocks of one backward task: rows are made ready once for all of them.
_COLUMN_BLOCKS_A_TASK = 4


class RowStatistics(NamedTuple):
    """What a backward must know of whole rows, (B…, Hq, L)."""

    row_shift: Array
    row_sum: Array
    row_term: Array  # D − g_lse, D = Σ gO ∘ O


class Results(NamedTuple):
    """The arrays that a forward fills and a backward reads."""

    output: Array  # (B…, Hq, L, Ev)
    row_shift: Array  # (B…, Hq, L), as the others
    row_sum: Array
    lse: Array


# Calls


def forward(inputs: Inputs, options: Options) -> SDPAResiduals:
    arrays = _with_leading_axes(inputs, options)
    results = empty_results(options, options.plane[:-1], arrays.value.shape[-1])
    forward_slabs(slabs_of(options), arrays, results, options)
    return SDPAResiduals(**inputs._asdict(), **results._asdict(), options=options)


def backward(residuals: SDPAResiduals, upstream: Upstream) -> Differentiable:
    """Gradients in the compute dtype, summed over what was broadcast within the plane."""
    options = residuals.options
    arrays = _with_leading_axes(residuals, options)
    return backward_slabs(slabs_of(options), arrays, _results_of(residuals), upstream, options)


def _results_of(residuals: Any) -> Results:
    return Results(*(getattr(residuals, name) for name in Results._fields))


def backward_from_rows(
    arrays: Any, options: Options, grad_output: Array, statistics: RowStatistics
) -> Differentiable:
    """The gradients that the keys at hand give, from what is known of the rows over all keys, wherever those are.

    Parameters
    ----------
    arrays : Inputs, SDPAResiduals or the like
        The part's query, key, value, bias, alibi_slopes, scale and softcap.
    options : Options
        Of the part: offset, lengths, mask and dropout as they are there.
    grad_output : array (B…, Hq, L, Ev), in the compute dtype
        0 in rows that see nothing at all.
    statistics : RowStatistics

    Returns
    -------
    Differentiable
        Without `sinks`, whose gradient belongs to whole rows: `sinks_backward`.
    """
    run = _Backward(slabs_of(options), _with_leading_axes(arrays, options), options)
    with blas.single_threaded():
        return run.gradients(grad_output, statistics)


def _with_leading_axes(arrays: Any, options: Options) -> Differentiable:
    """The inputs, query with the leading axes (B…, Hq), key and value with (B…, Hkv): views, nothing is repeated."""
    xp, lead = options.xp, options.plane[:-2]
    key_lead = (*lead[:-1], lead[-1] // options.group) if lead else ()

    def with_lead(array: Array, lead: tuple[int, ...]) -> Array:
        shape = (*lead, *array.shape[-2:])
        return array if array.shape == shape else xp.broadcast_to(array, shape)

    named = {name: getattr(arrays, name) for name in Differentiable._fields}
    named["query"] = with_lead(named["query"], lead)
    named["key"] = with_lead(named["key"], key_lead)
    named["value"] = with_lead(named["value"], key_lead)
    return Differentiable(**named)


def empty_results(options: Options, rows: tuple[int, ...], value_size: int) -> Results:
    xp, dtype = options.xp, options.compute_dtype
    shift_dtype = np.zeros((), dtype).real.dtype  # a shift is real, also of complex logits
    return Results(
        output=xp.empty((*rows, value_size), dtype=dtype),
        row_shift=xp.empty(rows, dtype=shift_dtype),
        row_sum=xp.empty(rows, dtype=dtype),
        lse=xp.empty(rows, dtype=dtype),
    )


def _workers(options: Options) -> Workers:
    count = (options.workers or default_workers()) if options.xp is np else 1
    return Workers(count, lambda: computing(options.xp, options.like))


# Forward


class _RowTask(NamedTuple):
    number: int  # of the slab
    rows: slice
    column_blocks: list[slice]
    is_whole: bool  # whether these are all columns


def forward_slabs(slabs: list[Slab], arrays: Differentiable, results: Results, options: Options) -> None:
    """Fill the results of every slab."""
    run = _Forward(slabs, arrays, results, options)
    workers = _workers(options)
    with blas.single_threaded():
        run.norms = workers.run(run.measure, range(len(slabs)))
        tasks = run.tasks()
        with Progress(options.progress, "forward", len(tasks)) as progress:
            partials = workers.run(run.add_rows, tasks, progress)
    run.join_pieces(tasks, partials)


class _Forward:
    def __init__(self, slabs: list[Slab], arrays: Differentiable, results: Results, options: Options) -> None:
        self._slabs = slabs
        self._arrays = arrays
        self._results = results
        self._options = options
        self._inputs = [_inputs_of(slab, arrays) for slab in slabs]
        self._grids = [grid_of(slab.options) for slab in slabs]
        self.norms: list[folded.Norms | None] = []

    def measure(self, number: int, buffers: Buffers) -> folded.Norms | None:
        """What `folded` must know of the slab's keys and values; None where its tiles cannot be folded."""
        return _norms(self._slabs[number].options, self._inputs[number])

    def tasks(self) -> list[_RowTask]:
        """Blocks of rows, the last first: under a causal mask they are the longest."""
        blocks = sum(len(grid.row_blocks) for grid in self._grids)
        return [
            _RowTask(number, rows, piece, len(piece) == len(grid.column_blocks))
            for number, grid in enumerate(self._grids)
            for rows in reversed(grid.row_blocks)
            for piece in _pieces(grid.column_blocks, blocks)
        ]

    def add_rows(self, task: _RowTask, buffers: Buffers) -> Partial | None:
        """Attention of a block of rows over the task's columns, written to the results where these are all."""
        slab, inputs, norms = self._slabs[task.number], self._inputs[task.number], self.norms[task.number]
        partial = None
        if norms is not None:
            partial = _folded_rows(slab, inputs, norms, task, buffers)
        if partial is None:
            partial = _running_rows(slab, inputs, task, self._options)
        if task.is_whole:
            self._write(task, partial)
            return None
        return Partial(*(self._options.xp.asarray(array, copy=True) for array in partial))

    def join_pieces(self, tasks: list[_RowTask], partials: list[Partial | None]) -> None:
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
        row_shift = xp.where(partial.row_shift == -xp.inf, 0, partial.row_shift)
        row_sum = partial.row_sum
        slab.queries(results.output)[..., rows, :] = partial.sums / xp.where(row_sum == 0, 1, row_sum)
        slab.rows(results.row_shift)[..., rows] = row_shift[..., 0]
        slab.rows(results.row_sum)[..., rows] = row_sum[..., 0]
        slab.rows(results.lse)[..., rows] = steps.log_sum_exp(xp, row_shift, row_sum)[..., 0]


def _pieces(column_blocks: list[slice], row_blocks: int) -> list[list[slice]]:
    wanted = 1 if row_blocks >= _FEW_TASKS else -(-_FEW_TASKS // max(1, row_blocks))
    size = max(_TILES_A_PIECE, -(-len(column_blocks) // wanted))
    return in_groups(column_blocks, size) or [[]]


def _inputs_of(slab: Slab, arrays: Differentiable) -> Differentiable:
    """Views of the slab's part of the inputs, in the caller's dtypes."""
    return arrays._replace(
        query=slab.queries(arrays.query),
        key=slab.keys(arrays.key),
        value=slab.keys(arrays.value),
        bias=slab.plane(arrays.bias),
        sinks=slab.per_head(arrays.sinks),
        alibi_slopes=slab.per_head(arrays.alibi_slopes),
    )


def _norms(options: Options, inputs: Differentiable) -> folded.Norms | None:
    if not folded.is_plain(options, inputs) or has_few_rows(options):
        return None  # where rows are few, measuring the keys would cost as much as using them
    return folded.norms_of(inputs.key, inputs.value, options.compute_dtype)


def _folded_rows(
    slab: Slab, inputs: Differentiable, norms: folded.Norms, task: _RowTask, buffers: Buffers
) -> Partial | None:
    """None where a score may be too large for it."""
    block = folded.ForwardRows(
        inputs.query[:, task.rows], inputs.scale, inputs.value.shape[-1], buffers
    )
    if not block.is_safe(norms):
        return None
    for tile, visible in seen_tiles(slab.options, task.rows, task.column_blocks, None):
        block.add(_from(tile.rows, task.rows), visible, inputs.key[0, tile.columns], inputs.value[0, tile.columns])
    return block.finish()


def _running_rows(slab: Slab, inputs: Differentiable, task: _RowTask, options: Options) -> Partial:
    xp = options.xp
    rows = (*inputs.query.shape[:-2], task.rows.stop - task.rows.start)
    empty = empty_results(options, rows, inputs.value.shape[-1])
    partial = Partial(xp.zeros_like(empty.output), xp.zeros_like(empty.row_sum)[..., None], xp.full_like(empty.row_shift, -xp.inf)[..., None])
    for tile, visible in seen_tiles(slab.options, task.rows, task.column_blocks, inputs.bias):
        operands, view = _operands_of_tile(slab.options, inputs, tile, visible)
        part = (..., _from(tile.rows, task.rows), slice(None))
        before = Partial(*(array[part] for array in partial))
        for array, joined in zip(partial, running.join(xp, before, running.of_tile(operands, view)), strict=True):
            array[part] = joined
    return partial


def _from(part: slice, whole: slice) -> slice:
    """`part`, counted from the start of `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)


def _operands_of_tile(
    options: Options, inputs: Differentiable, tile: Tile, visible: Array | None
) -> tuple[Differentiable, chain.View]:
    """The tile's inputs in the compute dtype."""
    operands = inputs._replace(
        query=inputs.query[..., tile.rows, :],
        key=inputs.key[..., tile.columns, :],
        value=inputs.value[..., tile.columns, :],
        bias=chain.tile_of_bias(inputs.bias, tile),
    )
    operands = Differentiable(*(None if array is None else astype(array, options.compute_dtype) for array in operands))
    return operands, chain.view_with(options, tile, visible, operands.alibi_slopes is not None)


# Backward


def backward_slabs(
    slabs: list[Slab], arrays: Differentiable, results: Results, upstream: Upstream, options: Options
) -> Differentiable:
    run = _Backward(slabs, arrays, options)
    with blas.single_threaded():
        grad_output, statistics = run.row_statistics(results, upstream)
        gradients = run.gradients(grad_output, statistics)
    if arrays.sinks is None:
        return gradients
    return gradients._replace(sinks=sinks_backward(slabs, arrays, statistics, options))


def sinks_backward(
    slabs: list[Slab], arrays: Differentiable, statistics: RowStatistics, options: Options
) -> Array:
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
    bias: Array | None  # where it is broadcast along the keys, so that no task has columns of its own


class _Backward:
    """One task is a group of column blocks, of one slab: it alone adds to the gradients of its keys and values.

    The tasks of a slab take turns at the gradient of each block of queries. A bias that several slabs share is met by one
    task in all of them.
    """

    def __init__(self, slabs: list[Slab], arrays: Differentiable, options: Options) -> None:
        self._slabs = slabs
        self._arrays = arrays
        self._options = options
        self._inputs = [_inputs_of(slab, arrays) for slab in slabs]
        self._grids = [grid_of(slab.options) for slab in slabs]
        self._workers = _workers(options)

    # What is known of rows

    def row_statistics(self, results: Results, upstream: Upstream) -> tuple[Array, RowStatistics]:
        """The upstream gradient of the output, 0 in rows that see nothing, and the numbers of every row."""
        xp, lse = self._options.xp, results.lse
        row_term = xp.zeros_like(lse)
        if upstream.lse is not None:
            row_term = xp.where(lse == -xp.inf, 0, -upstream.lse)
        grad_output = upstream.output
        if grad_output is None:
            grad_output = xp.zeros_like(results.output)
        else:
            grad_output = self._reaching(grad_output)
            self._workers.run(
                lambda number, _: self._add_row_dots(number, grad_output, results.output, row_term),
                range(len(self._slabs)),
            )
        return grad_output, RowStatistics(results.row_shift, results.row_sum, row_term)

    def _add_row_dots(self, number: int, grad_output: Array, output: Array, row_term: Array) -> None:
        """D = Σ gO ∘ O, which is Σ P ∘ gP."""
        xp, slab = self._options.xp, self._slabs[number]
        for rows in self._grids[number].row_blocks:
            product = slab.queries(grad_output)[..., rows, :] * slab.queries(output)[..., rows, :]
            slab.rows(row_term)[..., rows] += xp.sum(product, axis=-1)

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
                    sees[..., _from(tile.rows, rows), :] |= some
                part[...] = xp.where(sees, part, 0)
        return grad_output

    # Gradients

    def gradients(self, grad_output: Array, statistics: RowStatistics) -> Differentiable:
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
        self._safe_rows = self._workers.run(self._measure, range(len(self._slabs)))
        tasks = self._tasks()
        with Progress(options.progress, "backward", len(tasks)) as progress:
            small = self._workers.run(self._add_columns, tasks, progress)
        return self._with_small(small)

    def _measure(self, number: int, buffers: Buffers) -> list[bool]:
        """For each block of rows whether it may be folded."""
        slab, inputs, grid = self._slabs[number], self._inputs[number], self._grids[number]
        norms = _norms(slab.options, inputs)
        if norms is None:
            return [False] * len(grid.row_blocks)
        grad_output = slab.queries(self._grad_output)
        row_shift, row_sum, _ = (slab.rows(array) for array in self._statistics)
        return [
            folded.backward_is_safe(
                inputs.query[:, rows], inputs.scale, grad_output[:, rows], row_shift[:, rows], row_sum[:, rows], norms
            )
            for rows in grid.row_blocks
        ]

    def _tasks(self) -> list[_ColumnTask]:
        """The groups of columns, the first of every slab first: under a causal mask they are the longest."""
        bundles = [[number] for number in range(len(self._slabs))]
        if self._shares_bias():
            bundles = [list(range(len(self._slabs)))]
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
        plain = None
        for block, rows in enumerate(self._grids[number].row_blocks):
            self._workers.check()
            tiles = list(seen_tiles(slab.options, rows, column_blocks, inputs.bias))
            if tiles and self._safe_rows[number][block]:
                plain = plain or self._plain_columns(number, columns, buffers)
                grad_query = self._folded(number, rows, tiles, columns, plain, keys, small, buffers)
            elif tiles:
                grad_query = self._running(number, rows, tiles, columns, keys, small)
            if tiles:
                in_order.wait((number, block), place)
                slab.queries(self._gradients.query)[..., rows, :] += grad_query
            in_order.finish((number, block), place)

    def _plain_columns(self, number: int, columns: slice, buffers: Buffers) -> folded.Columns:
        inputs = self._inputs[number]
        return folded.Columns(inputs.key[0, columns], inputs.value[0, columns], self._options.compute_dtype, buffers)

    def _folded(
        self,
        number: int,
        rows: slice,
        tiles: list[tuple[Tile, Array | None]],
        columns: slice,
        plain: folded.Columns,
        keys: "_KeyGradients",
        small: _SmallGradients,
        buffers: Buffers,
    ) -> Array:
        inputs = self._inputs[number]
        grad_output, row_shift, row_sum, row_term = self._rows_of(number, rows)
        block = folded.BackwardRows(
            inputs.query[:, rows], inputs.scale, grad_output, row_shift, row_sum, row_term, buffers
        )
        for tile, visible in tiles:
            part = _from(tile.columns, columns)
            block.add(_from(tile.rows, rows), visible, plain, part, keys.key[0, part], keys.value[0, part])
        grad_query, grad_scale = block.finish()
        small.scale.append(grad_scale)
        return grad_query

    def _running(
        self,
        number: int,
        rows: slice,
        tiles: list[tuple[Tile, Array | None]],
        columns: slice,
        keys: "_KeyGradients",
        small: _SmallGradients,
    ) -> Array:
        slab, inputs, xp = self._slabs[number], self._inputs[number], self._options.xp
        of_rows = self._rows_of(number, rows)
        grad_query = xp.zeros(inputs.query[..., rows, :].shape, dtype=self._options.compute_dtype)
        for tile, visible in tiles:
            operands, view = _operands_of_tile(slab.options, inputs, tile, visible)
            part, part_of_columns = _from(tile.rows, rows), _from(tile.columns, columns)
            grads, grad_value = running.backward_of_tile(*(array[..., part, :] for array in of_rows), operands, view)
            grad_query[..., part, :] += grads.query
            keys.key[..., part_of_columns, :] += grads.key
            keys.value[..., part_of_columns, :] += sum_to_shape(xp, grad_value, keys.value[..., part_of_columns, :].shape)
            small.scale.append(grads.scale)
            if grads.softcap is not None:
                small.softcap.append(grads.softcap)
            if grads.alibi_slopes is not None:
                small.slopes.append((number, grads.alibi_slopes))
            if grads.bias is not None:
                shared = self._gradients.bias if small.bias is None else small.bias
                target = slice_tile(slab.plane(shared), tile.rows, tile.columns)
                target += sum_to_shape(xp, grads.bias, target.shape)
        return grad_query

    def _rows_of(self, number: int, rows: slice) -> tuple[Array, ...]:
        """grad_output, row_shift, row_sum and row_term of a block of rows, (heads, rows, X)."""
        slab = self._slabs[number]
        numbers = (slab.rows(array)[..., rows, None] for array in self._statistics)
        return slab.queries(self._grad_output)[..., rows, :], *numbers

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


class _KeyGradients(NamedTuple):
    """Views of the gradients of a range of columns."""

    key: Array
    value: Array


def _at_least_2d(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (2 - len(shape)) + tuple(shape)
