"""NumPy against CuPy on one GPU: the error and the time of every function, by size; and torch's kernels where torch is.

    python scripts/compare_gpu.py                    # a table
    python scripts/compare_gpu.py --json --sizes 512 2048 8192 --dtype float16

Each time is the median of repetitions after a warm-up, measured by events on the stream: the host does not count.
Each error is the largest difference from NumPy's float64 run on the same inputs, relative to the array's largest.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import numpy as np

import numpy_sdpa

Function = Callable[[Any], tuple[Any, ...]]


def functions(options: dict[str, Any]) -> dict[str, Function]:
    """What is compared: each takes the inputs and returns arrays."""

    def forward(method: str) -> Function:
        return lambda x: (numpy_sdpa.attention(x["query"], x["key"], x["value"], method=method, **options),)

    def both(method: str) -> Function:
        def run(x: dict[str, Any]) -> tuple[Any, ...]:
            output, residuals = numpy_sdpa.sdpa_forward(x["query"], x["key"], x["value"], method=method, **options)
            return (output, *numpy_sdpa.sdpa_backward(x["grad_output"], residuals)[:3])

        return run

    def residuals(x: dict[str, Any]) -> Any:
        return numpy_sdpa.sdpa_forward(x["query"], x["key"], x["value"], **options)[1]

    def double_backward(x: dict[str, Any]) -> tuple[Any, ...]:
        return numpy_sdpa.sdpa_double_backward(x["grad_output"], residuals(x), query=x["direction"])[:3]

    return {
        "dense forward": forward("dense"),
        "dense forward and backward": both("dense"),
        "blockwise forward": forward("blockwise"),
        "blockwise forward and backward": both("blockwise"),
        "jvp": lambda x: tuple(numpy_sdpa.sdpa_jvp(residuals(x), query=x["direction"])[:2]),
        "double backward": double_backward,
    }


def make_inputs(length: int, heads: int, head_size: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    shape = (1, heads, length, head_size)
    names = ("query", "key", "value", "grad_output", "direction")
    return {name: rng.standard_normal(shape).astype(dtype) for name in names}


def relative_error(got: tuple[Any, ...], expected: tuple[np.ndarray, ...]) -> float:
    errors = [
        np.max(np.abs(one.astype(np.float64) - other)) / max(np.max(np.abs(other)), np.finfo(float).tiny)
        for one, other in zip(got, expected, strict=True)
    ]
    return float(max(errors))


def device_milliseconds(cupy: Any, function: Callable[[], Any], repetitions: int) -> float:
    function()
    times = []
    for _ in range(repetitions):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop))
    return statistics.median(times)


def host_milliseconds(function: Callable[[], Any], repetitions: int) -> float:
    function()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def torch_milliseconds(inputs: dict[str, np.ndarray], is_causal: bool, repetitions: int) -> dict[str, float]:
    """torch's flash and math backends, forward, on the same GPU; empty where torch or its GPU is missing."""
    try:
        torch = importlib.import_module("torch")
        attention = importlib.import_module("torch.nn.attention")
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    query, key, value = (torch.from_numpy(inputs[name]).cuda() for name in ("query", "key", "value"))
    found = {}
    for backend in ("FLASH_ATTENTION", "MATH"):

        def run() -> None:
            torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            torch.cuda.synchronize()

        try:
            with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
                found[f"torch {backend.lower()}"] = host_milliseconds(run, repetitions)
        except RuntimeError:  # flash takes half types only
            continue
    return found


def measure(cupy: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    options = {"is_causal": arguments.causal}
    for length in arguments.sizes:
        inputs = make_inputs(length, arguments.heads, arguments.head_size, arguments.dtype)
        on_device = {name: cupy.asarray(array) for name, array in inputs.items()}
        gold = {name: array.astype(np.float64) for name, array in inputs.items()}
        for name, function in functions(options).items():
            if length > arguments.dense_up_to and not name.startswith("blockwise"):
                continue
            expected = function(gold)
            got = tuple(cupy.asnumpy(array) for array in function(on_device))
            rows.append(
                {
                    "function": name,
                    "length": length,
                    "error_cupy": relative_error(got, expected),
                    "error_numpy": relative_error(function(inputs), expected),
                    "ms_cupy": device_milliseconds(cupy, partial(function, on_device), arguments.repetitions),
                    "ms_numpy": host_milliseconds(partial(function, inputs), 3),
                }
            )
        for name, milliseconds in torch_milliseconds(inputs, arguments.causal, arguments.repetitions).items():
            rows.append({"function": name, "length": length, "ms_torch": milliseconds})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 2048], help="lengths L = S")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float16", "float32", "float64"])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dense-up-to", type=int, default=4096, help="longest length at which dense is run")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        print("compare_gpu: CuPy is not installed: pip install 'numpy-sdpa[cuda12x]' or [cuda13x]", file=sys.stderr)
        return 2
    if not cupy.cuda.is_available():
        print("compare_gpu: CuPy finds no GPU", file=sys.stderr)
        return 2
    rows = measure(cupy, arguments)
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    about = {"device": device, "cupy": cupy.__version__, "numpy": np.__version__, "date": date.today().isoformat()}
    if arguments.json:
        print(json.dumps({**about, "dtype": arguments.dtype, "causal": arguments.causal, "rows": rows}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in about.items()), f"{arguments.dtype}\n")
    columns = ("length", "error_cupy", "error_numpy", "ms_cupy", "ms_numpy", "ms_torch")
    print(f"{'function':<32}" + "".join(f"{column:>14}" for column in columns))
    for row in rows:
        cells = ("" if column not in row else f"{row[column]:.4g}" for column in columns)
        print(f"{row['function']:<32}" + "".join(f"{cell:>14}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
