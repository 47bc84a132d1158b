"""The array of the stand-in: what ``cupy.ndarray`` of 14.2 lists, and nothing else.

Operators go the way they go in CuPy (cupy/_core/core.pyx, v14.2.0): between two CuPy arrays to CuPy's
function, with anything else through NumPy's ufunc, which comes back to ``__array_ufunc__``; there
``numpy.ndarray`` is refused.
"""

import numpy as np

from cupy_standin import calls
from cupy_standin.api import words
from cupy_standin.device import Device, synchronisations
from cupy_standin.storage import Storage, check_device, wrap

# Listed, and not offered: they point into device memory, write files, or are deprecated in CuPy itself.
NOT_OFFERED_ATTRIBUTES = words(
    """
    byteswap choose cstruct data dump dumps flat mdspan reduced_view scatter_add scatter_max scatter_min
    toDlpack tofile
    """
)


def module_function(name):
    """The stand-in's ``cupy.NAME``."""
    import cupy_standin

    return getattr(cupy_standin.module, name)


class Flags:
    """No ``writeable`` here: CuPy's flags have none (cupy/_core/flags.pyx)."""

    def __init__(self, array):
        self.c_contiguous = array._host.flags.c_contiguous
        self.f_contiguous = array._host.flags.f_contiguous
        self.owndata = array._base is None
        self.fnc = self.f_contiguous and not self.c_contiguous
        self.forc = self.f_contiguous or self.c_contiguous


class ndarray(Storage):
    """A NumPy array that behaves as a ``cupy.ndarray``."""

    __slots__ = ()
    __array_priority__ = 100
    __hash__ = None

    # ---- metadata

    @property
    def dtype(self):
        return self._host.dtype

    @property
    def shape(self):
        return self._host.shape

    @shape.setter
    def shape(self, shape):
        reshaped = self._host.reshape(shape)
        if reshaped.size and not np.may_share_memory(reshaped, self._host):
            raise AttributeError("Incompatible shape for in-place modification.")
        self._host = reshaped

    @property
    def ndim(self):
        return self._host.ndim

    @property
    def size(self):
        return self._host.size

    @property
    def itemsize(self):
        return self._host.itemsize

    @property
    def nbytes(self):
        return self._host.nbytes

    @property
    def strides(self):
        return self._host.strides

    @property
    def flags(self):
        return Flags(self)

    @property
    def base(self):
        return self._base

    @property
    def device(self):
        return Device(self._device_id)

    def __len__(self):
        return len(self._host)

    # ---- views

    @property
    def T(self):
        return wrap(self._host.T, self)

    @property
    def mT(self):
        return wrap(self._host.mT, self)

    @property
    def real(self):
        return wrap(self._host.real, self)

    @real.setter
    def real(self, value):
        self.real[...] = value

    @property
    def imag(self):
        # The imaginary part of a real array is a new array of zeros, as in NumPy.
        return wrap(self._host.imag, self if self._host.dtype.kind == "c" else None)

    @imag.setter
    def imag(self, value):
        self.imag[...] = value

    def view(self, dtype=None):
        return wrap(self._host.view() if dtype is None else self._host.view(dtype), self)

    def reshape(self, *shape, order="C", copy=None):
        shape = shape[0] if len(shape) == 1 else shape
        return module_function("reshape")(self, shape, order, copy=copy)

    def transpose(self, *axes):
        axes = axes[0] if len(axes) == 1 else axes or None
        return module_function("transpose")(self, axes)

    # ---- copies

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if not copy and self.dtype == np.dtype(dtype):
            return self
        check_device(self)
        with np.errstate(all="ignore"):
            return wrap(self._host.astype(dtype, order, casting or "unsafe"))

    def copy(self, order="C"):
        return module_function("copy")(self, order)

    def flatten(self, order="C"):
        check_device(self)
        return wrap(self._host.flatten(order))

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    # ---- in and out

    def get(self, stream=None, order="C", out=None, blocking=True):
        host = self._synchronised_host("get") if blocking else self._host
        if out is None:
            return np.array(host, order=order)
        out[...] = host
        return out

    def set(self, arr, stream=None):
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        self._host[...] = arr

    def item(self):
        return self._synchronised_host("item").item()

    def tolist(self):
        return self._synchronised_host("tolist").tolist()

    def tobytes(self, order="C"):
        return self._synchronised_host("tobytes").tobytes(order)

    def __bool__(self):
        return bool(self._synchronised_host("bool"))

    def __int__(self):
        return int(self._synchronised_host("int"))

    def __float__(self):
        return float(self._synchronised_host("float"))

    def __complex__(self):
        return complex(self._synchronised_host("complex"))

    def __repr__(self):
        return repr(self._synchronised_host("repr"))

    def __str__(self):
        return str(self._synchronised_host("str"))

    def __format__(self, format_spec):
        return format(self._synchronised_host("format"), format_spec)

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    # ---- indexing

    def __iter__(self):
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index):
        index, selects = _host_index(self, index)
        return wrap(self._host[index], None if selects else self)

    def __setitem__(self, index, value):
        index, selects = _host_index(self, index)
        check_device(self)
        if isinstance(value, Storage):
            check_device(value)
            value = value._host
        elif not selects and np.ndim(value) > 0:
            # A slice is filled; only positions in arrays take a host array (_scatter_op in
            # _routines_indexing.pyx).
            raise ValueError(f"non-scalar {type(value).__name__} cannot be used for fill")
        with np.errstate(all="ignore"):
            self._host[index] = value

    def fill(self, value):
        if np.ndim(calls.unwrap(value)) > 0:
            raise ValueError("a non-scalar array cannot be used for fill")
        self[...] = value

    # ---- NumPy's protocols

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__":
            return NotImplemented
        try:
            function = module_function(ufunc.__name__)
        except AttributeError:
            return NotImplemented
        out = kwargs.get("out", ())
        if len(out) == 1:
            kwargs["out"] = out[0]
        if ufunc.__name__ in ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal"):
            inputs = [x.item() if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs]
        return function(*inputs, **kwargs)

    def __array_function__(self, func, types, args, kwargs):
        # numpy.sum(x) is cupy.sum(x); functions of numpy's submodules have no counterpart here.
        if func.__module__ != "numpy" or not all(issubclass(t, (ndarray, np.ndarray)) for t in types):
            return NotImplemented
        try:
            function = module_function(func.__name__)
        except AttributeError:
            return NotImplemented
        return function(*args, **kwargs)

    # ---- operators with two functions, and methods that change the array

    def __divmod__(self, other):
        return self // other, self % other

    def __rdivmod__(self, other):
        return other // self, other % self

    def sort(self, axis=-1, kind=None):
        self[...] = module_function("sort")(self, axis)

    def partition(self, kth, axis=-1):
        self[...] = module_function("partition")(self, kth, axis)

    def put(self, indices, values, mode="wrap"):
        self._host.put(calls.unwrap(indices), calls.unwrap(values), mode)

    def clip(self, min=None, max=None, out=None):
        return module_function("clip")(self, min, max, out)

    def dot(self, b, out=None):
        return module_function("dot")(self, b, out)

    def searchsorted(self, v, side="left", sorter=None):
        return module_function("searchsorted")(self, v, side, sorter)


def _host_index(array, index):
    """The index for the NumPy array behind ``array``, and whether it selects by arrays (and so copies).

    A trailing Ellipsis keeps a single element an array. A boolean mask is counted on the device and its count
    read back, for reading and for writing (``_prepare_mask_indexing_single`` in _routines_indexing.pyx).
    """
    index = index if isinstance(index, tuple) else (index,)
    selects = False
    for item in index:
        if isinstance(item, Storage):
            check_device(item)
            item = item._host
        if isinstance(item, np.ndarray | list | bool | np.bool):
            selects = True
            if np.asarray(item).dtype == bool:
                synchronisations.add("boolean mask")
    if selects:
        check_device(array)
    if not any(item is Ellipsis for item in index):
        index = (*index, Ellipsis)
    return tuple(_host_slice(item) if isinstance(item, slice) else calls.unwrap(item) for item in index), selects


def _host_slice(item):
    """A bound on the device is read back by ``int`` (``_extract_slice_element``, cupy/_core/internal.pyx)."""
    bounds = (item.start, item.stop, item.step)
    return slice(*(int(bound) if isinstance(bound, Storage) else bound for bound in bounds))


# ---- what goes to a function of the module

BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "matmul": "matmul",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
COMPARISONS = {
    "lt": "less",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
UNARY = {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}
METHODS = words(
    """
    all any argmax argmin argpartition argsort compress conj conjugate cumprod cumsum diagonal max mean min
    nonzero prod ptp ravel repeat round squeeze std sum swapaxes take trace var
    """
)


def _binary(name):
    def operator(self, other):
        if isinstance(other, ndarray):
            return module_function(name)(self, other)
        if getattr(other, "__array_ufunc__", False) is None:
            return NotImplemented
        return getattr(np, name)(self, other)

    return operator


def _reflected(name):
    def operator(self, other):
        if getattr(other, "__array_ufunc__", False) is None:
            return NotImplemented
        return getattr(np, name)(other, self)

    return operator


def _in_place(name):
    def operator(self, other):
        return module_function(name)(self, other, out=self)

    return operator


def _equality(name, answer):
    """CuPy compares with None and other objects without asking NumPy (``__richcmp__``)."""
    compare = _binary(name)

    def operator(self, other):
        if other is None or type(other).__eq__ is object.__eq__:
            return module_function("full")(self.shape, answer)
        return compare(self, other)

    return operator


def _unary(name):
    def operator(self):
        return module_function(name)(self)

    return operator


def _method(name):
    def method(self, *args, **kwargs):
        return module_function(name)(self, *args, **kwargs)

    method.__name__ = name
    return method


for _symbol, _name in BINARY.items():
    setattr(ndarray, f"__{_symbol}__", _binary(_name))
    setattr(ndarray, f"__r{_symbol}__", _reflected(_name))
    if _symbol != "matmul":  # CuPy has no __imatmul__: a @= b makes a new array
        setattr(ndarray, f"__i{_symbol}__", _in_place(_name))
for _symbol, _name in COMPARISONS.items():
    setattr(ndarray, f"__{_symbol}__", _binary(_name))
ndarray.__eq__ = _equality("equal", False)
ndarray.__ne__ = _equality("not_equal", True)
for _symbol, _name in UNARY.items():
    setattr(ndarray, f"__{_symbol}__", _unary(_name))
for _name in METHODS:
    setattr(ndarray, _name, _method(_name))

# namespace finders ask type(x).__module__; CuPy's is "cupy"
ndarray.__module__ = "cupy"
ndarray.__qualname__ = "ndarray"
