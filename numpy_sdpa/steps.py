"""The mathematics of attention, one step of the chain after the other.

    scores = scale · Q Kᵀ  →  softcap  →  − ALiBi, + bias  →  mask  →  softmax with sinks  →  dropout  →  · V

Every step has a forward rule and, directly below it, the rules derived from it by hand:

- ``…_backward``: gradients of the step's inputs from the gradient of its result (vector-Jacobian product);
- ``…_tangent``: the change of the result from changes of the inputs (Jacobian-vector product);
- ``…_backward_tangent``: the change of what ``…_backward`` returns. The double backward needs nothing else.

A step takes a rectangular tile of the L × S plane: arrays (…, heads, rows, columns), where the whole plane is one tile
(`dense`) or one of many (`blockwise`). ``grad_x`` is the gradient of a scalar with respect to x, ``x_tangent`` the
derivative of x along a direction. ``visible`` is True where a query may see a key, None where every query of the tile
sees every key. Nothing is written in place and nothing branches on a value, so the same lines run on any array module,
under a tracer, and with complex numbers (the analytic continuation that complex-step differentiation needs).

docs/derivation.md derives each rule.
"""

from typing import Any, NamedTuple

from numpy_sdpa._internal.namespace import Array, Namespace, astype, clipped, overwrite, real_part
from numpy_sdpa._internal.shapes import fold_groups, repeat_heads, sum_heads, unfold_groups

# ------------------------------------------------------------------------------------------------------------------
# Products in which a masked position is never read
# ------------------------------------------------------------------------------------------------------------------
#
# A tile is 0 wherever `visible` is False, but 0 · NaN and 0 · ∞ are NaN: a plain product would let a hidden NaN
# through. So non-finite entries of the other factor count as 0, and rows that do see one become NaN.


def only_where(xp: Namespace, condition: Array, array: Array) -> Array:
    """`array` where the condition holds, 0 elsewhere, whatever stands there: selected, never multiplied."""
    return xp.where(condition, array, 0)


def finite_part(xp: Namespace, array: Array, visible: Array | None) -> Array:
    """Non-finite entries replaced by 0 where a mask may hide them."""
    return array if visible is None else only_where(xp, xp.isfinite(array), array)


def _has_non_finite(xp: Namespace, array: Array) -> Array:
    return astype(~xp.all(xp.isfinite(array), axis=-1, keepdims=True), xp.float32)


def sum_over_keys(xp: Namespace, tile: Array, keys: Array, visible: Array | None, group: int) -> Array:
    """tile @ keys: (…, Hq, rows, columns) @ (…, Hkv, columns, X) → (…, Hq, rows, X)."""
    folded = fold_groups(xp, tile, group) @ finite_part(xp, keys, visible)
    product = unfold_groups(xp, folded, group)
    if visible is None:
        return product
    unusable = repeat_heads(xp, _has_non_finite(xp, keys), group)
    sees_unusable = astype(visible, xp.float32) @ unusable > 0
    return xp.where(sees_unusable, xp.nan, product)


def sum_over_queries(xp: Namespace, tile: Array, queries: Array, visible: Array | None, group: int) -> Array:
    """tileᵀ @ queries: (…, Hq, rows, columns)ᵀ @ (…, Hq, rows, X) → (…, Hkv, columns, X), summed over each group."""
    clean = finite_part(xp, queries, visible)
    product = fold_groups(xp, tile, group).mT @ fold_groups(xp, clean, group)
    if visible is None:
        return product
    seen_by_unusable = sum_heads(xp, astype(visible, xp.float32).mT @ _has_non_finite(xp, queries), group)
    return xp.where(seen_by_unusable > 0, xp.nan, product)


def inner_products(xp: Namespace, queries: Array, keys: Array, group: int) -> Array:
    """queries @ keysᵀ: (…, Hq, rows, X), (…, Hkv, columns, X) → (…, Hq, rows, columns)."""
    return unfold_groups(xp, fold_groups(xp, queries, group) @ keys.mT, group)


# ------------------------------------------------------------------------------------------------------------------
# 1. Scores: S = (c Q) Kᵀ
# ------------------------------------------------------------------------------------------------------------------


class ScoreGradients(NamedTuple):
    query: Array  # (…, Hq, rows, E)
    key: Array  # (…, Hkv, columns, E)
    scale: Array  # (): summed over the tile


def scores_forward(xp: Namespace, query: Array, key: Array, scale: Array, group: int) -> Array:
    """S = (c Q) Kᵀ: scaled before the product, so that a small scale prevents overflow."""
    return inner_products(xp, scale * query, key, group)


def scores_backward(
    xp: Namespace, grad_scores: Array, query: Array, key: Array, scale: Array, visible: Array | None, group: int
) -> ScoreGradients:
    """S = (c Q) Kᵀ  ⇒  gQ = c (gS K),  gK = gSᵀ (c Q),  gc = Σ q · (gS K)."""
    grad_scores_key = sum_over_keys(xp, grad_scores, key, visible, group)
    return ScoreGradients(
        query=scale * grad_scores_key,
        key=sum_over_queries(xp, grad_scores, scale * query, visible, group),
        scale=xp.sum(finite_part(xp, query, visible) * grad_scores_key),
    )


def scores_tangent(
    xp: Namespace,
    query: Array,
    key: Array,
    scale: Array,
    query_tangent: Array,
    key_tangent: Array,
    scale_tangent: Array,
    group: int,
) -> Array:
    """Ṡ = (ċ Q + c Q̇) Kᵀ + (c Q) K̇ᵀ."""
    scaled_query_tangent = scale_tangent * query + scale * query_tangent
    return inner_products(xp, scaled_query_tangent, key, group) + inner_products(xp, scale * query, key_tangent, group)


def scores_backward_tangent(
    xp: Namespace,
    grad_scores: Array,
    grad_scores_tangent: Array,
    query: Array,
    key: Array,
    scale: Array,
    query_tangent: Array,
    key_tangent: Array,
    scale_tangent: Array,
    visible: Array | None,
    group: int,
) -> ScoreGradients:
    """gQ = c (gS K)  ⇒  ġQ = ċ (gS K) + c (ġS K + gS K̇), and so for gK = gSᵀ (c Q) and gc = Σ q · (gS K)."""
    grad_scores_key = sum_over_keys(xp, grad_scores, key, visible, group)
    grad_scores_key_tangent = sum_over_keys(xp, grad_scores_tangent, key, visible, group) + sum_over_keys(
        xp, grad_scores, key_tangent, visible, group
    )
    scaled_query_tangent = scale_tangent * query + scale * query_tangent
    return ScoreGradients(
        query=scale_tangent * grad_scores_key + scale * grad_scores_key_tangent,
        key=sum_over_queries(xp, grad_scores_tangent, scale * query, visible, group)
        + sum_over_queries(xp, grad_scores, scaled_query_tangent, visible, group),
        scale=xp.sum(finite_part(xp, query_tangent, visible) * grad_scores_key)
        + xp.sum(finite_part(xp, query, visible) * grad_scores_key_tangent),
    )


# ------------------------------------------------------------------------------------------------------------------
# 2. Softcap: C = s tanh(u), u = S / s
# ------------------------------------------------------------------------------------------------------------------
#
# With t = tanh(u) and d = 1 − t²: ∂C/∂S = d and ∂C/∂s = t − u d. Backward, the scores of hidden positions must be 0
# (they may have been anything, and their gradient is 0): see mask_backward.

# tanh(350) is 1 and 1 − tanh² is 4 e^−700 = 4e-304, nothing beside it in any dtype.
_SATURATED = 350.0


class SoftcapGradients(NamedTuple):
    scores: Array  # (…, rows, columns)
    softcap: Array  # (): summed over the tile


class SoftcapSlope(NamedTuple):
    u: Array
    t: Array
    d: Array


def softcap_forward(xp: Namespace, scores: Array, softcap: Array) -> Array:
    """C = s tanh(S / s)."""
    return softcap * xp.tanh(scores / softcap)


def softcap_slope(xp: Namespace, scores: Array, softcap: Array) -> SoftcapSlope:
    """u = S / s, t = tanh(u), and d = 1 − t² = 4 / (2 + e + 1/e) with e = exp(2u).

    The second form keeps its digits where t rounds to 1. u is clipped where d is negligible: at a score that overflowed
    u d would be ∞ · 0.
    """
    u = clipped(xp, scores / softcap, _SATURATED)
    e = xp.exp(2 * u)
    return SoftcapSlope(u, xp.tanh(u), 4 / (2 + e + 1 / e))


def softcap_backward(xp: Namespace, grad_capped: Array, scores: Array, softcap: Array) -> SoftcapGradients:
    """C = s tanh(u), u = S / s  ⇒  gS = gC d,  gs = Σ gC (t − u d)."""
    u, t, d = softcap_slope(xp, scores, softcap)
    return SoftcapGradients(scores=grad_capped * d, softcap=xp.sum(grad_capped * (t - u * d)))


def softcap_tangent(
    xp: Namespace, scores: Array, softcap: Array, scores_tangent: Array, softcap_tangent: Array
) -> Array:
    """Ċ = d Ṡ + (t − u d) ṡ."""
    u, t, d = softcap_slope(xp, scores, softcap)
    return d * scores_tangent + (t - u * d) * softcap_tangent


def softcap_backward_tangent(
    xp: Namespace,
    grad_capped: Array,
    grad_capped_tangent: Array,
    scores: Array,
    softcap: Array,
    scores_tangent: Array,
    softcap_tangent: Array,
) -> SoftcapGradients:
    """gS = gC d  ⇒  ġS = ġC d + gC ḋ with ḋ = −2 t d u̇;  gs = Σ gC (t − u d)  ⇒  ġs = Σ ġC (t − u d) − gC u ḋ."""
    u, t, d = softcap_slope(xp, scores, softcap)
    u_tangent = (scores_tangent - u * softcap_tangent) / softcap
    d_tangent = -2 * t * d * u_tangent
    return SoftcapGradients(
        scores=grad_capped_tangent * d + grad_capped * d_tangent,
        softcap=xp.sum(grad_capped_tangent * (t - u * d) - grad_capped * u * d_tangent),
    )


# ------------------------------------------------------------------------------------------------------------------
# 3. ALiBi: A = C − m |p(i) − j|
# ------------------------------------------------------------------------------------------------------------------
#
# Linear in C and m: the tangent of the backward is the backward of the tangent.


def alibi_forward(capped: Array, alibi_slopes: Array, distance: Array) -> Array:
    """A = C − m · distance, one slope m for each query head (…, Hq)."""
    return capped - alibi_slopes[..., None, None] * distance


def alibi_backward(xp: Namespace, grad_biased: Array, distance: Array) -> Array:
    """A = C − m · distance  ⇒  gm = −Σ gA · distance, over rows and columns; gC = gA."""
    return -xp.sum(grad_biased * distance, axis=(-2, -1))


def alibi_tangent(capped_tangent: Array, alibi_slopes_tangent: Array, distance: Array) -> Array:
    """Ȧ = Ċ − ṁ · distance."""
    return alibi_forward(capped_tangent, alibi_slopes_tangent, distance)


# ------------------------------------------------------------------------------------------------------------------
# 4. Bias: Z = A + b. Its gradient is gZ itself, summed where b was broadcast (`_internal.shapes.sum_to_shape`).
# 5. Mask: select, never multiply
# ------------------------------------------------------------------------------------------------------------------


def mask_forward(xp: Namespace, logits: Array, visible: Array | None) -> Array:
    """Z where visible, −∞ elsewhere."""
    return logits if visible is None else xp.where(visible, logits, -xp.inf)


def mask_backward(xp: Namespace, grad_logits: Array, visible: Array | None) -> Array:
    """0 where hidden, whatever stands there. Also the rule for tangents."""
    return grad_logits if visible is None else only_where(xp, visible, grad_logits)


# ------------------------------------------------------------------------------------------------------------------
# 6. Softmax with sinks: P = exp(Z − lse), lse = log(Σ exp Z + exp sink)
# ------------------------------------------------------------------------------------------------------------------
#
# A sink is one more logit of the row, without a value: it takes the share p_sink of the row and is dropped.


class Softmax(NamedTuple):
    weights: Array  # (…, rows, columns)
    row_shift: Array  # (…, rows, 1)
    row_sum: Array  # (…, rows, 1)
    lse: Array  # (…, rows, 1), in nats; −∞ where nothing is visible


class SoftmaxGradients(NamedTuple):
    logits: Array  # (…, rows, columns)
    sinks: Array | None  # (…, rows, 1)


class SoftmaxTangents(NamedTuple):
    weights: Array  # (…, rows, columns)
    lse: Array  # (…, rows, 1)
    sink_weight: Array | None  # (…, rows, 1)


def row_maximum(xp: Namespace, logits: Array) -> Array:
    """The largest real part of each row; −∞ for a row without columns."""
    real = real_part(xp, logits)
    if logits.shape[-1] == 0:
        return xp.sum(real, axis=-1, keepdims=True) - xp.inf
    return xp.max(real, axis=-1, keepdims=True)


def softmax_forward(xp: Namespace, logits: Array, sinks: Array | None, visible: Array | None) -> Softmax:
    """P = exp(Z − shift) / row_sum, row_sum = Σ exp(Z − shift) + exp(sink − shift), lse = shift + log(row_sum).

    The shift (the row's maximum) cancels; it keeps every exponent at or below 0. A row of −∞, hidden or not, and
    without a sink has weights 0 and lse −∞.
    """
    row_shift = row_maximum(xp, logits)
    if sinks is not None:
        row_shift = xp.maximum(row_shift, row_maximum(xp, sinks[..., None, None]))
    row_shift = finite_shift(xp, row_shift)
    exponentials = overwrite(xp, xp.exp, logits - row_shift)
    row_sum = xp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        row_sum = row_sum + sink_exponential(xp, sinks, row_shift)
    weights = softmax_weights(xp, exponentials, row_sum, visible)
    return Softmax(weights, row_shift, row_sum, log_sum_exp(xp, row_shift, row_sum))


def softmax_weights(xp: Namespace, exponentials: Array, row_sum: Array, visible: Array | None) -> Array:
    """P = exp(Z − shift) / row_sum, over `exponentials`. A row that sees a NaN is NaN where it sees, 0 elsewhere."""
    weights = overwrite(xp, xp.divide, exponentials, divisor(xp, row_sum))
    return mask_backward(xp, weights, visible)


def log_sum_exp(xp: Namespace, row_shift: Array, row_sum: Array) -> Array:
    """lse = shift + log(row_sum), −∞ where the sum is 0."""
    return xp.where(row_sum == 0, -xp.inf, row_shift + xp.log(divisor(xp, row_sum)))


def finite_shift(xp: Namespace, row_shift: Array) -> Array:
    """The shift of a row; 0 for a row of −∞, whose exponentials are then 0."""
    return only_where(xp, row_shift != -xp.inf, row_shift)


def divisor(xp: Namespace, row_sum: Array) -> Array:
    """The sum of a row; 1 for a row of nothing, whose terms are all 0."""
    return xp.where(row_sum == 0, 1, row_sum)


def sink_exponential(xp: Namespace, sinks: Array, row_shift: Array) -> Array:
    """exp(sink − shift); 1 for a sink of +∞, which is its own shift."""
    sinks = sinks[..., None, None]
    return xp.exp(only_where(xp, real_part(xp, sinks) != xp.inf, sinks - row_shift))


def row_mean(
    xp: Namespace, entries: Array, weights: Array, sink_entry: Any = None, sink_weight: Array | None = None
) -> Array:
    """Σ P ∘ x + p_sink x_sink over each row, (…, rows, 1)."""
    mean = xp.sum(weights * entries, axis=-1, keepdims=True)
    return mean if sink_weight is None else mean + sink_weight * sink_entry


class Centred(NamedTuple):
    entries: Array  # (…, rows, columns)
    sink_entry: Array | None  # (…, rows, 1)
    mean: Array  # (…, rows, 1)


def centred(xp: Namespace, entries: Array, weights: Array, sink_entry: Any, sink_weight: Array | None) -> Centred:
    """x − mean, mean = Σ P ∘ x + p_sink x_sink: the Jacobian diag(p) − p pᵀ applied to x, before its product with P.

    The mean is subtracted twice. Rounded to eps · |x|, it is too coarse for a row that is nearly one weight, where the
    differences are as small as 1 − max P; the mean of what it leaves is a sum of such small numbers, right to eps of
    them.
    """
    mean = row_mean(xp, entries, weights, sink_entry, sink_weight)
    entries = entries - mean
    if sink_weight is not None:
        sink_entry = sink_entry - mean
    rest = row_mean(xp, entries, weights, sink_entry, sink_weight)
    return Centred(entries - rest, None if sink_weight is None else sink_entry - rest, mean + rest)


def sink_weight(xp: Namespace, sinks: Array | None, row_shift: Array, row_sum: Array) -> Array | None:
    """p_sink = exp(sink − shift) / row_sum, (…, rows, 1). A row's sum is 0 only where the sink is −∞."""
    if sinks is None:
        return None
    return sink_exponential(xp, sinks, row_shift) / divisor(xp, row_sum)


def softmax_backward(
    xp: Namespace, grad_weights: Array, grad_lse: Array, weights: Array, sink_weight: Array | None
) -> SoftmaxGradients:
    """P = exp(Z − lse)  ⇒  gZ = P ∘ (gP − D + g_lse), D = Σ P ∘ gP over the row;  g_sink = p_sink (g_lse − D).

    The Jacobian diag(p) − p pᵀ is symmetric: applied to gP it needs one number a row, D. The sink's own gP is 0.
    """
    grad = centred(xp, grad_weights, weights, 0, sink_weight)
    return SoftmaxGradients(
        logits=softmax_logits_backward(grad.entries, weights, -grad_lse),
        sinks=None if sink_weight is None else sink_weight * (grad.sink_entry + grad_lse),
    )


def softmax_logits_backward(grad_weights: Array, weights: Array, row_term: Array) -> Array:
    """gZ = P ∘ (gP − (D − g_lse)), also for a part of a row whose D − g_lse is known."""
    return weights * (grad_weights - row_term)


def softmax_tangent(
    xp: Namespace,
    weights: Array,
    sink_weight: Array | None,
    logits_tangent: Array,
    sinks_tangent: Any,
    visible: Array | None,
) -> SoftmaxTangents:
    """lse˙ = Σ P ∘ Ż + p_sink ṡink;  Ṗ = P ∘ (Ż − lse˙);  ṗ_sink = p_sink (ṡink − lse˙)."""
    if sink_weight is not None:
        sinks_tangent = sinks_tangent[..., None, None]
    tangent = centred(xp, logits_tangent, weights, sinks_tangent, sink_weight)
    return SoftmaxTangents(
        weights=mask_backward(xp, weights * tangent.entries, visible),  # lse˙ may be NaN
        lse=tangent.mean,
        sink_weight=None if sink_weight is None else sink_weight * tangent.sink_entry,
    )


def softmax_backward_tangent(
    xp: Namespace,
    grad_weights: Array,
    grad_weights_tangent: Array,
    grad_lse: Array,
    weights: Array,
    sink_weight: Array | None,
    tangents: SoftmaxTangents,
) -> SoftmaxGradients:
    """gZ = P ∘ (gP − D + g_lse)  ⇒  ġZ = Ṗ ∘ (gP − D + g_lse) + P ∘ (ġP − Ḋ), Ḋ = Σ Ṗ ∘ gP + P ∘ ġP; so g_sink.

    Σ Ṗ + ṗ_sink = 0, so that Σ Ṗ ∘ gP = Σ Ṗ ∘ (gP − D) − ṗ_sink D: small where the differences are.
    """
    grad = centred(xp, grad_weights, weights, 0, sink_weight)
    grad_tangent = centred(xp, grad_weights_tangent, weights, 0, sink_weight)
    moved = row_mean(xp, grad.entries, tangents.weights, grad.sink_entry, tangents.sink_weight)
    grad_sinks = None
    if sink_weight is not None:
        grad_sinks = tangents.sink_weight * (grad.sink_entry + grad_lse)
        grad_sinks = grad_sinks + sink_weight * (grad_tangent.sink_entry - moved)
    return SoftmaxGradients(
        logits=tangents.weights * (grad.entries + grad_lse) + weights * (grad_tangent.entries - moved),
        sinks=grad_sinks,
    )


# ------------------------------------------------------------------------------------------------------------------
# 7. Dropout: W = P ∘ kept / (1 − p)
# ------------------------------------------------------------------------------------------------------------------
#
# Linear and diagonal in P: one function is the forward, the backward and the tangent.


def dropout(xp: Namespace, weights: Array, kept: Array | None, dropout_p: float) -> Array:
    """W = P / (1 − p) where kept, 0 elsewhere; p = 1 keeps nothing."""
    if kept is None:
        return weights
    return only_where(xp, kept, weights * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0))


# ------------------------------------------------------------------------------------------------------------------
# 8. Weighted sum: O = W V
# ------------------------------------------------------------------------------------------------------------------


def output_forward(xp: Namespace, weights: Array, value: Array, visible: Array | None, group: int) -> Array:
    """O = W V."""
    return sum_over_keys(xp, weights, value, visible, group)


class OutputGradients(NamedTuple):
    weights: Array  # (…, Hq, rows, columns)
    value: Array  # (…, Hkv, columns, Ev)


def output_backward(
    xp: Namespace, grad_output: Array, weights: Array, value: Array, visible: Array | None, group: int
) -> OutputGradients:
    """O = W V  ⇒  gW = gO Vᵀ,  gV = Wᵀ gO."""
    return OutputGradients(
        weights=inner_products(xp, grad_output, value, group),
        value=sum_over_queries(xp, weights, grad_output, visible, group),
    )


def output_tangent(
    xp: Namespace,
    weights: Array,
    value: Array,
    weights_tangent: Array,
    value_tangent: Array,
    visible: Array | None,
    group: int,
) -> Array:
    """Ȯ = Ẇ V + W V̇."""
    return sum_over_keys(xp, weights_tangent, value, visible, group) + sum_over_keys(
        xp, weights, value_tangent, visible, group
    )


def output_backward_tangent(
    xp: Namespace,
    grad_output: Array,
    weights_tangent: Array,
    value_tangent: Array,
    visible: Array | None,
    group: int,
) -> OutputGradients:
    """gW = gO Vᵀ  ⇒  ġW = gO V̇ᵀ;  gV = Wᵀ gO  ⇒  ġV = Ẇᵀ gO."""
    return output_backward(xp, grad_output, weights_tangent, value_tangent, visible, group)
