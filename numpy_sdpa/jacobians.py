"""Explicit Jacobians, for small sizes: to look at, and to check gradients against."""

import math
from typing import Any, Unpack

from numpy_sdpa._internal.namespace import (
    Array,
    arange,
    array_namespace,
    astype,
    computing,
    dtype_kind,
    dtype_name,
    required,
)
from numpy_sdpa._internal.options import AttentionOptions
from numpy_sdpa.attention import sdpa_backward, sdpa_forward
from numpy_sdpa.residuals import SDPAGradients


def softmax_jacobian(weights: Array) -> Array:
    """diag(p) − p pᵀ for each row p = softmax(z): the derivative ∂p_i / ∂z_j.

    Parameters
    ----------
    weights : array (…, S), floating
        Rows of a softmax, such as `scaled_dot_product_attention` returns.

    Returns
    -------
    array (…, S, S), symmetric; its rows sum to 0 where p sums to 1

    Raises
    ------
    TypeError, ValueError
        Where weights is not floating, or 0-d.

    Examples
    --------
    >>> import numpy as np
    >>> softmax_jacobian(np.array([0.5, 0.5]))
    array([[ 0.25, -0.25],
           [-0.25,  0.25]])
    """
    weights = required("weights", weights)
    xp = array_namespace({"weights": weights})
    if dtype_kind(xp, weights.dtype) not in "fc":
        raise TypeError(f"weights must be floating, got {dtype_name(weights.dtype)}")
    if weights.ndim == 0:
        raise ValueError("weights must have the form (…, S), got shape ()")
    with computing(xp, weights):
        index = arange(xp, 0, weights.shape[-1], weights)
        diagonal = xp.where(index[:, None] == index, weights[..., :, None], 0)
        return diagonal - weights[..., :, None] * weights[..., None, :]


def attention_jacobian(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    *,
    wrt: str,
    **options: Unpack[AttentionOptions],
) -> Array:
    """∂output / ∂input, explicit: one backward for each entry of the output, so for small sizes.

    Parameters
    ----------
    query, key, value, mask, **options
        As for `scaled_dot_product_attention`.
    wrt : str
        "query", "key", "value", "bias", "sinks", "alibi_slopes", "scale" or "softcap".

    Returns
    -------
    array (*output.shape, *input.shape), in the input's dtype

    Raises
    ------
    ValueError
        Where `wrt` is no differentiable input, or one that was not given; and as `sdpa_forward`.

    Examples
    --------
    >>> import numpy as np
    >>> attention_jacobian(np.zeros((1, 4)), np.ones((2, 4)), np.array([[1.0], [5.0]]), wrt="value").shape
    (1, 1, 2, 1)
    """
    if wrt not in SDPAGradients._fields:
        raise ValueError(f"wrt must be one of {', '.join(SDPAGradients._fields)}, got {wrt!r}")
    output, residuals = sdpa_forward(query, key, value, mask, **options)
    given = getattr(residuals, wrt)
    if given is None:
        raise ValueError(f"wrt={wrt!r}, but no {wrt} was given")
    xp, size = residuals.options.xp, math.prod(output.shape)
    with computing(xp, output):
        if size == 0:
            return xp.reshape(xp.zeros_like(output, dtype=given.dtype), (*output.shape, *given.shape))
        entries = arange(xp, 0, size, output)
        rows: list[Any] = []
        for entry in range(size):
            one_hot = astype(entries == entry, residuals.options.compute_dtype)
            rows.append(getattr(sdpa_backward(xp.reshape(one_hot, output.shape), residuals), wrt))
        return xp.reshape(xp.stack(rows), (*output.shape, *given.shape))
