"""Arrays in and out of the checks: validation, precisions, and the one place where arrays change module.

Everything the checks compute, they compute in NumPy, in float64. `to_numpy` and `Argument.restore` are the
only two doors: a CuPy array leaves its device here and a perturbed argument returns to it here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Precision(NamedTuple):
    """What a check must know of a floating dtype.

    `eps` and `smallest_subnormal` are the dtype's own; the others are defaults of the checks.

    `rtol`: whoever writes a gradient loses digits to rounding, and may lose half of them to a long sum:
    √eps or a few of it. In float64 (1e-7) that is far above what a quotient is uncertain by (1e-13 to
    1e-9), in float32 (1e-4) about as much; any mistake in a formula is far larger. In float16 and bfloat16
    it is 20 and 13 eps: there √eps would hardly be a check.

    `atol`: 0 in float64 and else the smallest normal number, since hardware that flushes smaller ones to
    zero is not wrong. No larger absolute number suits every function, and none is needed: what a gradient
    loses where its terms cancel is measured as the function's noise and counted as uncertainty.

    `initial_step`, in units of the argument's size, and `order` of the difference quotient. At order 8 a
    quotient multiplies the function's noise by 8 / step, at order 6 by 4 / step. In float64 that is cheap,
    and order 8 with 0.1 served in a trial; in float32 more is lost to noise than to the series. Without an
    order, in dtypes of two or three digits, a polynomial is fitted instead.
    """

    eps: float
    smallest_subnormal: float
    atol: float
    rtol: float
    initial_step: float
    order: int | None


_FLOAT64 = Precision(2.0**-52, 2.0**-1074, 0.0, 1e-7, 0.1, 8)
PRECISIONS = {
    "float16": Precision(2.0**-10, 2.0**-24, 2.0**-14, 2e-2, 1.0, None),
    "bfloat16": Precision(2.0**-7, 2.0**-133, 2.0**-126, 1e-1, 1.0, None),
    "float32": Precision(2.0**-23, 2.0**-149, 2.0**-126, 1e-4, 0.2, 6),
    "float64": _FLOAT64,
    np.dtype(np.longdouble).name: _FLOAT64,  # the quotients themselves are float64
}


def coarsest(names: Sequence[str]) -> Precision:
    """The precision of a computation that passes through all these dtypes."""
    return max((PRECISIONS[name] for name in names), key=lambda precision: precision.eps)


def array_module(value: object) -> Any | None:
    """The module whose array `value` is, or None. CuPy arrays have no `__array_namespace__`: ask the type."""
    if isinstance(value, np.ndarray | np.generic):
        return np
    if type(value).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"]
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__()
    return None


def to_numpy(array: Any) -> np.ndarray:
    """A NumPy array of `array`, wherever it lives."""
    if type(array).__module__.partition(".")[0] == "cupy":
        return array.get()
    return np.asarray(array)


def dtype_name(array: Any) -> str:
    """`float32` for a NumPy, CuPy, JAX or array_api_strict array of that dtype."""
    return str(array.dtype).rpartition(".")[2]


def is_floating(value: object) -> bool:
    """Whether `value` is an array of a real floating dtype that the checks know."""
    return array_module(value) is not None and dtype_name(value) in PRECISIONS


def kind_of(value: Any) -> str:
    """How an error message calls `value`: `float32 array (2, 3)`, or its type."""
    if array_module(value) is None:
        return type(value).__module__.partition(".")[0] + "." + type(value).__name__
    return f"{dtype_name(value)} array {tuple(value.shape)}"


class Argument:
    """An argument that is differentiated: its value (`point`, NumPy, float64), and the way back."""

    def __init__(self, position: int, value: Any):
        self.position = position
        self.python_float = isinstance(value, float) and not isinstance(value, np.generic)
        array = np.asarray(value) if self.python_float else value
        self.module: Any = array_module(array)
        self.scalar_type = type(value) if isinstance(value, np.generic) else None
        self.dtype_name = dtype_name(array)
        host = to_numpy(array)
        self.dtype = host.dtype
        # float64 holds every value of the narrower dtypes; a long double keeps its digits
        self.point = np.array(host, dtype=np.result_type(host.dtype, np.float64))
        self.precision = PRECISIONS[self.dtype_name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.point.shape

    @property
    def size(self) -> float:
        """The root mean square of the finite entries, 1 where that says nothing: the unit of the steps."""
        finite = self.point[np.isfinite(self.point)].astype(float)
        largest = float(np.max(np.abs(finite), initial=0.0))
        if largest == 0:
            return 1.0
        return largest * float(np.sqrt(np.mean((finite / largest) ** 2)))  # scaled: 1e200 ** 2 overflows

    def rounded(self, point: np.ndarray) -> np.ndarray:
        """`point` as the argument's dtype holds it."""
        with np.errstate(all="ignore"):  # float16 overflows to inf; the function will say what it thinks of it
            return point.astype(self.dtype)

    def restore(self, point: np.ndarray) -> Any:
        """A fresh array of the argument's module and dtype at `point` (complex for a complex point)."""
        if point.dtype.kind == "c":
            host = point.astype(np.result_type(self.dtype, np.complex64))
        else:
            host = self.rounded(point)
        if self.python_float:
            return host.item()
        if self.scalar_type is not None:
            return host[()]
        return np.array(host) if self.module is np else self.module.asarray(host)


class ResultError(Exception):
    """A gradient or tangent without the structure it must have: a verdict, never the user's exception."""


class Layout:
    """The shapes and dtypes of a result, an array or a tuple of arrays; to a flat float64 vector and back."""

    def __init__(self, result: Any, whose: str):
        self.several = isinstance(result, tuple | list)
        arrays = list(result) if self.several else [result]
        for number, array in enumerate(arrays):
            # a Python float, or a tensor that NumPy can read, is as good as an array; not a dtype without
            # slopes
            name = dtype_name(array) if array_module(array) is not None else to_numpy(array).dtype.name
            if name not in PRECISIONS:
                place = f"output {number}" if self.several else "its result"
                raise TypeError(
                    f"{whose} must return a real floating array or a tuple of them; "
                    f"{place} is {kind_of(array)}"
                    + (" (return real and imaginary parts as two outputs)" if "complex" in name else "")
                )
        hosts = [to_numpy(array) for array in arrays]
        self.modules = [array_module(array) or np for array in arrays]
        self.dtypes = [host.dtype for host in hosts]
        self.dtype_names = [host.dtype.name for host in hosts]
        self.shapes = [host.shape for host in hosts]
        self.sizes = [host.size for host in hosts]
        self.starts = [sum(self.sizes[:number]) for number in range(len(hosts))]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def outputs(self) -> int:
        return len(self.sizes)

    def part(self, output: int) -> slice:
        """Where the output lies in the flat vector."""
        return slice(self.starts[output], self.starts[output] + self.sizes[output])

    def per_entry(self, values: Sequence[float]) -> np.ndarray:
        """One number per output, repeated for each of its entries."""
        return np.repeat(np.asarray(values, dtype=float), self.sizes)

    def flatten(self, result: Any, whose: str, complex_result: bool = False) -> np.ndarray:
        """The flat vector of `result`; ResultError where it is not laid out like this."""
        arrays = list(result) if isinstance(result, tuple | list) else [result]
        if len(arrays) != self.outputs:
            raise ResultError(f"{whose} has {len(arrays)} outputs, expected {self.outputs}")
        flat = np.empty(self.size, dtype=complex if complex_result else float)
        for number, array in enumerate(arrays):
            label = f"output {number} of {whose}" if self.several else whose
            host = host_of(array, self.shapes[number], label, complex_result)
            flat[self.part(number)] = host.ravel()
        return flat

    def unflatten(self, vector: np.ndarray) -> Any:
        """Arrays like the result, in its modules and dtypes, filled from the flat vector."""
        arrays = []
        for number, shape in enumerate(self.shapes):
            with np.errstate(all="ignore"):
                host = vector[self.part(number)].reshape(shape).astype(self.dtypes[number])
            arrays.append(host if self.modules[number] is np else self.modules[number].asarray(host))
        return tuple(arrays) if self.several else arrays[0]

    def index(self, flat: int) -> tuple[int, ...]:
        """The index of an entry of the flat vector, after the output's number where there are several."""
        output = int(np.searchsorted(np.cumsum(self.sizes), flat, side="right"))
        inner = unravel(flat - self.starts[output], self.shapes[output])
        return (output, *inner) if self.several else inner


def unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()


def host_of(array: Any, shape: tuple[int, ...], label: str, complex_allowed: bool = False) -> np.ndarray:
    """A float64 NumPy array of `array`, which must have `shape`; ResultError says what is the matter."""
    if array is None:
        raise ResultError(f"{label} is None, expected an array of shape {shape}")
    host = to_numpy(array)
    if host.shape != shape:
        raise ResultError(f"{label} has shape {host.shape}, expected {shape}")
    if host.dtype == object or (host.dtype.kind == "c" and not complex_allowed):
        raise ResultError(f"{label} has dtype {host.dtype}, expected a real floating array")
    with np.errstate(all="ignore"):
        return host.astype(complex if complex_allowed else float)


def check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {kind_of(value)}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_number(name: str, value: float | None, lowest: str) -> float | None:
    """`value` as a finite float within its bound, `lowest`: "at least 0" or "above 0"; None stays."""
    if value is None:
        return None
    if isinstance(value, bool | str) or not np.isscalar(value) or isinstance(value, complex):
        raise TypeError(f"{name} must be a number {lowest} or None, got {kind_of(value)}")
    number = float(value)
    if not np.isfinite(number) or number < 0 or (number == 0 and lowest == "above 0"):
        raise ValueError(f"{name} must be a finite number {lowest} or None, got {value!r}")
    return number


def find_arguments(args: Any, wrt: Any) -> list[Argument]:
    """The arguments to differentiate, in the order of `wrt`; mistakes in `args` and `wrt` are named."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"args must be a tuple or list of the function's arguments, got {kind_of(args)}: write (x,)")
    if wrt is None:
        positions = [position for position, value in enumerate(args) if is_floating(value)]
        if not positions:
            raise TypeError(f"args holds no floating NumPy, CuPy or Array API array to differentiate: {_listed(args)}")
    else:
        positions = _positions(wrt, args)
    return [Argument(position, args[position]) for position in positions]


def _positions(wrt: Any, args: Sequence[Any]) -> list[int]:
    entries = list(wrt) if isinstance(wrt, tuple | list | range) else [wrt]
    for position in entries:
        if isinstance(position, bool) or not isinstance(position, int | np.integer):
            raise TypeError(f"wrt must hold positions in args (integers), got {position!r}")
        if not 0 <= position < len(args):
            raise ValueError(f"wrt must hold positions from 0 to {len(args) - 1}, got {position}")
        value = args[int(position)]
        if not is_floating(value) and not isinstance(value, float):
            raise TypeError(f"wrt names argument {position}, which must be a real floating array, got {kind_of(value)}")
    if len(set(entries)) != len(entries) or not entries:
        raise ValueError(f"wrt must hold at least one position, each once, got {wrt!r}")
    return [int(position) for position in entries]


def _listed(args: Sequence[Any]) -> str:
    kinds = ", ".join(f"argument {position} is {kind_of(value)}" for position, value in enumerate(args))
    hint = "; pass tensor.detach().cpu().numpy() and wrap the function" if "torch." in kinds else ""
    return (kinds or "args is empty") + hint


def generator(rng: Any) -> np.random.Generator:
    """`numpy.random.default_rng(rng)`; None is seed 0, so that a check gives the same verdict every time."""
    try:
        return np.random.default_rng(0 if rng is None else rng)
    except (TypeError, ValueError) as error:
        raise type(error)(f"rng must be a numpy.random.Generator, a seed or None, got {rng!r}") from None


def random_direction(rng: np.random.Generator, size: int) -> np.ndarray:
    """Components of random sign, 1/2 to 3/2 in size: none is near zero, so that no entry goes unseen."""
    return rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 1.5, size)


def unit_of(entries: np.ndarray) -> float:
    """The largest |entry|, to divide by before squaring, as squares past 1e154 overflow; 1 where it is 0, ∞ or NaN."""
    largest = float(np.max(np.abs(entries), initial=0.0))
    return largest if 0 < largest < np.inf else 1.0
