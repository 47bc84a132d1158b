"""Right attention kernels as they are written elsewhere, emulated in NumPy with their own order of roundings.

`KERNELS` maps names to functions of a `Plane`; each returns output, lse, weights (where it makes them) and the
gradients, in the dtypes that a kernel would return. What may be seen, the distances and the upstream gradients are
given: these kernels differ in nothing but rounding. Arithmetic is float32 (float64 for float64 inputs); half types are
float16 or ml_dtypes' bfloat16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
TILE = 64  # keys and queries in a tile of the tiled kernels, as on a GPU


@dataclass(frozen=True)
class Plane:
    """A problem with every array repeated to (B…, Hq, …) and in the arithmetic's type."""

    query: Array
    key: Array
    value: Array
    visible: Array  # bool (…, L, S)
    keep: Array  # 0 or 1 / (1 − p), (…, L, S)
    scale: float
    softcap: float | None
    alibi: Array | None  # slope · |p(i) − j|
    distance: Array | None
    bias: Array | None
    sinks: Array | None  # (…, 1, 1)
    grad_output: Array
    grad_lse: Array  # (…, L, 1)
    storage: np.dtype
    shapes: dict[str, tuple[int, ...]]  # of query, key, value, bias, sinks, alibi_slopes, as given
    group: int

    @property
    def arithmetic(self) -> np.dtype:
        return self.query.dtype

    def stored(self, array: Array) -> Array:
        """Rounded to the storage type and back."""
        return array.astype(self.storage).astype(self.arithmetic)


# Sums of products, in three orders

Dot = Callable[[Array, Array], Array]


def blas(a: Array, b: Array) -> Array:
    return a @ b


def sequential(a: Array, b: Array) -> Array:
    """One product after the other."""
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k, None] * b[..., None, k, :]
    return total


def blocked(a: Array, b: Array) -> Array:
    """Blocks of 16 added one after the other."""
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    for k in range(0, a.shape[-1], 16):
        total += a[..., k : k + 16] @ b[..., k : k + 16, :]
    return total


def row_sum(array: Array, dot: Dot) -> Array:
    if dot is sequential and array.shape[-1]:
        return np.cumsum(array, axis=-1, dtype=array.dtype)[..., -1:]
    return np.sum(array, axis=-1, keepdims=True)


# Logits


def logits_of(plane: Plane, rows: slice, columns: slice, dot: Dot, scale_first: bool) -> tuple[Array, Array]:
    """Logits with −∞ where hidden, and the slope of the softcap."""
    query, key = plane.query[..., rows, :], plane.key[..., columns, :]
    scale = plane.arithmetic.type(plane.scale)
    scores = dot(scale * query, key.mT) if scale_first else dot(query, key.mT) * scale
    slope = np.ones_like(scores)
    if plane.softcap is not None:
        cap = plane.arithmetic.type(plane.softcap)
        tanh = np.tanh(scores / cap)
        slope, scores = 1 - tanh * tanh, cap * tanh
    if plane.alibi is not None:
        scores = scores - plane.alibi[..., rows, columns]
    if plane.bias is not None:
        scores = scores + plane.bias[..., rows, columns]
    return np.where(plane.visible[..., rows, columns], scores, -np.inf), slope


def exp(array: Array) -> Array:
    """In the arithmetic's type, numbers below the smallest normal one flushed to 0."""
    result = np.exp(array)
    return np.where(result < np.finfo(array.dtype).tiny, 0, result)


def exp_by_exp2(array: Array) -> Array:
    """2 to the power array · log₂e, the product rounded."""
    result = np.exp2(array * array.dtype.type(math.log2(math.e)))
    return np.where(result < np.finfo(array.dtype).tiny, 0, result)


# Naive: every step for the whole plane


def naive(plane: Plane, dot: Dot = blas, store_weights: bool = True) -> dict[str, Array]:
    whole = slice(None)
    logits, slope = logits_of(plane, whole, whole, dot, scale_first=True)
    shift = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    if plane.sinks is not None:
        shift = np.maximum(shift, plane.sinks)
    shift = np.where(shift == -np.inf, 0, shift)
    exponentials = exp(logits - shift)
    total = row_sum(exponentials, dot)
    if plane.sinks is not None:
        total = total + np.exp(plane.sinks - shift)
    weights = exponentials / np.where(total == 0, 1, total)
    lse = shift + np.log(total)
    stored = plane.stored(weights) if store_weights else weights  # what the backward pass finds
    dropped = plane.stored(stored * plane.keep)
    output = dot(dropped, plane.value)
    grad_weights = plane.stored(dot(plane.grad_output, plane.value.mT)) * plane.keep
    row_dot = row_sum(stored * grad_weights, dot)
    return {
        **_forward_results(plane, output, lse),
        "weights": weights.astype(plane.storage),
        **_gradients(plane, stored, dropped, grad_weights, row_dot, slope, lse, dot),
    }


def _forward_results(plane: Plane, output: Array, lse: Array) -> dict[str, Array]:
    return {"output": output.astype(plane.storage), "lse": lse[..., 0]}


def _gradients(
    plane: Plane,
    weights: Array,
    dropped: Array,
    grad_weights: Array,
    row_dot: Array,
    slope: Array,
    lse: Array,
    dot: Dot,
) -> dict[str, Array]:
    grad_lse = np.where(lse == -np.inf, 0, plane.grad_lse)
    grad_logits = weights * (grad_weights - row_dot + grad_lse)
    stored = plane.stored(grad_logits * slope)
    scale = plane.arithmetic.type(plane.scale)
    gradients = {
        "query": dot(stored, plane.key) * scale,
        "key": dot(stored.mT, plane.query) * scale,
        "value": dot(dropped.mT, plane.grad_output),
    }
    if plane.bias is not None:
        gradients["bias"] = plane.stored(grad_logits)
    if plane.distance is not None:
        gradients["alibi_slopes"] = -_rows_then_all(grad_logits * plane.distance, dot)
    if plane.sinks is not None:
        sink_weight = np.exp(plane.sinks - np.where(lse == -np.inf, 0, lse))
        gradients["sinks"] = _rows_then_all(sink_weight * (grad_lse - row_dot), dot)
    return {f"grad_{name}": reduced(plane, name, gradient) for name, gradient in gradients.items()}


def _rows_then_all(array: Array, dot: Dot) -> Array:
    return row_sum(array.reshape(*array.shape[:-2], -1), dot)[..., 0]


def reduced(plane: Plane, name: str, gradient: Array) -> Array:
    """Summed to the input's shape and rounded to its dtype; each copy is rounded before the sum."""
    shape = plane.shapes[name]
    if name in ("key", "value") and plane.group > 1:
        *batch, heads, length, size = gradient.shape
        groups = plane.stored(gradient).reshape(*batch, heads // plane.group, plane.group, length, size)
        gradient = np.sum(groups, axis=-3)
    added = gradient.ndim - len(shape)
    axes = [axis for axis in range(gradient.ndim) if axis < added or shape[axis - added] == 1 != gradient.shape[axis]]
    if axes:
        gradient = np.sum(plane.stored(gradient), axis=tuple(axes), keepdims=True)
    return gradient.reshape(shape).astype(plane.storage)


# Flash: tiles, a running softmax, weights rebuilt from lse, D from the stored output


def flash(
    plane: Plane, dot: Dot = blas, with_exp2: bool = False, row_tile: int = TILE, key_tile: int = TILE
) -> dict[str, Array]:
    exponential = exp_by_exp2 if with_exp2 else exp
    queries, keys = plane.visible.shape[-2:]
    row_tiles = [slice(start, min(start + row_tile, queries)) for start in range(0, queries, row_tile)]
    key_tiles = [slice(start, min(start + key_tile, keys)) for start in range(0, keys, key_tile)]
    output, lse = np.zeros_like(plane.grad_output), np.zeros_like(plane.grad_lse)
    for rows in row_tiles:
        output[..., rows, :], lse[..., rows, :] = _flash_rows(plane, rows, key_tiles, dot, exponential)
    output = plane.stored(output)
    row_dot = row_sum(plane.grad_output * output, dot)
    lead = plane.visible.shape[:-2]
    inputs = {"query": plane.query, "key": plane.key, "value": plane.value}
    grads = {name: np.zeros((*lead, *array.shape[-2:]), plane.arithmetic) for name, array in inputs.items()}
    grad_logits = np.zeros(plane.visible.shape, plane.arithmetic)
    scale = plane.arithmetic.type(plane.scale)
    finite_lse = np.where(lse == -np.inf, 0, lse)
    grad_lse = np.where(lse == -np.inf, 0, plane.grad_lse)
    for columns in key_tiles:
        for rows in row_tiles:
            logits, slope = logits_of(plane, rows, columns, dot, scale_first=False)
            weights = exponential(logits - finite_lse[..., rows, :])
            grad_output, keep = plane.grad_output[..., rows, :], plane.keep[..., rows, columns]
            grads["value"][..., columns, :] += dot(plane.stored(weights * keep).mT, grad_output)
            grad_weights = dot(grad_output, plane.value[..., columns, :].mT) * keep
            tile = weights * (grad_weights - row_dot[..., rows, :] + grad_lse[..., rows, :])
            grad_logits[..., rows, columns] = tile
            stored = plane.stored(tile * slope)
            grads["query"][..., rows, :] += dot(stored, plane.key[..., columns, :])
            grads["key"][..., columns, :] += dot(stored.mT, plane.query[..., rows, :])
    grads["query"] *= scale
    grads["key"] *= scale
    if plane.bias is not None:
        grads["bias"] = plane.stored(grad_logits)
    if plane.distance is not None:
        grads["alibi_slopes"] = -_rows_then_all(grad_logits * plane.distance, dot)
    if plane.sinks is not None:
        grads["sinks"] = _rows_then_all(exponential(plane.sinks - finite_lse) * (grad_lse - row_dot), dot)
    gradients = {f"grad_{name}": reduced(plane, name, gradient) for name, gradient in grads.items()}
    return {**_forward_results(plane, output, lse), **gradients}


def _flash_rows(
    plane: Plane, rows: slice, key_tiles: list[slice], dot: Dot, exponential: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """Output and lse of some rows; weights are rounded before they are normalised, their sum is not."""
    lead, count = plane.visible.shape[:-2], rows.stop - rows.start
    shift = np.full((*lead, count, 1), -np.inf, plane.arithmetic)
    total = np.zeros_like(shift)
    output = np.zeros((*lead, count, plane.value.shape[-1]), plane.arithmetic)
    for columns in key_tiles:
        logits, _ = logits_of(plane, rows, columns, dot, scale_first=False)
        new = np.maximum(shift, np.max(logits, axis=-1, keepdims=True))
        safe = np.where(new == -np.inf, 0, new)
        rescale = np.where(shift == -np.inf, 0, exponential(shift - safe))
        weights = exponential(logits - safe)
        total = total * rescale + row_sum(weights, dot)
        dropped = plane.stored(weights * plane.keep[..., rows, columns])
        output = output * rescale + dot(dropped, plane.value[..., columns, :])
        shift = new
    if plane.sinks is not None:
        new = np.maximum(shift, plane.sinks)
        rescale = exponential(shift - new)
        total = total * rescale + exponential(plane.sinks - new)
        output, shift = output * rescale, new
    safe = np.where(total == 0, 1, total)
    return output / safe, np.where(total == 0, -np.inf, np.where(shift == -np.inf, 0, shift) + np.log(safe))


KERNELS: dict[str, Callable[[Plane], dict[str, Array]]] = {
    "naive": naive,
    "naive, sequential": lambda plane: naive(plane, sequential),
    "naive, weights kept in float32": lambda plane: naive(plane, blocked, store_weights=False),
    "flash": flash,
    "flash, sequential": lambda plane: flash(plane, sequential),
    "flash, exp2": lambda plane: flash(plane, blas, with_exp2=True),
    "flash, key by key": lambda plane: flash(plane, blas, row_tile=4096, key_tile=1),
}
