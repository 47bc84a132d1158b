"""The functions in which CuPy differs from NumPy's function of the same name, or which NumPy does not have.

Sources: the files of CuPy v14.2.0 named at each function.
"""

import numpy as np

from cupy_standin import device as cuda
from cupy_standin.api import check_call, leading_positional
from cupy_standin.calls import call, check_scalar, run, unwrap, wrap_result
from cupy_standin.storage import Storage, check_device, wrap

ADAPTED = {}


def adapted(function):
    """Offer ``function`` under its name, behind the check of its arguments against CuPy's parameters."""
    name = function.__name__.rstrip("_")

    def checked(*args, **kwargs):
        check_call(name, args, kwargs)
        args, kwargs = leading_positional(name, args, kwargs)
        return function(*args, **kwargs)

    checked.__name__ = checked.__qualname__ = name
    ADAPTED[name] = checked
    return checked


def _on_current_device(*operands):
    for operand in operands:
        if isinstance(operand, Storage):
            check_device(operand)
        else:
            check_scalar(operand)


# ---- in and out of the device: cupy/_creation/from_data.py, cupy/__init__.py, array() in cupy/_core/core.pyx


@adapted
def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    """An array on the current device, from NumPy arrays, nested lists, and arrays of another device."""
    if isinstance(obj, Storage) and not copy and obj._device_id == cuda.current_device_id():
        same = (dtype is None or obj.dtype == np.dtype(dtype)) and ndmin <= obj.ndim
        if same:
            return obj
    if copy is False:
        raise ValueError("Unable to avoid copy while creating an array as requested.")
    return wrap(np.array(unwrap(obj), dtype=dtype, order=order or "K", subok=subok, ndmin=ndmin))


@adapted
def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    return array(a, dtype, copy, order, blocking=blocking)


@adapted
def asanyarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    return array(a, dtype, copy, order, blocking=blocking)


@adapted
def copy(a, order="K"):
    """On the current device, whatever device ``a`` is on."""
    return array(a, order=order)


@adapted
def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    if isinstance(a, Storage):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    result = np.asarray(a, order=order)
    if out is None:
        return result
    out[...] = result
    return out


@adapted
def is_available():
    return True


@adapted
def astype(x, dtype, *, copy=True):
    return x.astype(dtype, copy=copy)


# ---- results that NumPy gives as Python objects: cupy/_logic/comparison.py, cupy/_sorting/count.py


@adapted
def array_equal(a1, a2, equal_nan=False):
    _on_current_device(a1, a2)
    if equal_nan and a1.shape == a2.shape:
        cuda.synchronisations.add("array_equal(equal_nan=True)")
    return wrap(np.asarray(run(np.array_equal, (a1, a2, equal_nan), {})))


@adapted
def array_equiv(a1, a2):
    _on_current_device(a1, a2)
    return wrap(np.asarray(run(np.array_equiv, (a1, a2), {})))


@adapted
def allclose(a, b, rtol=1e-5, atol=1e-8, equal_nan=False):
    return call("isclose", (a, b, rtol, atol, equal_nan), {}).all()


@adapted
def count_nonzero(a, axis=None):
    _on_current_device(a)
    return wrap(np.asarray(run(np.count_nonzero, (a, axis), {})))


# ---- selection and products


@adapted
def where(condition, x=None, y=None):
    """``condition`` must have ``astype``: a Python bool has not. Without x and y it is ``nonzero``.

    The kernel has no bfloat16 loop and takes the float32 one (``_where_ufunc`` in cupy/_sorting/search.py).
    """
    if (x is None) != (y is None):
        raise ValueError("Must provide both 'x' and 'y' or neither.")
    if x is None:
        return call("nonzero", (condition,), {})
    condition = condition.astype("?", copy=False)
    _on_current_device(condition, x, y)
    result = run(np.where, (condition, x, y), {})
    return wrap(result.astype(np.float32) if result.dtype.name == "bfloat16" else result)


@adapted
def matmul(a, b, out=None, **options):
    """Arrays only; the result has the operands' common dtype (cupy/_core/_routines_linalg.pyx, ``matmul``).

    With more than two axes there is no product of bfloat16: it goes to the integers' kernel, which has no
    such type.
    """
    for operand in (a, b):
        if not isinstance(operand, Storage):
            raise TypeError(f"Argument has incorrect type (expected cupy.ndarray, got {type(operand)})")
        check_device(operand)
    dtype = np.promote_types(a.dtype, b.dtype)
    if dtype.name == "bfloat16" and max(a.ndim, b.ndim) > 2:
        raise TypeError(f"cupy.matmul has no kernel for stacks of {dtype}")
    result = run(np.matmul, (a, b), {"out": out, **options})
    if out is None and not options:
        result = result.astype(dtype, copy=False)  # NumPy's product of ml_dtypes' bfloat16 is float32
    return wrap_result(result, () if out is None else (out,))


def _arrays_only(name):
    """CuPy joins arrays, not numbers (``concatenate_method`` in cupy/_core/_routines_manipulation.pyx)."""

    def join(tup, *args, **kwargs):
        for item in tup:
            if not isinstance(item, Storage):
                raise TypeError("Only cupy arrays can be concatenated")
        return call(name, (tup, *args), kwargs)

    join.__name__ = name
    return adapted(join)


for _name in ("concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"):
    _arrays_only(_name)


@adapted
def repeat(a, repeats, axis=None):
    """Counts in an array on the device have to be read back (``_repeat_perelement``, the same file)."""
    if isinstance(repeats, Storage):
        cuda.synchronisations.add("repeat")
    return call("repeat", (a, repeats, axis), {})


@adapted
def result_type(*arrays_and_dtypes):
    return np.result_type(*unwrap(arrays_and_dtypes))
