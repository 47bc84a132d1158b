"""Which array module do these arrays belong to, and what differs between modules.

NumPy, CuPy and every module of the Array API standard share the operations that the mathematics needs. What they do
not share is here and nowhere else: how the module is found, dtypes and devices, floating-point warnings, tracers.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

Array = Any
DType = Any
Namespace = Any  # a module, typed as Any since its functions are looked up on it

# What to write instead, for arrays that are close enough to be passed by mistake.
_CONVERSIONS = {
    "torch": "pass {name}.detach().cpu().numpy(), or cupy.from_dlpack({name}.detach()) on a GPU",
    "tensorflow": "pass {name}.numpy()",
    "dask": "numpy_sdpa.distributed takes dask arrays, or pass {name}.compute()",
    "pandas": "pass {name}.to_numpy()",
}


def array_namespace(arrays: Mapping[str, Array]) -> Namespace:
    """The one module that all these named arrays belong to. None and lists do not count."""
    found: dict[str, Namespace] = {}
    for name, array in arrays.items():
        if array is not None:
            found[name] = _module_of(name, array)
    modules = list(found.values())
    if any(module is not modules[0] for module in modules):
        listed = ", ".join(f"{name} {module.__name__}" for name, module in found.items())
        raise TypeError(f"all arrays must belong to one array module: {listed}")
    return modules[0] if modules else np


def _module_of(name: str, array: Array) -> Namespace:
    if isinstance(array, (np.ndarray, np.generic)):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a numpy.ma.MaskedArray, whose mask would be ignored: "
                f"pass {name}.data, and what may be attended to as mask="
            )
        if isinstance(array, np.matrix):
            raise TypeError(f"{name} is a numpy.matrix, whose * is a matrix product: pass numpy.asarray({name})")
        return np
    package = type(array).__module__.partition(".")[0]
    if package == "cupy":  # no __array_namespace__: the type's module is the only sign
        return sys.modules["cupy"]
    if package not in _CONVERSIONS and hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    hint = _CONVERSIONS.get(package, "pass numpy.asarray({name})").format(name=name)
    raise TypeError(
        f"{name} must be an array of NumPy, CuPy or an Array API module, "
        f"got {type(array).__module__}.{type(array).__qualname__}: {hint}"
    )


_LISTS_AND_NUMBERS = (list, tuple, bool, int, float, complex)


def required(name: str, value: Any) -> Array:
    """An array that must be there; a list becomes one."""
    if value is None:
        raise TypeError(f"{name} must be an array, got None")
    return from_list(name, value)


def from_list(name: str, value: Any) -> Array:
    """Lists, tuples and Python numbers become NumPy arrays; everything else is returned as it is."""
    if not isinstance(value, _LISTS_AND_NUMBERS):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be an array, got a list with rows of different lengths") from error
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{name} must hold numbers, got a {type(value).__name__} of {array.dtype}")
    return array


_KINDS = {"b": "b", "i": "i", "u": "i", "f": "f", "c": "c"}


def dtype_kind(xp: Namespace, dtype: DType) -> str:
    """'b', 'i' (signed or not), 'f', 'c', or '?' for anything else."""
    if isinstance(dtype, np.dtype):
        if dtype.kind == "V" and dtype.name == "bfloat16":  # of ml_dtypes
            return "f"
        return _KINDS.get(dtype.kind, "?")
    for kind, name in (("b", "bool"), ("i", "integral"), ("f", "real floating"), ("c", "complex floating")):
        if xp.isdtype(dtype, name):
            return kind
    return "?"


def real_part(xp: Namespace, array: Array) -> Array:
    """What complex numbers are compared by, so that a complex step takes the branch of the real computation."""
    return xp.real(array) if dtype_kind(xp, array.dtype) == "c" else array


def clipped(xp: Namespace, array: Array, limit: float) -> Array:
    """Within ±limit; a complex number whose real part is outside becomes ±limit."""
    if dtype_kind(xp, array.dtype) != "c":
        return xp.clip(array, -limit, limit)
    real = xp.real(array)
    return xp.where(xp.abs(real) > limit, limit * xp.sign(real), array)


def dtype_name(dtype: DType) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:  # a dtype object of another module, array_api_strict.float64
        return str(dtype).rpartition(".")[2]


def result_type(xp: Namespace, *dtypes: DType) -> DType:
    """The module's own promotion; float16 and bfloat16, for which NumPy knows none, meet in float32."""
    if all(dtype == dtypes[0] for dtype in dtypes):
        return dtypes[0]
    if {"float16", "bfloat16"} <= {dtype_name(dtype) for dtype in dtypes}:
        dtypes = tuple(dtype for dtype in dtypes if dtype_name(dtype) not in ("float16", "bfloat16"))
        return xp.result_type(xp.float32, *dtypes)
    return xp.result_type(*dtypes)


def makes_dtype(xp: Namespace, name: str) -> bool:
    """False where the module has the name only: jax.numpy without x64 turns float64 into float32."""
    inspection = getattr(xp, "__array_namespace_info__", None)
    return xp is np or inspection is None or name in inspection().dtypes()


def default_integer(xp: Namespace) -> DType:
    return np.dtype(np.int64) if xp is np else xp.arange(0).dtype


def astype(array: Array, dtype: DType) -> Array:
    """The array itself where it already has the dtype. (`numpy.astype` is younger than NumPy 2.0.)"""
    if array.dtype == dtype:
        return array
    return array.astype(dtype) if hasattr(array, "astype") else array.__array_namespace__().astype(array, dtype)


def operand(xp: Namespace, array: Array, dtype: DType) -> Array:
    """The array in this dtype, in C order, aligned: how the caller's lies in memory must not decide a sum's order."""
    if xp is np:
        array = np.asarray(array, dtype=dtype, order="C")
        return array if array.flags.aligned else array.copy()
    return xp.asarray(array, dtype=dtype, order="C") if is_cupy(xp) else astype(array, dtype)


def overwrite(xp: Namespace, function: Callable[..., Array], array: Array, *operands: Array) -> Array:
    """function(array, *operands), written over `array` where the module can: for arrays that nobody else will read.

    New memory comes from the operating system in pages that it clears first, which costs as much as the arithmetic.
    """
    return function(array, *operands, out=array) if xp is np or is_cupy(xp) else function(array, *operands)


def owned(array: Array) -> Array:
    """The array, or a copy where it is a view of another one."""
    return array if getattr(array, "base", None) is None else array.copy()


def asarray(xp: Namespace, value: Any, dtype: DType, like: Array) -> Array:
    """`value` as an array of `xp`, on the device of `like`; host integers and numbers are moved there."""
    if xp is np or not hasattr(like, "device") or is_cupy(xp) or is_traced(like):
        return xp.asarray(value, dtype=dtype)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()  # not every module takes a NumPy array on another device than its default
    return xp.asarray(value, dtype=dtype, device=like.device)


def arange(xp: Namespace, start: int, stop: int, like: Array) -> Array:
    """Integers start … stop − 1 on the device of `like`."""
    if xp is np or is_cupy(xp) or is_traced(like):
        return xp.arange(start, stop)
    return xp.arange(start, stop, device=like.device)


def is_cupy(xp: Namespace) -> bool:
    return xp.__name__ == "cupy"


def is_traced(*arrays: Array) -> bool:
    """Whether any array stands for a value that is not known yet (jax.jit, jax.grad, jax.vmap)."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(array, jax.core.Tracer) for array in arrays)


def computing(xp: Namespace, like: Array) -> AbstractContextManager:
    """Where the arithmetic runs: on the device of `like`; infinities and NaN are results, not warnings."""
    return like.device if is_cupy(xp) else np.errstate(all="ignore")  # array_api_strict, too, computes by NumPy


class ValueChecks:
    """Conditions on array values, collected and asked at once: one synchronisation on a GPU, none under a tracer."""

    def __init__(self, xp: Namespace) -> None:
        self._xp = xp
        self._pending: list[tuple[Array, Callable[[], str]]] = []

    def require(self, condition: Array, message: Callable[[], str]) -> None:
        """`condition`: a 0-d bool array; `message`: called where it is False."""
        if not is_traced(condition):
            self._pending.append((condition, message))

    def ask(self) -> None:
        if not self._pending:
            return
        if not is_cupy(self._xp) or not bool(self._xp.all(self._xp.stack([flag for flag, _ in self._pending]))):
            for flag, message in self._pending:
                if not bool(flag):
                    raise ValueError(message())
