"""The command line: ``numpy-sdpa COMMAND``, the same as ``python -m numpy_sdpa COMMAND``.

Exit codes: 0 right, 1 wrong, 2 bad usage, unreadable input or unwritable output, which get one line and no traceback.
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from numpy_sdpa._version import __version__

# Each is a module of this package with HELP, add_arguments(parser) and run(arguments) -> exit code.
COMMANDS = ("demo", "verify", "make-case", "compare", "bench", "why-scale", "info")


class UsageError(Exception):
    """Bad usage or unreadable input: the message is the one line that the user reads."""


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without ≤ or − is no reason to fail
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"numpy-sdpa: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _give_up_stdout()
        return 0
    except OSError as error:  # of stdout, as on a full disk: what a command opens itself is a UsageError
        _give_up_stdout()
        print(f"numpy-sdpa: {error}", file=sys.stderr)
        return 2


def _give_up_stdout() -> None:
    """What is left to print goes nowhere: it must not fail again when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="numpy-sdpa", description="Scaled dot-product attention and all its derivatives, in NumPy."
    )
    parser.add_argument("--version", action="version", version=f"numpy-sdpa {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"numpy_sdpa.cli.{name.replace('-', '_')}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
