"""Problems that catch people: inputs with golden results, by the names of their features."""

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.attention import sdpa_backward, sdpa_forward
from numpy_sdpa.kernelcheck.problem import INPUTS, Array
from numpy_sdpa.visibility import visible_in, whole_plane

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Sizes:
    """By the letters of the docs: batch, heads, lengths, head sizes."""

    B: int = 2
    Hq: int = 4
    Hkv: int = 4
    L: int = 48
    S: int = 80
    E: int = 32
    Ev: int = 32


Options = dict[str, Any]
Make = Callable[[np.random.Generator, Sizes], Options]

# What a feature adds to the options; arrays among them are cast to the case's dtype if they are floating.
_OPTIONS: dict[str, Make] = {
    "mask": lambda rng, n: {"mask": rng.random((n.B, 1, n.L, n.S)) < 0.7},
    "head_mask": lambda rng, n: {"mask": rng.random((1, n.Hq, n.L, n.S)) < 0.7},
    "bias": lambda rng, n: {"bias": rng.standard_normal((n.B, n.Hq, n.L, n.S))},
    "broadcast_bias": lambda rng, n: {"bias": rng.standard_normal((1, n.Hq, n.L, n.S))},
    "causal": lambda rng, n: {"is_causal": True},
    "lower_right": lambda rng, n: {"is_causal": True, "alignment": "lower_right"},
    "query_offset": lambda rng, n: {"is_causal": True, "query_offset": rng.integers(-2, n.S // 2, n.B)},
    "window": lambda rng, n: {"window": (n.S // 5, n.S // 8)},
    "query_lengths": lambda rng, n: {"query_lengths": _lengths(rng, n.B, n.L)},
    "key_lengths": lambda rng, n: {"key_lengths": _lengths(rng, n.B, n.S)},
    "segments": lambda rng, n: {
        "query_segments": np.sort(rng.integers(0, 3, (n.B, n.L))),
        "key_segments": np.sort(rng.integers(0, 3, (n.B, n.S))),
    },
    "sinks": lambda rng, n: {"sinks": rng.standard_normal(n.Hq)},
    "alibi": lambda rng, n: {"alibi_slopes": 2.0 ** -np.arange(1, n.Hq + 1)},
    "scale": lambda rng, n: {"scale": 0.25},
    "softcap": lambda rng, n: {"softcap": 1.5},
    "dropout": lambda rng, n: {"dropout_p": 0.25, "dropout_mask": rng.random((n.B, n.Hq, n.L, n.S)) < 0.75},
    "gqa": lambda rng, n: {"enable_gqa": True},
    "empty_rows": lambda rng, n: {"mask": _with_empty_rows(rng, rng.random((n.B, 1, n.L, n.S)) < 0.7)},
    "poison": lambda rng, n: {"key_lengths": _lengths(rng, n.B, n.S), "query_lengths": _lengths(rng, n.B, n.L)},
}

# What a feature makes of the sizes. Equal sizes hide an exchanged axis; odd ones leave the last tile part full.
_SIZES: dict[str, Callable[[Sizes], Sizes]] = {
    "gqa": lambda n: replace(n, Hkv=n.Hq // 2 if n.Hq % 2 == 0 else 1),
    "one_key_head": lambda n: replace(n, Hkv=1),
    "more_queries": lambda n: replace(n, L=n.S, S=n.L),
    "equal_lengths": lambda n: replace(n, S=n.L),
    "batch_equals_heads": lambda n: replace(n, B=n.Hq),
    "heads_equal_keys": lambda n: replace(n, S=n.Hq),
    "value_size": lambda n: replace(n, Ev=n.Ev // 2 or 1),
    "odd_sizes": lambda n: replace(n, L=_odd(n.L), S=_odd(n.S), E=_odd(n.E), Ev=_odd(n.Ev)),
    "one_query": lambda n: replace(n, L=1),
}

# Features that change the arrays after they are drawn, or the upstream gradients.
_OTHERS = ("huge_logits", "strided", "lse_gradient")

FEATURES = tuple(dict.fromkeys([*_OPTIONS, *_SIZES, *_OTHERS]))

# What each is, in ASCII: `make-case --help` prints it on any terminal.
MEANINGS = {
    "mask": "a bool mask that all heads share",
    "head_mask": "a bool mask for each head, which the batch shares",
    "bias": "a bias for each batch element and head",
    "broadcast_bias": "a bias for each head, which the batch shares: its gradient is a sum",
    "causal": "a query sees the keys up to its own position",
    "lower_right": "causal, where the last query stands at the last key",
    "query_offset": "causal, with an offset for each batch element",
    "window": "a window, unlike to the left and to the right",
    "query_lengths": "a number of queries for each batch element",
    "key_lengths": "a number of keys for each batch element",
    "segments": "packed documents",
    "sinks": "a sink for each query head",
    "alibi": "ALiBi slopes",
    "scale": "another scale than 1/sqrt(E)",
    "softcap": "a softcap",
    "dropout": "dropout, with its mask",
    "gqa": "grouped heads: half as many key heads as query heads",
    "empty_rows": "a mask under which some queries see no key",
    "poison": "lengths, and NaN in every place that nothing may read",
    "one_key_head": "one key head for all query heads",
    "more_queries": "more queries than keys",
    "equal_lengths": "as many keys as queries",
    "batch_equals_heads": "as many batch elements as query heads",
    "heads_equal_keys": "as many keys as query heads",
    "value_size": "values of half the size",
    "odd_sizes": "odd lengths and head sizes: the last tile is only part full",
    "one_query": "one query",
    "huge_logits": "logits of some thousands, beyond the exponential's range",
    "strided": "arrays that are not contiguous (from Python: in a file all are)",
    "lse_gradient": "an upstream gradient of lse, grad_lse",
}

# Both set the same thing.
_EXCLUSIVE = (
    {"mask", "head_mask", "empty_rows"},
    {"bias", "broadcast_bias"},
    {"lower_right", "query_offset"},
    {"gqa", "one_key_head"},
    {"more_queries", "equal_lengths", "heads_equal_keys", "one_query", "odd_sizes"},
    {"query_lengths", "poison"},
    {"key_lengths", "poison"},
)

# The names of options serve as well.
_ALIASES = {
    "is_causal": "causal",
    "enable_gqa": "gqa",
    "alibi_slopes": "alibi",
    "dropout_p": "dropout",
    "dropout_mask": "dropout",
    "query_segments": "segments",
    "key_segments": "segments",
    "alignment": "lower_right",
    "grad_lse": "lse_gradient",
}


def make_case(
    features: str | Iterable[str] = (),
    *,
    dtype: str = "float32",
    seed: int = 0,
    backward: bool = True,
    layout: str = "bhld",
    batch: int | None = None,
    query_heads: int | None = None,
    key_heads: int | None = None,
    query_length: int | None = None,
    key_length: int | None = None,
    head_size: int | None = None,
    value_head_size: int | None = None,
) -> tuple[dict[str, Array], Options]:
    """Inputs with golden results, for a kernel to be run on.

    Parameters
    ----------
    features : str or iterable of str
        Any of `FEATURES` that go together: options (mask, bias, causal, window, gqa, …), coinciding and odd sizes, and
        empty_rows, huge_logits, poison (NaN in every place that nothing may read), strided (arrays that are not
        contiguous).
    dtype : "float32" (default), "float16", "bfloat16" or "float64"
        Of the floating inputs.
    seed : int
    backward : bool
        With upstream gradients and the golden gradients.
    layout : "bhld" or "blhd"
    batch, query_heads, key_heads, query_length, key_length, head_size, value_head_size : int, optional
        Sizes; features that set a size set it from these. Key heads fewer than query heads come with ``enable_gqa``.

    Returns
    -------
    arrays : dict
        query, key, value, the options that are arrays, grad_output (and grad_lse) in `dtype`; output, lse and grad_…
        of every floating input in float64: what is right. Replace these by the kernel's and give it all to `compare`.
    options : dict
        The other options, by this package's names.

    Raises
    ------
    ValueError
        For unknown features, features that exclude each other, an unknown dtype or layout, and a negative seed.

    Examples
    --------
    >>> arrays, options = make_case("causal", dtype="float16")
    >>> options, arrays["query"].dtype, arrays["output"].dtype
    ({'is_causal': True}, dtype('float16'), dtype('float64'))
    """
    names = checked_features(listed(features))
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if layout not in ("bhld", "blhd"):
        raise ValueError(f'layout must be "bhld" or "blhd", got {layout!r}')
    sizes = _sizes(
        names, B=batch, Hq=query_heads, Hkv=key_heads, L=query_length, S=key_length, E=head_size, Ev=value_head_size
    )
    rng = np.random.default_rng([zlib.crc32(" ".join(names).encode()), seed])
    arrays, options = _inputs(names, sizes, rng, dtype, backward)
    arrays |= _golden(arrays, options)
    if layout == "blhd":
        arrays = {name: np.swapaxes(a, 1, 2) if name in _HEADED else a for name, a in arrays.items()}
    if "strided" in names:
        arrays = {name: _strided(array) for name, array in arrays.items()}
    return arrays, options


_HEADED = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")


def listed(names: str | Iterable[str]) -> Iterable[str]:
    """One name alone is a list of it, not of its letters."""
    return (names,) if isinstance(names, str) else names


def checked_features(features: Iterable[str]) -> tuple[str, ...]:
    """Features by their own names, in the table's order."""
    names = {name.replace("-", "_") for name in features}
    names = {_ALIASES.get(name, name) for name in names}
    for name in sorted(names):
        if name not in FEATURES:
            raise ValueError(f"unknown feature {name!r}: the features are {', '.join(FEATURES)}")
    for group in _EXCLUSIVE:
        if len(group & names) > 1:
            raise ValueError(f"these features exclude each other: {', '.join(sorted(group & names))}")
    return tuple(name for name in FEATURES if name in names)


def feature_sets(features: str | Iterable[str] | None = None) -> Iterator[tuple[str, ...]]:
    """No feature, each alone, and all pairs that go together."""
    names = FEATURES if features is None else [checked_features([name])[0] for name in listed(features)]
    yield ()
    for name in names:
        yield (name,)
    for pair in itertools.combinations(names, 2):
        if not any(set(pair) <= group for group in _EXCLUSIVE):
            yield pair


def _sizes(names: tuple[str, ...], **given: int | None) -> Sizes:
    chosen = {name: size for name, size in given.items() if size is not None}
    if "Hq" in chosen and "Hkv" not in chosen:
        chosen["Hkv"] = chosen["Hq"]
    if "E" in chosen and "Ev" not in chosen:
        chosen["Ev"] = chosen["E"]
    sizes = replace(Sizes(), **chosen)
    for name in names:
        if name in _SIZES and not (name == "gqa" and "Hkv" in chosen and "Hq" in chosen and sizes.Hkv != sizes.Hq):
            sizes = _SIZES[name](sizes)
    if min(sizes.__dict__.values()) < 1:
        raise ValueError(f"every size must be at least 1 with these features, got {sizes}")
    return sizes


def _inputs(
    names: tuple[str, ...], n: Sizes, rng: np.random.Generator, dtype: str, backward: bool
) -> tuple[dict[str, Array], Options]:
    arrays = {
        "query": rng.standard_normal((n.B, n.Hq, n.L, n.E)),
        "key": rng.standard_normal((n.B, n.Hkv, n.S, n.E)),
        "value": rng.standard_normal((n.B, n.Hkv, n.S, n.Ev)),
    }
    if "huge_logits" in names:
        # logits of some thousands, beyond the exponential's range, and Q Kᵀ beyond float16's largest number
        arrays["query"] *= 60
        arrays["key"] *= 60
    if backward:
        arrays["grad_output"] = rng.standard_normal((n.B, n.Hq, n.L, n.Ev))
    if backward and "lse_gradient" in names:
        arrays["grad_lse"] = rng.standard_normal((n.B, n.Hq, n.L))
    options: Options = {"enable_gqa": True} if 1 < n.Hkv < n.Hq else {}
    for name in names:
        options |= _OPTIONS[name](rng, n) if name in _OPTIONS else {}
    arrays |= {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}
    arrays = {name: _cast(array, dtype) if array.dtype == np.float64 else array for name, array in arrays.items()}
    if "poison" in names:
        _poison(arrays, options)
    return arrays, options


def _odd(size: int) -> int:
    return 3 * size // 4 | 1


def _lengths(rng: np.random.Generator, batch: int, length: int) -> Array:
    """Half or more of the length, and, where there are several, one whole."""
    lengths = rng.integers(-(-length // 2), max(length, -(-length // 2) + 1), batch)
    if batch > 1:
        lengths[-1] = length
    return lengths


def _with_empty_rows(rng: np.random.Generator, mask: Array) -> Array:
    rows = mask.shape[-2]
    mask[..., rng.choice(rows, max(1, rows // 8), replace=False), :] = False
    return mask


def _poison(arrays: dict[str, Array], options: Options) -> None:
    """NaN where nothing may read: keys and values that no query sees, queries and gradients of empty rows."""
    attention = {name: array for name, array in arrays.items() if name not in ("query", "key", "value", "mask")}
    attention = {name: array for name, array in attention.items() if not name.startswith("grad_")}
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    inputs, resolved = resolve(query, key, value, arrays.get("mask"), {**attention, **options})
    bias = inputs.bias
    visible = visible_in(resolved, whole_plane(resolved), None if bias is None else np.atleast_2d(bias))
    visible = np.broadcast_to(True if visible is None else visible, resolved.plane)
    seen = np.any(visible, axis=-2)  # (B, Hq, S)
    seen = np.any(seen.reshape(len(seen), key.shape[1], -1, seen.shape[-1]), axis=2)
    sees = np.any(visible, axis=-1)
    key[~seen] = value[~seen] = np.nan
    query[~sees] = np.nan
    if "grad_output" in arrays:
        arrays["grad_output"][~sees] = np.nan


def _golden(arrays: dict[str, Array], options: Options) -> dict[str, Array]:
    wide: dict[str, Any] = {name: a.astype(np.float64) if _is_floating(a) else a for name, a in arrays.items()}
    grad_output, grad_lse = wide.pop("grad_output", None), wide.pop("grad_lse", None)
    output, residuals = sdpa_forward(wide.pop("query"), wide.pop("key"), wide.pop("value"), **wide, **options)
    golden = {"output": output, "lse": residuals.lse}
    if grad_output is not None:
        gradients = sdpa_backward(grad_output, residuals, grad_lse=grad_lse)
        golden |= {f"grad_{name}": getattr(gradients, name) for name in INPUTS if name in arrays}
    return golden


def _is_floating(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _cast(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    return array.astype(dtype)


def _strided(array: Array) -> Array:
    """The same entries, every second one in memory, the last axis not the fastest."""
    if array.ndim < 2:
        return array
    wide = np.zeros((*array.shape[:-2], array.shape[-1], 2 * array.shape[-2]), array.dtype)
    wide[..., ::2] = np.swapaxes(array, -1, -2)
    return np.swapaxes(wide[..., ::2], -1, -2)


def plane_size(arrays: dict[str, Array]) -> int:
    """Elements of (B, Hq, L, S)."""
    return math.prod(arrays["query"].shape[:-1]) * arrays["key"].shape[-2]
