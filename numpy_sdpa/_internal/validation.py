"""A call's arguments, validated once, on entry, with every error text about them.

`resolve` turns them into `Inputs` (the arrays as the caller gave them) and `Options` (everything else, checked, in the
form that the mathematics uses). Nothing behind it validates again.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from numpy_sdpa._internal.namespace import (
    Array,
    DType,
    Namespace,
    ValueChecks,
    arange,
    array_namespace,
    asarray,
    astype,
    computing,
    default_integer,
    dtype_kind,
    dtype_name,
    from_list,
    is_cupy,
    makes_dtype,
    real_part,
    result_type,
)
from numpy_sdpa._internal.options import AttentionOptions, Dropout, Inputs, Options

# What other libraries call these, and what to write here.
_OTHER_NAMES = {
    "attn_mask": "mask= (True = may attend) or, for numbers added to the scores, bias=",
    "attention_mask": "mask= (True = may attend) or, for numbers added to the scores, bias=",
    "key_padding_mask": "key_lengths=, or mask= with True = may attend",
    "attn_bias": "bias=",
    "causal": "is_causal=",
    "is_training": "dropout_p= (0 when not training)",
    "dropout": "dropout_p= with dropout_mask= or dropout_seed=",
    "sm_scale": "scale=",
    "softmax_scale": "scale=",
    "soft_cap": "softcap=",
    "logits_soft_cap": "softcap=",
    "logit_softcapping": "softcap=",
    "window_size": "window=(left, right)",
    "sliding_window": "window=(left, right)",
    "local_window_size": "window=(left, right)",
    "s_aux": "sinks=",
    "cu_seqlens_q": "sdpa_varlen_forward",
    "cu_seqlens_k": "sdpa_varlen_forward",
}


def resolve(
    query: Array, key: Array, value: Array, mask: Array | None, options: AttentionOptions | dict[str, Any]
) -> tuple[Inputs, Options]:
    """Validate a call. TypeError for module and dtype, ValueError for shape and range; values are asked for last."""
    _refuse_unknown(options)
    given = {name: option for name, option in options.items() if option is not None}
    if mask is not None:
        given["mask"] = mask
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        if array is None:
            raise TypeError(f"{name} must be an array, got None")
    arrays |= {name: given[name] for name in _OPTIONAL_ARRAYS if name in given}
    numbers = {name: array for name, array in arrays.items() if isinstance(array, float)}
    arrays = {name: from_list(name, array) for name, array in arrays.items() if name not in numbers}
    xp = array_namespace(arrays | _array_numbers(given))
    with computing(xp, arrays.get("query")):
        for name, number in numbers.items():  # a Python number takes the dtype of the arrays
            arrays[name] = asarray(xp, number, getattr(arrays.get("query"), "dtype", None), arrays.get("query"))
        return _Arguments(xp, dict.fromkeys(_OPTIONAL_ARRAYS) | arrays, given).resolve()


_OPTIONAL_ARRAYS = ("mask", "bias", "sinks", "alibi_slopes", "dropout_mask")


def _array_numbers(given: dict[str, Any]) -> dict[str, Array]:
    """scale and softcap where they are arrays. NumPy's numbers go with every module."""
    numbers = {name: given[name] for name in ("scale", "softcap") if name in given}
    return {
        name: number
        for name, number in numbers.items()
        if hasattr(number, "shape") and not isinstance(number, (np.generic, np.ndarray))
    }


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in AttentionOptions.__annotations__:
            hint = _OTHER_NAMES.get(name)
            known = f"use {hint}" if hint else f"the options are {', '.join(AttentionOptions.__annotations__)}"
            raise TypeError(f"unknown option {name!r}: {known}")


def described(**arrays: Array) -> str:
    """'query (2, 4, 8, 16), key (2, 4, 8, 32)'."""
    return ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())


class _Arguments:
    """One call's arguments on their way in. Each method checks one argument and returns it in its resolved form."""

    def __init__(self, xp: Namespace, arrays: dict[str, Any], given: dict[str, Any]) -> None:
        self.xp = xp
        self.arrays = arrays
        self.given = given
        self.checks = ValueChecks(xp)
        self.like = arrays["query"]  # new arrays are made on its device

    def resolve(self) -> tuple[Inputs, Options]:
        arrays, given = self.arrays, self.given
        self.check_dtypes()
        self.compute_dtype = self.resolve_compute_dtype()
        self.resolve_plane()
        query_lengths = self.lengths("query_lengths", -2, "query length L")
        key_lengths = self.lengths("key_lengths", -1, "key length S")
        query_segments, key_segments = self.segments()
        bias = self.bias()
        method, block_size, workers, progress = self.engine()
        options = Options(
            xp=self.xp,
            like=self.like,
            compute_dtype=self.compute_dtype,
            output_dtype=self.output_dtype(),
            plane=self.plane,
            group=self.group,
            mask=self.mask(),
            is_causal=self.flag("is_causal"),
            offset=self.offset(query_lengths, key_lengths),
            window=self.window(),
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            query_segments=query_segments,
            key_segments=key_segments,
            dropout=self.dropout(),
            method=method,
            block_size=block_size,
            workers=workers,
            progress=progress,
            given=given,
        )
        inputs = Inputs(
            query=arrays["query"],
            key=arrays["key"],
            value=arrays["value"],
            mask=arrays["mask"],
            bias=bias,
            sinks=self.per_head("sinks"),
            alibi_slopes=self.per_head("alibi_slopes"),
            scale=self.number("scale", _default_scale(arrays["query"])),
            softcap=self.number("softcap", None),
            dropout_mask=arrays["dropout_mask"],
        )
        self.checks.ask()
        return inputs, options

    # dtypes

    def check_dtypes(self) -> None:
        self.complex = _wants_complex(self.given.get("compute_dtype"))
        for name in ("query", "key", "value", "bias", "sinks", "alibi_slopes"):
            array = self.arrays[name]
            if array is None:
                continue
            kind = dtype_kind(self.xp, array.dtype)
            if kind == "f" or (kind == "c" and self.complex):
                continue
            hint = ""
            if kind == "c":
                hint = "; complex inputs need compute_dtype=complex128"
            elif name == "bias" and kind in "bi":
                hint = "; who may attend to whom goes into mask="
            raise TypeError(f"{name} must be floating, got {dtype_name(array.dtype)}{hint}")

    def resolve_compute_dtype(self) -> DType:
        xp = self.xp
        wanted = self.given.get("compute_dtype")
        if wanted is None:
            floating = ("query", "key", "value", "bias", "sinks", "alibi_slopes")
            dtypes = [self.arrays[name].dtype for name in floating if self.arrays[name] is not None]
            return result_type(xp, self.as_dtype(xp.float32), *dtypes)
        name = dtype_name(wanted)
        if name not in ("float32", "float64", "longdouble", "float96", "float128", "complex128"):
            raise ValueError(f"compute_dtype must be float32, float64 or complex128, got {name}")
        if not makes_dtype(xp, name):
            raise ValueError(
                f"compute_dtype={name}: {xp.__name__} makes no such arrays as it is set up now"
                + ('; jax.config.update("jax_enable_x64", True) lets it' if xp.__name__ == "jax.numpy" else "")
            )
        return self.as_dtype(getattr(xp, name))

    def as_dtype(self, scalar_type: DType) -> DType:
        """What `array.dtype` would be: NumPy's dtype object where the module uses those."""
        return np.dtype(scalar_type) if isinstance(self.like.dtype, np.dtype) else scalar_type

    def output_dtype(self) -> DType:
        if self.complex:
            return self.compute_dtype
        return result_type(self.xp, *(self.arrays[name].dtype for name in ("query", "key", "value")))

    # shapes

    def resolve_plane(self) -> None:
        """The plane (B…, Hq, L, S), its batch axes and heads, and the group size."""
        query, key, value = self.arrays["query"], self.arrays["key"], self.arrays["value"]
        if not 2 <= query.ndim <= 6 or not query.ndim == key.ndim == value.ndim:
            raise ValueError(f"query, key and value must have the same rank, 2 to 6: {self.shapes()}")
        if key.shape[-1] != query.shape[-1]:
            raise ValueError(f"key must have the same last dimension as query: {described(query=query, key=key)}")
        if value.shape[-2] != key.shape[-2]:
            raise ValueError(f"value must have the same length as key: {described(key=key, value=value)}")
        self.batch = query.shape[:-3]
        if not self.batch == key.shape[:-3] == value.shape[:-3]:
            try:
                self.batch = np.broadcast_shapes(self.batch, key.shape[:-3], value.shape[:-3])
            except ValueError:
                raise ValueError(f"the batch axes of query, key and value must broadcast: {self.shapes()}") from None
        gqa = self.flag("enable_gqa")
        self.heads: tuple[int, ...] = ()
        self.group = 1
        if query.ndim > 2:
            self.heads, self.group = self.grouped_heads() if gqa else self.broadcast_heads()
        self.plane = (*self.batch, *self.heads, query.shape[-2], key.shape[-2])

    def shapes(self) -> str:
        return described(**{name: self.arrays[name] for name in ("query", "key", "value")})

    def head_counts(self) -> tuple[int, int, int]:
        return tuple(self.arrays[name].shape[-3] for name in ("query", "key", "value"))

    def grouped_heads(self) -> tuple[tuple[int], int]:
        """Query heads and group size under enable_gqa."""
        query, key, value = self.head_counts()
        if key != value:
            raise ValueError(
                f"with enable_gqa key and value must have equal head counts, got {key} and {value}: {self.shapes()}"
            )
        if key == query:
            return (query,), 1
        if key == 0 or query % key:
            raise ValueError(
                "with enable_gqa query's head count must be a multiple of key's, "
                f"got {query} and {key}: {self.shapes()}"
            )
        return (query,), query // key

    def broadcast_heads(self) -> tuple[tuple[int], int]:
        """The broadcast head count, group size 1."""
        counts = self.head_counts()
        heads = next((count for count in counts if count != 1), 1)
        if any(count not in (1, heads) for count in counts):
            query, key, value = counts
            hint = "; enable_gqa=True lets query heads share key heads" if key and query % key == 0 else ""
            raise ValueError(
                "head counts of query, key and value must be equal or 1, "
                f"got {query}, {key} and {value}{hint}: {self.shapes()}"
            )
        return (heads,), 1

    def to_plane(self, name: str, array: Array) -> Array:
        """An array that broadcasts to the plane, at least 2-D."""
        rank, plane = len(self.plane), self.plane
        came = f"{name} {tuple(array.shape)}, (B…, Hq, L, S) = {plane}"
        if array.ndim > 2 and array.ndim != rank:
            insert = ""
            if array.ndim == rank - 1 and rank > 3:
                insert = f": {name}[..., None, :, :] inserts the head axis"
            raise ValueError(f"{name} must have rank at most 2, or {rank}, the rank of query{insert}; got {came}")
        for axis in range(1, array.ndim + 1):
            if array.shape[-axis] not in (1, plane[-axis]):
                per_head = " (a per-head one has the query's heads)" if axis == 3 and self.group > 1 else ""
                raise ValueError(f"{name} must broadcast to (B…, Hq, L, S), axis by axis{per_head}: {came}")
        if array.ndim < 2:
            return self.xp.reshape(array, (1,) * (2 - array.ndim) + tuple(array.shape))
        return array

    def mask(self) -> Array | None:
        mask = self.arrays["mask"]
        if mask is None:
            return None
        kind = dtype_kind(self.xp, mask.dtype)
        if kind not in "bif":
            raise TypeError(f"mask must be bool or integer, got {dtype_name(mask.dtype)}")
        if kind == "f" and math.prod(mask.shape) > 0:
            xp, one = self.xp, mask == 1
            self.checks.require(
                xp.all(one | (mask == 0)) & xp.any(one),
                lambda: looks_additive(xp.min(mask), xp.max(mask)),
            )
        plane = self.to_plane("mask", mask)
        return plane if kind == "b" else plane != 0

    def bias(self) -> Array | None:
        bias = self.arrays["bias"]
        if bias is not None:
            self.to_plane("bias", bias)
        return bias

    def per_head(self, name: str) -> Array | None:
        """sinks, alibi_slopes: (Hq,) or (B…, Hq); 0-d at rank 2."""
        array = self.arrays[name]
        if array is None or tuple(array.shape) in (self.heads, (*self.batch, *self.heads)):
            return array
        raise ValueError(
            f"{name} must have shape (Hq,) = {self.heads} or (B…, Hq) = {(*self.batch, *self.heads)}: "
            f"{described(**{name: array}, query=self.arrays['query'])}"
        )

    # integers

    def integers(
        self, name: str, shape: tuple[int, ...], low: int = 0, high: int | None = None, bound: str = ""
    ) -> Array | None:
        """Integers of exactly this shape, on the device; they may come from the host whatever the module."""
        value = self.given.get(name)
        if value is None:
            return None
        array = from_list(name, value)
        if not isinstance(array, np.ndarray | np.generic):
            array_namespace({"query": self.like, name: array})
        kind = dtype_kind(self.xp, array.dtype)
        if kind != "i" and not (kind == "f" and 0 in array.shape):  # an empty list shows no type
            raise TypeError(f"{name} must be integers, got {dtype_name(array.dtype)}")
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape}, got {tuple(array.shape)}: "
                f"{described(query=self.arrays['query'], key=self.arrays['key'])}"
            )
        if isinstance(array, np.ndarray | np.generic):
            if high is not None and array.size and not (array.min() >= low and array.max() <= high):
                raise ValueError(_out_of_range(name, low, high, bound, array.min(), array.max()))
            return asarray(self.xp, array, default_integer(self.xp), self.like)
        if high is not None:
            self.checks.require(
                self.xp.all((array >= low) & (array <= high)),
                lambda: _out_of_range(name, low, high, bound, self.xp.min(array), self.xp.max(array)),
            )
        return astype(array, default_integer(self.xp))

    def to_batch(self, array: Array | None) -> Array | None:
        """(B…) → (B…, 1, 1, 1); (1, 1) at rank 2."""
        if array is None:
            return None
        return self.xp.reshape(array, self.batch + (1,) * (len(self.plane) - len(self.batch)))

    def lengths(self, name: str, axis: int, bound: str) -> Array | None:
        return self.to_batch(self.integers(name, self.batch, 0, self.plane[axis], f" (the {bound})"))

    def segments(self) -> tuple[Array | None, Array | None]:
        """(B…, 1, L, 1) and (B…, 1, 1, S); without the head axis at rank 2."""
        query = self.integers("query_segments", (*self.batch, self.plane[-2]))
        key = self.integers("key_segments", (*self.batch, self.plane[-1]))
        if query is None and key is None:
            return None, None
        if query is None or key is None:
            present, missing = ("query", "key") if key is None else ("key", "query")
            raise ValueError(f"{present}_segments was given without {missing}_segments: give both or neither")
        head = (1,) * len(self.heads)
        return (
            self.xp.reshape(query, (*self.batch, *head, self.plane[-2], 1)),
            self.xp.reshape(key, (*self.batch, *head, 1, self.plane[-1])),
        )

    def offset(self, query_lengths: Array | None, key_lengths: Array | None) -> Any:
        alignment = self.given.get("alignment", "upper_left")
        offset = self.given.get("query_offset")
        if not isinstance(alignment, str) or alignment not in ("upper_left", "lower_right"):
            raise ValueError(f'alignment must be "upper_left" or "lower_right", got {alignment!r}')
        if alignment == "lower_right":
            if offset is not None:
                raise ValueError('query_offset and alignment="lower_right" both set the offset: give one of them')
            queries = self.plane[-2] if query_lengths is None else query_lengths
            keys = self.plane[-1] if key_lengths is None else key_lengths
            return keys - queries
        if offset is None:
            return 0
        farthest = _farthest(self.xp)
        if is_int(offset):
            if abs(int(offset)) > farthest:
                raise ValueError(_out_of_range("query_offset", -farthest, farthest, "", offset, offset))
            return int(offset)
        return self.to_batch(self.integers("query_offset", self.batch, -farthest, farthest))

    def window(self) -> tuple[int | None, int | None]:
        window = self.given.get("window")
        if window is None:
            return None, None
        form = "window must be (left, right), each an int ≥ 0 or None for unbounded"
        if not isinstance(window, tuple | list) or len(window) != 2:
            hint = ""
            if isinstance(window, int | np.integer) and not isinstance(window, bool) and window >= 0:
                hint = f": window=({window}, {window}), or ({window}, 0) under is_causal"
            raise ValueError(f"{form}{hint}; got {window!r}")
        for side in window:
            if side is not None and not is_int(side):
                raise ValueError(f"{form}; got {window!r}")
            if side is not None and side < 0:
                raise ValueError(f"{form}: None, not −1, is unbounded; got {window!r}")
        # a side that no distance between two positions reaches is unbounded, and need not fit the integers
        farthest = 2 * _farthest(self.xp)
        left, right = (None if side is None or side > farthest else int(side) for side in window)
        return left, right

    # numbers

    def number(self, name: str, default: float | None) -> Array | None:
        """A 0-d array in the compute dtype from a Python or NumPy number or a 0-d array."""
        value = self.given.get(name, default)
        if value is None:
            return None
        if isinstance(value, list | tuple):
            value = from_list(name, value)
        if isinstance(value, int) and not isinstance(value, bool):
            value = _as_float(name, value)
        shape = getattr(value, "shape", ())
        if tuple(shape) != ():
            raise ValueError(f"{name} must be one number, got shape {tuple(shape)}")
        kind = dtype_kind(self.xp, value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype)
        if kind not in "if" and not (kind == "c" and self.complex):
            raise TypeError(f"{name} must be a real number, got {value!r}")
        if not hasattr(value, "dtype") or isinstance(value, np.ndarray | np.generic):
            compute_dtype = dtype_name(self.compute_dtype)
            with np.errstate(all="ignore"):
                rounded = np.asarray(value, compute_dtype)
            if not np.isfinite(rounded):
                raise ValueError(f"{name} must be finite in {compute_dtype}, got {value}")
            if name == "softcap" and not np.real(rounded) > 0:
                raise ValueError(_not_positive(value, compute_dtype))
            return asarray(self.xp, rounded, self.compute_dtype, self.like)
        compute_dtype = dtype_name(self.compute_dtype)
        rounded = astype(value, self.compute_dtype)
        self.checks.require(self.xp.isfinite(rounded), lambda: f"{name} must be finite in {compute_dtype}, got {value}")
        if name == "softcap":
            self.checks.require(real_part(self.xp, rounded) > 0, lambda: _not_positive(value, compute_dtype))
        return rounded

    # dropout

    def dropout(self) -> Dropout | None:
        p = self.given.get("dropout_p")
        mask = self.arrays["dropout_mask"]
        seed: Any = self.given.get("dropout_seed")
        if p is None:
            for name, value in (("dropout_mask", mask), ("dropout_seed", seed)):
                if value is not None:
                    raise ValueError(f"{name} was given without dropout_p")
            return None
        if isinstance(p, bool) or not isinstance(p, int | float | np.integer | np.floating):
            raise TypeError(f"dropout_p must be a number, got {p!r}")
        if not 0 <= p <= 1:
            raise ValueError(f"dropout_p must lie in 0 … 1, got {p}")
        if mask is not None and seed is not None:
            raise ValueError("dropout_mask and dropout_seed both say what is kept: give one of them")
        if mask is None and seed is None:
            if p > 0:
                raise ValueError("dropout_p needs dropout_mask (True = kept) or dropout_seed")
            return None
        if mask is not None:
            if dtype_kind(self.xp, mask.dtype) != "b":
                raise TypeError(f"dropout_mask must be bool (True = kept), got {dtype_name(mask.dtype)}")
            mask = self.to_plane("dropout_mask", mask)
            seed = 0
        elif not is_int(seed):
            raise TypeError(f"dropout_seed must be an int, got {seed!r}")
        elif not 0 <= seed < 2**64:
            raise ValueError(f"dropout_seed must lie in 0 … 2⁶⁴ − 1, got {seed}")
        batches = arange(self.xp, 0, math.prod(self.batch), self.like)
        heads = arange(self.xp, 0, math.prod(self.heads), self.like)
        return Dropout(
            p=float(p),
            mask=mask,
            seed=int(seed),
            batches=self.to_batch(self.xp.reshape(batches, self.batch)),
            heads=self.xp.reshape(heads, (*self.heads, 1, 1)),
        )

    # flags and the engine

    def flag(self, name: str) -> bool:
        value = self.given.get(name, False)
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be True or False, got {value!r}")
        return bool(value)

    def engine(self) -> tuple[str, tuple[int, int] | None, int | None, bool]:
        given = self.given
        method = given.get("method", "dense")
        if not isinstance(method, str) or method not in ("dense", "blockwise"):
            raise ValueError(f'method must be "dense" or "blockwise", got {method!r}')
        if method == "dense":
            for name in ("block_size", "workers", "progress"):
                if name in given:
                    raise ValueError(f'{name} goes with method="blockwise"')
            return method, None, None, False
        if self.xp is not np and not is_cupy(self.xp):
            raise TypeError(
                f'method="blockwise" takes NumPy and CuPy arrays, got {self.xp.__name__}: use method="dense"'
            )
        block_size = given.get("block_size")
        if block_size is not None:
            sizes: Any = (block_size, block_size) if is_int(block_size) else block_size
            if not isinstance(sizes, tuple | list) or len(sizes) != 2 or not all(map(is_int, sizes)):
                raise TypeError(f"block_size must be an int or (rows, columns), got {block_size!r}")
            if min(sizes) < 1:
                raise ValueError(f"block_size must be at least 1, got {block_size!r}")
            block_size = int(sizes[0]), int(sizes[1])
        workers = given.get("workers")
        if workers is not None and not is_int(workers):
            raise TypeError(f"workers must be an int, got {workers!r}")
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        return method, block_size, None if workers is None else int(workers), self.flag("progress")


def _default_scale(query: Array) -> float:
    return 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0


def _wants_complex(compute_dtype: DType | None) -> bool:
    return compute_dtype is not None and dtype_name(compute_dtype).startswith("complex")


def is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def looks_additive(least: Any, most: Any) -> str:
    return (
        "mask must be bool or integer (True = may attend); this float mask looks additive: numbers "
        f"added to the scores go into bias=; its entries span {least} … {most}"
    )


def _farthest(xp: Namespace) -> int:
    """How far from 0 an offset may put a query. Four times that, and with it every sum of an offset, a window's side
    and an index, still fits the module's integers, which wrap around without a word."""
    return int(np.iinfo(dtype_name(default_integer(xp))).max) // 4


def _out_of_range(name: str, low: int, high: int | None, bound: str, least: Any, most: Any) -> str:
    came = str(int(least)) if least == most else f"{int(least)} … {int(most)}"
    return f"{name} must lie in {low} … {high}{bound}, got {came}"


def _as_float(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer of {value.bit_length()} bits") from None


def _not_positive(value: Any, compute_dtype: str) -> str:
    rounded = "" if value <= 0 else f", which is 0 in {compute_dtype}"
    return f"softcap must be greater than 0 (None, not 0, turns it off), got {value}{rounded}"
