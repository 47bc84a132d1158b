"""Between a model's hidden axis and attention's heads."""

from typing import Any

from numpy_sdpa._internal.namespace import Array, array_namespace, computing, required


def split_heads(hidden: Array, heads: int) -> Array:
    """(B…, L, H·E) → (B…, H, L, E): head h is the h-th run of E entries.

    Parameters
    ----------
    hidden : array (B…, L, H·E), any dtype
    heads : int
        H, at least 1.

    Returns
    -------
    array (B…, H, L, E)
        A copy.

    Raises
    ------
    TypeError, ValueError
        Where hidden is no array or heads no int; where the last axis is not a multiple of `heads`.

    Examples
    --------
    >>> import numpy as np
    >>> split_heads(np.arange(8).reshape(2, 4), 2).tolist()
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    hidden = required("hidden", hidden)
    xp = array_namespace({"hidden": hidden})
    _require_rank("hidden", hidden, 2, "(B…, L, H·E)")
    if isinstance(heads, bool) or not hasattr(heads, "__index__"):
        raise TypeError(f"heads must be an int, got {heads!r}")
    *batch, length, width = hidden.shape
    if heads < 1 or width % heads:
        raise ValueError(f"heads must divide the last axis of hidden: {heads} heads, hidden {tuple(hidden.shape)}")
    with computing(xp, hidden):
        parts = xp.reshape(hidden, (*batch, length, heads, width // heads))
        return xp.asarray(_swap_length_and_heads(xp, parts), copy=True)


def merge_heads(heads: Array) -> Array:
    """(B…, H, L, E) → (B…, L, H·E): undoes `split_heads`.

    Parameters
    ----------
    heads : array (B…, H, L, E), any dtype

    Returns
    -------
    array (B…, L, H·E)
        A copy.

    Raises
    ------
    TypeError, ValueError
        Where heads is no array, or of lower rank.

    Examples
    --------
    >>> import numpy as np
    >>> merge_heads(np.arange(8).reshape(1, 2, 2, 2)).tolist()
    [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    """
    heads = required("heads", heads)
    xp = array_namespace({"heads": heads})
    _require_rank("heads", heads, 3, "(B…, H, L, E)")
    *batch, count, length, size = heads.shape
    with computing(xp, heads):
        merged = xp.reshape(_swap_length_and_heads(xp, heads), (*batch, length, count * size))
        return xp.asarray(merged, copy=True)


def _swap_length_and_heads(xp: Any, array: Array) -> Array:
    axes = list(range(array.ndim))
    axes[-3], axes[-2] = axes[-2], axes[-3]
    return xp.permute_dims(array, tuple(axes))


def _require_rank(name: str, array: Array, rank: int, form: str) -> None:
    if array.ndim < rank:
        raise ValueError(f"{name} must have the form {form}, got shape {tuple(array.shape)}")
