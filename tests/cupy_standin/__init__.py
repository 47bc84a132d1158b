"""A stand-in for CuPy, made of NumPy: it offers what CuPy 14.2 offers, and refuses what CuPy refuses.

For tests on machines without a GPU. ``module`` is what stands for ``cupy``; ``installed()`` puts it into
``sys.modules``; ``synchronisations`` counts how often the host had to wait for the device. There are two
devices, and an operation on an array that is not on the current one raises.

Where CuPy reads or writes the wrong memory silently, the stand-in is the stricter of the two: out-of-bounds
positions raise (CuPy wraps them around), and so does writing into a broadcast view.
"""

import contextlib
import functools
import sys
import types

import numpy as np

from cupy_standin import calls
from cupy_standin.adapted import ADAPTED
from cupy_standin.api import CONSTANTS, FUNCTIONS, NUMPY_TYPES, words
from cupy_standin.device import DEVICE_COUNT, make_cuda_module, synchronisations
from cupy_standin.ndarray import ndarray

__all__ = ["DEVICE_COUNT", "NOT_OFFERED", "installed", "module", "ndarray", "synchronisations"]

# Listed by CuPy, and not offered here: files, printing and memory pools; functions that call the user's
# function on arrays; and names that NumPy 2 has dropped, which CuPy keeps for old code.
NOT_OFFERED = words(
    """
    array2string array_repr array_str base_repr binary_repr byte_bounds disp format_float_positional
    format_float_scientific frombuffer fromfile fromiter fromstring genfromtxt get_array_wrap
    get_default_memory_pool get_default_pinned_memory_pool get_printoptions load loadtxt printoptions
    safe_eval save savetxt savez savez_compressed set_printoptions set_string_function show_config typename
    who apply_along_axis apply_over_axes fromfunction mask_indices piecewise alltrue asfarray cumproduct
    find_common_type in1d issctype issubclass_ issubsctype msort obj2sctype product round_ row_stack
    sctype2char sometrue trapz Inf Infinity NAN NINF NZERO NaN PINF PZERO infty
    disable_experimental_feature_warning
    """
)


def _get_array_module(*args):
    return module if any(isinstance(arg, ndarray) for arg in args) else np


def _make_module() -> types.ModuleType:
    cupy = types.ModuleType("cupy", __doc__)
    cupy.__version__ = "14.2.0"
    for name in sorted(FUNCTIONS.keys() - NOT_OFFERED):
        function = ADAPTED.get(name)
        if function is None:
            function = functools.partial(lambda name, *args, **kwargs: calls.call(name, args, kwargs), name)
        setattr(cupy, name, function)
    for name in (CONSTANTS - NOT_OFFERED) | NUMPY_TYPES:
        setattr(cupy, name, getattr(np, name))
    cupy.get_array_module = _get_array_module
    cupy.ndarray = ndarray
    cupy.newaxis = None
    cupy.cuda = make_cuda_module()
    return cupy


module = _make_module()


@contextlib.contextmanager
def installed():
    """``import cupy`` gives the stand-in inside this context; afterwards what it gave before."""
    names = {"cupy": module, "cupy.cuda": module.cuda}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield module
    finally:
        for name, previous in before.items():
            if previous is None:
                del sys.modules[name]
            else:
                sys.modules[name] = previous
