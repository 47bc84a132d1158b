"""Where a stand-in array keeps its elements, and the explicit ways in and out of the device."""

import numpy as np

from cupy_standin import device as cuda
from cupy_standin.api import words

# CuPy computes with these (cupy/_core/_dtype.pyx, v14.2.0), and with ml_dtypes' bfloat16 beside NumPy >=
# 2.1.2 (cupy/_core/_scalar.pyx).
SUPPORTED_DTYPES = words(
    """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128
    bfloat16
    """
)


def check_dtype(dtype: np.dtype) -> None:
    """Raise ValueError, as CuPy does, for a dtype that it has no kernels for."""
    if dtype.name not in SUPPORTED_DTYPES:
        raise ValueError(f"Unsupported dtype {dtype}")


class Storage:
    """A stand-in array's state: its elements in a NumPy array, its device, and the array it is a view of."""

    __slots__ = ("_base", "_device_id", "_host")

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        if memptr is not None or strides is not None:
            raise NotImplementedError("the stand-in has no device memory to point to")
        self._fill_slots(np.empty(shape, dtype, order))

    def __init_subclass__(cls):
        Storage._array_class = cls

    def _fill_slots(self, host, device_id=None, base=None):
        check_dtype(host.dtype)
        self._host = host
        self._device_id = cuda.current_device_id() if device_id is None else device_id
        self._base = base

    def _synchronised_host(self, reason):
        """The elements, for the host to read: it has to wait for the device."""
        cuda.synchronisations.add(reason)
        return self._host


def wrap(host, viewed=None):
    """A stand-in array around ``host``: on the current device, or a view of the stand-in array ``viewed``."""
    array = Storage._array_class.__new__(Storage._array_class)
    if viewed is None:
        array._fill_slots(host)
    else:
        array._fill_slots(host, viewed._device_id, viewed if viewed._base is None else viewed._base)
    return array


def check_device(array) -> None:
    """Raise ValueError for an array that is not on the current device.

    CuPy does so where the devices cannot reach each other's memory (``_check_peer_access`` in
    cupy/_core/_kernel.pyx, v14.2.0); where they can, it warns, and the result lies on the wrong device.
    """
    current = cuda.current_device_id()
    if array._device_id != current:
        raise ValueError(
            f"The device where the array resides ({array._device_id}) is different from the current device "
            f"({current}). Peer access is unavailable between these devices."
        )
