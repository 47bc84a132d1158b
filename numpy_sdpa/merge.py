"""Attention over two sets of keys, joined into attention over their union."""

from typing import Any

import numpy as np

from numpy_sdpa._internal.namespace import (
    Array,
    DType,
    Namespace,
    array_namespace,
    astype,
    computing,
    dtype_kind,
    dtype_name,
    from_list,
    required,
    result_type,
)
from numpy_sdpa._internal.validation import described


def merge_attention(output_a: Array, lse_a: Array, output_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Attention over the union of two sets of keys that have none in common.

    Parameters
    ----------
    output_a, output_b : array (…, L, Ev), floating
        Attention of the same queries over either set. Not read where lse is −inf.
    lse_a, lse_b : array (…, L), floating
        Natural logarithms of the softmax's sums; −inf where a query saw no key. A sink belongs to one of the sets.

    Returns
    -------
    output : array (…, L, Ev), in ``result_type(output_a, output_b)``
    lse : array (…, L), in the widest of float32 and the inputs' dtypes

    Raises
    ------
    TypeError
        For a wrong array module or dtype.
    ValueError
        For shapes that do not agree.

    Notes
    -----
    With lse = log(exp lse_a + exp lse_b): output = exp(lse_a − lse) output_a + exp(lse_b − lse) output_b. Joining is
    associative (up to rounding) and commutative; (0, −inf), attention over no keys, is its identity. T. Dao et al.,
    "FlashAttention", 2022, arXiv:2205.14135, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> output, lse = merge_attention(np.array([[3.0]]), np.array([0.0]), np.array([[5.0]]), np.array([-np.inf]))
    >>> output, lse
    (array([[3.]]), array([0.]))
    """
    xp, parts = _parts(output_a, lse_a, output_b, lse_b)
    with computing(xp, parts["output_a"]):
        a, b, lse = _shares(xp, parts)
        merged = _times(xp, a, parts, "a") + _times(xp, b, parts, "b")
        return astype(merged, result_type(xp, parts["output_a"].dtype, parts["output_b"].dtype)), lse


def merge_attention_backward(
    grad_output: Array | None, grad_lse: Array | None, output_a: Array, lse_a: Array, output_b: Array, lse_b: Array
) -> tuple[Array, Array, Array, Array]:
    """The gradients of output_a, lse_a, output_b and lse_b, from those of `merge_attention`'s results.

    Parameters
    ----------
    grad_output : array (…, L, Ev), floating, or None
    grad_lse : array (…, L), floating, or None
        Ignored where the merged lse is −inf. One of the two may be None.
    output_a, lse_a, output_b, lse_b : array
        As for `merge_attention`.

    Returns
    -------
    grad_output_a, grad_lse_a, grad_output_b, grad_lse_b : array
        Each in its input's shape and dtype; 0 where that part's lse is −inf.

    Raises
    ------
    TypeError, ValueError
        As `merge_attention`; ValueError where both upstream gradients are None.

    Notes
    -----
    With the shares w_a = exp(lse_a − lse), w_b = exp(lse_b − lse) and output = w_a O_a + w_b O_b:

        gO_a = w_a gO,  g_lse_a = w_a (g_lse + Σ gO ∘ (O_a − output))

    since w_a + w_b = 1 and ∂w_a / ∂lse_a = w_a w_b = −∂w_b / ∂lse_a. The same for b.

    Examples
    --------
    >>> import numpy as np
    >>> parts = np.array([[3.0]]), np.array([0.0]), np.array([[5.0]]), np.array([0.0])  # of half the weight each
    >>> [gradient.item() for gradient in merge_attention_backward(np.ones((1, 1)), None, *parts)]
    [0.5, -0.5, 0.5, 0.5]
    """
    xp, parts = _parts(output_a, lse_a, output_b, lse_b)
    if grad_output is None and grad_lse is None:
        raise ValueError("at least one of grad_output and grad_lse must be given, got twice None")
    with computing(xp, parts["output_a"]):
        dtype = _compute_dtype(xp, parts)
        share_a, share_b, _ = _shares(xp, parts)
        upstream = _upstream(xp, "grad_output", grad_output, parts["output_a"], dtype)
        upstream_lse = _upstream(xp, "grad_lse", grad_lse, parts["lse_a"], dtype)
        # O_a − output = w_b (O_a − O_b), which keeps its digits where w_b is small
        apart = _present(xp, parts, "a", astype(parts["output_a"], dtype) - astype(parts["output_b"], dtype))
        apart = xp.sum(upstream * _present(xp, parts, "b", apart), axis=-1)
        gradients = []
        for name, share, lever in (("a", share_a, share_b * apart), ("b", share_b, -share_a * apart)):
            output, lse = parts[f"output_{name}"], parts[f"lse_{name}"]
            gradients.append(astype(_present(xp, parts, name, share[..., None] * upstream), output.dtype))
            gradients.append(astype(xp.where(lse == -xp.inf, 0, share * (upstream_lse + lever)), lse.dtype))
        grad_output_a, grad_lse_a, grad_output_b, grad_lse_b = gradients
        return grad_output_a, grad_lse_a, grad_output_b, grad_lse_b


def _shares(xp: Namespace, parts: dict[str, Array]) -> tuple[Array, Array, Array]:
    """exp(lse_a − lse), exp(lse_b − lse) and lse; 0 and −∞ where there are no keys."""
    dtype = _compute_dtype(xp, parts)
    lse_a, lse_b = astype(parts["lse_a"], dtype), astype(parts["lse_b"], dtype)
    largest = xp.maximum(lse_a, lse_b)

    def exponential(lse: Array) -> Array:
        """exp(lse − largest); 1 for the same infinity."""
        return xp.where(lse == -xp.inf, 0, xp.exp(xp.where(lse == largest, 0, lse - largest)))

    a, b = exponential(lse_a), exponential(lse_b)
    total = xp.where(largest == -xp.inf, 1, a + b)
    return a / total, b / total, largest + xp.log(total)


def _times(xp: Namespace, share: Array, parts: dict[str, Array], name: str) -> Array:
    """share · output of part `name`."""
    return _present(xp, parts, name, share[..., None] * astype(parts[f"output_{name}"], share.dtype))


def _present(xp: Namespace, parts: dict[str, Array], name: str, array: Array) -> Array:
    """0 in the rows where part `name` has no keys: there its output may be anything."""
    return xp.where(parts[f"lse_{name}"][..., None] == -xp.inf, 0, array)


def _parts(output_a: Any, lse_a: Any, output_b: Any, lse_b: Any) -> tuple[Namespace, dict[str, Array]]:
    given = {"output_a": output_a, "lse_a": lse_a, "output_b": output_b, "lse_b": lse_b}
    parts = {name: required(name, array) for name, array in given.items()}
    xp = array_namespace(parts)
    for name, array in parts.items():
        _require_floating(xp, name, array)
    shape = parts["output_a"].shape
    if len(shape) < 2 or parts["output_b"].shape != shape:
        raise ValueError(f"output_a and output_b must have the same shape (…, L, Ev): {described(**parts)}")
    if not parts["lse_a"].shape == parts["lse_b"].shape == shape[:-1]:
        raise ValueError(f"lse_a and lse_b must have the shape of the outputs without Ev: {described(**parts)}")
    return xp, parts


def _require_floating(xp: Namespace, name: str, array: Array) -> None:
    if dtype_kind(xp, array.dtype) != "f":
        raise TypeError(f"{name} must be floating, got {dtype_name(array.dtype)}")


def _compute_dtype(xp: Namespace, parts: dict[str, Array]) -> DType:
    like = parts["output_a"].dtype
    float32 = np.dtype(xp.float32) if isinstance(like, np.dtype) else xp.float32
    return result_type(xp, float32, *(array.dtype for array in parts.values()))


def _upstream(xp: Namespace, name: str, array: Any, like: Array, dtype: DType) -> Array:
    """In the compute dtype; zeros for None."""
    if array is None:
        return xp.zeros_like(like, dtype=dtype)
    array = from_list(name, array)
    array_namespace({"output_a": like, name: array})
    _require_floating(xp, name, array)
    if array.shape != like.shape:
        raise ValueError(f"{name} must have shape {tuple(like.shape)}, got {tuple(array.shape)}")
    return astype(array, dtype)
