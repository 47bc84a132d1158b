"""The number types that kernels compute and store in, and what one rounding in them costs.

`math` is the type of a kernel's arithmetic and sums; `storage` the type of its inputs and of what it rounds on the way.
Everything is a plain number, so that bfloat16 needs no package.
"""

import math
from typing import NamedTuple

import numpy as np

# A rounding error is spread evenly over ± half a unit in the last place: its standard deviation is a unit / √12.
_UNIFORM = 1 / math.sqrt(12)


class Format(NamedTuple):
    """A binary floating-point type."""

    eps: float  # the unit in the last place of 1
    smallest_normal: float
    largest: float

    @property
    def spacing(self) -> float:
        """The distance of two subnormal numbers."""
        return self.eps * self.smallest_normal


FORMATS = {
    "float16": Format(2.0**-10, 2.0**-14, 65504.0),
    "bfloat16": Format(2.0**-7, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
    "float32": Format(2.0**-23, 2.0**-126, float(np.finfo(np.float32).max)),
    "float64": Format(2.0**-52, 2.0**-1022, float(np.finfo(np.float64).max)),
}


class Precision(NamedTuple):
    """What a right kernel in one precision may do to a number. Variances are in units of `rounding` squared."""

    rounding: float  # relative standard deviation of one rounding of the arithmetic
    half: float  # relative variance of one rounding to a half type; 0 without one
    half_eps: float  # relative distance of two numbers of the half type; 0 without one
    underflow: float  # variance of a number near 0: what flushing or gradual underflow costs
    vanished: float  # numbers below this may become 0
    vanishing: float  # terms of a sum of 1 below this are, or may be, lost from it
    factor: float  # of σ: the elementwise bound
    frobenius_factor: float  # of ‖σ‖


def precision_of(dtype: str) -> Precision:
    """The precision of a kernel whose query has this dtype; half types compute in float32."""
    if dtype not in FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(FORMATS)}, got {dtype!r}")
    storage = FORMATS[dtype]
    arithmetic = FORMATS["float64" if dtype == "float64" else "float32"]
    rounding = arithmetic.eps * _UNIFORM
    if dtype == "float64":
        rounding *= math.sqrt(2)  # the golden results come from float64 too and are as far off
    if storage is arithmetic:
        underflow = arithmetic.smallest_normal
        return Precision(rounding, 0.0, 0.0, (underflow / rounding) ** 2, underflow, arithmetic.eps, 8.0, 1.5)
    half = (storage.eps * _UNIFORM / rounding) ** 2
    underflow = max(arithmetic.smallest_normal, storage.spacing)
    return Precision(rounding, half, storage.eps, (underflow / rounding) ** 2, underflow, arithmetic.eps, 12.0, 3.0)


def half_unit(array: np.ndarray, dtype: str) -> np.ndarray:
    """Half a unit in the last place of each number in this dtype, subnormal numbers included."""
    form = FORMATS[dtype]
    _, exponent = np.frexp(np.abs(array))  # |array| = fraction · 2^exponent, fraction in [½, 1)
    unit = np.where(array == 0, 0.0, np.ldexp(form.eps, exponent - 1))
    return np.maximum(unit, form.spacing) / 2
