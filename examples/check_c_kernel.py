"""Check a C kernel: build examples/attention.c, call it through ctypes, and let `check_kernel` judge it.

python examples/check_c_kernel.py                        # right
python examples/check_c_kernel.py -DFORGET_ROW_DOT       # wrong, and named
"""

import ctypes
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from numpy_sdpa.kernelcheck import check_kernel

SOURCE = Path(__file__).with_name("attention.c")
SUPPORTED = {"is_causal", "scale", "enable_gqa"}


def build(folder, *flags):
    library = Path(folder) / "attention.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, str(SOURCE), "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))


def kernel_of(library):
    def pointer(array):
        return array.ctypes.data_as(ctypes.c_void_p)

    def kernel(arrays, options):
        query, key, value, grad_output = (
            np.ascontiguousarray(arrays.pop(name)) for name in ("query", "key", "value", "grad_output")
        )
        if (
            arrays
            or not options.keys() <= SUPPORTED
            or query.shape[-1] != value.shape[-1]
            or query.shape[1] < key.shape[1]
        ):
            raise NotImplementedError("mask, bias, window, … and value sizes of their own")
        (batch, heads, rows, size), keys = query.shape, key.shape[2]
        scale = ctypes.c_float(options.get("scale", 1 / math.sqrt(size)))
        numbers = rows, keys, size, scale, int(options.get("is_causal", False))
        output, lse = np.empty_like(query), np.empty(query.shape[:-1], np.float32)
        grad_query, grad_key, grad_value = np.empty_like(query), np.zeros_like(key), np.zeros_like(value)
        for b in range(batch):
            for h in range(heads):
                kh = h // (heads // key.shape[1])
                inputs = pointer(query[b, h]), pointer(key[b, kh]), pointer(value[b, kh])
                results = pointer(output[b, h]), pointer(lse[b, h])
                library.attention_forward(*inputs, *results, *numbers)
                gradients = pointer(grad_query[b, h]), pointer(grad_key[b, kh]), pointer(grad_value[b, kh])
                library.attention_backward(*inputs, *results, pointer(grad_output[b, h]), *gradients, *numbers)
        return {
            "output": output,
            "lse": lse,
            "grad_query": grad_query,
            "grad_key": grad_key,
            "grad_value": grad_value,
        }

    return kernel


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report = check_kernel(kernel_of(build(folder, *sys.argv[1:])))
    print(report)
    sys.exit(0 if report.passed else 1)
