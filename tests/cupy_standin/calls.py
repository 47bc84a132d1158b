"""A call of a function of the module: checked against what CuPy takes, then done by NumPy.

What CuPy refuses and NumPy does not: parameters that are not listed, NumPy arrays among the arguments, arrays
of another device. What differs in the result: a reduction gives a 0-d array, not a scalar, and nothing warns.
"""

import numpy as np

from cupy_standin import device as cuda
from cupy_standin.api import FUNCTIONS, SYNCHRONISING, check_call, leading_positional, words
from cupy_standin.storage import Storage, check_device, wrap

# Exactly these: CScalar in cupy/_core/_scalar.pyx (v14.2.0) takes no subclass.
PYTHON_SCALARS = (bool, int, float, complex)

# These give a view or only look at shape and dtype: no kernel runs, so the current device does not matter.
NO_KERNEL = words(
    """
    broadcast_arrays broadcast_to can_cast common_type diagonal expand_dims flip fliplr flipud
    get_array_module imag iscomplexobj isfortran isrealobj isscalar iterable matrix_transpose may_share_memory
    moveaxis ndim permute_dims ravel real require reshape result_type rollaxis rot90 shape shares_memory split
    squeeze swapaxes transpose atleast_1d atleast_2d atleast_3d array_split hsplit vsplit dsplit
    """
)
# Only here may arrays stand in a list or tuple.
TAKE_SEQUENCES = words(
    """
    broadcast_arrays choose column_stack concat concatenate dstack einsum hstack lexsort meshgrid select stack
    vstack ravel_multi_index row_stack
    """
)
# Shapes, axes and the like live on the host: an array has no __index__ and cannot be one.
HOST_PARAMETERS = words(
    """
    shape newshape axis axes dtype N M k ndmin order keepdims source destination
    """
)


def call(name: str, args: tuple, kwargs: dict):
    """What ``cupy.NAME(*args, **kwargs)`` gives, for a function that NumPy has under the same name."""
    check_call(name, args, kwargs)
    args, kwargs = leading_positional(name, args, kwargs)
    arrays = list(_checked_arrays(name, args, kwargs))
    if name not in NO_KERNEL:
        for array in arrays:
            check_device(array)
    if name in SYNCHRONISING:
        cuda.synchronisations.add(name)
    if kwargs.get("copy", True) is None:  # the default; reshape takes it from NumPy 2.1 on
        kwargs = {keyword: value for keyword, value in kwargs.items() if keyword != "copy"}
    function = getattr(np, RENAMED.get(name, name))
    return wrap_result(run(function, args, kwargs), arrays, kernel=name not in NO_KERNEL)


# What newer NumPy calls otherwise.
RENAMED = {"fix": "trunc"}


def run(function, args, kwargs):
    """``function`` of the NumPy arrays behind the arguments, silent as a GPU is about overflow and NaN."""
    with np.errstate(all="ignore"):
        return function(*unwrap(args), **unwrap(kwargs))


def unwrap(argument):
    """``argument`` with the NumPy array behind each stand-in array."""
    if isinstance(argument, Storage):
        return argument._host
    if isinstance(argument, dict):
        return {key: unwrap(value) for key, value in argument.items()}
    if type(argument) in (list, tuple):
        return type(argument)(unwrap(item) for item in argument)
    return argument


def wrap_result(result, arrays=(), kernel=True):
    """NumPy's result as CuPy gives it: arrays, also 0-d ones; ``out`` itself where given; views as views."""
    if isinstance(result, np.ndarray):
        return _wrap_array(result, arrays, kernel)
    if isinstance(result, np.generic):
        return wrap(np.asarray(result))
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(wrap_result(item, arrays, kernel) for item in result))
    if isinstance(result, tuple | list):
        return type(result)(wrap_result(item, arrays, kernel) for item in result)
    return result


def _wrap_array(result, arrays, kernel):
    for array in arrays:
        if result is array._host:
            return array
        # Two buffers never have overlapping bounds, so may_share_memory says here whether the result is a
        # view.
        if np.may_share_memory(result, array._host) or (result.size == 0 and not kernel):
            return wrap(result, array)
    # A reshape that could not be a view has copied, and a copy is a kernel on the current device.
    for array in arrays:
        check_device(array)
    return wrap(result)


def _checked_arrays(name, args, kwargs):
    """The stand-in arrays among the arguments; TypeError for what CuPy does not take."""
    function = FUNCTIONS[name]
    names = [*function.get("positional", ())[: len(args)], *kwargs]
    names = [None] * (len(args) + len(kwargs) - len(names)) + names  # *args have no names
    for parameter, argument in zip(names, (*args, *kwargs.values()), strict=True):
        if function.get("ufunc") and parameter is None and not isinstance(argument, Storage):
            check_scalar(argument)
        for value in _flattened(argument):
            if isinstance(value, np.ndarray):
                raise TypeError(f"Unsupported type {type(value)}")
            if not isinstance(value, Storage):
                continue
            if parameter in HOST_PARAMETERS:
                raise TypeError(f"cupy.{name}(): {parameter} cannot be an array on the device")
            if value is not argument and name not in TAKE_SEQUENCES and parameter != "out":
                raise TypeError(f"cupy.{name}() does not take arrays in a {type(argument).__name__}")
            yield value


def _flattened(argument):
    if type(argument) in (list, tuple):
        for item in argument:
            yield from _flattened(item)
    else:
        yield argument


def check_scalar(value) -> None:
    """TypeError, in CuPy's words, for an operand of a kernel that is neither a CuPy array nor a number."""
    if type(value) not in PYTHON_SCALARS and not isinstance(value, np.generic):
        raise TypeError(f"Unsupported type {type(value)}")
