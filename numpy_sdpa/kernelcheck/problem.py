"""One attention problem in float64: inputs, options, upstream gradients, and what a kernel gave for it.

Arrays are (B…, H, L, E) here, whatever the layout of the dump they came from (`dump`), and always have a head axis.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from numpy_sdpa._internal.options import Inputs, Options
from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.chain import tile_of_bias
from numpy_sdpa.kernelcheck.semantics import SYSTEMS, System
from numpy_sdpa.visibility import Tile, visible_in

Array = np.ndarray

INPUTS = ("query", "key", "value", "bias", "sinks", "alibi_slopes")  # those that have a gradient
FORWARD = ("output", "lse", "weights")
GRADIENTS = tuple(f"grad_{name}" for name in INPUTS)
RESULTS = FORWARD + GRADIENTS

# What a masked logit is filled with by a mistake: below all logits, and a float64 of its size still holds an lse's
# digits.
FILL = -1e9
LARGEST_FILL = -30.0  # a larger number would show in rows that see something

_TILE = 2**22  # elements of the plane whose visibility is looked at together


@dataclass(frozen=True, eq=False)
class Problem:
    """What a kernel was asked.

    Attributes
    ----------
    inputs : mapping
        query, key, value and the option arrays by this package's names; floating ones in float64.
    options : mapping
        The other options.
    upstream : mapping
        grad_output and grad_lse, those that flow, in float64.
    given : mapping
        What the kernel gave, by result name, in float64; a shape may be wrong.
    dtype : str
        The kernel's precision: its query's dtype.
    system : System
        Whose meaning is right where a query sees no key. (Its other habits are in the options and the layout already.)
    outside : bool array (B…, 1, L) or None
        Rows that are in no packed sequence: their lse is −inf, with a sink as well.
    """

    inputs: Mapping[str, Array]
    options: Mapping[str, Any]
    upstream: Mapping[str, Array]
    given: Mapping[str, Array]
    dtype: str
    system: System = SYSTEMS["numpy-sdpa"]
    outside: Array | None = None

    @cached_property
    def resolved(self) -> tuple[Inputs, Options]:
        """The inputs and options as the reference takes them, computing in float64."""
        arguments = {**self.inputs, **self.options, "compute_dtype": np.float64}
        query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
        return resolve(query, key, value, arguments.pop("mask", None), arguments)

    @property
    def plane(self) -> tuple[int, ...]:
        """(B…, Hq, L, S)"""
        return self.resolved[1].plane

    @property
    def lead(self) -> tuple[int, ...]:
        """(B…, Hq)"""
        return self.plane[:-2]

    @property
    def key_heads(self) -> Array:
        """The key head that each query head reads, under grouped heads."""
        return np.arange(self.lead[-1]) // self.resolved[1].group

    @cached_property
    def sees(self) -> Array:
        """Whether each row sees any key, (B…, Hq, L, 1)."""
        options = self.resolved[1]
        rows_at_once = max(1, _TILE // max(1, math.prod(self.lead) * options.key_length))
        sees = np.ones((*self.plane[:-1], 1), dtype=bool)
        for start in range(0, options.query_length, rows_at_once):
            rows = slice(start, min(start + rows_at_once, options.query_length))
            tile = Tile(rows, slice(0, options.key_length))
            visible = visible_in(options, tile, tile_of_bias(self.resolved[0].bias, tile))
            if visible is not None:
                sees[..., rows, :] = np.any(visible, axis=-1, keepdims=True)
            elif options.key_length == 0:
                sees[..., rows, :] = False
        return sees

    def lse_of_system(self, lse: Array, given: Array | None, rows: Array | slice = slice(None)) -> Array:
        """lse of some rows, with what the kernel's system gives where nothing is visible: where that is anything,
        `given`.

        Any finite fill is as good as ours: where an lse comes from that, it becomes the given one if that comes from
        a fill.
        """
        given = given if given is not None and given.shape == lse.shape else lse
        of_empty_rows = given if self.system.lse_of_empty_rows is None else self.system.lse_of_empty_rows
        lse = np.where(lse == -np.inf, of_empty_rows, lse)
        filled = np.isfinite(lse) & (lse < FILL / 2)
        lse = np.where(filled & np.isfinite(given) & (given < LARGEST_FILL), given, lse)
        return lse if self.outside is None else np.where(self.outside[..., rows], -np.inf, lse)

    def has_gradients(self) -> bool:
        return bool(self.upstream)

    def shape_of(self, result: str) -> tuple[int, ...]:
        """The shape that this package gives to a result."""
        if result.startswith("grad_"):
            return self.inputs[result.removeprefix("grad_")].shape
        tail = {"output": (self.inputs["value"].shape[-1],), "lse": (), "weights": (self.plane[-1],)}[result]
        return (*self.plane[:-1], *tail)

    def repeated_axes(self, name: str) -> tuple[int, ...]:
        """The axes (from the right, negative) along which an input is broadcast, in its gradient before any sum.

        That gradient is (B…, Hq, …): for key and value the heads are those of the group, which is no broadcasting.
        """
        shape, full = self.inputs[name].shape, self.full_shape(name)
        grouped = name in ("key", "value") and self.resolved[1].group > 1
        missing = len(full) - len(shape)
        padded = (1,) * missing + tuple(shape)
        return tuple(
            axis - len(full)
            for axis in range(len(full))
            if padded[axis] == 1 != full[axis] and not (grouped and axis == len(full) - 3)
        )

    def in_groups(self, name: str, unsummed: Array, key_heads: Array | None = None) -> Array:
        """Gradients of key and value summed over the query heads of each key head; others as they are."""
        if name not in ("key", "value") or self.resolved[1].group == 1:
            return unsummed
        key_heads = self.key_heads if key_heads is None else key_heads
        of_heads = [
            np.sum(unsummed[..., key_heads == head, :, :], axis=-3) for head in range(self.inputs[name].shape[-3])
        ]
        return np.stack(of_heads, axis=-3)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an input's gradient before any sum: one entry for each place where the input is read."""
        if name in ("sinks", "alibi_slopes"):
            return self.lead
        if name == "bias":
            return self.plane
        return (*self.lead, *self.inputs[name].shape[-2:])

    def element(self, index: int) -> "Problem":
        """The problem of one batch element alone (its batch axes stay, with size 1)."""
        batch = self.lead[:-1]
        if not batch:
            return self
        place = element_place(index, batch)
        inputs = {name: batch_element(name, array, place) for name, array in self.inputs.items()}
        options = {name: batch_element(name, option, place) for name, option in self.options.items()}
        upstream = {name: batch_element(name, array, place) for name, array in self.upstream.items()}
        given = {name: batch_element(name, array, place) for name, array in self.given.items()}
        outside = None if self.outside is None else batch_element("lse", self.outside, place)
        return replace(self, inputs=inputs, options=options, upstream=upstream, given=given, outside=outside)


# How many axes of an array follow its batch axes; what is not here has no batch axes. Sinks, slopes, mask, bias and
# dropout_mask may come without: they are told by their rank.
_AFTER_BATCH = {
    **dict.fromkeys(("query_lengths", "key_lengths", "query_offset"), 0),
    **dict.fromkeys(("sinks", "alibi_slopes", "query_segments", "key_segments"), 1),
    **dict.fromkeys(("grad_sinks", "grad_alibi_slopes"), 1),
    **dict.fromkeys(("lse", "grad_lse"), 2),
}


def element_place(index: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    """The index over the batch axes of a batch element's number."""
    return tuple(int(i) for i in np.unravel_index(index, batch)) if batch else ()


def batch_element(name: str, array: Any, place: tuple[int, ...]) -> Any:
    """One batch element's part of an array or option; where it is broadcast, or has no batch axes, all of it."""
    if not isinstance(array, np.ndarray):
        return array
    batch_axes = array.ndim - _AFTER_BATCH.get(name, 3)
    if batch_axes < len(place):
        return array
    return array[
        tuple(slice(None) if size == 1 else slice(i, i + 1) for i, size in zip(place, array.shape, strict=False))
    ]


def batch_elements(problem: Problem) -> Iterator[int]:
    return iter(range(math.prod(problem.lead[:-1])))
