"""What forward and backward share: the arrays of a call, those of a slab, and those of a tile."""

from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa import chain
from numpy_sdpa._internal.namespace import Array, computing, operand
from numpy_sdpa._internal.options import Options
from numpy_sdpa.blockwise.running import shift_dtype
from numpy_sdpa.blockwise.slabs import Slab
from numpy_sdpa.blockwise.workers import Workers, default_workers
from numpy_sdpa.chain import Differentiable
from numpy_sdpa.visibility import Tile


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


def with_leading_axes(arrays: Any, options: Options) -> Differentiable:
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
    return Results(
        output=xp.empty((*rows, value_size), dtype=dtype),
        row_shift=xp.empty(rows, dtype=shift_dtype(options)),
        row_sum=xp.empty(rows, dtype=dtype),
        lse=xp.empty(rows, dtype=dtype),
    )


def workers_of(options: Options) -> Workers:
    count = (options.workers or default_workers()) if options.xp is np else 1
    return Workers(count, lambda: computing(options.xp, options.like))


def inputs_of_slab(slab: Slab, arrays: Differentiable) -> Differentiable:
    """Views of the slab's part of the inputs, in the caller's dtypes."""
    return arrays._replace(
        query=slab.queries(arrays.query),
        key=slab.keys(arrays.key),
        value=slab.keys(arrays.value),
        bias=slab.plane(arrays.bias),
        sinks=slab.per_head(arrays.sinks),
        alibi_slopes=slab.per_head(arrays.alibi_slopes),
    )


def operands_of_tile(
    options: Options, inputs: Differentiable, tile: Tile, visible: Array | None
) -> tuple[Differentiable, chain.View]:
    """The tile's inputs in the compute dtype."""
    operands = inputs._replace(
        query=inputs.query[..., tile.rows, :],
        key=inputs.key[..., tile.columns, :],
        value=inputs.value[..., tile.columns, :],
        bias=chain.tile_of_bias(inputs.bias, tile),
    )
    xp, dtype = options.xp, options.compute_dtype
    operands = Differentiable(*(None if array is None else operand(xp, array, dtype) for array in operands))
    return operands, chain.view_with(options, tile, visible, operands.alibi_slopes is not None)
