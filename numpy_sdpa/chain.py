"""The steps composed over one tile of the plane: from query and key to logits, and from weights to the output.

`dense` runs these on the whole plane as one tile, `blockwise` on many. An option that is off is a step left out, here
and nowhere else; each ``…_backward`` undoes the lines of its forward in reverse order.
"""

from typing import Any, NamedTuple

from numpy_sdpa import steps
from numpy_sdpa._internal.namespace import Array, Namespace, astype, operand, owned
from numpy_sdpa._internal.options import Options
from numpy_sdpa._internal.shapes import slice_tile, sum_to_shape
from numpy_sdpa.dropout import kept_in
from numpy_sdpa.visibility import Tile, alibi_distance, visible_in


class Differentiable(NamedTuple):
    """One entry for every input that has a gradient: the inputs, a direction of change, or the gradients."""

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    scale: Any = None
    softcap: Any = None


class View(NamedTuple):
    """What holds in one tile of the plane, besides the differentiable inputs."""

    xp: Namespace
    group: int
    visible: Array | None  # bool, its last two axes whole; None where every query sees every key
    distance: Array | None  # |p(i) − j| in the compute dtype; None without ALiBi
    kept: Array | None  # bool; None without dropout
    dropout_p: float


class Logits(NamedTuple):
    scores: Array
    capped_scores: Array
    logits: Array


def operands_of(arrays: Any, options: Options) -> Differentiable:
    """The differentiable attributes of `arrays` in the compute dtype, query with the plane's batch axes and heads."""

    def of(name: str) -> Array | None:
        array = getattr(arrays, name)
        return None if array is None else operand(options.xp, array, options.compute_dtype)

    operands = Differentiable(**{name: of(name) for name in Differentiable._fields})
    shape = (*options.plane[:-1], operands.query.shape[-1])
    if operands.query.shape == shape:
        return operands
    return operands._replace(query=options.xp.broadcast_to(operands.query, shape))


def view_of(options: Options, tile: Tile, bias: Array | None, has_alibi: bool) -> View:
    """What holds in `tile`; `bias` is the tile's part of the bias."""
    return view_with(options, tile, visible_in(options, tile, bias), has_alibi)


def view_with(options: Options, tile: Tile, visible: Array | None, has_alibi: bool) -> View:
    """What holds in `tile`, where it is known already what is visible there."""
    return View(
        xp=options.xp,
        group=options.group,
        visible=visible,
        distance=astype(alibi_distance(options, tile), options.compute_dtype) if has_alibi else None,
        kept=kept_in(options, tile),
        dropout_p=options.dropout.p if options.dropout else 0.0,
    )


def tile_of_bias(bias: Array | None, tile: Tile) -> Array | None:
    """The tile's part of the bias, at least 2-D."""
    if bias is None:
        return None
    return slice_tile(bias[(None,) * (2 - bias.ndim) + (...,)], tile.rows, tile.columns)


# From query and key to logits: scores → softcap → ALiBi, bias → mask


def logits_forward(operands: Differentiable, view: View) -> Logits:
    """scores, then softcap, ALiBi and bias where they are on, then the mask."""
    xp = view.xp
    scores = steps.scores_forward(xp, operands.query, operands.key, operands.scale, view.group)
    capped = scores
    if operands.softcap is not None:
        capped = steps.softcap_forward(xp, scores, operands.softcap)
    logits = capped
    if operands.alibi_slopes is not None:
        logits = steps.alibi_forward(logits, operands.alibi_slopes, view.distance)
    if operands.bias is not None:
        logits = logits + operands.bias
    return Logits(scores, capped, steps.mask_forward(xp, logits, view.visible))


def logits_backward(grad_logits: Array, scores: Array, operands: Differentiable, view: View) -> Differentiable:
    """Gradients of query, key, bias (the tile's, not summed), ALiBi slopes, scale and softcap."""
    xp = view.xp
    grad_scores = grad_logits = steps.mask_backward(xp, grad_logits, view.visible)
    grad_slopes = grad_softcap = None
    if operands.alibi_slopes is not None:
        grad_slopes = steps.alibi_backward(xp, grad_logits, view.distance)
    if operands.softcap is not None:
        scores = steps.mask_backward(xp, scores, view.visible)  # what is hidden may be anything
        grad_scores, grad_softcap = steps.softcap_backward(xp, grad_logits, scores, operands.softcap)
    grads = steps.scores_backward(
        xp, grad_scores, operands.query, operands.key, operands.scale, view.visible, view.group
    )
    return Differentiable(
        query=grads.query,
        key=grads.key,
        bias=None if operands.bias is None else grad_logits,
        alibi_slopes=grad_slopes,
        scale=grads.scale,
        softcap=grad_softcap,
    )


class LogitsTangent(NamedTuple):
    scores: Array
    logits: Array


def logits_tangent(scores: Array, operands: Differentiable, directions: Differentiable, view: View) -> LogitsTangent:
    """The change of scores and logits along `directions`, 0 where hidden."""
    xp = view.xp
    scores_tangent = steps.scores_tangent(
        xp,
        operands.query,
        operands.key,
        operands.scale,
        directions.query,
        directions.key,
        directions.scale,
        view.group,
    )
    scores_tangent = tangent = steps.mask_backward(xp, scores_tangent, view.visible)
    if operands.softcap is not None:
        tangent = steps.softcap_tangent(xp, scores, operands.softcap, scores_tangent, directions.softcap)
    if operands.alibi_slopes is not None:
        tangent = steps.alibi_tangent(tangent, directions.alibi_slopes, view.distance)
    if operands.bias is not None:
        tangent = tangent + directions.bias
    return LogitsTangent(scores_tangent, steps.mask_backward(xp, tangent, view.visible))


def logits_backward_tangent(
    grad_logits: Array,
    grad_logits_tangent: Array,
    scores: Array,
    scores_tangent: Array,
    operands: Differentiable,
    directions: Differentiable,
    view: View,
) -> Differentiable:
    """The change of what `logits_backward` returns, along `directions`."""
    xp = view.xp
    grad_scores = grad_logits = steps.mask_backward(xp, grad_logits, view.visible)
    grad_scores_tangent = grad_logits_tangent = steps.mask_backward(xp, grad_logits_tangent, view.visible)
    grad_slopes = grad_softcap = None
    if operands.alibi_slopes is not None:
        grad_slopes = steps.alibi_backward(xp, grad_logits_tangent, view.distance)
    if operands.softcap is not None:
        scores = steps.mask_backward(xp, scores, view.visible)
        grad_scores, _ = steps.softcap_backward(xp, grad_logits, scores, operands.softcap)
        grad_scores_tangent, grad_softcap = steps.softcap_backward_tangent(
            xp, grad_logits, grad_logits_tangent, scores, operands.softcap, scores_tangent, directions.softcap
        )
    grads = steps.scores_backward_tangent(
        xp,
        grad_scores,
        grad_scores_tangent,
        operands.query,
        operands.key,
        operands.scale,
        directions.query,
        directions.key,
        directions.scale,
        view.visible,
        view.group,
    )
    return Differentiable(
        query=grads.query,
        key=grads.key,
        bias=None if operands.bias is None else grad_logits_tangent,
        alibi_slopes=grad_slopes,
        scale=grads.scale,
        softcap=grad_softcap,
    )


# From weights to the output: dropout → · V


def output_forward(weights: Array, value: Array, view: View) -> Array:
    """The values' sum with the weights that dropout leaves."""
    dropped = steps.dropout(view.xp, weights, view.kept, view.dropout_p)
    return steps.output_forward(view.xp, dropped, value, view.visible, view.group)


def output_backward(grad_output: Array, weights: Array, value: Array, view: View) -> steps.OutputGradients:
    """Gradients of weights (before dropout) and value."""
    dropped = steps.dropout(view.xp, weights, view.kept, view.dropout_p)
    grads = steps.output_backward(view.xp, grad_output, dropped, value, view.visible, view.group)
    return grads._replace(weights=_dropout_and_mask_backward(grads.weights, view))


def output_tangent(weights: Array, value: Array, weights_tangent: Array, value_tangent: Array, view: View) -> Array:
    dropped = steps.dropout(view.xp, weights, view.kept, view.dropout_p)
    dropped_tangent = steps.dropout(view.xp, weights_tangent, view.kept, view.dropout_p)
    return steps.output_tangent(view.xp, dropped, value, dropped_tangent, value_tangent, view.visible, view.group)


def output_backward_tangent(
    grad_output: Array, weights_tangent: Array, value_tangent: Array, view: View
) -> steps.OutputGradients:
    """The change of what `output_backward` returns."""
    dropped_tangent = steps.dropout(view.xp, weights_tangent, view.kept, view.dropout_p)
    grads = steps.output_backward_tangent(
        view.xp, grad_output, dropped_tangent, value_tangent, view.visible, view.group
    )
    return grads._replace(weights=_dropout_and_mask_backward(grads.weights, view))


def _dropout_and_mask_backward(grad_dropped: Array, view: View) -> Array:
    """Back through dropout, and 0 where hidden: V may hold anything there."""
    grad_weights = steps.dropout(view.xp, grad_dropped, view.kept, view.dropout_p)
    return steps.mask_backward(view.xp, grad_weights, view.visible)


def over_rows(xp: Namespace, grad_sinks: Array | None) -> Array | None:
    """(…, Hq, L, 1) → (…, Hq): every row of a head has the same sink."""
    return None if grad_sinks is None else xp.sum(grad_sinks, axis=(-2, -1))


def like_inputs(gradients: Differentiable, arrays: Any, options: Options) -> Differentiable:
    """Each gradient summed to its input's shape and rounded to its input's dtype."""
    xp = options.xp

    def like_input(name: str) -> Array | None:
        gradient, given = getattr(gradients, name), getattr(arrays, name)
        if given is None:
            return None
        return owned(astype(xp.asarray(sum_to_shape(xp, gradient, given.shape)), given.dtype))

    return Differentiable(**{name: like_input(name) for name in Differentiable._fields})
