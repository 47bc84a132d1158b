"""The plain tile, with every pass that can be folded into a matrix product folded into it.

Without softcap, ALiBi, bias and dropout, and with finite numbers, a tile costs its matrix products, one exp and,
backward, one multiplication. It is the steps of the chain in another arrangement:

- the scale is multiplied into the rows of Q, and the query heads that share a key head are rows of one matrix;
- the row shift is 0: by Cauchy and Schwarz no score exceeds c |q| max |k|, and where that bound is small, exp can
  neither overflow nor lose a row. Blocks of rows where it is not small take the steps, with a running maximum;
- a mask is multiplied in after exp: with finite numbers this selects;
- backward, 1 / row_sum is multiplied into the rows of gO, and D is one more column of them:
  [gO, −D] / row_sum · [V, 1]ᵀ = (gP − D) / row_sum, whose product with exp(S) is gS.

Sums over keys are products with a column of ones, which BLAS does three times as fast as a reduction.
"""

import math
from typing import NamedTuple

import numpy as np

from numpy_sdpa._internal.namespace import Array, DType
from numpy_sdpa._internal.options import Options
from numpy_sdpa.blockwise.running import Partial, Rows
from numpy_sdpa.blockwise.workers import Buffers
from numpy_sdpa.chain import Differentiable

# exp(±40) = 2·10^±17 leaves 20 decades of float32 on both sides for the length of a row, for values and for gradients;
# a score of 40 is still rounded to 2·10⁻⁶. Of 24 heads of a trained encoder (`data`), one goes beyond.
LARGEST_SCORE = 40.0
# What values and upstream gradients may be, so that their products with exp(±40) and sums of 10⁵ of those stay normal
# float32 numbers.
LARGEST_VALUE, SMALLEST_GRADIENT, LARGEST_GRADIENT = 1e15, 1e-12, 1e12
# How many keys are measured at once: a copy of that many, in the compute dtype, stays in cache.
_NORM_BLOCK = 1024


class Norms(NamedTuple):
    """The largest Euclidean norms of a slab's keys and values; inf or NaN where one is not finite."""

    key: float
    value: float


def is_plain(options: Options, inputs: Differentiable) -> bool:
    """Whether a slab's tiles may be folded, as far as options go."""
    extras = (inputs.softcap, inputs.alibi_slopes, inputs.bias, options.dropout)
    return (
        options.xp is np
        and options.compute_dtype in (np.float32, np.float64)
        and all(extra is None for extra in extras)
    )


def norms_of(key: Array, value: Array, dtype: DType) -> Norms:
    return Norms(largest_norm(key, dtype), largest_norm(value, dtype))


def largest_norm(array: Array, dtype: DType) -> float:
    """max |row| of (1, rows, X); 0 without rows."""
    largest = 0.0
    for start in range(0, array.shape[-2], _NORM_BLOCK):
        block = array[0, start : start + _NORM_BLOCK].astype(dtype, copy=False)
        largest = np.maximum(largest, np.einsum("ij,ij->i", block, block).max())  # unlike max(), passes NaN on
    return math.sqrt(largest) if np.isfinite(largest) else math.inf


def fold_rows(array: Array, out: np.ndarray) -> np.ndarray:
    """(heads, rows, X) into (rows · heads, X): the heads of a row are neighbours, so a range of rows is one range."""
    np.copyto(unfold_rows(out, array.shape[0]), array, casting="same_kind")
    return out


def unfold_rows(folded: np.ndarray, heads: int) -> np.ndarray:
    """(rows · heads, X) as (heads, rows, X)."""
    return folded.reshape(len(folded) // heads, heads, folded.shape[-1]).swapaxes(0, 1)


def _product_operand(array: Array, dtype: DType, name: str, buffers: Buffers) -> np.ndarray:
    """The matrix itself where BLAS can read it, else a copy in the compute dtype."""
    if array.dtype == dtype and array.strides[-1] == array.itemsize and array.strides[0] > 0:
        return array
    copy = buffers.take(name, array.shape, dtype)
    np.copyto(copy, array, casting="same_kind")
    return copy


def _hide(tile: np.ndarray, visible: Array | None, heads: int) -> None:
    """0 where hidden, in a tile of folded rows."""
    if visible is None:
        return
    by_row = visible.swapaxes(0, 1) if visible.ndim == 3 else visible[:, None, :]
    unfolded = tile.reshape(len(tile) // heads, heads, tile.shape[-1])
    np.multiply(unfolded, by_row, out=unfolded)


class ForwardRows:
    """A block of query rows: tiles are added one after the other."""

    def __init__(self, query: Array, scale: Array, value_size: int, buffers: Buffers) -> None:
        self._heads, rows, size = query.shape
        self._dtype = scale.dtype
        self._buffers = buffers
        count = self._heads * rows
        self._query = fold_rows(query, buffers.take("query", (count, size), self._dtype))
        np.multiply(self._query, scale, out=self._query)
        self._sums = buffers.take("sums", (count, value_size), self._dtype)
        self._row_sum = buffers.take("row sum", (count, 1), self._dtype)
        self._sums[:] = 0
        self._row_sum[:] = 0

    def is_safe(self, norms: Norms) -> bool:
        return _is_safe(self._query, norms)

    def add(self, rows: slice, visible: Array | None, key: Array, value: Array) -> None:
        """`rows` counts from the block's first; `key` and `value` are the tile's, (columns, X)."""
        take, dtype = self._buffers.take, self._dtype
        folded = _folded_range(rows, self._heads)
        key = _product_operand(key, dtype, "key", self._buffers)
        value = _product_operand(value, dtype, "value", self._buffers)
        query, sums, row_sum = self._query[folded], self._sums[folded], self._row_sum[folded]
        weights = np.matmul(query, key.T, out=take("weights", (len(query), len(key)), dtype))
        np.exp(weights, out=weights)
        _hide(weights, visible, self._heads)
        np.add(sums, np.matmul(weights, value, out=take("sums of tile", sums.shape, dtype)), out=sums)
        ones = take("ones", (len(key), 1), dtype)
        ones[:] = 1
        np.add(row_sum, np.matmul(weights, ones, out=take("row sum of tile", row_sum.shape, dtype)), out=row_sum)

    def finish(self) -> Partial:
        """Views of buffers: to be used before the next block begins."""
        row_sum = unfold_rows(self._row_sum, self._heads)
        return Partial(unfold_rows(self._sums, self._heads), row_sum, np.zeros_like(row_sum))


class Columns:
    """Keys and values of a range of columns, ready for the products of the backward."""

    def __init__(self, key: Array, value: Array, dtype: DType, buffers: Buffers) -> None:
        """`key`, `value`: (columns, X)."""
        self.key = _product_operand(key, dtype, "keys", buffers)
        self.value_and_one = buffers.take("values and one", (len(value), value.shape[1] + 1), dtype)
        np.copyto(self.value_and_one[:, :-1], value, casting="same_kind")
        self.value_and_one[:, -1] = 1


class BackwardRows:
    """A block of query rows: the gradients that each tile of it gives."""

    def __init__(self, query: Array, scale: Array, rows: Rows, buffers: Buffers) -> None:
        self._heads, length, size = query.shape
        self._scale = scale
        self._dtype = dtype = scale.dtype
        self._buffers = buffers
        count = self._heads * length
        self._query = fold_rows(query, buffers.take("query", (count, size), dtype))
        self._scaled_query = np.multiply(self._query, scale, out=buffers.take("scaled query", (count, size), dtype))
        self._upstream = buffers.take("upstream", (count, rows.grad_output.shape[-1] + 1), dtype)
        upstream = unfold_rows(self._upstream, self._heads)
        empty = rows.row_sum == 0  # sees nothing: gives nothing
        factor = np.where(empty, 0, np.exp(-rows.row_shift) / np.where(empty, 1, rows.row_sum))
        np.multiply(rows.grad_output, factor, out=upstream[..., :-1])
        np.multiply(rows.row_term, -factor, out=upstream[..., -1:])
        self._grad_query = buffers.take("grad query", (count, size), dtype)
        self._grad_query[:] = 0

    def add(
        self, rows: slice, visible: Array | None, columns: Columns, part: slice, grad_key: Array, grad_value: Array
    ) -> None:
        """Add to the gradients (columns, X). `rows` counts from the block's first, `part` from the columns' first."""
        take, dtype = self._buffers.take, self._dtype
        folded = _folded_range(rows, self._heads)
        query, upstream, grad_query = self._scaled_query[folded], self._upstream[folded], self._grad_query[folded]
        key, value_and_one = columns.key[part], columns.value_and_one[part]
        shape = len(query), len(key)
        weights = np.matmul(query, key.T, out=take("weights", shape, dtype))
        np.exp(weights, out=weights)
        _hide(weights, visible, self._heads)
        product = take("product with values", grad_value.shape, dtype)
        np.add(grad_value, np.matmul(weights.T, upstream[:, :-1], out=product), out=grad_value)
        grad_scores = np.matmul(upstream, value_and_one.T, out=take("grad scores", shape, dtype))
        np.multiply(grad_scores, weights, out=grad_scores)
        product = take("product with keys", query.shape, dtype)
        np.add(grad_query, np.matmul(grad_scores, key, out=product), out=grad_query)
        product = take("product with queries", grad_key.shape, dtype)
        np.add(grad_key, np.matmul(grad_scores.T, query, out=product), out=grad_key)

    def finish(self) -> tuple[Array, Array]:
        """Gradients of query (heads, rows, E), a view of a buffer, and of scale: c (gS K) and Σ q · (gS K)."""
        grad_scale = np.vdot(self._query, self._grad_query)
        np.multiply(self._grad_query, self._scale, out=self._grad_query)
        return unfold_rows(self._grad_query, self._heads), grad_scale


def backward_is_safe(query: Array, scale: Array, rows: Rows, norms: Norms) -> bool:
    """Whether a block of rows may be folded backward."""
    scaled = np.multiply(query, scale, dtype=scale.dtype)
    if not _is_safe(scaled.reshape(math.prod(scaled.shape[:-1]), scaled.shape[-1]), norms):
        return False
    largest = np.abs(rows.grad_output).max(axis=-1, initial=0)
    usable = (largest == 0) | ((largest >= SMALLEST_GRADIENT) & (largest <= LARGEST_GRADIENT))
    return bool(usable.all() and not np.isnan(rows.row_shift).any() and np.isfinite(rows.row_sum).all())


def _is_safe(scaled_query: np.ndarray, norms: Norms) -> bool:
    """c |q| max |k| ≤ 40, and values that exp(40) does not lift out of range."""
    squares = np.einsum("ij,ij->i", scaled_query, scaled_query)
    bound = math.sqrt(squares.max(initial=0)) * norms.key
    return bound <= LARGEST_SCORE and norms.value <= LARGEST_VALUE


def _folded_range(rows: slice, heads: int) -> slice:
    return slice(rows.start * heads, rows.stop * heads)
