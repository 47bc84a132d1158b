"""How rounding errors travel through the chain: the variance of each result of a right kernel, to first order.

docs/tolerance.md derives each line under the name of its function. Here a tile is some rows and all columns of the
plane: arrays (B…, Hq, rows, S), 0 where hidden. Everything is float64 and NumPy, and every variance is in units of
`Precision.rounding` squared: an array's own rounding has the variance array².
"""

from typing import NamedTuple

import numpy as np

from numpy_sdpa import chain, steps
from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Options
from numpy_sdpa._internal.shapes import slice_tile
from numpy_sdpa.chain import Differentiable, View
from numpy_sdpa.kernelcheck.precision import Precision
from numpy_sdpa.kernelcheck.sums import (
    RunningSum,
    like_columns,
    like_rows,
    parts_of,
    stored_alike,
    sum_variance,
    summed_in_parts,
    weights_drift,
)
from numpy_sdpa.residuals import SDPAResiduals, Upstream
from numpy_sdpa.visibility import Tile, key_positions, query_positions

# Fast exp and tanh are off by one or two units in the last place; a unit is √12 roundings.
FUNCTION_VARIANCE = 4 * 12.0


class Problem(NamedTuple):
    """The chain's inputs without non-finite entries, and what the forward pass gave."""

    options: Options
    operands: Differentiable  # query with the plane's batch axes and heads, not scaled
    masking_bias: Array | None  # the bias with its −∞, at least 2-D
    has_sink: Array | None  # (…, Hq): False where a sink is −∞ (no sink) or +∞ (exact)
    output: Array  # (B…, Hq, L, Ev)
    lse: Array  # (B…, Hq, L, 1); 0 where −∞
    grad_output: Array  # (B…, Hq, L, Ev)
    grad_lse: Array  # (B…, Hq, L, 1)
    grad_weights: Array | None  # (B…, Hq, L, S)


def finite(array: Array) -> Array:
    """Non-finite entries as 0: hidden ones are never read, and those that are read make no finite result."""
    return np.where(np.isfinite(array), array, 0.0)


def problem_of(residuals: SDPAResiduals, upstream: Upstream | None) -> Problem:
    options = residuals.options
    operands = chain.operands_of(residuals, options)
    clean = Differentiable(*(None if array is None else finite(array) for array in operands))
    flowing = Upstream(None, None, None) if upstream is None else upstream
    output, lse = finite(residuals.output), finite(residuals.lse)[..., None]
    grad_lse = np.zeros_like(lse) if flowing.lse is None else finite(flowing.lse)[..., None]
    return Problem(
        options=options,
        operands=clean,
        masking_bias=None if operands.bias is None else np.atleast_2d(operands.bias),
        has_sink=None if operands.sinks is None else np.isfinite(operands.sinks),
        output=output,
        lse=lse,
        grad_output=np.zeros_like(output) if flowing.output is None else finite(flowing.output),
        grad_lse=np.where(np.isfinite(residuals.lse)[..., None], grad_lse, 0.0),
        grad_weights=None if flowing.weights is None else finite(flowing.weights),
    )


# ------------------------------------------------------------------------------------------------------------------
# Forward: scores → logits → softmax → output
# ------------------------------------------------------------------------------------------------------------------


class Logits(NamedTuple):
    values: Array
    capped_scores: Array
    variance: Array
    shared: Array  # the part of the variance that a row's keys may share: the scaled query's, the scale's
    cap_slope: Array | None  # d = ∂ capped / ∂ scores; None without softcap
    cap_slope_variance: Array | None


def logits(operands: Differentiable, view: View, options: Options, rows: slice, precision: Precision) -> Logits:
    """`operands` of the tile's rows. Hidden positions are computed like the others: their weight is 0."""
    stages = chain.logits_forward(operands, view._replace(visible=None))
    scaled = operands.scale * operands.query
    squares = steps.inner_products(np, scaled**2, operands.key**2, view.group)
    # scaling the query; or the product by a rounded scale, or scale · log₂e
    shared = squares + 2 * stages.scores**2
    variance = sum_variance(stages.scores, squares, scaled.shape[-1], precision) + shared
    slope = slope_variance = None
    if operands.softcap is not None:
        u = stages.scores / operands.softcap
        u_variance = variance / operands.softcap**2 + u**2
        t = np.tanh(u)
        slope = 1 - t**2
        slope_variance = 4 * t**2 * (FUNCTION_VARIANCE * t**2 + slope**2 * u_variance) + t**4 + slope**2
        variance = operands.softcap**2 * slope**2 * u_variance + (FUNCTION_VARIANCE + 1) * stages.capped_scores**2
        shared = slope**2 * shared
    if view.distance is not None:
        # slope · j alone is as right as slope · |p(i) − j| where only earlier keys are seen: it shifts the row
        positions = np.abs(query_positions(options, rows)), key_positions(options, slice(0, options.key_length))
        variance = variance + 2 * (operands.alibi_slopes[..., None, None] * np.maximum(*positions)) ** 2
    if view.distance is not None or operands.bias is not None:
        variance = variance + stages.logits**2
    return Logits(stages.logits, stages.capped_scores, variance, shared, slope, slope_variance)


def exponential_variance(shifted: Array, logit: Array, logit_variance: Array | float) -> Array:
    """Relative, of exp(logit − shift): the logit's own, the subtraction's or that inside exp2, exp's."""
    return logit_variance + logit**2 + shifted**2 + FUNCTION_VARIANCE


class Sink(NamedTuple):
    weight: Array  # 0 without one, (…, rows, 1)
    exponential: Array  # relative variance of its exponential


class Forward(NamedTuple):
    """One tile's weights, and where their errors come from. A row's array is (…, rows, 1)."""

    view: View
    query: Array  # scaled
    count: Array  # terms of a row's sums
    weights: Array
    log_weights: Array
    dropped: Array  # weights after dropout
    tail: Array  # the part of `dropped` that a sum may lose, in units of a rounding
    partial_output: Array  # mean square of the output's partial sums, (…, rows, Ev)
    exponential: Array  # relative variance of each exponential
    like_keys: Array  # how many keys have the same scores, and so the same errors, as this one, (…, 1, S)
    like_rows: Array  # how many queries have
    stored: float  # relative variance of `dropped` from rounding to the half type
    alike: Array  # the part of it that a row's weights share
    drift: Array  # relative variance of the row's sum of exponentials from adding like terms
    together: Array  # relative variance of a row's sums from all that its terms share
    lse: Array  # variance
    sink: Sink
    cap_slope: Array | None
    cap_slope_variance: Array | None


def forward(problem: Problem, rows: slice, precision: Precision) -> Forward:
    options, operands = problem.options, problem.operands
    tile = Tile(rows, slice(0, options.key_length))
    masking_bias = bias = None
    if problem.masking_bias is not None:
        masking_bias = slice_tile(problem.masking_bias, tile.rows, tile.columns)
        bias = finite(masking_bias)
    view = chain.view_of(options, tile, masking_bias, operands.alibi_slopes is not None)
    operands = operands._replace(query=operands.query[..., rows, :], bias=bias)
    z = logits(operands, view, options, rows, precision)
    lse = problem.lse[..., rows, :]
    visible = np.broadcast_to(True if view.visible is None else view.visible, z.values.shape)
    log_weights = z.values - lse
    weights = np.where(visible, np.exp(np.minimum(log_weights, 0)), 0.0)
    exponential = np.where(visible, exponential_variance(log_weights, z.values, z.variance), 0.0)
    like_keys = like_columns(z.capped_scores)
    like = np.maximum(
        like_rows(z.capped_scores, options.query_length),
        like_rows(np.where(visible, log_weights, 0.0), options.query_length),
    )
    count = np.sum(visible, axis=-1, keepdims=True) + 1.0  # the sink, or the last block
    sink = _sink(problem, lse)
    row = row_variances(weights, log_weights, z.shared, sink, like_keys, count, precision)
    roundings = 1 if view.kept is None else 2  # of the stored weights, before and after dropout
    alike = roundings * stored_alike(weights, log_weights, -1, precision)
    # the errors of a row's logits may all be the same, as where its keys are
    lse_variance = np.sum(weights * exponential, axis=-1, keepdims=True) + sink.weight * sink.exponential
    dropped = steps.dropout(np, weights, view.kept, view.dropout_p)
    small = np.maximum(precision.vanishing * np.sum(dropped, axis=-1, keepdims=True), precision.vanished)
    return Forward(
        view=view,
        query=operands.scale * operands.query,
        count=count,
        weights=weights,
        log_weights=log_weights,
        dropped=dropped,
        tail=np.where(dropped < small, dropped, 0.0) / precision.rounding,
        partial_output=sum_in_order(dropped, operands.value, view.group).mean_square(),
        exponential=exponential,
        like_keys=like_keys,
        like_rows=like,
        stored=roundings * precision.half,
        alike=alike,
        drift=row.drift,
        together=row.additions + row.drift + row.against_sink + alike,
        # log, row shift, their sum, and the change to base 2 and back
        lse=lse_variance + row.additions + row.drift + 4 * lse**2 + 1,
        sink=sink,
        cap_slope=z.cap_slope,
        cap_slope_variance=z.cap_slope_variance,
    )


def _sink(problem: Problem, lse: Array) -> Sink:
    if problem.has_sink is None:
        return Sink(np.zeros_like(lse), np.zeros_like(lse))
    sinks = problem.operands.sinks[..., None, None]
    weight = np.where(problem.has_sink[..., None, None], np.exp(np.minimum(sinks - lse, 0)), 0.0)
    return Sink(weight, exponential_variance(sinks - lse, sinks, 0.0))


class RowVariances(NamedTuple):
    """Relative variances of a row's sums, (…, rows, 1)."""

    additions: Array  # of the sum of exponentials, from adding them
    drift: Array  # the same, from adding like terms
    against_sink: Array  # of the other sums, from errors that all keys share and the sink does not


def row_variances(
    weights: Array, log_weights: Array, shared: Array, sink: Sink, like_keys: Array, count: Array, precision: Precision
) -> RowVariances:
    seen = np.maximum(np.sum(weights, axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    like_terms = 1 / np.maximum(np.sum((weights / seen) ** 2, axis=-1, keepdims=True), 1 / count)
    repeated = like_terms * np.sum(weights * like_keys, axis=-1, keepdims=True) / seen
    lost = np.sum(np.where(weights < precision.vanishing, weights, 0.0), axis=-1, keepdims=True)
    return RowVariances(
        additions=(count + repeated) / 3 + 1 + (lost / precision.rounding) ** 2,
        drift=weights_drift(weights, log_weights, -1, count, precision),
        against_sink=sink.weight**2 * np.sum(weights * shared, axis=-1, keepdims=True) / seen,
    )


def weights_variance(tile: Forward) -> Array:
    """P = exp(logits − lse), or normalised by the row's own sum, which costs less."""
    return tile.weights**2 * (tile.exponential + tile.lse)


def output_variance(tile: Forward, value: Array, output: Array, precision: Precision) -> Array:
    """O = Σ W V. An error of one exponential also changes the row's sum: Σ r (W V − P O)², and the roundings."""
    group, weights, dropped = tile.view.group, tile.weights, tile.dropped
    exponential = tile.exponential * tile.like_keys
    own = exponential + (tile.stored + 2) * tile.like_keys + tile.count / 6
    own = own * dropped**2 + near_zero(dropped, precision)
    mixed = steps.sum_over_keys(np, exponential * weights * dropped, value, None, group)
    whole = np.sum(exponential * weights**2, axis=-1, keepdims=True) + tile.sink.exponential * tile.sink.weight**2
    variance = steps.sum_over_keys(np, own, value**2, None, group) + output * (output * whole - 2 * mixed)
    variance = np.maximum(variance, 0) + output**2 * tile.together + tile.count * tile.partial_output
    return variance + steps.sum_over_keys(np, tile.tail, value, None, group) ** 2


def sum_in_order(tile: Array, keys: Array, group: int) -> RunningSum:
    """tile @ keys, with what it is on the way."""
    total = RunningSum()
    for part in parts_of(tile.shape[-1]):
        total.add(steps.sum_over_keys(np, tile[..., part], keys[..., part, :], None, group))
    return total


def near_zero(array: Array, precision: Precision) -> Array:
    """Numbers near 0 lose what underflow takes, at most themselves."""
    return np.minimum((array / precision.rounding) ** 2, precision.underflow)


# ------------------------------------------------------------------------------------------------------------------
# Backward: output → softmax → scores
# ------------------------------------------------------------------------------------------------------------------


class Entries(NamedTuple):
    """One tile of a gradient (gZ or gS), and the variance of its entries alone and in sums."""

    values: Array
    weights: Array  # P, or P · d: what an error of D is multiplied by
    own: Array  # variance from errors of each entry's own
    of_products: Array  # the part of `own` that entries share where those of gO Vᵀ are alike
    like_products: tuple[Array, Array]  # how many rows and columns of gO Vᵀ are alike, (…, rows, 1) and (…, 1, S)
    lse: Array  # variance of lse and of D, whose errors reach the whole row, (…, rows, 1)
    row_dot: Array
    like_rows: Array
    like_keys: Array

    def alone(self) -> Array:
        return self.own + self.lse * self.values**2 + self.row_dot * self.weights**2

    def along_row(self) -> Array:
        """For sums over a row: like keys err together. Without the errors of lse and D, which all its entries share."""
        return self.own * self.like_keys + self.of_products * np.maximum(self.like_products[1] - self.like_keys, 0)

    def along_column(self) -> Array:
        """For sums over a column: like rows err together."""
        of_products = self.of_products * np.maximum(self.like_products[0] - self.like_rows, 0)
        return self.alone() * self.like_rows + of_products


class Backward(NamedTuple):
    logits: Entries
    scores: Entries
    grad_sinks: Array  # (…, rows, 1)
    grad_sinks_variance: Array


def backward(problem: Problem, tile: Forward, rows: slice, precision: Precision) -> Backward:
    """gP = dropout(gO Vᵀ), gZ = P ∘ (gP − D + g_lse), gS = d ∘ gZ, g_sink = p_sink (g_lse − D)."""
    view, weights, value, sink = tile.view, tile.weights, problem.operands.value, tile.sink
    grad_output, output = problem.grad_output[..., rows, :], problem.output[..., rows, :]
    grad_lse = problem.grad_lse[..., rows, :]
    products = steps.inner_products(np, grad_output, value, view.group)
    squares = steps.inner_products(np, grad_output**2, value**2, view.group)
    like_products = like_rows(products, problem.options.query_length), like_columns(products)
    keep = steps.dropout(np, np.ones_like(weights), view.kept, view.dropout_p)
    grad_weights = keep * products
    if problem.grad_weights is not None:
        grad_weights = grad_weights + problem.grad_weights[..., rows, :]
    of_products = keep**2 * sum_variance(products, squares, value.shape[-1], precision)
    of_products = weights**2 * (of_products + (precision.half + 1) * grad_weights**2)
    row_dot = np.sum(weights * grad_weights, axis=-1, keepdims=True)
    row_dot_variance = _row_dot_variance(tile, grad_weights, of_products, like_products[1], precision)
    row_dot_variance += _output_dot_variance(tile, grad_output, output, products, squares, precision)
    row_dot_variance += _row_dot_lost(tile, grad_weights, row_dot, precision)
    inside = grad_weights - row_dot
    grad_logits = weights * (inside + grad_lse)
    own = of_products + (weights * inside) ** 2 + (tile.exponential + 2) * grad_logits**2
    # stored weights, and their gradient as it goes into the products
    own = own + 2 * precision.half * grad_logits**2 + near_zero(grad_logits, precision)
    own = own + near_zero(weights, precision) * (inside + grad_lse) ** 2
    of_products = of_products + 2 * tile.alike * grad_logits**2
    along = (like_products, tile.lse, row_dot_variance, tile.like_rows, tile.like_keys)
    of_logits = of_scores = Entries(grad_logits, weights, own, of_products, *along)
    if tile.cap_slope is not None and tile.cap_slope_variance is not None:
        grad_scores = tile.cap_slope * grad_logits
        # a kernel's slope: where a saturated softcap leaves d = 0 and gZ is 0 too, the product of both errors
        slope = np.hypot(tile.cap_slope, precision.rounding * np.sqrt(tile.cap_slope_variance))
        own = slope**2 * own + tile.cap_slope_variance * grad_logits**2 + grad_scores**2
        own = own + near_zero(grad_scores, precision)
        of_scores = Entries(grad_scores, slope * weights, own, slope**2 * of_products, *along)
    grad_sinks = sink.weight * (grad_lse - row_dot)
    grad_sinks_variance = (sink.exponential + tile.lse + 2) * grad_sinks**2 + sink.weight**2 * row_dot_variance
    grad_sinks_variance = grad_sinks_variance + near_zero(sink.weight, precision) * (grad_lse - row_dot) ** 2
    return Backward(of_logits, of_scores, grad_sinks, grad_sinks_variance)


def _row_dot_variance(
    tile: Forward, grad_weights: Array, of_products: Array, like_products: Array, precision: Precision
) -> Array:
    """D = Σ P ∘ gP over the row's keys. An error of one exponential also changes the row's sum: Σ r (P (gP − D))²."""
    terms = tile.weights * grad_weights
    row_dot = np.sum(terms, axis=-1, keepdims=True)
    own = tile.exponential * (terms - tile.weights * row_dot) ** 2 * tile.like_keys
    own = own + of_products * np.maximum(tile.like_keys, like_products) + (tile.count / 6 + 1) * terms**2
    # weights as they are stored
    own = own + precision.half * terms**2 + near_zero(tile.weights, precision) * grad_weights**2
    shared = tile.together + tile.sink.exponential * tile.sink.weight**2
    return np.sum(own, axis=-1, keepdims=True) + shared * row_dot**2 + tile.count * partial_sums(terms)


def _row_dot_lost(tile: Forward, grad_weights: Array, row_dot: Array, precision: Precision) -> Array:
    """Where gP is stored in a half type and the weights are alike, rounding P ∘ (gP − D) takes a small D away again."""
    if not precision.half:
        return np.zeros_like(row_dot)
    taken = np.minimum(np.abs(row_dot), precision.half_eps / 2 * np.abs(grad_weights))
    lost = np.sum(tile.weights * taken, axis=-1, keepdims=True) / precision.rounding
    return tile.alike / precision.half * lost**2


def partial_sums(terms: Array) -> Array:
    """The mean square of a row's partial sums, (…, rows, 1)."""
    total = RunningSum()
    total.add_along(summed_in_parts(terms))
    return np.broadcast_to(np.asarray(total.mean_square())[..., None], (*terms.shape[:-1], 1))


def _output_dot_variance(
    tile: Forward, grad_output: Array, output: Array, products: Array, squares: Array, precision: Precision
) -> Array:
    """D = Σ gO ∘ O, in addition: this sum, the sums and roundings inside O, and O's own rounding."""
    terms = grad_output * output
    output_dot = np.sum(terms, axis=-1, keepdims=True)
    terms_squared = np.sum(terms**2, axis=-1, keepdims=True)
    variance = sum_variance(output_dot, terms_squared, terms.shape[-1], precision)
    entries = precision.half * output**2 + near_zero(output, precision) + tile.count * tile.partial_output
    variance = variance + np.sum(grad_output**2 * entries, axis=-1, keepdims=True)
    inside = (tile.count / 6 + 2) * squares + tile.stored * tile.like_keys * products**2
    entries = tile.dropped**2 * inside + near_zero(tile.dropped, precision) * products**2
    variance = variance + np.sum(entries, axis=-1, keepdims=True)
    return variance + np.sum(tile.tail * products, axis=-1, keepdims=True) ** 2
