"""The rounding variance of sums: in any order, in the given order, and of terms that are alike.

Variances are in units of `Precision.rounding` squared. docs/tolerance.md derives them under the functions' names.
"""

from collections.abc import Iterator

import numpy as np

from numpy_sdpa._internal.namespace import Array
from numpy_sdpa.kernelcheck.precision import FORMATS, Precision

# Partial sums are looked at after each of so many parts of a sum: every 256th of 4096 terms.
PARTS = 16

_TINY = np.finfo(np.float64).tiny
_LOG_TINY = np.log(_TINY)


def sum_variance(total: Array, squares: Array, count: int, precision: Precision) -> Array:
    """Of a sum of `count` products, one by one in any order: n (total²/3 + Σx²/6), and Σx² for the products.

    `total` is the sum, `squares` the sum of the squared terms. Blocks and pairs cost less; like terms drift.
    """
    spread = count * squares / np.maximum(total**2, _TINY) - 1
    return (count / 3 + drift(spread, count, precision)) * total**2 + (count / 6 + 1) * squares


def drift(spread: Array, count: Array | float, precision: Precision) -> Array:
    """Relative variance of adding `count` like terms one by one, in addition; `spread` is their relative variance.

    Each addition then rounds as the last one did for as long as the sum's exponent stays: n/3 roundings in all, if the
    terms differ by less than n eps.
    """
    return count**2 / 9 * _share(spread, count * precision.vanishing)


def weights_drift(weights: Array, log_weights: Array, axis: int, count: Array | float, precision: Precision) -> Array:
    """`drift` of sums of `count` weights along an axis, whether all of them are alike or only many of them.

    What an addition rounds depends on the term, and on nothing else as long as the sum's exponent stays: other terms in
    between change nothing, and terms that differ by less than the sum's eps are alike. Those that are lost from the sum
    are not looked at.
    """
    total = np.sum(weights, axis=axis, keepdims=True)
    others = np.maximum(np.sum(weights > 0, axis=axis, keepdims=True) - 1, 1)
    counted = weights > precision.vanishing * total
    part = 0.0
    for extreme in _extremes(log_weights, counted, axis):
        scale = precision.vanishing * total / np.exp(np.maximum(extreme, _LOG_TINY))
        alike = np.where(counted, _share((log_weights - extreme) ** 2, scale), 0.0)
        like_it = np.maximum(np.sum(alike, axis=axis, keepdims=True) - 1, 0)
        part = part + (like_it / others) ** 2
    return count**2 / 9 * np.minimum(part, 1)


def stored_alike(weights: Array, log_weights: Array, axis: int, precision: Precision) -> Array:
    """Relative variance of a sum over weights along an axis, from roundings to the half type that are equal.

    Weights that differ by less than the type's eps round alike.
    """
    total = np.maximum(np.sum(weights, axis=axis, keepdims=True), _TINY)
    if not precision.half:
        return np.zeros_like(total)
    share = np.zeros_like(total)
    for extreme in _extremes(log_weights, weights > 0, axis):
        alike = np.where(weights > 0, _share((log_weights - extreme) ** 2, precision.half_eps), 0.0)
        share = share + (np.sum(weights * alike, axis=axis, keepdims=True) / total) ** 2
    return precision.half * np.minimum(share, 1)


def _extremes(log_weights: Array, counted: Array, axis: int) -> Iterator[Array]:
    """The logarithms of the largest and of the smallest counted weight along an axis.

    Like one of them are: all weights of an even row; that of the first key and those of all others; the two sides of a
    saturated softcap.
    """
    for least, of in ((-np.inf, np.max), (np.inf, np.min)):
        yield of(log_weights, axis=axis, keepdims=True, initial=least, where=counted)


def _share(spread: Array, scale: Array | float) -> Array:
    """From 1 where terms are alike on this scale to 0 where they are not."""
    return scale**2 / np.maximum(scale**2 + np.maximum(spread, 0), _TINY)


class RunningSum:
    """The mean square of a sum's partial sums, in the given order or its reverse, whichever is larger."""

    def __init__(self) -> None:
        self.total: Array | float = 0.0
        self._sums: Array | float = 0.0
        self._squares: Array | float = 0.0
        self._parts = 0

    def add(self, part: Array) -> None:
        self.total = self.total + part
        self._sums = self._sums + self.total
        self._squares = self._squares + self.total**2
        self._parts += 1

    def add_along(self, parts: Array) -> None:
        """Parts that follow each other along the last axis."""
        if parts.shape[-1] == 0:
            return
        partial = np.asarray(self.total)[..., None] + np.cumsum(parts, axis=-1)
        self.total = partial[..., -1]
        self._sums = self._sums + np.sum(partial, axis=-1)
        self._squares = self._squares + np.sum(partial**2, axis=-1)
        self._parts += parts.shape[-1]

    def mean_square(self) -> Array | float:
        forward = self._squares / max(1, self._parts)
        backward = forward + self.total * (self.total - 2 * self._sums / max(1, self._parts))
        return np.maximum(forward, backward)


def parts_of(length: int) -> list[slice]:
    """An axis in at most `PARTS` parts."""
    size = max(1, -(-length // PARTS))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def summed_in_parts(terms: Array) -> Array:
    """(…, n) → (…, parts): the last axis summed part by part."""
    starts = [part.start for part in parts_of(terms.shape[-1])]
    return np.add.reduceat(terms, starts, axis=-1) if starts else terms


def like_columns(product: Array) -> Array:
    """How many columns are like each column of a product of two matrices, (…, 1, columns).

    Equal numbers are rounded equally: their errors add up where those of different ones average out. Equal queries,
    repeated tokens and padding make them. Two columns are called equal if a random projection of them is, to float32's
    eps.
    """
    direction = np.random.default_rng(0).standard_normal(product.shape[-2])
    return _repetitions(product.mT, direction)[..., None, :]


def like_rows(product: Array, query_length: int) -> Array:
    """How many rows are like each row, (…, rows, 1): where a tile's rows are, those of other tiles are taken to be."""
    direction = np.random.default_rng(0).standard_normal(product.shape[-1])
    repetitions = _repetitions(product, direction)
    of_all = repetitions * query_length / max(1, product.shape[-2])
    return np.where(repetitions > 1, of_all, 1.0)[..., None]


def _repetitions(vectors: Array, direction: Array) -> Array:
    """How many vectors (…, n, d) project on the direction as each does, itself included: (…, n)."""
    projection = vectors @ direction
    allowed = np.sqrt(vectors**2 @ direction**2) * FORMATS["float32"].eps
    if projection.size == 0:
        return projection
    order = np.argsort(projection, axis=-1)
    starts = np.ones(projection.shape, dtype=bool)  # of a run of equal ones in the sorted order
    gaps = np.diff(np.take_along_axis(projection, order, -1), axis=-1)
    starts[..., 1:] = gaps > np.take_along_axis(allowed, order, -1)[..., 1:]
    runs = np.cumsum(starts) - 1
    repetitions = np.empty(projection.shape)
    np.put_along_axis(repetitions, order, np.bincount(runs)[runs].reshape(projection.shape), -1)
    return repetitions
