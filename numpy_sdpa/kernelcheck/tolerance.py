"""What a right kernel in a given precision may be off by: derived from its roundings, not guessed.

docs/tolerance.md derives the variances (`rounding`) and tells how the bounds below were tried.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from numpy_sdpa import steps
from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Options
from numpy_sdpa._internal.shapes import sum_heads, sum_to_shape
from numpy_sdpa.kernelcheck import rounding
from numpy_sdpa.kernelcheck.precision import FORMATS, Precision, half_unit, precision_of
from numpy_sdpa.residuals import SDPAResiduals, Upstream

# Elements of the plane in one tile: its dozen arrays of float64 stay below half a gigabyte.
_TILE = 2**21


def rounding_sigma(
    residuals: SDPAResiduals, upstream: Upstream | None, gold: Mapping[str, Array], dtype: str
) -> dict[str, Array]:
    """Standard deviation of each result of a right kernel, to first order in its roundings.

    Parameters
    ----------
    residuals : SDPAResiduals
        Of the inputs as the kernel got them, with ``compute_dtype=float64``. Only inputs, options, output and lse are
        read: those of ``method="blockwise"`` serve as well.
    upstream : Upstream or None
        What the gold gradients come from; None when there are none.
    gold : mapping
        Names (output, lse, weights, grad_query, grad_key, grad_value, grad_bias, grad_sinks, grad_alibi_slopes) to
        float64 results in the contract's shapes.
    dtype : "float16", "bfloat16", "float32" or "float64"
        The kernel's precision, which is its query's dtype. Half types compute and add in float32.

    Returns
    -------
    dict
        For each name of `gold` the standard deviations, float64, in gold's shape; without the rounding to the array's
        own dtype (see `tolerance`). Finite everywhere.
    """
    precision = precision_of(dtype)
    with np.errstate(all="ignore"):
        variances = _Variances(residuals, upstream, gold, precision)
        for rows in _row_tiles(residuals.options):
            variances.add(rows)
        return {name: precision.rounding * np.sqrt(variance) for name, variance in variances.finished().items()}


def _row_tiles(options: Options) -> Iterator[slice]:
    """Rows of the plane such that a tile of all heads and keys has about `_TILE` elements."""
    length = options.query_length
    across = math.prod(options.plane[:-2]) * options.key_length
    size = max(1, _TILE // max(1, across))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class _Variances:
    """The variance of each result, gathered tile by tile."""

    def __init__(
        self, residuals: SDPAResiduals, upstream: Upstream | None, gold: Mapping[str, Array], precision: Precision
    ) -> None:
        self.residuals, self.gold, self.precision = residuals, gold, precision
        self.problem = rounding.problem_of(residuals, upstream)
        self.has_backward = any(name.startswith("grad_") for name in gold)
        if self.has_backward and upstream is None:
            raise ValueError("gold has gradients: upstream says what they come from, got None")
        plane, operands = residuals.options.plane, self.problem.operands
        rows = plane[:-1]
        shapes = {
            "output": self.problem.output.shape,
            "lse": rows,
            "weights": plane,
            "grad_query": operands.query.shape,
            "grad_key": self._summed_shape(operands.key),
            "grad_value": self._summed_shape(operands.value),
            "grad_bias": () if operands.bias is None else self.problem.masking_bias.shape,
            "grad_sinks": rows[:-1],
            "grad_alibi_slopes": rows[:-1],
        }
        self.variances = {name: np.zeros(shapes[name]) for name in gold}
        # errors that add up over the tiles before they are squared
        self.together = {
            name: np.zeros_like(self.variances[name])
            for name in ("grad_key", "grad_value")
            if name in gold and (name == "grad_value" or precision.vanished)
        }
        self.like_rows: list[float] = []
        # each head's and batch element's own gradient, where half types round it before they are summed
        self.copies = {
            name: np.zeros((*plane[:-1][:-1], *gold[name].shape[-2:]))
            for name in ("grad_key", "grad_value")
            if name in gold and precision.half and self.count(name) > plane[-2]
        }

    def _summed_shape(self, array: Array) -> tuple[int, ...]:
        """(B…, Hq or Hkv, S, X): summed over rows and groups, not yet over broadcast axes."""
        options = self.residuals.options
        batch_and_heads = list(options.plane[:-2])
        if options.group > 1:
            batch_and_heads[-1] //= options.group
        return (*batch_and_heads, *array.shape[-2:])

    def count(self, name: str) -> float:
        """How many terms are added up for one entry of the gradient."""
        plane, shape = self.residuals.options.plane, self.gold[name].shape
        terms = math.prod(plane)
        if name in ("grad_key", "grad_value"):
            terms, shape = math.prod(plane[:-1]), shape[:-2]
        elif name == "grad_query":
            terms, shape = math.prod(plane[:-2]), shape[:-2]
        elif name == "grad_sinks":
            terms = math.prod(plane[:-1])
        return terms / max(1, math.prod(shape))

    def add(self, rows: slice) -> None:
        problem, precision, variances = self.problem, self.precision, self.variances
        tile = rounding.forward(problem, self.residuals, rows, precision)
        if "output" in variances:
            output = problem.output[..., rows, :]
            variances["output"][..., rows, :] = rounding.output_variance(
                tile, problem.operands.value, output, precision
            )
        if "lse" in variances:
            variances["lse"][..., rows] = tile.lse[..., 0]
        if "weights" in variances:
            variances["weights"][..., rows, :] = rounding.weights_variance(tile)
        if self.has_backward:
            self.like_rows.append(float(np.mean(tile.like_rows)) if tile.like_rows.size else 1.0)
            self._add_backward(tile, rows)

    def _add_backward(self, tile: rounding.Forward, rows: slice) -> None:
        problem, precision, variances = self.problem, self.precision, self.variances
        back = rounding.backward(problem, tile, rows, precision)
        grad_output = problem.grad_output[..., rows, :]
        if "grad_query" in variances:
            has_copies = self.count("grad_query") > 1
            variances["grad_query"][..., rows, :] = rounding.grad_query_variance(
                problem, tile, back, has_copies, precision
            )
        if "grad_key" in variances:
            variances["grad_key"] += rounding.grad_key_variance(tile, back, self.count("grad_key"))
        if "grad_value" in variances:
            count = self.count("grad_value")
            variances["grad_value"] += rounding.grad_value_variance(tile, grad_output, count, precision)
            self.together["grad_value"] += rounding.grad_value_together(tile, grad_output, count, precision)
        if "grad_key" in self.together:
            self.together["grad_key"] += rounding.grad_key_vanished(tile, back, precision)
        if "grad_bias" in variances:
            self._add_bias(tile, back, rows)
        if "grad_sinks" in variances:
            own = back.grad_sinks_variance + (self.count("grad_sinks") / 6 + 1) * back.grad_sinks**2
            own = own * tile.like_rows
            variances["grad_sinks"] += np.sum(own, axis=(-2, -1))
        if "grad_alibi_slopes" in variances:
            total = rounding.row_total_variance(tile, back, tile.view.distance, self.count("grad_alibi_slopes"), precision)
            variances["grad_alibi_slopes"] += np.sum(total, axis=(-2, -1))
        if "grad_key" in self.copies:
            self.copies["grad_key"] += steps.sum_over_queries(np, back.grad_scores, tile.query, None, 1)
        if "grad_value" in self.copies:
            self.copies["grad_value"] += steps.sum_over_queries(np, tile.dropped, grad_output, None, 1)

    def _add_bias(self, tile: rounding.Forward, back: rounding.Backward, rows: slice) -> None:
        variance = self.variances["grad_bias"]
        over_keys = variance.shape[-1] == 1
        own = rounding.grad_bias_variance(tile, back, over_keys, self.count("grad_bias"), self.precision)
        part = variance if variance.shape[-2] == 1 else variance[..., rows, :]
        part += sum_to_shape(np, own, part.shape)

    def finished(self) -> dict[str, Array]:
        """In gold's shapes, with the rounding of the gradients' long sums."""
        finished = {}
        like_rows = max(self.like_rows, default=1.0)
        for name, variance in self.variances.items():
            gold = self.gold[name]
            if name in self.together:
                variance = variance + self.together[name] ** 2
            variance = sum_to_shape(np, variance, gold.shape) if name != "grad_bias" else variance.reshape(gold.shape)
            if name in self.copies:
                group = self.residuals.options.group
                copies = self.copies[name]
                own = self.precision.half * copies**2 + rounding.near_zero(copies, self.precision)
                variance = variance + sum_to_shape(np, sum_heads(np, own, group), gold.shape)
            if name.startswith("grad_"):
                variance = variance + (self.count(name) * like_rows / 3 + 2) * rounding.finite(gold) ** 2
            finished[name] = variance
        return finished


def tolerance(sigma: Array, dtype: str, array_dtype: str, gold: Array) -> Array:
    """The elementwise bound of |kernel − gold|: 8 σ (12 σ for half types) and the rounding to the array's own dtype.

    Parameters
    ----------
    sigma : array
        From `rounding_sigma`.
    dtype : str
        The kernel's precision.
    array_dtype : str
        The dtype of the kernel's array: "float16", "bfloat16", "float32" or "float64".
    gold : array
        The float64 result, in sigma's shape.

    Returns
    -------
    array, float64
        factor · σ + half a unit in the last place of array_dtype (subnormal numbers included) + the smallest normal
        number of the kernel's arithmetic and, but for float16, of array_dtype, below which a kernel may flush to 0.
    """
    error = precision_of(dtype).factor * sigma
    with np.errstate(all="ignore"):
        return error + half_unit(np.abs(rounding.finite(gold)) + error, array_dtype) + _flush(dtype, array_dtype)


def may_overflow(gold: Array, tolerance: Array, array_dtype: str) -> Array:
    """True where a right kernel's result may be past the largest number of array_dtype, and so ±∞ (of gold's sign)."""
    return np.abs(gold) + tolerance > FORMATS[array_dtype].largest


def frobenius_bound(sigma: Array, dtype: str, array_dtype: str, gold: Array) -> float:
    """The bound of ‖kernel − gold‖ (Frobenius). Parameters as for `tolerance`.

    Many errors average out: together they may be 1.5 σ (3 σ for half types) in the mean square, with room for one entry
    at its own bound.
    """
    precision = precision_of(dtype)
    with np.errstate(all="ignore"):
        own = half_unit(np.abs(rounding.finite(gold)) + precision.factor * sigma, array_dtype) / math.sqrt(3)
        variance = sigma**2 + own**2
        largest = np.max(variance, initial=0.0)
        flush = _flush(dtype, array_dtype) * math.sqrt(sigma.size)
        together = precision.frobenius_factor**2 * np.sum(variance) + precision.factor**2 * largest
        return float(np.sqrt(together)) + flush


def sensitivity(sigma: Array, dtype: str, array_dtype: str, gold: Array) -> float:
    """The relative error that is always called wrong: an array off by more than this factor from a right one.

    A right array's own error may be as large as the bound b = min(‖tolerance‖, frobenius_bound) and point the other
    way: (1 + f) (gold + error) is called wrong for certain where f ‖gold‖ > (2 + f) b, that is f > 2 b / (‖gold‖ − b).
    Infinite where the bound exceeds gold: this precision cannot tell.
    """
    bound = min(
        float(np.linalg.norm(tolerance(sigma, dtype, array_dtype, gold))),
        frobenius_bound(sigma, dtype, array_dtype, gold),
    )
    size = float(np.linalg.norm(rounding.finite(gold)))
    return 2 * bound / (size - bound) if size > bound else math.inf


def _flush(dtype: str, array_dtype: str) -> float:
    arithmetic = FORMATS["float64" if dtype == "float64" else "float32"]
    # float16 keeps its subnormal numbers everywhere: they are what it has below 6e-5
    stored = 0.0 if array_dtype == "float16" else FORMATS[array_dtype].smallest_normal
    return max(arithmetic.smallest_normal, stored)
