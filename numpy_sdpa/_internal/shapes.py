"""Broadcasting and grouped heads, each beside its adjoint."""

from numpy_sdpa._internal.namespace import Array, Namespace


def sum_to_shape(xp: Namespace, array: Array, shape: tuple[int, ...]) -> Array:
    """The adjoint of broadcasting `shape` to `array.shape`: the sum over every axis that was repeated."""
    if array.shape == tuple(shape):
        return array
    added = array.ndim - len(shape)
    repeated = [axis for axis in range(added, array.ndim) if shape[axis - added] == 1 != array.shape[axis]]
    return xp.reshape(xp.sum(array, axis=(*range(added), *repeated)), shape)


def fold_groups(xp: Namespace, array: Array, group: int) -> Array:
    """(…, Hkv·group, L, X) → (…, Hkv, group·L, X): the query heads that share a key head become rows of one matrix.

    A product over the rows of the folded array then sums over the group by itself.
    """
    if group == 1:
        return array
    *batch, heads, length, size = array.shape
    return xp.reshape(array, (*batch, heads // group, group * length, size))


def unfold_groups(xp: Namespace, array: Array, group: int) -> Array:
    """(…, Hkv, group·L, X) → (…, Hkv·group, L, X): undoes fold_groups."""
    if group == 1:
        return array
    *batch, heads, rows, size = array.shape
    return xp.reshape(array, (*batch, heads * group, rows // group, size))


def repeat_heads(xp: Namespace, array: Array, group: int) -> Array:
    """(…, Hkv, L, X) → (…, Hkv·group, L, X): each head, group times in a row."""
    if group == 1:
        return array
    *batch, heads, length, size = array.shape
    repeated = xp.broadcast_to(array[..., None, :, :], (*batch, heads, group, length, size))
    return xp.reshape(repeated, (*batch, heads * group, length, size))


def sum_heads(xp: Namespace, array: Array, group: int) -> Array:
    """(…, Hkv·group, L, X) → (…, Hkv, L, X): the adjoint of repeat_heads."""
    if group == 1:
        return array
    *batch, heads, length, size = array.shape
    return xp.sum(xp.reshape(array, (*batch, heads // group, group, length, size)), axis=-3)


def slice_tile(array: Array, rows: slice, columns: slice) -> Array:
    """The part over a tile of an array that broadcasts to the L × S plane: axes of size 1 stay whole."""
    whole = slice(None)
    return array[..., rows if array.shape[-2] != 1 else whole, columns if array.shape[-1] != 1 else whole]
