"""What a kernel was given and what it gave, from a mapping, an ``.npz`` or a ``.safetensors`` file.

Everything is checked here, and everything that is wrong is one `DumpError` of one line.
"""

import json
import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa._internal.namespace import array_namespace, dtype_name, is_cupy
from numpy_sdpa._internal.options import AttentionOptions
from numpy_sdpa.dropout import kept_in
from numpy_sdpa.kernelcheck.layouts import Heads, Layout, Packed
from numpy_sdpa.kernelcheck.problem import INPUTS, RESULTS, Array, Problem
from numpy_sdpa.kernelcheck.semantics import System, system
from numpy_sdpa.visibility import whole_plane

UPSTREAM = ("grad_output", "grad_lse")
OPTION_ARRAYS = (
    "mask", "bias", "sinks", "alibi_slopes", "dropout_mask", "key_lengths", "query_lengths", "query_segments",
    "key_segments", "query_offset",
)  # fmt: skip
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
# How our own code runs is no part of what a kernel was asked.
_NOT_HERE = ("compute_dtype", "method", "block_size", "workers", "progress")
OPTIONS = tuple(name for name in AttentionOptions.__annotations__ if name not in _NOT_HERE)
ARRAYS = ("query", "key", "value", "mask", *UPSTREAM, *RESULTS, *CU_SEQLENS)

PRECISIONS = ("float16", "bfloat16", "float32", "float64")

# What others call these, and the name here.
_OTHER_NAMES = {
    **dict.fromkeys(("q", "Q"), "query"),
    **dict.fromkeys(("k", "K"), "key"),
    **dict.fromkeys(("v", "V"), "value"),
    **dict.fromkeys(("o", "O", "out", "y"), "output"),
    **dict.fromkeys(("do", "dout", "dO", "grad_out", "grad_o"), "grad_output"),
    **dict.fromkeys(("dq", "dQ", "grad_q"), "grad_query"),
    **dict.fromkeys(("dk", "dK", "grad_k"), "grad_key"),
    **dict.fromkeys(("dv", "dV", "grad_v"), "grad_value"),
    **dict.fromkeys(("attn_mask", "attention_mask"), "mask, or bias where it is added to the scores"),
    **dict.fromkeys(("logsumexp", "softmax_lse", "l"), "lse"),
    **dict.fromkeys(("attn", "p", "P", "attention_weights"), "weights"),
    **dict.fromkeys(("attn_bias", "dbias"), "bias, or grad_bias"),
    **dict.fromkeys(("causal",), "is_causal"),
    **dict.fromkeys(("sm_scale", "softmax_scale"), "scale"),
    **dict.fromkeys(("window_size", "sliding_window"), "window"),
}


class DumpError(ValueError):
    """A dump that cannot be read or lacks something; the message is one line."""


class Dump(NamedTuple):
    problem: Problem
    layout: Layout
    dtypes: Mapping[str, str]  # of each result, as the kernel gave it


def load(
    source: Mapping[str, Any] | str | os.PathLike[str],
    layout: str | None = None,
    semantics: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Dump:
    """Read and check a dump. `options` override those of the file; None turns one off."""
    try:
        of_system = system(semantics)
    except ValueError as error:
        raise DumpError(str(error)) from error
    arrays, given_options = _read(source)
    named = {**arrays, **given_options, **(options or {})}
    named = {name: value for name, value in named.items() if value is not None}
    _check_names(named)
    try:
        values = {name: _value(name, value) for name, value in named.items()}
    except (TypeError, ValueError) as error:
        raise DumpError(" ".join(str(error).split())) from error
    _check_completeness(values)
    dtypes = {name: _stored_dtype(value) for name, value in values.items() if isinstance(value, np.ndarray)}
    if dtypes["query"] not in PRECISIONS:
        raise DumpError(f"query must be one of {', '.join(PRECISIONS)}, got {dtypes['query']}")
    values = {name: _in_float64(name, value) for name, value in values.items()}
    values |= of_system.options(values)
    layout = layout or of_system.layout
    try:
        return _dump(dict(values), dtypes, layout, of_system)
    except DumpError as error:
        raise DumpError(f"{error}{_other_layout(values, dtypes, layout, of_system)}") from error


def _other_layout(values: dict[str, Any], dtypes: dict[str, str], layout: str, of_system: System) -> str:
    """A hint, where the shapes agree in the other layout."""
    other = {"bhld": "blhd", "blhd": "bhld"}.get(layout)
    if other is None:
        return ""
    try:
        _dump(dict(values), dtypes, other, of_system)
    except DumpError:
        return ""
    return f"; in layout {other} all shapes agree"


def _dump(values: dict[str, Any], dtypes: dict[str, str], layout_name: str, of_system: System) -> Dump:
    cu_seqlens = [values.pop(name, None) for name in CU_SEQLENS]
    try:
        layout: Layout
        if cu_seqlens[0] is not None or cu_seqlens[1] is not None:
            layout = Packed.of(values, *cu_seqlens)
        else:
            layout = Heads.of(values, layout_name, of_system.lse_layout)
        values = {name: layout.to_bhld(name, value) for name, value in values.items()}
        if isinstance(layout, Packed):
            values |= layout.lengths()
        inputs = {name: values.pop(name) for name in ("query", "key", "value")}
        inputs |= {name: values.pop(name) for name in OPTION_ARRAYS if isinstance(values.get(name), np.ndarray)}
        given = {name: values.pop(name) for name in RESULTS if name in values}
        upstream = {name: values.pop(name) for name in UPSTREAM if name in values}
        outside = layout.outside() if isinstance(layout, Packed) else None
        problem = _without_seed(Problem(inputs, values, upstream, given, dtypes["query"], of_system, outside))
        _check_shapes(problem)
    except (TypeError, ValueError) as error:
        raise DumpError(" ".join(str(error).split())) from error
    return Dump(problem, layout, {name: dtypes[name] for name in given})


def _without_seed(problem: Problem) -> Problem:
    """The seed's mask written out, so that a part of the problem keeps its part of it."""
    if "dropout_seed" not in problem.options:
        return problem
    mask = kept_in(problem.resolved[1], whole_plane(problem.resolved[1]))
    options = {name: option for name, option in problem.options.items() if name != "dropout_seed"}
    inputs = (
        problem.inputs if mask is None else {**problem.inputs, "dropout_mask": np.broadcast_to(mask, problem.plane)}
    )
    return replace(problem, inputs=inputs, options=options)


# Reading


def _read(source: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and options."""
    if isinstance(source, Mapping):
        arrays = dict(source)
        return arrays, _parsed_options(arrays.pop("options", None))
    path = Path(source)
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    ending = path.suffix.lower()
    if ending not in readers:
        raise DumpError(f"a dump is a .npz or a .safetensors file, got {path}")
    try:
        return readers[ending](path)
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from error


def _read_npz(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    # what zipfile and NumPy raise where a file, or one array in it, is cut off, damaged or compressed by another method
    unreadable = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, MemoryError)
    with path.open("rb") as stream:
        try:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DumpError(f"{path} is no .npz file, but a single array")
        except DumpError:
            raise
        except unreadable as error:
            raise DumpError(f"{path} is no .npz file") from error
        arrays = {}
        with file:
            for name in file.files:
                try:
                    arrays[name] = file[name]
                except unreadable as error:
                    if "pickle" in str(error):  # which may run anything
                        raise DumpError(f"{path}: {name} cannot be read without pickle; save plain arrays") from error
                    reason = " ".join(str(error).split())
                    raise DumpError(f"{path}: {name} is no readable array: {reason}") from error
    return arrays, _parsed_options(arrays.pop("options", None))


# Names of dtypes in safetensors files. Two bytes without a NumPy dtype of their own are kept as they are.
_SAFETENSORS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "V2", "BOOL": "?", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        import safetensors
    except ImportError as error:
        raise DumpError(
            "reading .safetensors needs the package safetensors: pip install 'numpy-sdpa[safetensors]'"
        ) from error
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        tensors = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise DumpError(f"{path} is no .safetensors file: {error}") from error
    arrays = {}
    for name, tensor in tensors:
        if tensor["dtype"] not in _SAFETENSORS:
            raise DumpError(
                f"{path}: {name} has dtype {tensor['dtype']}, which is not one of {', '.join(_SAFETENSORS)}"
            )
        arrays[name] = np.frombuffer(tensor["data"], dtype=_SAFETENSORS[tensor["dtype"]]).reshape(tensor["shape"])
    return arrays, _parsed_options(metadata.get("options"))


def _parsed_options(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    if isinstance(options, Mapping):
        return dict(options)
    if isinstance(options, np.ndarray):
        if options.size != 1 or options.dtype.kind not in "US":
            raise DumpError(
                f"options must be one string with a JSON object, got shape {options.shape} of {options.dtype}"
            )
        options = options.reshape(-1)[0]
    text = options.decode("utf-8", "replace") if isinstance(options, bytes) else str(options)
    try:
        parsed = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DumpError(f"options is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise DumpError(f"options must be a JSON object, got {type(parsed).__name__}")
    return parsed


# Names and values


def _check_names(named: Mapping[str, Any]) -> None:
    for name in named:
        if name in _NOT_HERE:
            raise DumpError(f"{name} says how this package computes; a kernel has no such option")
        if name not in ARRAYS and name not in OPTIONS:
            other = _OTHER_NAMES.get(name)
            known = f"call it {other}" if other else f"the names are {', '.join((*ARRAYS, *OPTIONS))}, options"
            raise DumpError(f"unknown name {name!r}: {known}")


def _value(name: str, value: Any) -> Any:
    """An array of NumPy, or a plain number or word."""
    if name == "window" and isinstance(value, list | tuple | np.ndarray):
        return tuple(value.tolist()) if isinstance(value, np.ndarray) and value.ndim else value
    if name in ARRAYS or name in OPTION_ARRAYS:
        if isinstance(value, int | np.integer) and name == "query_offset":
            return int(value)
        return _as_numpy(name, value)
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value


def _as_numpy(name: str, value: Any) -> Array:
    if isinstance(value, list | tuple | int | float | bool):
        try:
            return np.asarray(value)
        except ValueError as error:
            raise DumpError(f"{name} must be one array, got lists of different lengths") from error
    try:
        xp = array_namespace({name: value})
    except TypeError as error:
        raise DumpError(str(error)) from error
    return value.get() if is_cupy(xp) else np.asarray(value)


def _check_completeness(values: Mapping[str, Any]) -> None:
    for name in ("query", "key", "value"):
        if name not in values:
            raise DumpError(f"{name} is missing: a dump has query, key, value and what the kernel gave")
    given = [name for name in RESULTS if name in values]
    if not given:
        raise DumpError(f"nothing to compare: the dump has none of {', '.join(RESULTS)}")
    for name in given:
        argument = name.removeprefix("grad_")
        if name.startswith("grad_") and argument not in values:
            raise DumpError(f"{name} was given without {argument}")
        if name.startswith("grad_") and not any(upstream in values for upstream in UPSTREAM):
            raise DumpError(f"{name} was given without grad_output, the upstream gradient that it comes from")


def _stored_dtype(array: Array) -> str:
    """The name of an array's dtype; two raw bytes are what NumPy saves of a bfloat16."""
    return "bfloat16" if array.dtype == np.dtype("V2") else dtype_name(array.dtype)


def _in_float64(name: str, value: Any) -> Any:
    """Floating arrays in float64, which holds every number of the smaller types exactly; others as they are."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.dtype("V2"):
        value = np.asarray(value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)  # 0-d stays an array
    is_floating = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
    if name in (*INPUTS, *UPSTREAM, *RESULTS) and not is_floating:
        raise DumpError(f"{name} must be floating, got {dtype_name(value.dtype)}")
    return value.astype(np.float64) if is_floating else value


def _check_shapes(problem: Problem) -> None:
    """Of the upstream gradients; resolving checks the inputs. Results are checked against what mistakes explain."""
    shapes = {"grad_output": problem.shape_of("output"), "grad_lse": problem.shape_of("lse")}
    for name, array in problem.upstream.items():
        if array.shape != shapes[name]:
            raise DumpError(f"{name} must have shape {shapes[name]}, got {array.shape}")
    if not math.prod(problem.plane[:-1]):
        raise DumpError(f"nothing to compare: the output has no entries, (B…, Hq, L, S) = {problem.plane}")
