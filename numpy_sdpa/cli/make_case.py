"""``numpy-sdpa make-case FILE``: inputs and golden results for a kernel to be run on."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

HELP = "Write inputs and golden results, for a kernel to be run on wherever it lives."

_SIZES = {
    "batch": "B",
    "query-heads": "Hq",
    "key-heads": "Hkv",
    "query-length": "L",
    "key-length": "S",
    "head-size": "E",
    "value-head-size": "Ev",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from numpy_sdpa.kernelcheck.cases import DTYPES, MEANINGS, Sizes

    parser.add_argument("file", type=Path, help="where to write: .npz or .safetensors")
    parser.add_argument(
        "--features",
        nargs="*",
        default=[],
        metavar="NAME",
        help="what the problem has, as listed below; default nothing",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, MEANINGS))
    listed = "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in MEANINGS.items())
    parser.epilog = f"features:\n{listed}"
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the inputs, default float32")
    parser.add_argument(
        "--layout",
        default="bhld",
        choices=("bhld", "blhd"),
        help="order of the axes: batch, head, length, d (default), or length before head",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--no-backward", action="store_true", help="without gradients")
    for name, letter in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar=letter, help=f"default {getattr(Sizes, letter)}")


def run(arguments: argparse.Namespace) -> int:
    from numpy_sdpa.cli import UsageError
    from numpy_sdpa.kernelcheck import make_case
    from numpy_sdpa.kernelcheck.problem import RESULTS

    sizes = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name in _SIZES}
    try:
        arrays, options = make_case(
            arguments.features,
            dtype=arguments.dtype,
            seed=arguments.seed,
            backward=not arguments.no_backward,
            layout=arguments.layout,
            **sizes,
        )
        write(arguments.file, arrays, options)
    except (ValueError, ImportError, MemoryError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{arguments.file}: {error.strerror or error}") from error
    for name, array in arrays.items():
        print(f"{name:<18} {array.dtype.name:<9} {array.shape}")
    print(f"{'options':<18} {json.dumps(options)}")
    results = ", ".join(name for name in RESULTS if name in arrays)
    layout = "" if arguments.layout == "bhld" else f" --layout {arguments.layout}"
    print(f"\nNext: put your kernel's own {results} in place of these, and: numpy-sdpa compare DUMP{layout}")
    return 0


def write(path: Path, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> None:
    """A dump that `compare` reads."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if path.suffix == ".npz":
        # a plain .npz has no bfloat16: NumPy keeps the two bytes of each number
        arrays = {name: a.view("V2") if a.dtype.name == "bfloat16" else a for name, a in arrays.items()}
        named: dict[str, Any] = {**arrays, "options": json.dumps(options)}
        np.savez(path, **named)
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file(arrays, path, metadata={"options": json.dumps(options)})
    else:
        raise ValueError(f"a case is written as .npz or .safetensors, got {path.name}")
