"""The plain tile, with every pass that can be folded into a matrix product folded into it.

Without softcap, ALiBi, bias and dropout a tile costs its matrix products, one exp and, backward, one multiplication.
It is the steps of the chain in another arrangement:

- the scale is multiplied into the rows of Q, and the query heads that share a key head are rows of one matrix;
- the row shift is 0. Where a row's sum shows that exp has left its comfortable range, that row is done again by the
  steps, with a running maximum;
- backward, 1 / row_sum is multiplied into the rows of gO, and D is one more column of them:
  [gO, −D] / row_sum · [V, 1]ᵀ = (gP − D) / row_sum, whose product with exp(S) is gS.

A row's sum is one more column of its product with the values: [exp(S) V, row_sum] = exp(S) [V, 1].

Whether a row is folded depends on that row and on keys that it sees alone: what is hidden changes no bit of it. So keys
that could spoil a product (not finite, or huge) count as 0 here, and the rows that see one are left to the steps.
"""

import math
from typing import NamedTuple

import numpy as np

from numpy_sdpa._internal.namespace import Array, DType
from numpy_sdpa._internal.options import Options
from numpy_sdpa.blockwise.running import Partial, Rows
from numpy_sdpa.blockwise.tiles import counted_from, has_few_rows, seen_tiles
from numpy_sdpa.blockwise.workers import Buffers
from numpy_sdpa.chain import Differentiable

# The range of a row's lse. exp(±40) = 2·10^±17 leaves 20 decades of float32 on both sides, for values, for upstream
# gradients and for what of the row is smaller than its sum.
LARGEST_LSE = 40.0
# Of entries of query, key and value: products of two of them, summed over a head, are finite in float32.
LARGEST_ENTRY = 1e15
# Of the norm of a row of the upstream gradient, as it is (so that its square is a float32) and divided by row_sum (so
# that its products with values and weights are).
SMALLEST_UPSTREAM, LARGEST_UPSTREAM = 1e-18, 1e15
# How many rows are looked at together: a copy of so many, in the compute dtype, stays in cache.
_ROWS_AT_ONCE = 1024


class Keys(NamedTuple):
    """Keys and values of a slab without what could spoil a product."""

    key: Array  # (1, S, E)
    value: Array  # (1, S, Ev)
    is_spoilt: np.ndarray | None  # (S,): True where they are 0 here only; None: nowhere


def is_plain(options: Options, inputs: Differentiable) -> bool:
    """Whether a slab's tiles may be folded, as far as options go."""
    extras = (inputs.softcap, inputs.alibi_slopes, inputs.bias, options.dropout)
    return (
        options.xp is np
        and options.compute_dtype in (np.float32, np.float64)
        and all(extra is None for extra in extras)
        and not has_few_rows(options)  # then looking at the keys would cost as much as using them
    )


def plain_keys(options: Options, inputs: Differentiable) -> Keys | None:
    """The slab's keys and values for its folded tiles; None where its tiles are not folded."""
    if not is_plain(options, inputs):
        return None
    key, value, dtype = inputs.key, inputs.value, options.compute_dtype
    spoilt = [rows for rows in (_spoilt_rows(array, dtype) for array in (key, value)) if rows is not None]
    if not spoilt:
        return Keys(key, value, None)
    is_spoilt = spoilt[0] | spoilt[-1]
    zero = np.zeros((), dtype)
    return Keys(np.where(is_spoilt[..., None], zero, key), np.where(is_spoilt[..., None], zero, value), is_spoilt[0])


def sees_some(options: Options, rows: slice, column_blocks: list[slice], keys: np.ndarray) -> np.ndarray:
    """(heads, rows): which rows of a block see one of the keys that are True in (S,)."""
    sees = np.zeros((options.plane[-3], rows.stop - rows.start), dtype=bool)
    for tile, visible in seen_tiles(options, rows, column_blocks, None):
        some = keys[tile.columns]
        sees[:, counted_from(tile.rows, rows)] |= some.any() if visible is None else (visible & some).any(axis=-1)
    return sees


def _spoilt_rows(array: Array, dtype: DType) -> np.ndarray | None:
    """(…, rows): which rows of (…, rows, X) have an entry beyond `LARGEST_ENTRY`; None: none has."""
    spoilt = None
    for start in range(0, array.shape[-2], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        block = array[..., rows, :].astype(dtype, copy=False)
        if not _sum_of_squares(block) <= LARGEST_ENTRY**2:  # then some entry may be, or is NaN
            spoilt = np.zeros(array.shape[:-1], dtype=bool) if spoilt is None else spoilt
            spoilt[..., rows] = ~(np.abs(block) <= LARGEST_ENTRY).all(axis=-1)
    return spoilt


def _sum_of_squares(array: np.ndarray) -> float:
    """∞ or NaN tells that an entry may be: the fastest look at all of them, by BLAS."""
    flat = array.reshape(-1)
    return float(np.dot(flat, flat))


def is_foldable(query: Array, rows: Rows, dtype: DType) -> np.ndarray:
    """(heads, L): which rows may be folded backward. Those that see nothing give nothing, and are not."""
    lse = rows.row_shift[..., 0] + np.log(rows.row_sum[..., 0])
    norm = np.sqrt(np.einsum("hle,hle->hl", rows.grad_output, rows.grad_output))
    upstream = norm * np.exp(-lse)
    foldable = (np.abs(lse) <= LARGEST_LSE) & np.isfinite(rows.row_term[..., 0])
    in_range = (norm >= SMALLEST_UPSTREAM) & (upstream >= SMALLEST_UPSTREAM) & (upstream <= LARGEST_UPSTREAM)
    if not in_range.all():  # a row of zeros is as good
        in_range |= (rows.grad_output == 0).all(axis=-1)
    foldable &= in_range
    spoilt = _spoilt_rows(query, dtype)
    return foldable if spoilt is None else foldable & ~spoilt


def unfold_rows(folded: np.ndarray, heads: int) -> np.ndarray:
    """(rows · heads, X) as (heads, rows, X): the heads of a row are neighbours, so a range of rows is one range."""
    return folded.reshape(len(folded) // heads, heads, folded.shape[-1]).swapaxes(0, 1)


def _fold_into(out: np.ndarray, array: Array) -> np.ndarray:
    np.copyto(unfold_rows(out, array.shape[0]), array, casting="same_kind")
    return out


def _folded_range(rows: slice, heads: int) -> slice:
    return slice(rows.start * heads, rows.stop * heads)


def _product_operand(array: Array, dtype: DType, name: str, buffers: Buffers) -> np.ndarray:
    """The matrix itself or a copy, in the compute dtype and as `operand` would have it."""
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned:
        return array
    copy = buffers.take(name, array.shape, dtype)
    np.copyto(copy, array, casting="same_kind")
    return copy


def _exponentials(
    query: np.ndarray, key: np.ndarray, visible: Array | None, heads: int, buffers: Buffers
) -> np.ndarray:
    """exp(Q Kᵀ) of folded rows, 0 where hidden: selected by its bits, since there it may be ∞."""
    exponentials = buffers.take("weights", (len(query), len(key)), query.dtype)
    np.matmul(query, key.T, out=exponentials)
    np.exp(exponentials, out=exponentials)
    if visible is not None:
        by_row = visible.swapaxes(0, 1) if visible.ndim == 3 else visible[:, None, :]
        words = exponentials.view(f"i{exponentials.itemsize}").reshape(len(query) // heads, heads, len(key))
        every_bit = buffers.take("bits", by_row.shape, words.dtype)
        np.negative(by_row.view(np.int8), out=every_bit, casting="same_kind")  # −1 is all ones
        np.bitwise_and(words, every_bit, out=words)
    return exponentials


class ForwardRows:
    """A block of query rows: tiles are added one after the other."""

    def __init__(self, query: Array, scale: Array, value_size: int, buffers: Buffers) -> None:
        self._heads, rows, size = query.shape
        self._buffers = buffers
        self._dtype = dtype = scale.dtype
        count = self._heads * rows
        self._query = _fold_into(buffers.take("query", (count, size), dtype), query)
        np.multiply(self._query, scale, out=self._query)
        self._sums = buffers.take("sums and row sum", (count, value_size + 1), dtype)
        self._sees = np.zeros((self._heads, rows), dtype=bool)
        self._sums[:] = 0

    def add(self, rows: slice, visible: Array | None, key: Array, value: Array) -> None:
        """`rows` counts from the block's first; `key` and `value` are the tile's, (columns, X)."""
        take, dtype = self._buffers.take, self._dtype
        folded = _folded_range(rows, self._heads)
        key = _product_operand(key, dtype, "key", self._buffers)
        sums = self._sums[folded]
        weights = _exponentials(self._query[folded], key, visible, self._heads, self._buffers)
        product = np.matmul(weights, _and_one(value, dtype, self._buffers), out=take("product", sums.shape, dtype))
        np.add(sums, product, out=sums)
        self._sees[:, rows] |= True if visible is None else visible.any(axis=-1)

    def is_right(self) -> np.ndarray:
        """(heads, rows): the rows that are as they should be. The others have left the range."""
        row_sum = unfold_rows(self._sums, self._heads)[..., -1]
        largest = math.exp(LARGEST_LSE)
        return ((row_sum >= 1 / largest) & (row_sum <= largest)) | ~self._sees

    def partial(self) -> Partial:
        """Views of buffers: to be used before the next block begins."""
        sums = unfold_rows(self._sums, self._heads)
        row_sum = sums[..., -1:]
        return Partial(sums[..., :-1], row_sum, np.zeros_like(row_sum))

    def write(self, output: np.ndarray, row_sum: np.ndarray, lse: np.ndarray) -> None:
        """What the rows come to if these were all keys, and there is no sink; (heads, rows, X)."""
        sums = unfold_rows(self._sums, self._heads)
        row_sum[...] = sums[..., -1:]
        np.log(row_sum, out=lse)  # −∞ where nothing is seen
        divisor = row_sum if self._sees.all() else np.where(self._sees[..., None], row_sum, 1)
        np.divide(sums[..., :-1], divisor, out=output)


def _and_one(value: Array, dtype: DType, buffers: Buffers) -> np.ndarray:
    """[V, 1] in the compute dtype, (columns, Ev + 1)."""
    value_and_one = buffers.take("values and one", (len(value), value.shape[1] + 1), dtype)
    np.copyto(value_and_one[:, :-1], value, casting="same_kind")
    value_and_one[:, -1] = 1
    return value_and_one


class Columns:
    """Keys and values of a range of columns, ready for the products of the backward."""

    def __init__(self, key: Array, value: Array, dtype: DType, buffers: Buffers) -> None:
        """`key`, `value`: (columns, X)."""
        self.key = _product_operand(key, dtype, "keys", buffers)
        self.value_and_one = _and_one(value, dtype, buffers)


class BackwardRows:
    """A block of query rows: the gradients that each tile of it gives."""

    def __init__(self, query: Array, scale: Array, rows: Rows, is_foldable: np.ndarray, buffers: Buffers) -> None:
        """Rows that are not foldable (heads, rows) give nothing here."""
        self._heads, length, size = query.shape
        self._scale = scale
        self._buffers = buffers
        self._dtype = dtype = scale.dtype
        count = self._heads * length
        self._query = _fold_into(buffers.take("query", (count, size), dtype), query)
        self._upstream = buffers.take("upstream", (count, rows.grad_output.shape[-1] + 1), dtype)
        upstream = unfold_rows(self._upstream, self._heads)
        factor = np.exp(-rows.row_shift) / rows.row_sum  # ∞ for a row of nothing, which is not foldable
        np.multiply(rows.grad_output, factor, out=upstream[..., :-1])
        np.multiply(rows.row_term, -factor, out=upstream[..., -1:])
        if not is_foldable.all():
            unfold_rows(self._query, self._heads)[~is_foldable] = 0
            upstream[~is_foldable] = 0
        self._scaled_query = np.multiply(self._query, scale, out=buffers.take("scaled query", (count, size), dtype))
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
        weights = _exponentials(query, key, visible, self._heads, self._buffers)
        product = take("product with upstream", grad_value.shape, dtype)
        np.add(grad_value, np.matmul(weights.T, upstream[:, :-1], out=product), out=grad_value)
        grad_scores = take("grad scores", weights.shape, dtype)
        np.matmul(upstream, value_and_one.T, out=grad_scores)
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
