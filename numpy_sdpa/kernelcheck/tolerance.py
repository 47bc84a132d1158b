"""What a right kernel in a given precision may be off by: derived from its roundings, not guessed.

docs/tolerance.md derives the variances (`rounding`) and tells how the bounds below were tried.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Options
from numpy_sdpa.blockwise.workers import Buffers, Workers, default_workers
from numpy_sdpa.kernelcheck import rounding
from numpy_sdpa.kernelcheck.input_gradients import GRADIENTS
from numpy_sdpa.kernelcheck.precision import FORMATS, Precision, half_unit, precision_of
from numpy_sdpa.residuals import SDPAResiduals, Upstream

# Elements of the plane in one tile: its dozens of arrays of float64 take 4 MiB each.
_TILE = 2**19
_MOST_WORKERS = 8  # each has a tile at hand

# Variances are float64: those of float64 results below this are lost, as their squares are below 2⁻¹⁰²².
_VARIANCE_UNDERFLOW = 2.0**-500


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
        float64 results in this package's shapes.
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
        problem = rounding.problem_of(residuals, upstream)
        wanted = {name: rounding.finite(gold[name]) for name in gold if name in GRADIENTS}
        gradients = {name: GRADIENTS[name](problem, array, precision) for name, array in wanted.items()}
        if gradients and upstream is None:
            raise ValueError(f"upstream, which {', '.join(gradients)} come from, must be given, got None")
        variances = {name: np.zeros(array.shape) for name, array in gold.items() if name not in gradients}
        workers = Workers(min(default_workers(), _MOST_WORKERS), lambda: np.errstate(all="ignore"))

        def add_tile(task: tuple[int, slice], _: Buffers) -> None:
            number, rows = task
            tile = rounding.forward(problem, rows, precision)
            _put_forward(variances, problem, tile, rows, precision)
            if not gradients:
                return
            back = rounding.backward(problem, tile, rows, precision)
            for name, gradient in gradients.items():
                workers.in_order.wait(name, number)
                gradient.add(tile, back, rows)
                workers.in_order.finish(name, number)

        workers.run(add_tile, list(enumerate(_row_tiles(residuals.options))))
        variances |= {name: gradient.variance() for name, gradient in gradients.items()}
        return {name: precision.rounding * np.sqrt(variances[name]) for name in gold}


def _put_forward(
    variances: dict[str, Array], problem: rounding.Problem, tile: rounding.Forward, rows: slice, precision: Precision
) -> None:
    if "output" in variances:
        output, value = problem.output[..., rows, :], problem.operands.value
        variances["output"][..., rows, :] = rounding.output_variance(tile, value, output, precision)
    if "lse" in variances:
        variances["lse"][..., rows] = tile.lse[..., 0]
    if "weights" in variances:
        variances["weights"][..., rows, :] = rounding.weights_variance(tile)


def _row_tiles(options: Options) -> Iterator[slice]:
    """Rows of the plane such that a tile of all heads and keys has about `_TILE` elements."""
    length = options.query_length
    across = math.prod(options.plane[:-2]) * options.key_length
    size = max(1, _TILE // max(1, across))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


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
    at its own bound, or for one row (the last axis) at half of it, as its entries share the errors of lse and D.
    """
    precision = precision_of(dtype)
    with np.errstate(all="ignore"):
        own = half_unit(np.abs(rounding.finite(gold)) + precision.factor * sigma, array_dtype) / math.sqrt(3)
        variance = sigma**2 + own**2
        row = np.max(np.sum(variance, axis=-1), initial=0.0) if sigma.ndim > 1 else 0.0
        largest = np.maximum(np.max(variance, initial=0.0), row / 4)
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
    """Numbers below this may be 0."""
    if dtype == "float64":
        return _VARIANCE_UNDERFLOW
    # float16 keeps its subnormal numbers everywhere: they are what it has below 6e-5
    stored = 0.0 if array_dtype == "float16" else FORMATS[array_dtype].smallest_normal
    return max(FORMATS["float32"].smallest_normal, stored)
