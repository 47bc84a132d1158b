"""The public calls: validate, compute in the arrays' own module, return. The mathematics is behind `dense`.

On the way, the same inputs are three records: `Inputs`, as they were given; `Differentiable`, those that have a
gradient, in the compute dtype and shaped for the plane; `SDPAResiduals`, what was given beside all that was made.
"""

from typing import Any, Unpack

import numpy as np

from numpy_sdpa import blockwise, dense
from numpy_sdpa._internal.namespace import (
    Array,
    array_namespace,
    asarray,
    astype,
    computing,
    dtype_kind,
    dtype_name,
    from_list,
    operand,
    owned,
)
from numpy_sdpa._internal.options import AttentionOptions, Options
from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.chain import Differentiable, like_inputs
from numpy_sdpa.residuals import (
    SDPADoubleGradients,
    SDPAGradients,
    SDPAResiduals,
    SDPATangents,
    Upstream,
)


def scaled_dot_product_attention(
    query: Array, key: Array, value: Array, mask: Array | None = None, **options: Unpack[AttentionOptions]
) -> tuple[Array, Array]:
    """softmax(scale · Q Kᵀ + bias) V and the attention weights.

    Parameters
    ----------
    query : array (B…, Hq, L, E), floating
        Any number of batch axes B…, also none. Rank 3 is (H, L, E), rank 2 is (L, E): no head axis.
    key : array (B…, Hkv, S, E), floating
    value : array (B…, Hkv, S, Ev), floating
        Batch axes broadcast; head counts are equal or 1, or multiples with ``enable_gqa=True``.
    mask : bool or integer array, broadcasts to (B…, Hq, L, S), optional
        Who may attend: True or nonzero = attend, 0 = masked.
    **options
        Keyword-only, None = off. Every one works with every other, or raises.

        bias : floating array, broadcasts to (B…, Hq, L, S)
            Added to the scores; −inf entries mask.
        is_causal : bool
            Key j is visible to query i iff j ≤ p(i), p(i) = i + offset.
        alignment : "upper_left" (offset 0, the default) or "lower_right" (offset S − L, or key_length − query_length)
        query_offset : int or ints (B…)
            The offset itself; may be negative.
        window : (left, right), each an int ≥ 0 or None
            Visible iff p(i) − left ≤ j ≤ p(i) + right.
        query_lengths, key_lengths : ints (B…)
            Rows or keys at or past the length are masked.
        query_segments, key_segments : ints (B…, L) and (B…, S)
            Visible only within equal ids.
        sinks : floating array (Hq,) or (B…, Hq)
            One extra logit per query head, without a value.
        alibi_slopes : floating array (Hq,) or (B…, Hq)
            Adds −slope · abs(p(i) − j).
        scale : number, default 1/√E
        softcap : number > 0
            softcap · tanh(scores / softcap).
        dropout_p : number in [0, 1], with dropout_mask (bool, True = kept) or dropout_seed (int)
        enable_gqa : bool
            Query head h reads key head h // (Hq / Hkv).
        compute_dtype : dtype, default the widest of float32 and the inputs' dtypes
            float32, float64, or complex128 (analytic continuation, for complex-step differentiation).
        method : "dense" (the default) or "blockwise"
        block_size : int or (rows, columns); workers : int; progress : bool
            For "blockwise".

    Returns
    -------
    output : array (B…, Hq, L, Ev)
        In ``result_type(query, key, value)``. 0 for a query that sees no key.
    attention_weights : array (B…, Hq, L, S)
        In the compute dtype, before dropout. Rows sum to 1, less the sink's share; to 0 where nothing is visible.

    Raises
    ------
    TypeError
        For a wrong array module or dtype, or an unknown option.
    ValueError
        For a wrong shape or value, and for ``method="blockwise"``, which makes no weights.

    Notes
    -----
    The order is scale → softcap → ALiBi, bias → mask → softmax with sinks → dropout → weighted sum. A. Vaswani et al.,
    "Attention is all you need", 2017, arXiv:1706.03762, equation 1. A masked position is never read: NaN in a key or
    value that a query may not see changes nothing in that query's output.

    Examples
    --------
    >>> import numpy as np
    >>> output, weights = scaled_dot_product_attention(np.zeros((1, 4)), np.ones((2, 4)), np.array([[1.0], [5.0]]))
    >>> output, weights
    (array([[3.]]), array([[0.5, 0.5]]))
    """
    if options.get("method") == "blockwise":
        raise ValueError('method="blockwise" makes no attention weights: use method="dense", or attention(…)')
    output, residuals = _forward(query, key, value, mask, options)
    return output, residuals.weights


def attention(
    query: Array, key: Array, value: Array, mask: Array | None = None, **options: Unpack[AttentionOptions]
) -> Array:
    """softmax(scale · Q Kᵀ + bias) V, keeping nothing.

    Parameters
    ----------
    query, key, value, mask, **options
        As for `scaled_dot_product_attention`.

    Returns
    -------
    output : array (B…, Hq, L, Ev), in ``result_type(query, key, value)``

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`, but that ``method="blockwise"`` is none.

    Examples
    --------
    >>> import numpy as np
    >>> attention(np.zeros((2, 4)), np.ones((2, 4)), np.array([[1.0], [5.0]]), is_causal=True)
    array([[1.],
           [3.]])
    """
    return _forward(query, key, value, mask, options)[0]


def sdpa_forward(
    query: Array, key: Array, value: Array, mask: Array | None = None, **options: Unpack[AttentionOptions]
) -> tuple[Array, SDPAResiduals]:
    """The output and what a backward needs.

    Parameters
    ----------
    query, key, value, mask, **options
        As for `scaled_dot_product_attention`.

    Returns
    -------
    output : array (B…, Hq, L, Ev), in ``result_type(query, key, value)``
    residuals : SDPAResiduals
        Every array of the forward pass under its name, in the compute dtype.

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`, but that ``method="blockwise"`` is none.

    Examples
    --------
    >>> import numpy as np
    >>> output, residuals = sdpa_forward(np.zeros((1, 4)), np.ones((2, 4)), np.array([[1.0], [5.0]]))
    >>> residuals.weights, residuals.lse
    (array([[0.5, 0.5]]), array([0.69314718]))
    """
    output, residuals = _forward(query, key, value, mask, options)
    if output is residuals.output:
        # in-place work on the output, as `output += …`, must not reach what the backward reads
        with computing(residuals.options.xp, residuals.options.like):
            output = residuals.options.xp.asarray(output, copy=True)
    return output, residuals


def sdpa_backward(
    grad_output: Array | None,
    residuals: SDPAResiduals,
    *,
    grad_lse: Array | None = None,
    grad_weights: Array | None = None,
) -> SDPAGradients:
    """The gradient of every input, from the gradients of the forward's results.

    Parameters
    ----------
    grad_output : array (B…, Hq, L, Ev), floating, or None
    residuals : SDPAResiduals
        From `sdpa_forward`. The options are the forward's: there are none to give here.
    grad_lse : array (B…, Hq, L), floating, optional
        Ignored where lse is −inf.
    grad_weights : array (B…, Hq, L, S), floating, optional
        With respect to the weights before dropout.

    Returns
    -------
    SDPAGradients
        (query, key, value, bias, sinks, alibi_slopes, scale, softcap), each in the shape and dtype of its input, summed
        over every axis that was broadcast.

    Raises
    ------
    ValueError
        All three upstream gradients None; a wrong shape; residuals of complex numbers; grad_weights with blockwise
        residuals.

    Notes
    -----
    With P = weights, W = P after dropout, D = Σ P ∘ gP over each row:

        gV = Wᵀ gO,  gP = dropout(gO Vᵀ) + g_weights,  gZ = P ∘ (gP − D + g_lse),
        gQ = scale · gS K,  gK = gSᵀ (scale · Q)

    where gS is gZ through the softcap. T. Dao et al., "FlashAttention", 2022, arXiv:2205.14135, appendix B.

    Examples
    --------
    >>> import numpy as np
    >>> output, residuals = sdpa_forward(np.zeros((1, 4)), np.ones((2, 4)), np.array([[1.0], [5.0]]))
    >>> gradients = sdpa_backward(np.ones((1, 1)), residuals)
    >>> gradients.value, gradients.bias is None
    (array([[0.5],
           [0.5]]), True)
    """
    require_residuals(residuals, SDPAResiduals, "sdpa_forward")
    options = residuals.options
    with computing(options.xp, options.like):
        upstream = checked_upstream(residuals, grad_output, grad_lse, grad_weights)
        return SDPAGradients(*like_inputs(_engine(options).backward(residuals, upstream), residuals, options))


def sdpa_jvp(
    residuals: SDPAResiduals,
    *,
    query: Array | None = None,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    scale: Any = None,
    softcap: Any = None,
) -> SDPATangents:
    """The derivative of the forward pass along a direction (forward mode, Jacobian-vector product).

    Parameters
    ----------
    residuals : SDPAResiduals
        From `sdpa_forward` with ``method="dense"``.
    query, key, value, bias, sinks, alibi_slopes, scale, softcap : array, optional
        The direction: for each input its rate of change, in the input's shape; None = held fixed.

    Returns
    -------
    SDPATangents
        output (B…, Hq, L, Ev); lse (B…, Hq, L), 0 where lse is −inf; weights (B…, Hq, L, S), before dropout.

    Raises
    ------
    ValueError
        A direction for an input that was not given, a wrong shape, or blockwise residuals.

    Notes
    -----
    With Ż the change of the logits: lse˙ = Σ P ∘ Ż + p_sink ṡink, Ṗ = P ∘ (Ż − lse˙), Ȯ = Ẇ V + W V̇.

    Examples
    --------
    >>> import numpy as np
    >>> output, residuals = sdpa_forward(np.zeros((1, 4)), np.ones((2, 4)), np.array([[1.0], [5.0]]))
    >>> sdpa_jvp(residuals, value=np.array([[1.0], [0.0]])).output
    array([[0.5]])
    """
    given = Differentiable(query, key, value, bias, sinks, alibi_slopes, scale, softcap)
    options = _dense_only(residuals, "sdpa_jvp")
    with computing(options.xp, options.like):
        tangents = dense.jvp(residuals, _directions(residuals, given))
        return SDPATangents(owned(tangents.output), owned(tangents.lse[..., 0]), tangents.weights)


def sdpa_double_backward(
    grad_output: Array | None,
    residuals: SDPAResiduals,
    *,
    grad_lse: Array | None = None,
    grad_weights: Array | None = None,
    query: Array | None = None,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    scale: Any = None,
    softcap: Any = None,
) -> SDPADoubleGradients:
    """The gradient of Σ⟨cotangent, sdpa_backward(…)⟩ for every input and every upstream gradient.

    Parameters
    ----------
    grad_output, residuals, grad_lse, grad_weights
        As for `sdpa_backward`; the residuals of ``method="dense"``.
    query, key, value, bias, sinks, alibi_slopes, scale, softcap : array, optional
        The cotangents: the gradient of a scalar with respect to each field of `sdpa_backward`'s result.

    Returns
    -------
    SDPADoubleGradients
        The fields of `SDPAGradients`, equal to d/dε sdpa_backward at inputs + ε · cotangents, and grad_output,
        grad_lse, grad_weights, equal to `sdpa_jvp` along the cotangents; None where that one was not given.

    Raises
    ------
    ValueError
        As `sdpa_backward` and `sdpa_jvp`.

    Notes
    -----
    The second derivatives are symmetric: the change of the backward along the cotangents is the gradient of
    ⟨cotangents, backward⟩. docs/derivation.md derives every line.

    Examples
    --------
    >>> import numpy as np
    >>> output, residuals = sdpa_forward(np.zeros((1, 4)), np.ones((2, 4)), np.array([[1.0], [5.0]]))
    >>> second = sdpa_double_backward(np.ones((1, 1)), residuals, value=np.array([[1.0], [0.0]]))
    >>> second.grad_output, second.value
    (array([[0.5]]), array([[0.],
           [0.]]))
    """
    given = Differentiable(query, key, value, bias, sinks, alibi_slopes, scale, softcap)
    options = _dense_only(residuals, "sdpa_double_backward")
    with computing(options.xp, options.like):
        upstream = checked_upstream(residuals, grad_output, grad_lse, grad_weights)
        gradients, tangents = dense.double_backward(residuals, upstream, _directions(residuals, given))
        upstreams = (
            (grad_output, tangents.output),
            (grad_lse, tangents.lse[..., 0]),
            (grad_weights, tangents.weights),
        )
        return SDPADoubleGradients(
            *like_inputs(gradients, residuals, options),
            *(None if array is None else owned(astype(tangent, array.dtype)) for array, tangent in upstreams),
        )


def _forward(
    query: Array, key: Array, value: Array, mask: Array | None, options: AttentionOptions
) -> tuple[Array, SDPAResiduals]:
    """The output in the inputs' dtype, rounded once, and the residuals."""
    inputs, resolved = resolve(query, key, value, mask, options)
    with computing(resolved.xp, resolved.like):
        residuals = _engine(resolved).forward(inputs, resolved)
        return owned(astype(residuals.output, resolved.output_dtype)), residuals


def _engine(options: Options) -> Any:
    """The module that computes: each has forward(inputs, options) and backward(residuals, upstream)."""
    if options.method == "dense":
        return dense
    return blockwise


def require_residuals(residuals: Any, kind: type, forward: str) -> None:
    if isinstance(residuals, kind):
        return
    came = f"{type(residuals).__module__}.{type(residuals).__qualname__}"
    hint = ": take the second of the two" if isinstance(residuals, tuple) else ""
    raise TypeError(f"residuals must be the {kind.__name__} that {forward} returns, got {came}{hint}")


def _dense_only(residuals: SDPAResiduals, function: str) -> Options:
    require_residuals(residuals, SDPAResiduals, "sdpa_forward")
    if residuals.options.method != "dense":
        raise ValueError(f'{function} needs the residuals of method="dense", which keeps the weights')
    return residuals.options


def checked_upstream(
    residuals: Any, grad_output: Array | None, grad_lse: Array | None, grad_weights: Array | None
) -> Upstream:
    """The upstream gradients, checked, in the compute dtype."""
    options = residuals.options
    if dtype_kind(options.xp, options.compute_dtype) == "c":
        raise ValueError("a backward takes residuals of real numbers; these come from compute_dtype=complex128")
    if grad_output is None and grad_lse is None and grad_weights is None:
        raise ValueError("at least one of grad_output, grad_lse and grad_weights must be given, got three times None")
    if grad_weights is not None and options.method != "dense":
        raise ValueError('grad_weights needs the residuals of method="dense", which keeps the weights')
    return Upstream(
        output=_checked(residuals, "grad_output", grad_output, residuals.output.shape),
        lse=_checked(residuals, "grad_lse", grad_lse, residuals.lse.shape),
        weights=_checked(residuals, "grad_weights", grad_weights, options.plane),
    )


def _directions(residuals: SDPAResiduals, given: Differentiable) -> Differentiable:
    """A direction for every input of the forward, 0 where none was given, in the compute dtype."""
    for name, array in given._asdict().items():
        if array is not None and getattr(residuals, name) is None:
            raise ValueError(f"a direction for {name} was given, but the forward had no {name}")

    def direction(name: str) -> Array | None:
        primal = getattr(residuals, name)
        if primal is None:
            return None
        checked = _checked(residuals, name, getattr(given, name), primal.shape)
        if checked is None:
            return residuals.options.xp.zeros_like(primal, dtype=residuals.options.compute_dtype)
        return checked

    return Differentiable(**{name: direction(name) for name in Differentiable._fields})


def _checked(residuals: SDPAResiduals, name: str, array: Any, shape: tuple[int, ...]) -> Array | None:
    """A floating array of this shape and of the residuals' module, in their compute dtype."""
    if array is None:
        return None
    options = residuals.options
    array = from_list(name, array)
    if isinstance(array, np.ndarray | np.generic) and array.shape == ():
        array = asarray(options.xp, array, options.compute_dtype, options.like)
    array_namespace({"the forward's query": residuals.query, name: array})
    kind = dtype_kind(options.xp, array.dtype)
    if kind != "f" and not (kind == "c" and dtype_kind(options.xp, options.compute_dtype) == "c"):
        raise TypeError(f"{name} must be floating, got {dtype_name(array.dtype)}")
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(array.shape)}")
    return operand(options.xp, array, options.compute_dtype)
