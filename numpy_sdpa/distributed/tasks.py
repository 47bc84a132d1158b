"""What a worker does: one tile, or the beginning or the end of a strip of tiles. Nothing here knows of Dask.

A strip is a chunk of queries, or a chunk of keys, on its way from tile to tile. A tile is a call of its own, by the
blockwise engine, in which the offset and the lengths are counted from the tile's corner.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa import blockwise, steps
from numpy_sdpa._internal.namespace import Array, DType, Namespace, arange, array_namespace, astype, computing, owned
from numpy_sdpa._internal.options import Dropout, Inputs, Options
from numpy_sdpa._internal.shapes import sum_to_shape
from numpy_sdpa._internal.validation import looks_additive, resolve
from numpy_sdpa.blockwise import running
from numpy_sdpa.blockwise.parts import RowStatistics
from numpy_sdpa.blockwise.running import Partial

Arrays = dict[str, Array]


class Call(NamedTuple):
    """What holds in every tile of a call. It goes with every task, so it holds numbers only."""

    batch: tuple[int, ...]  # B… of the whole
    value_size: int
    compute_dtype: DType
    offset: int | None  # None: it differs within the batch, and goes with the rows
    options: dict[str, Any]  # the others, as the caller wrote them


class Place(NamedTuple):
    """Where a tile begins in the whole."""

    batch: tuple[int, ...]
    head: int
    row: int
    column: int


class Known(NamedTuple):
    """What a backward knows of a chunk of queries: this is over all keys, wherever they are."""

    grad_output: Array | None  # as it was given
    sees: Array  # (B…, Hq, L): True where a query sees a key
    statistics: RowStatistics


class Strip(NamedTuple):
    """A chunk of queries or of keys, and what the tiles that it has passed through have made of it."""

    arrays: Arrays  # by the names of the public call
    sums: Any = None  # of queries, forward: Partial; backward: gradients by name
    known: Any = None  # Known, of queries, backward


def resolved(call: Call, place: Place, arrays: Arrays) -> tuple[Inputs, Options]:
    """The tile as a call of its own. p(i) − j is what it is in the whole, and so are dropout's coordinates."""
    given = dict(arrays)
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    given["query_offset"] = given.pop("query_offset", call.offset) + (place.row - place.column)
    for name, first, length in (
        ("query_lengths", place.row, query.shape[-2]),
        ("key_lengths", place.column, key.shape[-2]),
    ):
        if name in given:
            given[name] = (given[name] - first).clip(0, length)
    inputs, options = resolve(query, key, value, given.pop("mask", None), {**call.options, **given})
    if options.dropout is not None:
        dropout = _dropout_at(options.dropout, call, place, options)
        options = dataclasses.replace(options, dropout=dropout)
    return inputs, options


def _dropout_at(dropout: Dropout, call: Call, place: Place, options: Options) -> Dropout:
    """The generator's coordinates in the whole: chunks of several batch axes are not in one piece there."""
    xp, like = options.xp, options.like
    flat = xp.zeros_like(dropout.batches)
    for axis, (first, whole) in enumerate(zip(place.batch, call.batch, strict=True)):
        here = arange(xp, first, first + flat.shape[axis], like)
        flat = flat * whole + xp.reshape(here, (-1,) + (1,) * (flat.ndim - axis - 1))
    return dropout._replace(
        batches=flat, heads=dropout.heads + place.head, first_row=place.row, first_column=place.column
    )


def begin(names: list[str], arrays: list[Array]) -> Strip:
    return Strip(dict(zip(names, arrays, strict=True)))


def _passed(strip: Strip, sums: Any) -> Strip:
    """The strip after a tile. What came from another worker is a view of a message: that may go, if copies are kept."""
    known = strip.known
    if known is not None:
        grad_output = None if known.grad_output is None else owned(known.grad_output)
        known = Known(grad_output, owned(known.sees), RowStatistics(*map(owned, known.statistics)))
    return Strip({name: owned(array) for name, array in strip.arrays.items()}, sums, known)


# Forward: a strip of queries collects the running softmax, a strip of keys is only read


def forward_tile(
    call: Call, place: Place, names: list[str], rows: Strip, columns: Strip, arrays: list[Array]
) -> tuple[Strip, Strip]:
    """Both strips after the tile; `arrays` are the tile's parts of mask, bias and dropout mask."""
    inputs, options = resolved(call, place, rows.arrays | columns.arrays | dict(zip(names, arrays, strict=True)))
    xp = options.xp
    with computing(xp, options.like):
        partial = _partial_of(xp, blockwise.forward(inputs, options))
        if rows.sums is not None:
            partial = running.join(xp, rows.sums, partial)
        return _passed(rows, partial), _passed(columns, None)


def _partial_of(xp: Namespace, residuals: Any) -> Partial:
    """The tile's results before the division by the row's sum: as such, parts of a row add up.

    This is `merge_attention` with lse left as what it is made of, shift + log(sum): lse itself has lost the sum's
    digits where logits are large.
    """
    row_sum = residuals.row_sum[..., None]
    row_shift = xp.where(row_sum == 0, -xp.inf, residuals.row_shift[..., None])
    return Partial(residuals.output * row_sum, row_sum, row_shift)


def end_rows(call: Call, shape: tuple[int, ...], strips: list[Strip], sinks: Array | None) -> Arrays:
    """The results of whole rows, (B…, Hq, L) = `shape`. The sink joins the strips' keys here, once."""
    xp, like = _module_of(strips[0]), strips[0].arrays["query"]
    with computing(xp, like):
        partial = _nothing(xp, call, shape)
        for strip in strips:
            if strip.sums is not None:
                partial = running.join(xp, partial, strip.sums)
        sees = partial.row_sum[..., 0] != 0
        if sinks is not None:
            sinks = astype(sinks, call.compute_dtype)
            partial = running.join(xp, partial, running.of_sinks(xp, sinks, partial))
        row_shift = steps.finite_shift(xp, partial.row_shift)
        return {
            "output": partial.sums / steps.divisor(xp, partial.row_sum),
            "row_shift": row_shift[..., 0],
            "row_sum": partial.row_sum[..., 0],
            "lse": steps.log_sum_exp(xp, row_shift, partial.row_sum)[..., 0],
            "sees": sees,
        }


def _nothing(xp: Namespace, call: Call, shape: tuple[int, ...]) -> Partial:
    """Attention over no keys."""
    dtype = call.compute_dtype
    row_sum = xp.zeros((*shape, 1), dtype=dtype)
    row_shift = xp.full((*shape, 1), -xp.inf, dtype=row_sum.real.dtype)
    return Partial(xp.zeros((*shape, call.value_size), dtype=dtype), row_sum, row_shift)


# Backward: a strip collects the gradients of what it carries, one of queries also those of scale and softcap


def begin_rows_backward(
    call: Call, names: list[str], known_names: list[str], arrays: list[Array], known_arrays: list[Array]
) -> Strip:
    """`known_arrays`: the results of `end_rows`, grad_output and grad_lse: all statistics are of whole rows."""
    strip, known = begin(names, arrays), dict(zip(known_names, known_arrays, strict=True))
    xp, grad_output = _module_of(strip), known.get("grad_output")
    with computing(xp, strip.arrays["query"]):
        row_term = xp.zeros_like(known["lse"])
        if "grad_lse" in known:
            row_term = steps.only_where(xp, known["lse"] != -xp.inf, -astype(known["grad_lse"], call.compute_dtype))
        if grad_output is not None:
            reaching = _reaching(xp, call, grad_output, known["sees"])
            row_term = row_term + xp.sum(reaching * known["output"], axis=-1)
        statistics = RowStatistics(known["row_shift"], known["row_sum"], row_term)
    return strip._replace(known=Known(grad_output, known["sees"], statistics))


def _reaching(xp: Namespace, call: Call, grad_output: Array, sees: Array) -> Array:
    """In the compute dtype, 0 in rows that see nothing: there it reaches nothing, whatever it is."""
    return steps.only_where(xp, sees[..., None], astype(grad_output, call.compute_dtype))


def backward_tile(
    call: Call,
    place: Place,
    names: list[str],
    rows: Strip,
    columns: Strip,
    arrays: list[Array],
    grad_bias: Array | None,
) -> tuple[Strip, Strip, Array | None]:
    """Both strips after the tile, and the gradient of a bias that has rows and columns, with `grad_bias` added."""
    tile = dict(zip(names, arrays, strict=True))
    inputs, options = resolved(call, place, rows.arrays | columns.arrays | tile)
    xp = options.xp
    with computing(xp, options.like):
        grad_output, sees, statistics = rows.known
        if grad_output is None:
            grad_output = xp.zeros((*sees.shape, call.value_size), dtype=call.compute_dtype)
        grad_output = _reaching(xp, call, grad_output, sees)
        gradients = blockwise.backward_from_rows(inputs, options, grad_output, statistics)._asdict()
        if "bias" in tile:
            of_tile = sum_to_shape(xp, gradients["bias"], tile["bias"].shape)
            grad_bias = of_tile if grad_bias is None else grad_bias + of_tile
        return _added(xp, call, rows, gradients), _added(xp, call, columns, gradients), grad_bias


def _added(xp: Namespace, call: Call, strip: Strip, gradients: Arrays) -> Strip:
    """The strip after the tile that has made these gradients."""
    sums = {name: sum_to_shape(xp, gradients[name], shape) for name, shape in _summed(call, strip).items()}
    if strip.sums is not None:
        sums = {name: strip.sums[name] + array for name, array in sums.items()}
    return _passed(strip, sums)


def _summed(call: Call, strip: Strip) -> dict[str, tuple[int, ...]]:
    """The gradients that a strip collects in its tiles, and their shapes."""
    differentiable = ("query", "key", "value", "bias", "alibi_slopes")
    shapes = {name: strip.arrays[name].shape for name in differentiable if name in strip.arrays}
    if strip.known is not None:
        has_softcap = "softcap" in strip.arrays or "softcap" in call.options
        shapes |= {"scale": (), "softcap": ()} if has_softcap else {"scale": ()}
    return shapes


def end_backward(call: Call, strips: list[Strip], sinks: Array | None) -> Arrays:
    """The gradients that strips of the same rows or columns have collected, and that of the sinks of whole rows."""
    xp, first = _module_of(strips[0]), strips[0]
    with computing(xp, next(iter(first.arrays.values()))):
        gradients = {name: xp.zeros(shape, dtype=call.compute_dtype) for name, shape in _summed(call, first).items()}
        for sums in (strip.sums for strip in strips if strip.sums is not None):
            gradients = {name: gradient + sums[name] for name, gradient in gradients.items()}
        if sinks is not None:
            gradients["sinks"] = _sinks_backward(xp, sinks, first.known.statistics)
    return gradients


def _sinks_backward(xp: Namespace, sinks: Array, statistics: RowStatistics) -> Array:
    """g_sink = −p_sink (D − g_lse), summed over rows."""
    row_shift, row_sum, row_term = (array[..., None] for array in statistics)
    sink_weight = steps.sink_weight(xp, astype(sinks, row_sum.dtype), row_shift, row_sum)
    return sum_to_shape(xp, -xp.sum(sink_weight * row_term, axis=(-2, -1)), sinks.shape)


def part_of(results: Arrays, name: str, summed_axes: int) -> Array:
    """One of the results, behind as many axes of size 1 as it is still to be summed over."""
    array = results[name]
    return array.reshape((1,) * summed_axes + array.shape)


def zeros(call: Call, like: Array) -> Array:
    xp = array_namespace({"like": like})
    with computing(xp, like):
        return xp.zeros(like.shape, dtype=call.compute_dtype)


def _module_of(strip: Strip) -> Namespace:
    return array_namespace({name: strip.arrays[name] for name in ("query", "key") if name in strip.arrays})


# What only the numbers of a Dask array can tell


def stand_in(shape: tuple[int, ...], dtype: DType, fill: int = 0) -> np.ndarray:
    """An array to be looked at for its shape and dtype, in the memory of one number."""
    return np.broadcast_to(np.full((), fill, dtype=dtype), shape)


def checked(name: str, operands: dict[str, tuple[Any, DType]], options: Arrays, array: Array) -> Array:
    """Lengths or a number, found to be what every call demands of them; `operands`: shape and dtype of query, …"""
    if array.size > 0:
        query, key, value = (stand_in(*operands[name]) for name in ("query", "key", "value"))
        resolve(query, key, value, None, {**options, name: array.tolist()})
    return array


def checked_mask(is_one: Array, is_mask: Array, least: Array, most: Array) -> Array:
    """A chunk of a mask of floating numbers, if the whole of it holds 0 and 1 only."""
    if not is_mask:
        raise ValueError(looks_additive(least, most))
    return is_one
