"""``numpy-sdpa why-scale``: why attention divides by √d_k, by experiment."""

import argparse
import json
from typing import Any

from numpy_sdpa import why_scale
from numpy_sdpa.cli import UsageError
from numpy_sdpa.cli.plotting import check_plot, save_plot

HELP = "Measure what dividing by sqrt(d_k) does to scores, softmax and gradients, with a picture."
_COLUMNS = (
    "entropy",
    "max_weight",
    "jacobian_norm",
    "grad_query_norm",
    "grad_key_norm",
    "grad_value_norm",
    "saturated",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--d-k",
        type=int,
        nargs="+",
        default=why_scale.D_K,
        metavar="N",
        help=f"key sizes, two or more (default: {' '.join(map(str, why_scale.D_K))})",
    )
    parser.add_argument(
        "--length", type=int, default=why_scale.LENGTH, metavar="N", help="keys in a row (default: %(default)s)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=why_scale.SAMPLES,
        metavar="N",
        help="independent pairs q, k for each d_k (default: %(default)s)",
    )
    parser.add_argument(
        "--distribution",
        choices=list(why_scale.DISTRIBUTIONS),
        default="normal",
        help="of the entries, each of mean 0 and variance 1 (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE.png", help="save the picture (needs matplotlib: numpy-sdpa[plot])")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """0, or 1 where an interval misses what was derived (by chance in 1 % of the seeds)."""
    if arguments.plot:
        check_plot(arguments.plot)
    try:
        result = why_scale.measure(
            arguments.d_k,
            length=arguments.length,
            samples=arguments.samples,
            distribution=arguments.distribution,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if arguments.plot:
        from numpy_sdpa.why_scale_figure import plot

        save_plot(plot(result), arguments.plot)
    print(json.dumps(result) if arguments.json else as_text(result))
    return 0 if why_scale.agrees_with_derivation(result) else 1


def as_text(result: dict[str, Any]) -> str:
    """Tables and sentences in ASCII, for any terminal."""
    parameters, model = result["parameters"], result["model"]
    low, high = result["variance_exponent_ci"]
    return "\n".join(
        [
            f"{parameters['distribution']} entries of mean 0 and variance 1, seed {parameters['seed']}; "
            f"the intervals hold jointly at {parameters['joint_level']:.0%}",
            "",
            f"q.k before any scale, {parameters['samples']} independent pairs for each d_k",
            *_score_table(result),
            f"variance ~ d_k^{result['variance_exponent']:.4f} [{low:.4f}, {high:.4f}]",
            "",
            f"Means over rows of {parameters['length']} keys (entropy in nats; saturated: share of rows with a weight "
            f"above {why_scale.SATURATED})",
            *_measure_table(result["rows"]),
            "",
            f"{model['source']}: q.k has mean {model['score_mean']:.4g} and variance {model['score_variance']:.4g}, "
            f"{model['score_variance_scaled']:.4g} after the scale",
            *_measure_table([{"d_k": model["d_k"], **row} for row in model["rows"]]),
            "",
            *(
                f"{'yes' if claim['holds'] else 'NO ':<3}  {claim['claim']}: {claim['evidence']}."
                for claim in result["claims"]
            ),
        ]
    )


def _score_table(result: dict[str, Any]) -> list[str]:
    lines = [f"{'d_k':>6}{'mean':>10}{'interval':>22}{'variance':>11}{'interval':>22}"]
    for row in result["rows"]:
        if row["scale"] == why_scale.UNSCALED:
            lines.append(
                f"{row['d_k']:>6}{row['score_mean']:>10.4g}{_interval(row['score_mean_ci']):>22}"
                f"{row['score_variance']:>11.5g}{_interval(row['score_variance_ci']):>22}"
            )
    return lines


def _measure_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'d_k':>6}  {'scale':<12}" + "".join(f"{name:>16}" for name in _COLUMNS)]
    for row in rows:
        lines.append(f"{row['d_k']:>6}  {row['scale']:<12}" + "".join(f"{row[name]:>16.3g}" for name in _COLUMNS))
    return lines


def _interval(interval: list[float]) -> str:
    return f"[{interval[0]:.5g}, {interval[1]:.5g}]"
