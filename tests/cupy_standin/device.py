"""Devices, streams and the count of synchronisations: the stand-in for ``cupy.cuda``.

Facts from CuPy v14.2.0: cupy/cuda/device.pyx (Device, its per-thread stack) and cupy/cuda/stream.pyx.
"""

import threading
import types

DEVICE_COUNT = 2
_state = threading.local()  # CUDA's current device and stream belong to the thread


class SynchronisationCounter:
    """How often the host had to wait for the device, in all threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._reasons: list[str] = []

    def add(self, reason: str) -> None:
        with self._lock:
            self._reasons.append(reason)

    def reset(self) -> None:
        with self._lock:
            self._reasons.clear()

    @property
    def count(self) -> int:
        return len(self._reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What synchronised, in order: for the message of a failed test."""
        return tuple(self._reasons)


synchronisations = SynchronisationCounter()


def current_device_id() -> int:
    return getattr(_state, "device", 0)


class Device:
    """One of the two devices; ``with Device(1):`` makes it the thread's current one."""

    def __init__(self, device=None):
        self.id = current_device_id() if device is None else int(device)

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None  # as in CuPy: a device cannot be the key of a dict or of functools.cache

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def use(self):
        if not 0 <= self.id < DEVICE_COUNT:
            raise RuntimeError(f"cudaErrorInvalidDevice: invalid device ordinal {self.id}")
        _state.device = self.id
        return self

    def __enter__(self):
        if not hasattr(_state, "devices"):
            _state.devices = []
        _state.devices.append(current_device_id())
        return self.use()

    def __exit__(self, *_):
        _state.device = _state.devices.pop()

    def synchronize(self):
        synchronisations.add("Device.synchronize")


class Stream:
    """Something to be current and to be waited for; here every operation is done when it returns."""

    def __init__(self, null=False, non_blocking=False, ptds=False):
        self.is_non_blocking = non_blocking

    def use(self):
        _state.stream = self
        return self

    def __enter__(self):
        if not hasattr(_state, "streams"):
            _state.streams = []
        _state.streams.append(get_current_stream())
        return self.use()

    def __exit__(self, *_):
        _state.stream = _state.streams.pop()

    def synchronize(self):
        synchronisations.add("Stream.synchronize")


Stream.null = Stream(null=True)


def get_current_stream():
    return getattr(_state, "stream", Stream.null)


def make_cuda_module() -> types.ModuleType:
    """The module that stands for ``cupy.cuda``."""
    cuda = types.ModuleType("cupy.cuda")
    cuda.Device = Device
    cuda.Stream = Stream
    cuda.get_current_stream = get_current_stream
    cuda.is_available = lambda: True
    cuda.runtime = types.ModuleType("cupy.cuda.runtime")
    cuda.runtime.getDeviceCount = lambda: DEVICE_COUNT
    cuda.runtime.getDevice = current_device_id
    cuda.runtime.is_hip = False
    return cuda
