"""What only hardware can show. The grid of cases runs on real CuPy in test_module_neutral.py.

Both skip where there is no GPU; `NUMPY_SDPA_REQUIRE_GPU=1` turns the skip into a failure.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from arrays import CUPY_STANDIN, skip_without_gpu

import numpy_sdpa

ROOT = Path(__file__).parent.parent


def compare_gpu_command(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "compare_gpu.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # of this checkout, installed or not
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def cupy():
    skip_without_gpu()
    return importlib.import_module("cupy")


def arrays(xp, shape=(2, 4, 256, 64), dtype=np.float32, count=4):
    rng = np.random.default_rng(0)
    return [xp.asarray(rng.standard_normal(shape).astype(dtype)) for _ in range(count)]


def forward_and_backward(query, key, value, grad_output, **options):
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, **options)
    return (output, *numpy_sdpa.sdpa_backward(grad_output, residuals)[:3])


@pytest.mark.parametrize("method", ["dense", "blockwise"])
def test_results_stay_on_the_current_stream(cupy, method):
    """Work that is queued behind a wait must not run ahead of it on another stream."""
    inputs = arrays(cupy)
    expected = forward_and_backward(*inputs, is_causal=True, method=method)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = [cupy.zeros_like(array) for array in inputs]
        big = cupy.ones((4096, 4096), dtype=cupy.float32)
        for _ in range(20):  # keeps the stream busy, so that reading `late` too early would read zeros
            big = big @ big * 1e-4
        for array, source in zip(late, inputs, strict=True):
            array[...] = source
        results = forward_and_backward(*late, is_causal=True, method=method)
    stream.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        assert bool((got == wanted).all())


@pytest.mark.parametrize("method", ["dense", "blockwise"])
def test_two_runs_are_equal_bit_for_bit(cupy, method):
    inputs = arrays(cupy)
    first, second = (forward_and_backward(*inputs, softcap=5.0, method=method) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert bool((one == other).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_float32_arithmetic_without_tf32(cupy, dtype):
    """TF32 keeps 10 bits of each factor: errors of 1e-3. float32 sums of 256 terms are right to about 1e-6."""
    from cases import cast

    inputs = [cast(array, dtype) for array in arrays(np)]
    on_device = forward_and_backward(*(cupy.asarray(array) for array in inputs))
    gold = forward_and_backward(*(array.astype(np.float64) for array in inputs))
    # float32, or one rounding at the end: 2⁻¹¹ in float16, 2⁻⁸ in bfloat16
    tolerance = {"float32": 5e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for got, expected in zip(on_device, gold, strict=True):
        error = np.abs(cupy.asnumpy(got.astype(np.float32)) - expected)
        assert error.max() <= tolerance * np.abs(expected).max()


def test_a_device_that_is_not_the_current_one(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        inputs = arrays(cupy)
    results = forward_and_backward(*inputs, is_causal=True)
    assert all(result.device.id == 1 for result in results)
    assert cupy.cuda.Device().id == 0


@pytest.mark.slow
def test_a_problem_of_eight_gibibytes(cupy):
    """More than 2³¹ entries in an array: offsets must not wrap around."""
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 24 * 2**30:
        pytest.skip(f"needs 24 GiB of GPU memory, {free / 2**30:.0f} free")
    query = cupy.ones((1, 1, 2**25 + 1, 64), dtype=cupy.float32)
    query[..., -1, :] = 2
    key = cupy.asarray(np.random.default_rng(0).standard_normal((1, 1, 2, 64)).astype(np.float32))
    output = numpy_sdpa.attention(query, key, key, method="blockwise")
    expected = numpy_sdpa.attention(query[..., -1:, :], key, key)
    assert bool((abs(output[..., -1:, :] - expected) < 1e-6).all())


def test_the_comparison_script_runs(cupy):
    run = compare_gpu_command("--json", "--sizes", "64", "--repetitions", "2")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert {row["function"] for row in report["rows"]} >= {"dense forward", "jvp", "blockwise forward and backward"}
    assert all(row["error_cupy"] < 1e-5 for row in report["rows"] if "error_cupy" in row)


def test_the_comparison_script_says_what_is_missing():
    """Without a GPU: one line, exit code 2."""
    run = compare_gpu_command("--sizes", "16")
    if run.returncode == 0:
        pytest.skip("there is a GPU")
    assert run.returncode == 2
    assert run.stderr.startswith("compare_gpu: CuPy")


def test_what_the_comparison_script_computes():
    """Its functions, on the stand-in: no GPU is needed to know that they are right."""
    import compare_gpu

    inputs = compare_gpu.make_inputs(length=16, heads=2, head_size=4, dtype="float32")
    gold = {name: array.astype(np.float64) for name, array in inputs.items()}
    with CUPY_STANDIN.installed():
        on_device = {name: CUPY_STANDIN.to_module(array) for name, array in inputs.items()}
        for name, function in compare_gpu.functions({"is_causal": True}).items():
            got = tuple(CUPY_STANDIN.to_numpy(array) for array in function(on_device))
            assert compare_gpu.relative_error(got, function(gold)) < 1e-5, name
