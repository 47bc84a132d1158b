"""How rounding errors travel through the chain: the variance of each result of a right kernel, to first order.

docs/tolerance.md derives each line under the name of its function. Here a tile is some rows and all columns of the
plane: arrays (B…, Hq, rows, S), 0 where hidden. Everything is float64 and NumPy, and every variance is in units of
`Precision.rounding` squared: an array's own rounding has the variance array².
"""

from typing import NamedTuple

import numpy as np

from numpy_sdpa import chain, steps
from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.shapes import slice_tile
from numpy_sdpa.chain import Differentiable, View
from numpy_sdpa.kernelcheck.precision import FORMATS, Precision
from numpy_sdpa.residuals import SDPAResiduals, Upstream
from numpy_sdpa.visibility import Tile, key_positions, query_positions

# Fast exp and tanh are off by one or two units in the last place; a unit is √12 roundings.
FUNCTION_VARIANCE = 4 * 12.0


def sum_variance(total: Array, squares: Array, count: Array | float) -> Array:
    """Of a sum of `count` products, one by one in any order: n (total²/3 + Σx²/6), and Σx² for the products themselves.

    `total` is the sum, `squares` the sum of the squared terms. Blocks and pairs cost less.
    """
    return count * total**2 / 3 + (count / 6 + 1) * squares


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
    variance: Array
    cap_slope: Array | None  # d = ∂ capped / ∂ scores; None without softcap
    cap_slope_variance: Array | None


def logits(operands: Differentiable, view: View, options: object, rows: slice) -> Logits:
    """`operands` of the tile's rows. Hidden positions are computed like the others: their weight is 0."""
    stages = chain.logits_forward(operands, view._replace(visible=None))
    scaled = operands.scale * operands.query
    squares = steps.inner_products(np, scaled**2, operands.key**2, view.group)
    # scaling the query, or the sum by a rounded scale or scale · log₂e
    variance = sum_variance(stages.scores, squares, scaled.shape[-1]) + squares + 2 * stages.scores**2
    slope = slope_variance = None
    if operands.softcap is not None:
        u = stages.scores / operands.softcap
        u_variance = variance / operands.softcap**2 + u**2
        t = np.tanh(u)
        slope = 1 - t**2
        slope_variance = 4 * t**2 * (FUNCTION_VARIANCE * t**2 + slope**2 * u_variance) + t**4 + slope**2
        variance = operands.softcap**2 * slope**2 * u_variance + (FUNCTION_VARIANCE + 1) * stages.capped_scores**2
    if operands.alibi_slopes is not None:
        # slope · j alone is as right as slope · |p(i) − j| where only earlier keys are seen: it shifts the row
        reach = np.maximum(
            np.abs(query_positions(options, rows)), key_positions(options, slice(0, view.distance.shape[-1]))
        )
        variance = variance + 2 * (operands.alibi_slopes[..., None, None] * reach) ** 2
    if operands.alibi_slopes is not None or operands.bias is not None:
        variance = variance + stages.logits**2
    return Logits(stages.logits, variance, slope, slope_variance)


def exponential_variance(shifted: Array, logit: Array, logit_variance: Array) -> Array:
    """Relative, of exp(logit − shift): the logit's own, the subtraction's or that inside exp2, exp's."""
    return logit_variance + logit**2 + shifted**2 + FUNCTION_VARIANCE


class Forward(NamedTuple):
    view: View
    query: Array  # scaled
    count: Array  # terms of a row's sums, (…, rows, 1)
    weights: Array
    dropped: Array  # weights after dropout
    tail: Array  # the part of `dropped` that a sum may lose
    exponential: Array  # relative variance of each exponential, each its own
    like_keys: Array  # how many keys give the same logits, and so the same errors, as this one, (…, 1, S)
    like_rows: Array  # how many queries do, (…, rows, 1)
    spread: Array  # variance of the row's log weights under its weights, (…, rows, 1)
    alike: Array  # relative variance of the row's sums from roundings that like weights share, (…, rows, 1)
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
    z = logits(operands, view, options, rows)
    lse = problem.lse[..., rows, :]
    visible = np.broadcast_to(True if view.visible is None else view.visible, z.values.shape)
    weights = np.where(visible, np.exp(np.minimum(z.values - lse, 0)), 0.0)
    exponential = np.where(visible, exponential_variance(z.values - lse, z.values, z.variance), 0.0)
    sink_weight = sink_exponential = None
    if operands.sinks is not None:
        sinks = operands.sinks[..., None, None]
        sink_weight = np.where(problem.has_sink[..., None, None], np.exp(np.minimum(sinks - lse, 0)), 0.0)
        sink_exponential = exponential_variance(sinks - lse, sinks, 0.0)
    count = np.sum(visible, axis=-1, keepdims=True) + 1.0  # the sink, or the last block
    like_rows, like_keys = _like_counts(z.values, options.query_length)
    seen = np.maximum(np.sum(weights, axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    lost = np.sum(np.where(weights < precision.vanishing, weights, 0.0), axis=-1, keepdims=True)
    mean = np.sum(weights * (z.values - lse), axis=-1, keepdims=True) / seen
    spread = np.sum(weights * (z.values - lse - mean) ** 2, axis=-1, keepdims=True) / seen
    like_terms = 1 / np.maximum(np.sum((weights / seen) ** 2, axis=-1, keepdims=True), 1 / count)
    repeated = like_terms * np.sum(weights * like_keys, axis=-1, keepdims=True) / seen
    row_sum = (count + repeated) / 3 + 1 + (lost / precision.rounding) ** 2
    # the errors of a row's logits may all be the same, as where its keys are
    lse_variance = np.sum(weights * exponential, axis=-1, keepdims=True) + row_sum + 4 * lse**2 + 1
    if sink_weight is not None:
        lse_variance = lse_variance + sink_weight * sink_exponential
    dropped = steps.dropout(np, weights, view.kept, view.dropout_p)
    small = np.maximum(precision.vanishing * np.max(dropped, axis=-1, keepdims=True, initial=0.0), precision.vanished)
    return Forward(
        view=view,
        query=operands.scale * operands.query,
        count=count,
        weights=weights,
        dropped=dropped,
        tail=np.where(dropped < small, dropped, 0.0) / precision.rounding,
        exponential=exponential,
        like_keys=like_keys,
        like_rows=like_rows,
        spread=spread,
        alike=like_roundings(spread, like_terms, precision),
        row_sum=row_sum,
        lse=lse_variance,
        sink_weight=sink_weight,
        sink_exponential=sink_exponential,
        cap_slope=z.cap_slope,
        cap_slope_variance=z.cap_slope_variance,
    )


def _like_counts(values: Array, query_length: int) -> tuple[Array, Array]:
    """How many rows are like each row of logits, and how many columns like each column.

    Equal logits are rounded equally: their errors add up where those of different ones average out. Equal queries, repeated
    tokens and padding do that. Two rows are called equal if a random projection of them is, to float32's eps; if a tile's
    rows are, those of the other tiles are taken to be.
    """
    rows, columns = values.shape[-2:]
    draw = np.random.default_rng(0).standard_normal
    like_rows = _repetitions(*_projections(values, draw(columns))) * (query_length / max(1, rows))
    like_columns = _repetitions(*_projections(values.mT, draw(rows)))
    return np.where(like_rows * rows > query_length, like_rows, 1.0)[..., None], like_columns[..., None, :]


def _projections(values: Array, direction: Array) -> tuple[Array, Array]:
    return values @ direction, np.sqrt(values**2 @ direction**2)


def _repetitions(projection: Array, size: Array) -> Array:
    """For each number of the last axis how many others there are within float32's eps of its size; itself included."""
    if projection.size == 0:
        return projection
    order = np.argsort(projection, axis=-1)
    ordered = np.take_along_axis(projection, order, -1)
    allowed = np.take_along_axis(size, order, -1)[..., 1:] * FORMATS["float32"].eps
    starts = np.ones(projection.shape, dtype=bool)
    starts[..., 1:] = np.diff(ordered, axis=-1) > allowed
    group = np.cumsum(starts) - 1  # a new one starts with each row of the last axis
    counts = np.bincount(group)[group].reshape(projection.shape)
    repetitions = np.empty(projection.shape)
    np.put_along_axis(repetitions, order, counts, -1)
    return repetitions


def _share(spread: Array, scale: Array | float) -> Array:
    """0 … 1: how far weights of this variance of their logarithms are alike on this scale."""
    return scale**2 / (scale**2 + spread)


def like_roundings(spread: Array, count: Array | float, precision: Precision) -> Array:
    """Relative variance of a sum over (nearly) equal weights, whose roundings are equal, not independent.

    The weights round to the half type alike where they differ by less than its eps. And adding `count` like terms one by
    one rounds alike for as long as the sum's exponent stays, n/3 roundings in all, if they differ by less than n eps.
    """
    stored = precision.half * _share(spread, precision.half_eps) if precision.half else 0.0
    return stored + count**2 / 9 * _share(spread, count * precision.vanishing)


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
    variance = np.maximum(variance, 0) + output**2 * (tile.count / 3 + tile.row_sum + tile.alike)
    return variance + steps.sum_over_keys(np, tile.tail, value, None, group) ** 2


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
        keep**2 * sum_variance(products, squares, value.shape[-1]) + (precision.half + 1) * grad_weights**2
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
    variance = np.sum(own * tile.like_keys, axis=-1, keepdims=True) + (tile.row_sum + tile.alike) * row_dot**2
    if tile.sink_weight is not None:
        variance = variance + tile.sink_exponential * (tile.sink_weight * row_dot) ** 2
    return variance + sum_variance(row_dot, np.sum(terms**2, axis=-1, keepdims=True), tile.count)


def _output_dot_variance(
    tile: Forward, grad_output: Array, output: Array, products: Array, squares: Array, precision: Precision
) -> Array:
    """D = Σ gO ∘ O, in addition: this sum, the sums and roundings inside O, and O's own rounding."""
    terms = grad_output * output
    output_dot = np.sum(terms, axis=-1, keepdims=True)
    terms_squared = np.sum(terms**2, axis=-1, keepdims=True)
    variance = sum_variance(output_dot, terms_squared, terms.shape[-1])
    variance = variance + (precision.half + tile.count / 3) * terms_squared
    variance = variance + np.sum(grad_output**2 * near_zero(output, precision), axis=-1, keepdims=True)
    inside = (tile.count / 6 + 2) * squares + precision.half * tile.like_keys * products**2
    variance = variance + np.sum(tile.dropped**2 * inside, axis=-1, keepdims=True)
    return variance + np.sum(tile.tail * products, axis=-1, keepdims=True) ** 2


def near_zero(array: Array, precision: Precision) -> Array:
    """Numbers near 0 lose what underflow takes, at most themselves."""
    return np.minimum((array / precision.rounding) ** 2, precision.underflow)


def vanished(tile: Forward, back: Backward, precision: Precision) -> Array:
    """The entries of the scores' gradient that stored weights or stored gradients of a small type may lose, all at once."""
    is_lost = (tile.weights < precision.vanished) | (np.abs(back.grad_logits) < precision.vanished)
    return np.where(is_lost, back.grad_scores, 0.0) / precision.rounding


# Gradients of the inputs. Those summed over rows are one tile's share of the variance: the caller adds the tiles.


def grad_query_variance(
    problem: Problem, tile: Forward, back: Backward, has_copies: bool, precision: Precision
) -> Array:
    """gQ = scale · gS K: errors of a row's lse and D reach all its keys together, as gQ itself and as Σ P d k.

    `has_copies`: the query was broadcast, and half types round each copy's gradient before they are summed.
    """
    group, key, scale = tile.view.group, problem.operands.key, problem.operands.scale
    product = steps.sum_over_keys(np, back.grad_scores, key, None, group)
    mean_key = steps.sum_over_keys(np, back.slope_weights, key, None, group)
    own = back.scores_own * tile.like_keys + (tile.count / 6 + 1) * back.grad_scores**2
    variance = steps.sum_over_keys(np, own, key**2, None, group) + back.row_dot * mean_key**2
    if precision.vanished:
        variance = variance + steps.sum_over_keys(np, vanished(tile, back, precision), key, None, group) ** 2
    variance = scale**2 * (variance + (tile.lse + tile.count / 3 + 2) * product**2)
    if has_copies:
        variance = variance + precision.half * (scale * product) ** 2 + near_zero(scale * product, precision)
    return variance


def grad_key_variance(tile: Forward, back: Backward, count: float) -> Array:
    """gK = gSᵀ (scale · Q), but for the total of the sum of `count` terms: each row's errors are its own."""
    own = (back.scores_variance(tile) + (count / 6 + 3) * back.grad_scores**2) * tile.like_rows
    return steps.sum_over_queries(np, own, tile.query**2, None, tile.view.group)


def grad_key_vanished(tile: Forward, back: Backward, precision: Precision) -> Array:
    """What underflow takes from gK; adds up over tiles."""
    return steps.sum_over_queries(np, vanished(tile, back, precision), tile.query, None, tile.view.group)


def grad_value_variance(tile: Forward, grad_output: Array, count: float, precision: Precision) -> Array:
    """gV = Wᵀ gO, but for the total of the sum of `count` terms."""
    own = (tile.exponential + tile.lse + precision.half + count / 6 + 3) * tile.like_rows * tile.dropped**2
    own = own + near_zero(tile.dropped, precision)
    return steps.sum_over_queries(np, own, grad_output**2, None, tile.view.group)


def grad_value_together(tile: Forward, grad_output: Array, count: float, precision: Precision) -> Array:
    """The standard deviation of gV from what like weights share, and what underflow takes; adds up over tiles."""
    share = np.sqrt(like_roundings(tile.spread, count, precision))
    lost = np.where(tile.dropped < precision.vanished, tile.dropped, 0.0) / precision.rounding
    return steps.sum_over_queries(np, share * tile.dropped + lost, grad_output, None, tile.view.group)


def grad_bias_variance(
    tile: Forward, back: Backward, over_keys: bool, count: float, precision: Precision
) -> Array:
    """gb = gZ, summed over keys where the bias has one column; but for the total of the sum of `count` terms."""
    if over_keys:
        return row_total_variance(tile, back, 1.0, count, precision)
    return (back.logits_variance(tile) + (count / 6 + 1) * back.grad_logits**2) * (tile.like_rows if count > 1 else 1)


def row_total_variance(
    tile: Forward, back: Backward, factor: Array | float, count: float, precision: Precision
) -> Array:
    """Σ gZ · factor over a row's keys (…, rows, 1), which errors of lse and D reach together; but for the sum's total.

    The factor is −distance for the slopes' gradient, and 1 for that of a bias of one column.
    """
    own = (back.own * tile.like_keys + (count / 6 + 2) * back.grad_logits**2) * factor**2
    total = np.sum(back.grad_logits * factor, axis=-1, keepdims=True)
    mean = np.sum(tile.weights * factor, axis=-1, keepdims=True)
    variance = np.sum(own, axis=-1, keepdims=True) + tile.lse * total**2 + back.row_dot * mean**2
    if precision.vanished:
        lost = np.where(tile.weights < precision.vanished, back.grad_logits, 0.0) / precision.rounding
        variance = variance + np.sum(lost * factor, axis=-1, keepdims=True) ** 2
    return variance * tile.like_rows
