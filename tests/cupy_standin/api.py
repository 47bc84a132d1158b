"""What CuPy 14.2 offers: the recorded list, and the check of a call against it.

``tests/data/cupy-14.2-api.json`` was read from cupy 14.2.0 by ``inspect``: functions with their parameters,
constants, and the attributes of ``cupy.ndarray``. The types that CuPy takes from NumPy stand below.
"""

import json
from pathlib import Path

import numpy as np


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


API = json.loads((Path(__file__).parent.parent / "data" / "cupy-14.2-api.json").read_text())
FUNCTIONS: dict = API["functions"]
CONSTANTS = frozenset(API["constants"])
NDARRAY = frozenset(API["ndarray"])
DUNDERS = frozenset(API["dunder"])

# cupy.float32 is numpy.float32, and so on: cupy/__init__.py imports these from NumPy. float128 and the string
# and object types are not among them.
SCALAR_TYPES = words(
    """
    bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128
    byte short intc int_ long longlong intp ubyte ushort uintc uint ulong ulonglong uintp half single double
    csingle cdouble generic number integer signedinteger unsignedinteger inexact floating complexfloating
    """
)
NUMPY_TYPES = SCALAR_TYPES | {"dtype", "finfo", "iinfo"}
NAMES = frozenset(FUNCTIONS) | CONSTANTS | NUMPY_TYPES | {"ndarray", "newaxis", "cuda"}

# These read a count back to size their result, or a value to check it: "may synchronize the device" in their
# docstrings or "synchronize!" in their source (v14.2.0: cupy/_indexing, cupy/_core/_routines_indexing.pyx,
# cupy/_manipulation).
SYNCHRONISING = words(
    """
    argwhere asarray_chkfinite bincount compress delete digitize extract flatnonzero histogram histogram2d
    histogramdd intersect1d mask_indices nonzero place ravel_multi_index real_if_close setdiff1d setxor1d
    trim_zeros union1d unique unique_all unique_counts unique_inverse unique_values unravel_index
    """
)


def check_call(name: str, args: tuple, kwargs: dict) -> None:
    """Raise TypeError unless CuPy's ``name`` takes these arguments (their number and their keywords)."""
    unknown = unlisted_keywords(name, kwargs)
    if unknown:
        raise TypeError(f"cupy.{name}() got an unexpected keyword argument {unknown[0]!r}")
    limit = most_positional(name)
    if limit is not None and len(args) > limit:
        raise TypeError(f"cupy.{name}() takes at most {limit} positional arguments ({len(args)} given)")


def unlisted_keywords(name: str, keywords) -> list[str]:
    """Those of ``keywords`` that CuPy's ``name`` does not take."""
    function = FUNCTIONS[name]
    if function.get("var_keyword"):
        return []
    return [keyword for keyword in keywords if keyword not in function["keywords"]]


def most_positional(name: str) -> int | None:
    """How many positional arguments CuPy's ``name`` takes; None where the list does not say (``*args``)."""
    function = FUNCTIONS[name]
    if function.get("ufunc"):
        ufunc = getattr(np, name, None)
        return ufunc.nargs if isinstance(ufunc, np.ufunc) else None
    return len(function["positional"]) or None


def leading_positional(name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The same call with as many arguments as possible given by position.

    CuPy and NumPy agree on the order of parameters more often than on their names (``concatenate(tup=…)``
    is ``concatenate(arrays=…)`` in NumPy 2).
    """
    kwargs = dict(kwargs)
    args = list(args)
    for parameter in FUNCTIONS[name].get("positional", ())[len(args) :]:
        if parameter not in kwargs:
            break
        args.append(kwargs.pop(parameter))
    return tuple(args), kwargs
