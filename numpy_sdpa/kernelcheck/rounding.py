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
    drift,
    like_counts,
    log_spread,
    parts_of,
    stored_alike,
    sum_variance,
    summed_in_parts,
)
from numpy_sdpa.residuals import SDPAResiduals, Upstream
from numpy_sdpa.visibility import Tile, key_positions, query_positions

# Fast exp and tanh are off by one or two units in the last place; a unit is √12 roundings.
FUNCTION_VARIANCE = 4 * 12.0


class Problem(NamedTuple):
    """The chain's inputs without non-finite entries, and what the forward pass gave."""

    operands: Differentiable  # query with the plane's batch axes and heads, not scaled
    masking_bias: Array | None  # the bias with its −∞, at least 2-D
    has_sink: Array | None  # (…, Hq): False where a sink is −∞ (no sink) or +∞ (exact)
    output: Array  # (B…, Hq, L, Ev)
    lse: Array  # (B…, Hq, L, 1); 0 where −∞
    grad_output: Array | None  # (B…, Hq, L, Ev)
    grad_lse: Array | None  # (B…, Hq, L, 1)
    grad_weights: Array | None  # (B…, Hq, L, S)


def finite(array: Array) -> Array:
    """Non-finite entries as 0: hidden ones are never read, and those that are read make no finite result."""
    return np.where(np.isfinite(array), array, 0.0)


def problem_of(residuals: SDPAResiduals, upstream: Upstream | None) -> Problem:
    operands = chain.operands_of(residuals, residuals.options)
    clean = Differentiable(*(None if array is None else finite(array) for array in operands))
    upstream = Upstream(None, None, None) if upstream is None else upstream
    flowing = Upstream(*(None if array is None else finite(array) for array in upstream))
    lse = finite(residuals.lse)[..., None]
    return Problem(
        operands=clean,
        masking_bias=None if operands.bias is None else np.atleast_2d(operands.bias),
        has_sink=None if operands.sinks is None else np.isfinite(operands.sinks),
        output=finite(residuals.output),
        lse=lse,
        grad_output=flowing.output,
        grad_lse=None if flowing.lse is None else np.where(np.isfinite(residuals.lse), flowing.lse, 0.0)[..., None],
        grad_weights=flowing.weights,
    )


# Forward: logits → softmax → output


class Logits(NamedTuple):
    values: Array
    scores: Array  # capped
    variance: Array
    common: Array  # the part of the variance that the row's keys may share: the scaled query's, the scale's
    cap_slope: Array | None  # d = ∂ capped / ∂ scores; None without softcap
    cap_slope_variance: Array | None


def logits(operands: Differentiable, view: View, options: Options, rows: slice, precision: Precision) -> Logits:
    """`operands` of the tile's rows. Hidden positions are computed like the others: their weight is 0."""
    stages = chain.logits_forward(operands, view._replace(visible=None))
    scaled = operands.scale * operands.query
    squares = steps.inner_products(np, scaled**2, operands.key**2, view.group)
    # scaling the query, or the sum by a rounded scale or scale · log₂e
    common = squares + 2 * stages.scores**2
    variance = sum_variance(stages.scores, squares, scaled.shape[-1], precision) + common
    slope = slope_variance = None
    if operands.softcap is not None:
        u = stages.scores / operands.softcap
        u_variance = variance / operands.softcap**2 + u**2
        t = np.tanh(u)
        slope = 1 - t**2
        slope_variance = 4 * t**2 * (FUNCTION_VARIANCE * t**2 + slope**2 * u_variance) + t**4 + slope**2
        variance = operands.softcap**2 * slope**2 * u_variance + (FUNCTION_VARIANCE + 1) * stages.capped_scores**2
        common = slope**2 * common
    if operands.alibi_slopes is not None:
        # slope · j alone is as right as slope · |p(i) − j| where only earlier keys are seen: it shifts the row
        reach = np.maximum(
            np.abs(query_positions(options, rows)), key_positions(options, slice(0, view.distance.shape[-1]))
        )
        variance = variance + 2 * (operands.alibi_slopes[..., None, None] * reach) ** 2
    if operands.alibi_slopes is not None or operands.bias is not None:
        variance = variance + stages.logits**2
    return Logits(stages.logits, stages.capped_scores, variance, common, slope, slope_variance)


def exponential_variance(shifted: Array, logit: Array, logit_variance: Array) -> Array:
    """Relative, of exp(logit − shift): the logit's own, the subtraction's or that inside exp2, exp's."""
    return logit_variance + logit**2 + shifted**2 + FUNCTION_VARIANCE


class Forward(NamedTuple):
    view: View
    query: Array  # scaled
    count: Array  # terms of a row's sums, (…, rows, 1)
    weights: Array
    dropped: Array  # weights after dropout
    partial_output: Array  # mean square of the output's partial sums, (…, rows, Ev)
    tail: Array  # the part of `dropped` that a sum may lose
    exponential: Array  # relative variance of each exponential, each its own
    like_keys: Array  # how many keys give the same logits, and so the same errors, as this one, (…, 1, S)
    like_rows: Array  # how many queries do, (…, rows, 1)
    log_weights: Array
    alike: Array  # relative variance of the row's sums from roundings that like weights share, (…, rows, 1)
    against_sink: Array  # relative variance of the row's sums from errors that all keys share and the sink does not
    row_sum: Array  # relative variance of the row's sum from its additions, (…, rows, 1)
    lse: Array  # variance, (…, rows, 1)
    sink_weight: Array | None
    sink_exponential: Array | None
    cap_slope: Array | None
    cap_slope_variance: Array | None


def forward(problem: Problem, residuals: SDPAResiduals, rows: slice, precision: Precision) -> Forward:
    """One tile's weights and where their errors come from."""
    options = residuals.options
    tile = Tile(rows, slice(0, options.key_length))
    operands = problem.operands
    masking_bias = bias = None
    if problem.masking_bias is not None:
        masking_bias = slice_tile(problem.masking_bias, tile.rows, tile.columns)
        bias = finite(masking_bias)
    view = chain.view_of(options, tile, masking_bias, operands.alibi_slopes is not None)
    operands = operands._replace(query=operands.query[..., rows, :], bias=bias)
    z = logits(operands, view, options, rows, precision)
    lse = problem.lse[..., rows, :]
    visible = np.broadcast_to(True if view.visible is None else view.visible, z.values.shape)
    weights = np.where(visible, np.exp(np.minimum(z.values - lse, 0)), 0.0)
    exponential = np.where(visible, exponential_variance(z.values - lse, z.values, z.variance), 0.0)
    sink_weight = sink_exponential = None
    against_sink = np.zeros_like(lse)
    if operands.sinks is not None:
        sinks = operands.sinks[..., None, None]
        sink_weight = np.where(problem.has_sink[..., None, None], np.exp(np.minimum(sinks - lse, 0)), 0.0)
        sink_exponential = exponential_variance(sinks - lse, sinks, 0.0)
    count = np.sum(visible, axis=-1, keepdims=True) + 1.0  # the sink, or the last block
    like_rows, like_keys = like_counts(z.scores, options.query_length)
    log_weights = z.values - lse
    seen = np.maximum(np.sum(weights, axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    lost = np.sum(np.where(weights < precision.vanishing, weights, 0.0), axis=-1, keepdims=True)
    spread = log_spread(weights, log_weights, -1)
    like_terms = 1 / np.maximum(np.sum((weights / seen) ** 2, axis=-1, keepdims=True), 1 / count)
    repeated = like_terms * np.sum(weights * like_keys, axis=-1, keepdims=True) / seen
    row_sum = (count + repeated) / 3 + 1 + (lost / precision.rounding) ** 2
    # the errors of a row's logits may all be the same, as where its keys are
    lse_variance = np.sum(weights * exponential, axis=-1, keepdims=True) + row_sum + 4 * lse**2 + 1
    if sink_weight is not None:
        lse_variance = lse_variance + sink_weight * sink_exponential
        against_sink = sink_weight**2 * np.sum(weights * z.common, axis=-1, keepdims=True) / seen
    dropped = steps.dropout(np, weights, view.kept, view.dropout_p)
    small = np.maximum(precision.vanishing * np.sum(dropped, axis=-1, keepdims=True), precision.vanished)
    return Forward(
        view=view,
        query=operands.scale * operands.query,
        count=count,
        weights=weights,
        dropped=dropped,
        partial_output=sum_in_order(dropped, operands.value, view.group).mean_square(),
        tail=np.where(dropped < small, dropped, 0.0) / precision.rounding,
        exponential=exponential,
        like_keys=like_keys,
        like_rows=like_rows,
        log_weights=log_weights,
        alike=stored_alike(spread, precision) + drift(spread, like_terms, precision),
        against_sink=against_sink,
        row_sum=row_sum,
        lse=lse_variance,
        sink_weight=sink_weight,
        sink_exponential=sink_exponential,
        cap_slope=z.cap_slope,
        cap_slope_variance=z.cap_slope_variance,
    )


def weights_variance(tile: Forward) -> Array:
    """P = exp(logits − lse), or normalised by the row's own sum, which costs less."""
    return tile.weights**2 * (tile.exponential + tile.lse)


def output_variance(tile: Forward, value: Array, output: Array, precision: Precision) -> Array:
    """O = Σ W V. An error of one exponential also changes the row's sum: Σ r (W V − P O)², and the roundings."""
    group, weights, dropped = tile.view.group, tile.weights, tile.dropped
    exponential = tile.exponential * tile.like_keys
    own = exponential + (precision.half + 2) * tile.like_keys + tile.count / 6
    own = own * dropped**2 + near_zero(dropped, precision)
    mixed = steps.sum_over_keys(np, exponential * weights * dropped, value, None, group)
    whole = np.sum(exponential * weights**2, axis=-1, keepdims=True)
    if tile.sink_weight is not None:
        whole = whole + tile.sink_exponential * tile.sink_weight**2
    variance = steps.sum_over_keys(np, own, value**2, None, group) + output * (output * whole - 2 * mixed)
    variance = np.maximum(variance, 0) + output**2 * (tile.row_sum + tile.alike + tile.against_sink) + tile.count * tile.partial_output
    return variance + steps.sum_over_keys(np, tile.tail, value, None, group) ** 2


def sum_in_order(tile: Array, keys: Array, group: int) -> RunningSum:
    """tile @ keys, with what it is on the way."""
    total = RunningSum()
    for part in parts_of(tile.shape[-1]):
        total.add(steps.sum_over_keys(np, tile[..., part], keys[..., part, :], None, group))
    return total


# Backward: output → softmax → logits


class Backward(NamedTuple):
    grad_logits: Array
    own: Array  # variance of grad_logits from errors of its own
    row_dot: Array  # variance of D, which reaches the whole row as P · error, (…, rows, 1)
    grad_scores: Array
    scores_own: Array
    slope_weights: Array  # P · d: what an error of D is multiplied by on its way to grad_scores
    grad_sinks: Array | None  # (…, rows, 1)
    grad_sinks_variance: Array | None

    def logits_variance(self, tile: Forward) -> Array:
        """Of grad_logits, all errors together."""
        return self.own + tile.lse * self.grad_logits**2 + self.row_dot * tile.weights**2

    def scores_variance(self, tile: Forward) -> Array:
        """Of grad_scores, all errors together."""
        return self.scores_own + tile.lse * self.grad_scores**2 + self.row_dot * self.slope_weights**2


def backward(problem: Problem, tile: Forward, rows: slice, precision: Precision) -> Backward:
    """gZ = P ∘ (gP − D + g_lse), gS = d ∘ gZ."""
    view, weights, value = tile.view, tile.weights, problem.operands.value
    grad_output = problem.grad_output[..., rows, :]
    grad_lse = 0.0 if problem.grad_lse is None else problem.grad_lse[..., rows, :]
    products = steps.inner_products(np, grad_output, value, view.group)
    squares = steps.inner_products(np, grad_output**2, value**2, view.group)
    keep = steps.dropout(np, np.ones_like(weights), view.kept, view.dropout_p)
    grad_weights = keep * products
    if problem.grad_weights is not None:
        grad_weights = grad_weights + problem.grad_weights[..., rows, :]
    grad_weights_variance = (
        keep**2 * sum_variance(products, squares, value.shape[-1], precision) + (precision.half + 1) * grad_weights**2
    )
    row_dot = np.sum(weights * grad_weights, axis=-1, keepdims=True)
    inside = grad_weights - row_dot
    grad_logits = weights * (inside + grad_lse)
    row_dot_variance = _row_dot_variance(tile, grad_weights, grad_weights_variance)
    row_dot_variance += _output_dot_variance(
        tile, grad_output, problem.output[..., rows, :], products, squares, precision
    )
    own = weights**2 * (grad_weights_variance + inside**2) + (tile.exponential + 2) * grad_logits**2
    # stored weights, and their gradient as it goes into the products
    own = own + 2 * precision.half * grad_logits**2 + near_zero(grad_logits, precision)
    own = own + near_zero(weights, precision) * (inside + grad_lse) ** 2
    grad_scores, scores_own, slope_weights = grad_logits, own, weights
    if tile.cap_slope is not None:
        grad_scores, slope_weights = tile.cap_slope * grad_logits, tile.cap_slope * weights
        scores_own = tile.cap_slope**2 * own + tile.cap_slope_variance * grad_logits**2 + grad_scores**2
        scores_own = scores_own + near_zero(grad_scores, precision)
    grad_sinks = grad_sinks_variance = None
    if tile.sink_weight is not None:
        grad_sinks = tile.sink_weight * (grad_lse - row_dot)
        grad_sinks_variance = (tile.sink_exponential + tile.lse + 2) * grad_sinks**2
        grad_sinks_variance = grad_sinks_variance + tile.sink_weight**2 * row_dot_variance
        grad_sinks_variance = grad_sinks_variance + near_zero(tile.sink_weight, precision) * (grad_lse - row_dot) ** 2
    return Backward(
        grad_logits, own, row_dot_variance, grad_scores, scores_own, slope_weights, grad_sinks, grad_sinks_variance
    )


def _row_dot_variance(tile: Forward, grad_weights: Array, grad_weights_variance: Array) -> Array:
    """D = Σ P ∘ gP over the row's keys. An error of one exponential also changes the row's sum: Σ r (P (gP − D))²."""
    terms = tile.weights * grad_weights
    row_dot = np.sum(terms, axis=-1, keepdims=True)
    own = tile.exponential * (terms - tile.weights * row_dot) ** 2 + tile.weights**2 * grad_weights_variance
    variance = np.sum(own * tile.like_keys, axis=-1, keepdims=True) + (tile.row_sum + tile.alike + tile.against_sink) * row_dot**2
    if tile.sink_weight is not None:
        variance = variance + tile.sink_exponential * (tile.sink_weight * row_dot) ** 2
    return variance + tile.count * partial_sums(terms) + (tile.count / 6 + 1) * np.sum(terms**2, axis=-1, keepdims=True)


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
    inside = (tile.count / 6 + 2) * squares + precision.half * tile.like_keys * products**2
    variance = variance + np.sum(tile.dropped**2 * inside, axis=-1, keepdims=True)
    return variance + np.sum(tile.tail * products, axis=-1, keepdims=True) ** 2


def near_zero(array: Array, precision: Precision) -> Array:
    """Numbers near 0 lose what underflow takes, at most themselves."""
    return np.minimum((array / precision.rounding) ** 2, precision.underflow)


def vanished(tile: Forward, back: Backward, precision: Precision) -> Array:
    """The entries of the scores' gradient that stored weights or stored gradients of a small type may lose, all at once."""
    is_lost = (tile.weights < precision.vanished) | (np.abs(back.grad_scores) < precision.vanished)
    return np.where(is_lost, back.grad_scores, 0.0) / precision.rounding
