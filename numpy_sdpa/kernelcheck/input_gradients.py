"""The rounding variance of the inputs' gradients: what `rounding` finds in each tile, summed as a kernel sums.

Every class gathers one gradient: `add` takes the tiles in order, `variance` gives the result in the input's shape, in
units of `Precision.rounding` squared. docs/tolerance.md derives them under their names.
"""

import math
from typing import Protocol

import numpy as np

from numpy_sdpa import steps
from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Options
from numpy_sdpa._internal.shapes import sum_heads, sum_to_shape
from numpy_sdpa.kernelcheck.precision import Precision
from numpy_sdpa.kernelcheck.rounding import Backward, Entries, Forward, Problem, near_zero, partial_sums, sum_in_order
from numpy_sdpa.kernelcheck.sums import RunningSum, parts_of, stored_alike, summed_in_parts, weights_drift


class Gradient(Protocol):
    """How one input's gradient is gathered."""

    def __init__(self, problem: Problem, gold: Array, precision: Precision) -> None: ...

    def add(self, tile: Forward, back: Backward, rows: slice) -> None: ...

    def variance(self) -> Array: ...


class GradQuery:
    """gQ = scale · gS K: errors of a row's lse and D reach all its keys together, as gQ itself and as Σ P d k."""

    def __init__(self, problem: Problem, gold: Array, precision: Precision) -> None:
        self._problem, self._gold, self._precision = problem, gold, precision
        self._copies = math.prod(problem.options.plane[:-2]) / max(1, math.prod(gold.shape[:-2]))
        self._variance = np.zeros(problem.operands.query.shape)

    def add(self, tile: Forward, back: Backward, rows: slice) -> None:
        group, precision = tile.view.group, self._precision
        key, scale = self._problem.operands.key, self._problem.operands.scale
        scores = back.scores
        product = sum_in_order(scores.values, key, group)
        mean_key = steps.sum_over_keys(np, scores.weights, key, None, group)
        own = scores.along_row() + (tile.count / 6 + 1) * scores.values**2
        variance = steps.sum_over_keys(np, own, key**2, None, group) + scores.row_dot * mean_key**2
        variance = variance + tile.count * product.mean_square() + (tile.lse + 2) * product.total**2
        lost = vanished(tile, back.scores, precision)
        if np.any(lost):
            variance = variance + steps.sum_over_keys(np, lost, key, None, group) ** 2
        variance = scale**2 * variance
        if self._copies > 1:
            variance = variance + copy_variance(scale * product.total, precision)
        self._variance[..., rows, :] = variance

    def variance(self) -> Array:
        """A broadcast query's gradient is summed over its copies."""
        summed = sum_to_shape(np, self._variance, self._gold.shape)
        return summed + self._copies / 3 * self._gold**2 if self._copies > 1 else summed


class _Alike:
    """How much the errors of a problem's rows have in common: in sums over rows they add up."""

    def __init__(self) -> None:
        self.rows = 1.0  # how many rows are like a row, on average
        self.drift = 0.0  # relative variance of the rows' sums, all the same way

    def add(self, tile: Forward) -> None:
        if tile.like_rows.size:
            self.rows = max(self.rows, float(np.mean(tile.like_rows)))
            self.drift = max(self.drift, float(np.mean(tile.drift)))


class _OverRows:
    """A matrix's columns times the rows of an array, (…, L, S)ᵀ @ (…, L, X): each row's errors are its own."""

    def __init__(self, options: Options, gold: Array, precision: Precision) -> None:
        self._group, self._gold, self._precision = options.group, gold, precision
        length = options.query_length
        self.count = math.prod(options.plane[:-1]) / max(1, math.prod(gold.shape[:-2]))
        self._part = max((part.stop - part.start for part in parts_of(length)), default=1)
        self._has_copies = self.count > length
        *batch, heads = (*options.plane[:-2], 1)[: max(1, len(options.plane) - 2)]
        summed = (*batch, heads // options.group)[: len(options.plane) - 2]
        self._own: Array = np.zeros((*summed, *gold.shape[-2:]))
        self._together: Array | float = 0.0
        self._copies: Array | float = 0.0
        self._sum = RunningSum()
        self._alike = _Alike()

    def add(self, matrix: Array, array: Array, own: Array, together: Array, tile: Forward) -> None:
        """`own`: the variance of the matrix's entries; `together`: their deviations that add up, column by column."""

        def summed(factor: Array, group: int = self._group) -> Array:
            return steps.sum_over_queries(np, factor, array, None, group)

        own = own + (self.count / 6 + 3) * tile.like_rows * matrix**2
        self._own = self._own + steps.sum_over_queries(np, own, array**2, None, self._group)
        if np.any(together):
            self._together = self._together + summed(together)
        for start in range(0, matrix.shape[-2], self._part):
            part = slice(start, start + self._part)
            self._sum.add(steps.sum_over_queries(np, matrix[..., part, :], array[..., part, :], None, self._group))
        if self._has_copies and self._precision.half:
            self._copies = self._copies + summed(matrix, 1)
        self._alike.add(tile)

    def variance(self) -> Array:
        gold = self._gold
        variance = self._own + self._together**2 + self.count * self._alike.rows * self._sum.mean_square()
        variance = sum_to_shape(np, variance, gold.shape) + (2 + self._alike.drift) * gold**2
        if self._has_copies:
            variance = variance + self.count / 3 * gold**2
        if self._has_copies and self._precision.half:
            copies = sum_heads(np, copy_variance(np.asarray(self._copies), self._precision), self._group)
            variance = variance + sum_to_shape(np, copies, gold.shape)
        return variance


class GradKey:
    """gK = gSᵀ (scale · Q)."""

    def __init__(self, problem: Problem, gold: Array, precision: Precision) -> None:
        self._sum, self._precision = _OverRows(problem.options, gold, precision), precision

    def add(self, tile: Forward, back: Backward, rows: slice) -> None:
        lost = vanished(tile, back.scores, self._precision)
        self._sum.add(back.scores.values, tile.query, back.scores.along_column(), lost, tile)

    def variance(self) -> Array:
        return self._sum.variance()


class GradValue:
    """gV = Wᵀ gO."""

    def __init__(self, problem: Problem, gold: Array, precision: Precision) -> None:
        self._sum, self._problem, self._precision = _OverRows(problem.options, gold, precision), problem, precision

    def add(self, tile: Forward, back: Backward, rows: slice) -> None:
        precision, dropped = self._precision, tile.dropped
        own = (tile.exponential + tile.lse + tile.stored) * tile.like_rows * dropped**2
        own = own + near_zero(dropped, precision)
        share = weights_drift(tile.weights, tile.log_weights, -2, self._sum.count, precision)
        alike = np.sqrt(share + stored_alike(tile.weights, tile.log_weights, -2, precision))
        small = np.maximum(precision.vanishing * np.sum(dropped, axis=-2, keepdims=True), precision.vanished)
        lost = np.where(dropped < small, dropped, 0.0) / precision.rounding
        self._sum.add(dropped, self._problem.grad_output[..., rows, :], own, alike * dropped + lost, tile)

    def variance(self) -> Array:
        return self._sum.variance()


class GradBias:
    """gb = gZ, summed over the axes along which the bias was broadcast."""

    def __init__(self, problem: Problem, gold: Array, precision: Precision) -> None:
        self._gold, self._precision = gold, precision
        plane, shape = problem.options.plane, (1,) * (2 - gold.ndim) + gold.shape
        self._count = math.prod(plane) / max(1, math.prod(shape))
        self._over_rows, self._over_keys = (shape[axis] != plane[axis] for axis in (-2, -1))
        self._variance = np.zeros(shape)
        self._sum = RunningSum()
        self._alike = _Alike()

    def add(self, tile: Forward, back: Backward, rows: slice) -> None:
        grad_logits = back.logits.values
        if self._over_keys:
            own = row_total_variance(tile, back.logits, 1.0, self._precision) + tile.count * partial_sums(grad_logits)
            grad_logits = np.sum(grad_logits, axis=-1, keepdims=True)
        else:
            own = back.logits.along_column() if self._count > 1 else back.logits.alone()
        if self._count > 1:
            own = own + (self._count / 6 + 1) * tile.like_rows * grad_logits**2
        part = self._variance if self._over_rows else self._variance[..., rows, :]
        part += sum_to_shape(np, own, part.shape)
        if self._over_rows:
            self._sum.add(sum_to_shape(np, grad_logits, part.shape))
            self._alike.add(tile)

    def variance(self) -> Array:
        variance = self._variance + self._count * self._alike.rows * self._sum.mean_square()
        return np.reshape(variance, self._gold.shape) + (self._count / 3 + 2 + self._alike.drift) * self._gold**2


class _PerHead:
    """A sum over all rows of a head, and over the batch where the input has no batch axes."""

    def __init__(self, options: Options, gold: Array, precision: Precision, terms: int) -> None:
        self._gold, self._precision = gold, precision
        heads = options.plane[:-2]
        self.count = options.query_length * terms * math.prod(heads) / max(1, math.prod(gold.shape))
        self._has_copies = heads != gold.shape
        self._own: Array = np.zeros(heads)
        self._lost: Array = np.zeros(heads)
        self._sum = RunningSum()
        self._alike = _Alike()

    def add(self, terms: Array, own: Array, tile: Forward) -> None:
        """`terms` (…, rows, n) and the variance of each row's sum (…, rows, 1)."""
        squares = np.sum(terms**2, axis=-1, keepdims=True)
        self._own = self._own + np.sum(own + (self.count / 6 + 2) * tile.like_rows * squares, axis=(-2, -1))
        small = self._precision.vanishing * np.abs(self._gold)[..., None, None]
        self._lost = self._lost + np.sum(np.where(np.abs(terms) < small, terms, 0.0), axis=(-2, -1))
        parts = summed_in_parts(terms)
        self._sum.add_along(np.reshape(parts, (*parts.shape[:-2], parts.shape[-2] * parts.shape[-1])))
        self._alike.add(tile)

    def variance(self) -> Array:
        variance = self._own + (self._lost / self._precision.rounding) ** 2
        variance = variance + self.count * self._alike.rows * self._sum.mean_square()
        if self._has_copies:
            variance = variance + copy_variance(np.asarray(self._sum.total), self._precision)
            variance = sum_to_shape(np, variance, self._gold.shape) + self.count / 3 * self._gold**2
        return variance + (2 + self._alike.drift) * self._gold**2


class GradSinks:
    """g_sink = Σ p_sink (g_lse − D) over the rows."""

    def __init__(self, problem: Problem, gold: Array, precision: Precision) -> None:
        self._sum = _PerHead(problem.options, gold, precision, 1)

    def add(self, tile: Forward, back: Backward, rows: slice) -> None:
        self._sum.add(back.grad_sinks, back.grad_sinks_variance * tile.like_rows, tile)

    def variance(self) -> Array:
        return self._sum.variance()


class GradSlopes:
    """gm = −Σ gZ · distance over rows and keys."""

    def __init__(self, problem: Problem, gold: Array, precision: Precision) -> None:
        self._sum, self._precision = _PerHead(problem.options, gold, precision, problem.options.key_length), precision

    def add(self, tile: Forward, back: Backward, rows: slice) -> None:
        distance = tile.view.distance
        own = row_total_variance(tile, back.logits, distance, self._precision)
        self._sum.add(-back.logits.values * distance, own, tile)

    def variance(self) -> Array:
        return self._sum.variance()


GRADIENTS: dict[str, type[Gradient]] = {
    "grad_query": GradQuery,
    "grad_key": GradKey,
    "grad_value": GradValue,
    "grad_bias": GradBias,
    "grad_sinks": GradSinks,
    "grad_alibi_slopes": GradSlopes,
}


def copy_variance(copies: Array, precision: Precision) -> Array:
    """Of rounding each copy's gradient to the half type before they are summed."""
    return precision.half * copies**2 + near_zero(copies, precision) if precision.half else np.zeros_like(copies)


def vanished(tile: Forward, scores: Entries, precision: Precision) -> Array:
    """The entries of the scores' gradient that underflow may take, all at once, in units of a rounding."""
    is_lost = (tile.weights < precision.vanished) | (np.abs(scores.values) < precision.vanished)
    return np.where(is_lost, scores.values, 0.0) / precision.rounding


def row_total_variance(tile: Forward, logits: Entries, factor: Array | float, precision: Precision) -> Array:
    """Σ gZ · factor over a row's keys (…, rows, 1), without its additions, in sums over like rows.

    Errors of lse and D reach all of a row's entries together.
    """
    own = np.sum((logits.along_row() + logits.values**2) * factor**2, axis=-1, keepdims=True)
    total = np.sum(logits.values * factor, axis=-1, keepdims=True)
    mean = np.sum(logits.weights * factor, axis=-1, keepdims=True)
    lost = np.where(tile.weights < precision.vanished, logits.values * factor, 0.0) / precision.rounding
    own = own + logits.lse * total**2 + logits.row_dot * mean**2 + np.sum(lost, axis=-1, keepdims=True) ** 2
    return own * np.maximum(logits.like_rows, logits.like_products[0])
