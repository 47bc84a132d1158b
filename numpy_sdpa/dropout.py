"""Which weights dropout keeps: a counter-based generator that gives every position of the plane its own random number.

The number at (flat batch, query head, i, j) depends on these four and the seed alone: not on the method, the tile, the
number of workers or the array module. The generator is Threefry-2×32 with 20 rounds: J. K. Salmon, M. A. Moraes,
R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, doi:10.1145/2063384.2063405. It needs
additions, rotations and exclusive-ors of 32-bit words only.

    (k0, k1) = threefry(key = (seed mod 2³², seed div 2³²), counter = (flat batch, query head))
    (w0, w1) = threefry(key = (k0, k1),                     counter = (i, j div 2))
    position (i, j) is kept iff (w0 if j is even else w1) ≥ round(p · 2³²)
"""

from typing import Any

from numpy_sdpa._internal.namespace import Array, arange, asarray, astype
from numpy_sdpa._internal.options import Options
from numpy_sdpa._internal.shapes import slice_tile
from numpy_sdpa.visibility import Tile

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA  # the key schedule's constant, from the Skein hash function


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2×32-20: two words for a key and a counter of two words each; uint32 arrays that broadcast."""
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    first, second = counter[0] + schedule[0], counter[1] + schedule[1]
    for number in range(20):
        rotation = _ROTATIONS[number % 8]
        first = first + second
        second = ((second << rotation) | (second >> (32 - rotation))) ^ first
        if number % 4 == 3:
            injection = number // 4 + 1
            first = first + schedule[injection % 3]
            second = second + schedule[(injection + 1) % 3] + injection
    return first, second


def kept_in(options: Options, tile: Tile) -> Array | None:
    """True where dropout keeps a weight, broadcasting to the tile (B…, Hq, rows, columns); None where it keeps all."""
    dropout = options.dropout
    if dropout is None:
        return None
    if dropout.mask is not None:
        return slice_tile(dropout.mask, tile.rows, tile.columns)
    xp, like = options.xp, options.like

    def words(values: Any) -> Array:
        return astype(values, xp.uint32)

    seed = [asarray(xp, [word], xp.uint32, like) for word in (dropout.seed % 2**32, dropout.seed >> 32)]
    key = threefry((seed[0], seed[1]), (words(dropout.batches), words(dropout.heads)))
    rows = arange(xp, dropout.first_row + tile.rows.start, dropout.first_row + tile.rows.stop, like)
    first, last = dropout.first_column + tile.columns.start, dropout.first_column + tile.columns.stop
    pairs = arange(xp, first // 2, (last + 1) // 2, like)
    even, odd = threefry(key, (words(rows)[:, None], words(pairs)))
    word = xp.stack([even, odd], axis=-1)
    word = xp.reshape(word, (*even.shape[:-1], 2 * even.shape[-1]))[..., first % 2 : first % 2 + last - first]
    threshold = round(dropout.p * 2**32)
    if threshold == 2**32:  # p = 1 keeps nothing; its threshold is no 32-bit word
        return xp.zeros_like(word, dtype=xp.bool)
    return word >= asarray(xp, threshold, xp.uint32, like)
