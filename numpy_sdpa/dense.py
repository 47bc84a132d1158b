"""The reference: the chain on the whole L × S plane, forward, backward, and the tangents of both.

Everything is kept, so that it can be looked at. The forward's lines are numbered; the backward undoes them in reverse.
"""

from typing import NamedTuple

from numpy_sdpa import chain, steps
from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Inputs, Options
from numpy_sdpa.chain import Differentiable, View
from numpy_sdpa.residuals import SDPAResiduals, Upstream
from numpy_sdpa.visibility import whole_plane


class Tangents(NamedTuple):
    output: Array
    lse: Array  # (B…, Hq, L, 1)
    weights: Array


def _prepare(arrays: Inputs | SDPAResiduals, options: Options) -> tuple[Differentiable, View]:
    operands = chain.operands_of(arrays, options)
    plane = whole_plane(options)
    return operands, chain.view_of(options, plane, operands.bias, operands.alibi_slopes is not None)


def forward(inputs: Inputs, options: Options) -> SDPAResiduals:
    """The chain on the whole plane; every array on the way is a residual."""
    xp = options.xp
    operands, view = _prepare(inputs, options)
    stages = chain.logits_forward(operands, view)  # 1
    softmax = steps.softmax_forward(xp, stages.logits, operands.sinks, view.visible)  # 2
    output = chain.output_forward(softmax.weights, operands.value, view)  # 3
    return SDPAResiduals(
        **inputs._replace(dropout_mask=view.kept)._asdict(),
        scores=stages.scores,
        capped_scores=stages.capped_scores,
        logits=stages.logits,
        weights=softmax.weights,
        row_shift=xp.squeeze(softmax.row_shift, axis=-1),
        row_sum=xp.squeeze(softmax.row_sum, axis=-1),
        lse=xp.squeeze(softmax.lse, axis=-1),
        output=output,
        options=options,
    )


def backward(residuals: SDPAResiduals, upstream: Upstream) -> Differentiable:
    """Gradients in the compute dtype, summed over what was broadcast within the plane."""
    xp = residuals.options.xp
    operands, view = _prepare(residuals, residuals.options)
    weights = residuals.weights
    grad_output, grad_lse, upstream_weights = _reaching(upstream, residuals, view)
    # 3: output = weights @ value
    grads = chain.output_backward(grad_output, weights, operands.value, view)
    grad_value, grad_weights = grads.value, grads.weights + upstream_weights
    # 2: weights, lse = softmax(logits, sinks)
    grad_logits, grad_sinks = steps.softmax_backward(
        xp, grad_weights, grad_lse, weights, _sink_weight(residuals, operands.sinks)
    )
    # 1: logits = logits(query, key, …)
    gradients = chain.logits_backward(grad_logits, residuals.scores, operands, view)
    return gradients._replace(value=grad_value, sinks=chain.over_rows(xp, grad_sinks))


def jvp(residuals: SDPAResiduals, directions: Differentiable) -> Tangents:
    """The forward's change along `directions`, line by line."""
    operands, view = _prepare(residuals, residuals.options)
    _, softmax, output = _tangents(residuals, operands, directions, view)
    return Tangents(output, softmax.lse, softmax.weights)


def _tangents(
    residuals: SDPAResiduals, operands: Differentiable, directions: Differentiable, view: View
) -> tuple[chain.LogitsTangent, steps.SoftmaxTangents, Array]:
    xp = view.xp
    stages = chain.logits_tangent(residuals.scores, operands, directions, view)  # 1
    sink_weight = _sink_weight(residuals, operands.sinks)
    # a row of −∞ remains one, however fast its scores change
    logits_tangent = steps.only_where(xp, residuals.lse[..., None] != -xp.inf, stages.logits)
    softmax = steps.softmax_tangent(  # 2
        xp, residuals.weights, sink_weight, logits_tangent, directions.sinks, view.visible
    )
    output = chain.output_tangent(  # 3
        residuals.weights, operands.value, softmax.weights, directions.value, view
    )
    return stages, softmax, output


def double_backward(
    residuals: SDPAResiduals, upstream: Upstream, directions: Differentiable
) -> tuple[Differentiable, Tangents]:
    """The change of `backward` along `directions` with `upstream` held, and the change of the forward.

    These are the gradients of ⟨directions, backward(upstream)⟩ with respect to the inputs and to `upstream`: the first
    since second derivatives are symmetric, the second since it is ⟨upstream, jvp(directions)⟩.
    """
    xp = residuals.options.xp
    operands, view = _prepare(residuals, residuals.options)
    weights = residuals.weights
    sink_weight = _sink_weight(residuals, operands.sinks)
    stages, softmax, output_tangent = _tangents(residuals, operands, directions, view)
    grad_output, grad_lse, upstream_weights = _reaching(upstream, residuals, view)
    # 3
    grads = chain.output_backward(grad_output, weights, operands.value, view)
    grad_weights = grads.weights + upstream_weights
    grads_tangent = chain.output_backward_tangent(grad_output, softmax.weights, directions.value, view)
    # 2
    grad_logits, _ = steps.softmax_backward(xp, grad_weights, grad_lse, weights, sink_weight)
    grad_logits_tangent, grad_sinks_tangent = steps.softmax_backward_tangent(
        xp, grad_weights, grads_tangent.weights, grad_lse, weights, sink_weight, softmax
    )
    # 1
    gradients = chain.logits_backward_tangent(
        grad_logits, grad_logits_tangent, residuals.scores, stages.scores, operands, directions, view
    )
    gradients = gradients._replace(value=grads_tangent.value, sinks=chain.over_rows(xp, grad_sinks_tangent))
    return gradients, Tangents(output_tangent, softmax.lse, softmax.weights)


def _reaching(upstream: Upstream, residuals: SDPAResiduals, view: View) -> tuple[Array, Array, Array]:
    """Upstream gradients of output, lse (…, L, 1) and weights: zeros for None; the last two 0 where they reach nothing.

    That of the output needs no such care: no product reads the rows of it that see nothing.
    """
    xp, visible = view.xp, view.visible
    lse = residuals.lse[..., None]
    grad_output = xp.zeros_like(residuals.output) if upstream.output is None else upstream.output
    grad_lse, grad_weights = xp.zeros_like(lse), xp.zeros_like(residuals.weights)
    if upstream.lse is not None:
        grad_lse = steps.only_where(xp, lse != -xp.inf, upstream.lse[..., None])
    if upstream.weights is not None:
        grad_weights = steps.mask_backward(xp, upstream.weights, visible)
    return grad_output, grad_lse, grad_weights


def _sink_weight(residuals: SDPAResiduals, sinks: Array | None) -> Array | None:
    return steps.sink_weight(residuals.options.xp, sinks, residuals.row_shift[..., None], residuals.row_sum[..., None])
