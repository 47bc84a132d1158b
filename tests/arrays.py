"""The array modules that the suite runs on, one record each.

A test that takes the fixture ``array_module`` runs once on every module of ``ARRAY_MODULES``: it makes its
inputs with ``to_module``, calls the package, checks ``assert_same_module_and_device``, and compares after
``to_numpy``. The inputs lie on a device that is not the default one wherever the module has two, so that a
result made on the default device shows.
"""

import contextlib
import os
import warnings

import numpy as np
import pytest

# Read by JAX when it is first imported: two devices on the CPU, 64-bit types, and no GPU even where there
# is one.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

ALL_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex128")


class ArrayModule:
    """NumPy with read-only inputs: a write into an input raises. The other modules say what differs."""

    name = "numpy"
    dtypes = ALL_DTYPES  # what the module can hold of float16, bfloat16, float32, float64 and complex128

    @contextlib.contextmanager
    def installed(self):
        """The module is importable, and skipped where it cannot be: the fixture enters this."""
        yield

    def to_module(self, array):
        """A NumPy array as an array of this module, on the device under test."""
        array = np.array(array)
        array.flags.writeable = False
        return array

    def to_numpy(self, array):
        """An array of this module as a NumPy array."""
        return array

    def array_type(self):
        """What every array of this module is an instance of."""
        return np.ndarray

    def device(self, array):
        return "cpu"

    def supports(self, dtype) -> bool:
        return str(dtype) in self.dtypes

    def assert_same_module_and_device(self, result, like):
        """Fail unless ``result`` (an array, None, or a tuple of such) is ours and on ``like``'s device."""
        if result is None:
            return
        if isinstance(result, tuple):
            for item in result:
                self.assert_same_module_and_device(item, like)
            return
        assert isinstance(result, self.array_type()), f"{type(result)} is not an array of {self.name}"
        assert self.device(result) == self.device(like)

    def __repr__(self):
        return self.name


class ArrayApiStrict(ArrayModule):
    """The standard and nothing more, on a device from which ``numpy.asarray`` raises."""

    name = "array_api_strict"
    dtypes = ("float32", "float64", "complex128")  # the standard has no float16 and no bfloat16

    def to_module(self, array):
        import array_api_strict

        return array_api_strict.asarray(np.array(array), device=array_api_strict.Device("device1"))

    def to_numpy(self, array):
        import array_api_strict

        return np.array(array.to_device(array_api_strict.Device("CPU_DEVICE")))

    def array_type(self):
        import array_api_strict

        return type(array_api_strict.zeros(0))

    def device(self, array):
        return array.device


class JaxNumpy(ArrayModule):
    """jax.numpy run operation by operation; ``jit`` compiles a function instead."""

    name = "jax.numpy"

    @contextlib.contextmanager
    def installed(self):
        import jax

        jax.config.update("jax_enable_x64", True)
        yield

    def jit(self, function):
        import jax

        return jax.jit(function)

    def to_module(self, array):
        import jax

        return jax.device_put(np.array(array), jax.devices()[1])

    def to_numpy(self, array):
        return np.array(array)

    def array_type(self):
        import jax

        return jax.Array

    def device(self, array):
        return array.device

    def assert_same_module_and_device(self, result, like):
        # jax.numpy.where of empty arrays gives one on the default device, whatever device its operands are on.
        if isinstance(result, self.array_type()) and result.size == 0:
            return
        super().assert_same_module_and_device(result, like)


class JaxNumpy32(JaxNumpy):
    """jax.numpy as it is out of the box, where asking for a 64-bit type warns, and so fails."""

    name = "jax.numpy-32-bit"
    dtypes = ("float16", "bfloat16", "float32")

    @contextlib.contextmanager
    def installed(self):
        import jax

        with jax.enable_x64(False):
            yield


class CuPyStandIn(ArrayModule):
    """NumPy behind CuPy's interface and refusals; inputs on device 1, while device 0 is the current one."""

    name = "cupy_standin"

    @contextlib.contextmanager
    def installed(self):
        import cupy_standin

        with cupy_standin.installed() as cupy:
            yield
            assert cupy.cuda.Device().id == 0, "the current device was changed and not restored"

    def to_module(self, array):
        import cupy

        with cupy.cuda.Device(cupy.cuda.runtime.getDeviceCount() - 1):
            return cupy.asarray(np.array(array))

    def to_numpy(self, array):
        return array.get()

    def array_type(self):
        import cupy

        return cupy.ndarray

    def device(self, array):
        return array.device


class CuPy(CuPyStandIn):
    """CuPy itself, on the last GPU."""

    name = "cupy"

    @contextlib.contextmanager
    def installed(self):
        skip_without_gpu()
        import cupy

        current = cupy.cuda.Device().id
        yield
        assert cupy.cuda.Device().id == current, "the current device was changed and not restored"


def why_no_gpu() -> str | None:
    """Why CuPy cannot run here, or None where it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns at import about a CUDA that it cannot find
        try:
            import cupy
        except ImportError as error:
            return f"cupy cannot be imported: {error}"
        return None if cupy.cuda.is_available() else "cupy is installed, but cupy.cuda.is_available() is false"


def skip_without_gpu() -> None:
    """Skip the test where CuPy has no GPU; fail instead if NUMPY_SDPA_REQUIRE_GPU is 1."""
    reason = why_no_gpu()
    if reason is None:
        return
    if os.environ.get("NUMPY_SDPA_REQUIRE_GPU") == "1":
        pytest.fail(f"NUMPY_SDPA_REQUIRE_GPU=1, but {reason}")
    pytest.skip(reason)


NUMPY = ArrayModule()
STRICT = ArrayApiStrict()
JAX = JaxNumpy()
JAX_32 = JaxNumpy32()
CUPY_STANDIN = CuPyStandIn()
CUPY = CuPy()
ARRAY_MODULES = (NUMPY, STRICT, JAX, CUPY_STANDIN, CUPY)


@pytest.fixture(params=ARRAY_MODULES, ids=repr)
def array_module(request):
    """Each array module in turn, importable while the test runs."""
    with request.param.installed():
        yield request.param
