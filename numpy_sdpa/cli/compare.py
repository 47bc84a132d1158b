"""``numpy-sdpa compare DUMP``: is this kernel right, and if not, which mistake is it?"""

import argparse
from pathlib import Path
from typing import Any

HELP = "Judge what a kernel gave, array by array, and name the known mistake that reproduces it."

_FLAGS = ("is_causal", "enable_gqa")
_NUMBERS: dict[str, type] = {
    "query_offset": int,
    "scale": float,
    "softcap": float,
    "dropout_p": float,
    "dropout_seed": int,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from numpy_sdpa.kernelcheck.semantics import SYSTEMS

    parser.add_argument("dump", type=Path, help=".npz or .safetensors with query, key, value and what the kernel gave")
    parser.add_argument(
        "--layout",
        choices=("bhld", "blhd"),
        help="order of the axes: batch, head, length, d; default: that of --semantics, or bhld",
    )
    parser.add_argument(
        "--semantics", choices=tuple(SYSTEMS), help="whose meaning is right (docs/semantics.md); default numpy-sdpa"
    )
    parser.add_argument("--tolerance", type=float, help="allow this error everywhere instead of the derived one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="save error maps and the worst rows (needs matplotlib: numpy-sdpa[plot])"
    )
    options = parser.add_argument_group("options of attention, overriding those in the dump")
    for name in _FLAGS:
        options.add_argument(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction)
    options.add_argument("--alignment", choices=("upper_left", "lower_right"))
    options.add_argument("--window", nargs=2, type=_side, metavar=("LEFT", "RIGHT"), help="each an int or none")
    for name, kind in _NUMBERS.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name.upper())


def _side(text: str) -> int | None:
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"each side is an int or none, got {text!r}") from None


def run(arguments: argparse.Namespace) -> int:
    from numpy_sdpa.cli import UsageError
    from numpy_sdpa.cli.plotting import check_plot
    from numpy_sdpa.kernelcheck import DumpError, compare

    if arguments.plot is not None:
        check_plot(arguments.plot)
    given: dict[str, Any] = {name: getattr(arguments, name) for name in (*_FLAGS, "alignment", "window", *_NUMBERS)}
    options = {name: value for name, value in given.items() if value is not None}
    try:
        report = compare(
            arguments.dump,
            layout=arguments.layout,
            semantics=arguments.semantics,
            tolerance=arguments.tolerance,
            **options,
        )
    except DumpError as error:
        raise UsageError(str(error)) from error
    print(report.to_json() if arguments.json else report)
    if arguments.plot is not None:
        try:
            report.plot(arguments.plot)
        except OSError as error:
            raise UsageError(f"--plot {arguments.plot}: {error.strerror or error}") from None
    return 0 if report.passed else 1
