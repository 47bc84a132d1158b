"""A call cut into slabs: the parts that share no key head, each a small attention of its own.

On the CPU a slab is one key head with the query heads that share it, so that threads have something to divide and a
head's tiles stay in cache; on a GPU it is the whole call, so that one launch does all heads. A head of a packed
sequence is one too (`varlen`). A slab only says where its arrays are: it hands out views.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Dropout, Options

Index = tuple[Any, ...]


class Slab(NamedTuple):
    """Where one part of a call lies in the call's arrays, and what holds in it.

    `options.plane` is the slab's own (heads, L, S); `options.offset` and the lengths are ints where one number holds
    for all of it.
    """

    options: Options
    query_index: Index  # into (B…, Hq, …): query, output and what belongs to a query head
    key_index: Index  # into (B…, Hkv, …): key and value
    head_index: Index  # into (B…, Hq): sinks and slopes
    packed: bool = False  # query and key arrays are (tokens, heads, …), as in `varlen`

    def queries(self, array: Array) -> Array:
        """(heads, L, X) of query, output or their gradients."""
        return _heads_first(array[self.query_index]) if self.packed else array[self.query_index]

    def keys(self, array: Array) -> Array:
        """(key heads, S, X) of key, value or their gradients."""
        return _heads_first(array[self.key_index]) if self.packed else array[self.key_index]

    def rows(self, array: Array) -> Array:
        """(heads, L) of lse and its like, (B…, Hq, L); packed (Hq, tokens)."""
        return array[self.query_index[::-1] if self.packed else self.query_index]

    def per_head(self, array: Any) -> Any:
        """(heads,) of sinks or slopes, (Hq,) or (B…, Hq)."""
        return None if array is None else array[self.head_index[-array.ndim :]]

    def plane(self, array: Array | None) -> Array | None:
        """The slab's part of an array that broadcasts to (B…, Hq, L, S)."""
        return None if array is None else part_of_plane(array, self.query_index)


def _heads_first(array: Array) -> Array:
    return array.swapaxes(0, 1)


def part_of_plane(array: Array, index: Index) -> Array:
    """`array[index]` for leading axes of which some have size 1, or for an array that has none."""
    if array.ndim <= 2 or not index:
        return array
    leading = zip(index, array.shape[:-2], strict=True)
    return array[
        tuple(place if size != 1 else (slice(None) if isinstance(place, slice) else 0) for place, size in leading)
    ]


def slabs_of(options: Options) -> list[Slab]:
    """The slabs of a call whose arrays have all their leading axes."""
    lead = options.plane[:-2]
    if options.xp is not np:
        return [Slab(options, (), (), ())]
    if not lead:  # rank 2: one head
        return [Slab(_restricted(options, (), 1), (None,), (None,), (None,))]
    batches = list(itertools.product(*(range(size) for size in lead[:-1])))
    key_heads = range(lead[-1] // options.group)
    return [_head_slab(options, batch, head) for batch in batches for head in key_heads]


def _head_slab(options: Options, batch: Index, head: int) -> Slab:
    heads = slice(head * options.group, (head + 1) * options.group)
    index = (*batch, heads)
    restricted = _restricted(options, batch, options.group)
    if options.mask is not None:
        restricted = dataclasses.replace(restricted, mask=part_of_plane(options.mask, index))
    if options.dropout is not None:
        restricted = dataclasses.replace(restricted, dropout=_head_dropout(options.dropout, batch, heads))
    return Slab(restricted, index, (*batch, slice(head, head + 1)), index)


def _restricted(options: Options, batch: Index, heads: int) -> Options:
    """What holds in one batch element, save mask and dropout."""

    def one(value: Any) -> Any:
        return value if value is None or isinstance(value, int) else value[batch].item()

    def part(array: Array | None) -> Array | None:
        return None if array is None else array[batch]

    return dataclasses.replace(
        options,
        plane=(heads, *options.plane[-2:]),
        offset=one(options.offset),
        query_lengths=one(options.query_lengths),
        key_lengths=one(options.key_lengths),
        query_segments=part(options.query_segments),
        key_segments=part(options.key_segments),
    )


def _head_dropout(dropout: Dropout, batch: Index, heads: slice) -> Dropout:
    return dropout._replace(
        mask=None if dropout.mask is None else part_of_plane(dropout.mask, (*batch, heads)),
        batches=dropout.batches[batch],
        heads=dropout.heads[heads],
    )
