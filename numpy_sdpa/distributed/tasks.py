"""What a worker does: one tile, or the beginning or the end of a strip of tiles. Nothing here knows of Dask.

A strip is a chunk of queries, or a chunk of keys, on its way from tile to tile. A tile is a call of its own, by the
blockwise engine, in which the offset and the lengths are counted from the tile's corner.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa import blockwise, steps
from numpy_sdpa._internal.namespace import Array, DType, Namespace, arange, array_namespace, astype, computing
from numpy_sdpa._internal.options import Dropout, Inputs, Options, looks_additive, resolve
from numpy_sdpa._internal.shapes import sum_to_shape
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


class Strip(NamedTuple):
    """A chunk of queries or of keys, and what the tiles that it has passed through have made of it."""

    arrays: Arrays  # by the names of the public call
    sums: Any  # Partial of queries, forward; gradients by name, backward
    upstream: Any = None  # of queries, backward: grad_output and RowStatistics


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


# Forward: a strip of queries collects the running softmax, a strip of keys is only read


def begin_rows(call: Call, shape: tuple[int, ...], names: list[str], arrays: list[Array]) -> Strip:
    """A strip of queries; `shape` is (B…, Hq, L) of its part of the plane."""
    strip = Strip(dict(zip(names, arrays, strict=True)), None)
    xp = _module_of(strip)
    real = xp.zeros((), dtype=call.compute_dtype).real.dtype
    with computing(xp, strip.arrays["query"]):
        nothing = Partial(
            sums=xp.zeros((*shape, call.value_size), dtype=call.compute_dtype),
            row_sum=xp.zeros((*shape, 1), dtype=call.compute_dtype),
            row_shift=xp.full((*shape, 1), -xp.inf, dtype=real),
        )
    return strip._replace(sums=nothing)


def begin_columns(names: list[str], arrays: list[Array]) -> Strip:
    return Strip(dict(zip(names, arrays, strict=True)), None)


def forward_tile(
    call: Call, place: Place, names: list[str], rows: Strip, columns: Strip, arrays: list[Array]
) -> tuple[Strip, Strip]:
    """Both strips after the tile; `arrays` are the tile's parts of mask, bias and dropout mask."""
    tile = dict(zip(names, arrays, strict=True))
    inputs, options = resolved(call, place, rows.arrays | columns.arrays | tile)
    with computing(options.xp, options.like):
        partial = _partial_of(options.xp, blockwise.forward(inputs, options))
        return rows._replace(sums=running.join(options.xp, rows.sums, partial)), columns


def _partial_of(xp: Namespace, residuals: Any) -> Partial:
    """The tile's results before the division by the row's sum: as such, parts of a row add up.

    This is `merge_attention` with lse left as what it is made of, shift + log(sum): lse itself has lost the sum's
    digits where logits are large.
    """
    row_sum = residuals.row_sum[..., None]
    row_shift = xp.where(row_sum == 0, -xp.inf, residuals.row_shift[..., None])
    return Partial(residuals.output * row_sum, row_sum, row_shift)


def end_rows(strips: list[Strip], sinks: Array | None) -> Arrays:
    """The results of whole rows, from the strips that have met their keys. The sink joins them here, once."""
    xp = _module_of(strips[0])
    with computing(xp, strips[0].arrays["query"]):
        partial = strips[0].sums
        for strip in strips[1:]:
            partial = running.join(xp, partial, strip.sums)
        sees = partial.row_sum[..., 0] != 0
        if sinks is not None:
            sinks = astype(sinks, partial.row_sum.dtype)
            partial = running.join(xp, partial, running.of_sinks(xp, sinks, partial))
        row_shift = xp.where(partial.row_shift == -xp.inf, 0, partial.row_shift)
        return {
            "output": partial.sums / xp.where(partial.row_sum == 0, 1, partial.row_sum),
            "row_shift": row_shift[..., 0],
            "row_sum": partial.row_sum[..., 0],
            "lse": steps.log_sum_exp(xp, row_shift, partial.row_sum)[..., 0],
            "sees": sees,
        }


# Backward: a strip collects the gradients of what it carries; that of queries also those of single numbers

_SUMMED = ("query", "key", "value", "bias", "alibi_slopes")


def begin_columns_backward(call: Call, names: list[str], arrays: list[Array]) -> Strip:
    strip = begin_columns(names, arrays)
    xp = _module_of(strip)
    return strip._replace(
        sums={
            name: xp.zeros(array.shape, dtype=call.compute_dtype)
            for name, array in strip.arrays.items()
            if name in _SUMMED
        }
    )


def begin_rows_backward(
    call: Call, names: list[str], known_names: list[str], arrays: list[Array], known_rows: list[Array], sinks: Array | None
) -> Strip:
    """`known_rows`: the results of `end_rows`, grad_output and grad_lse. So D and the statistics are of whole rows."""
    strip = begin_columns_backward(call, names, arrays)
    xp, known, dtype = _module_of(strip), dict(zip(known_names, known_rows, strict=True)), call.compute_dtype
    with computing(xp, strip.arrays["query"]):
        grad_output, row_term = xp.zeros_like(known["output"]), xp.zeros_like(known["lse"])
        if "grad_lse" in known:
            row_term = xp.where(known["lse"] == -xp.inf, 0, -astype(known["grad_lse"], dtype))
        if "grad_output" in known:
            grad_output = xp.where(known["sees"][..., None], astype(known["grad_output"], dtype), 0)
            row_term = row_term + xp.sum(grad_output * known["output"], axis=-1)
        statistics = RowStatistics(known["row_shift"], known["row_sum"], row_term)
        sums = {"scale": xp.zeros((), dtype=dtype)}
        if "softcap" in strip.arrays or "softcap" in call.options:
            sums["softcap"] = sums["scale"]
        if sinks is not None:
            sums["sinks"] = _sinks_backward(xp, sinks, statistics)
    return strip._replace(sums=strip.sums | sums, upstream=(grad_output, statistics))


def _sinks_backward(xp: Namespace, sinks: Array, statistics: RowStatistics) -> Array:
    """g_sink = −p_sink (D − g_lse), summed over rows."""
    row_shift, row_sum, row_term = (array[..., None] for array in statistics)
    sink_weight = steps.sink_weight(xp, astype(sinks, row_sum.dtype), row_shift, row_sum)
    return sum_to_shape(xp, -xp.sum(sink_weight * row_term, axis=(-2, -1)), sinks.shape)


def backward_tile(
    call: Call, place: Place, names: list[str], rows: Strip, columns: Strip, arrays: list[Array], grad_bias: Array | None
) -> tuple[Strip, Strip, Array | None]:
    """Both strips after the tile, and the gradient of a bias that has rows and columns, with `grad_bias` added."""
    tile = dict(zip(names, arrays, strict=True))
    inputs, options = resolved(call, place, rows.arrays | columns.arrays | tile)
    xp = options.xp
    grad_output, statistics = rows.upstream
    with computing(xp, options.like):
        gradients = blockwise.backward_from_rows(inputs, options, grad_output, statistics)._asdict()

        def added(strip: Strip) -> Strip:
            return strip._replace(
                sums={
                    name: total + sum_to_shape(xp, gradients[name], total.shape) if name != "sinks" else total
                    for name, total in strip.sums.items()
                }
            )

        if "bias" in tile:
            of_tile = sum_to_shape(xp, gradients["bias"], tile["bias"].shape)
            grad_bias = of_tile if grad_bias is None else grad_bias + of_tile
        return added(rows), added(columns), grad_bias


def end_backward(strips: list[Strip]) -> Arrays:
    """The gradients that strips of the same rows, or of the same columns, have collected."""
    sums = strips[0].sums
    for strip in strips[1:]:
        sums = sums | {name: sums[name] + total for name, total in strip.sums.items()}
    return sums


# Small things


def part_of(results: Arrays, name: str, summed_axes: int) -> Array:
    """One of the results, behind as many axes of size 1 as it is still to be summed over."""
    array = results[name]
    return array.reshape((1,) * summed_axes + array.shape)


def zeros(call: Call, like: Array) -> Array:
    xp = array_namespace({"like": like})
    return xp.zeros(like.shape, dtype=call.compute_dtype)


def _module_of(strip: Strip) -> Namespace:
    return array_namespace({name: strip.arrays[name] for name in ("query", "key") if name in strip.arrays})


# What only the numbers of a Dask array can tell


def stand_in(shape: tuple[int, ...], dtype: DType, fill: int = 0) -> np.ndarray:
    """An array to be looked at for its shape and dtype, in the memory of one number."""
    return np.broadcast_to(np.full((), fill, dtype=dtype), shape)


def checked(name: str, operands: dict[str, tuple[Any, DType]], options: Arrays, array: Array) -> Array:
    """Lengths or a number, found to be what every call demands of them; `operands`: shape and dtype of query, …"""
    query, key, value = (stand_in(*operands[name]) for name in ("query", "key", "value"))
    resolve(query, key, value, None, {**options, name: array.tolist()})
    return array


def checked_mask(is_one: Array, is_mask: Array, least: Array, most: Array) -> Array:
    """A chunk of a mask of floating numbers, if the whole of it holds 0 and 1 only."""
    if not is_mask:
        raise ValueError(looks_additive(least, most))
    return is_one
