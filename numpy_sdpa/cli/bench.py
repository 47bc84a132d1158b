"""``numpy-sdpa bench``: how fast attention is on this machine."""

import argparse
import json
from typing import Any

from numpy_sdpa.cli import UsageError
from numpy_sdpa.cli.plotting import check_plot, save_plot

HELP = "Measure attention on this machine: against torch where it is installed, its own matrix products, and itself."
_HEADER = f"{'what: ours / other':<75}{'ours':>13}{'other':>14}{'ratio':>8}  (bar: the ratio that is meant)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 2048, 4096], metavar="L", help="default: 512 2048 4096"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: the cores that this process may use")
    parser.add_argument(
        "--pairs",
        type=int,
        default=5,
        metavar="N",
        help="times that each row is measured, ours and the other in turns; default 5",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose words hold this text, as 'causal'")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE", help="save the ratios as a picture")


def run(arguments: argparse.Namespace) -> int:
    from numpy_sdpa import benchmark

    if min(*arguments.lengths, arguments.pairs, 1 if arguments.threads is None else arguments.threads) < 1:
        raise UsageError("--lengths, --threads and --pairs must be at least 1")
    if arguments.plot:
        check_plot(arguments.plot)
    shown: list[Any] = []

    def show(row: Any) -> None:
        if not shown:
            print(_HEADER)
        shown.append(row)
        print_row(row)

    result = benchmark.run(
        tuple(arguments.lengths),
        arguments.threads,
        arguments.pairs,
        arguments.only,
        report=(lambda row: None) if arguments.json else show,
    )
    if not result["rows"]:
        raise UsageError(f"--only {arguments.only}: no row holds this text")
    if arguments.json:
        print(json.dumps(result))
    else:
        print_summary(result)
    if arguments.plot:
        save_plot(figure(result), arguments.plot)
    return 0


def print_row(row: Any) -> None:
    bar = "" if row.bar is None else f"  (bar {row.bar:g})"
    times = f"{1e3 * row.ours:10.2f} ms {1e3 * row.other:10.2f} ms"
    print(f"{row.group + ': ' + row.name:<75}{times}{row.ratio:8.3f}{bar}", flush=True)


def print_summary(result: dict[str, Any]) -> None:
    print()
    for group, mean in result["geometric_means"].items():
        print(f"{group + ', geometric mean':<103}{mean:8.3f}")
    torch = f"torch {result['torch']}" if result["torch"] else "no torch"
    print(f"\n{result['threads']} threads, numpy {result['numpy']}, {torch}, {result['blas']}")


def figure(result: dict[str, Any]) -> Any:
    """A bar for every ratio, and a mark where it is meant to end."""
    from matplotlib.figure import Figure

    rows = result["rows"][::-1]
    picture = Figure(figsize=(9, 1 + 0.22 * len(rows)), layout="constrained")
    axes = picture.subplots()
    places = range(len(rows))
    axes.barh(places, [row["ratio"] for row in rows], color="#56B4E9", label="measured")
    bars = [(place, row["bar"]) for place, row in zip(places, rows, strict=True) if row["bar"] is not None]
    axes.plot([bar for _, bar in bars], [place for place, _ in bars], "|", color="black", markersize=12, label="bar")
    axes.set_yticks(places, [f"{row['group']}: {row['name']}" for row in rows], fontsize=7)
    axes.set(xlabel="time, divided by the other's", ylim=(-0.6, len(rows) - 0.4))
    axes.legend()
    return picture
