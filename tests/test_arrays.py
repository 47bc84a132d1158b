"""The records of the array modules do what the suite takes for granted of them."""

import numpy as np
import pytest
from arrays import ARRAY_MODULES, CUPY, CUPY_STANDIN, JAX, JAX_32, NUMPY, STRICT


def with_dtype(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.arange(6.0).reshape(2, 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def test_round_trip_of_every_dtype_that_a_module_declares(array_module):
    for dtype in array_module.dtypes:
        array = with_dtype(dtype)
        back = array_module.to_numpy(array_module.to_module(array))
        assert type(back) is np.ndarray
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


def test_the_standard_has_no_half_precision():
    for dtype in ("float16", "bfloat16"):
        assert not STRICT.supports(dtype)
        with pytest.raises(TypeError):
            STRICT.to_module(with_dtype(dtype))


def test_numpy_inputs_are_read_only():
    array = NUMPY.to_module(np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_inputs_are_not_on_the_default_device():
    import array_api_strict
    import jax

    assert STRICT.to_module(np.zeros(3)).device != array_api_strict.zeros(3).device
    with JAX.installed():
        assert JAX.to_module(np.zeros(3)).device != jax.numpy.zeros(3).device
    with CUPY_STANDIN.installed():
        import cupy

        assert CUPY_STANDIN.to_module(np.zeros(3)).device != cupy.zeros(3).device


def test_another_module_is_noticed(array_module):
    like = array_module.to_module(np.zeros(3))
    array_module.assert_same_module_and_device((like, None), like)
    with pytest.raises(AssertionError, match="is not an array of"):
        array_module.assert_same_module_and_device((like, 0.0), like)
    with pytest.raises(AssertionError, match="is not an array of"):
        array_module.assert_same_module_and_device(np.float64(0), like)


@pytest.mark.parametrize("module", [m for m in ARRAY_MODULES if m not in (NUMPY, CUPY)], ids=repr)
def test_another_device_is_noticed(module):
    with module.installed():
        like = module.to_module(np.zeros(3))
        if module is STRICT:
            import array_api_strict

            elsewhere = array_api_strict.zeros(3)
        elif module is JAX:
            elsewhere = __import__("jax").numpy.zeros(3)
        else:
            elsewhere = __import__("cupy").zeros(3)
        with pytest.raises(AssertionError):
            module.assert_same_module_and_device(elsewhere, like)


def test_a_device_that_is_not_restored_is_noticed():
    def leave_device_1_current():
        with CUPY_STANDIN.installed():
            import cupy

            cupy.cuda.Device(1).use()

    try:
        with pytest.raises(AssertionError, match="not restored"):
            leave_device_1_current()
    finally:
        import cupy_standin

        cupy_standin.module.cuda.Device(0).use()


def test_jax_computes_in_64_bits_and_as_it_comes_in_32():
    with JAX.installed():
        x = JAX.to_module(np.ones(3))
        assert (x + 1).dtype == "float64"
        assert JAX.jit(lambda a: a + a)(x).dtype == "float64"
    with JAX_32.installed():
        assert JAX_32.to_module(np.ones(3, np.float32)).dtype == "float32"
        with pytest.warns(UserWarning, match="float64"):
            __import__("jax").numpy.zeros(3, "float64")


def test_a_missing_gpu_skips_with_a_reason_or_fails_on_demand(monkeypatch):
    import arrays

    monkeypatch.setattr(arrays, "why_no_gpu", lambda: "there is none")
    monkeypatch.delenv("NUMPY_SDPA_REQUIRE_GPU", raising=False)
    with pytest.raises(pytest.skip.Exception, match="there is none"):
        arrays.skip_without_gpu()
    monkeypatch.setenv("NUMPY_SDPA_REQUIRE_GPU", "1")
    with pytest.raises(pytest.fail.Exception, match="there is none"):
        arrays.skip_without_gpu()
