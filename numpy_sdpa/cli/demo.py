"""``numpy-sdpa demo``: a quick test, and its weights as a small picture. Only a plot needs more than NumPy."""

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from numpy_sdpa.attention import scaled_dot_product_attention
from numpy_sdpa.cli import UsageError
from numpy_sdpa.cli.plotting import check_plot, save_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELP = "Run the quick test: random query, key and value of shape [1, 1, 5, 64], causal and not."
_SHAPE = (1, 1, 5, 64)  # batch, heads, sequence length, d_k
_BLOCKS = " ░▒▓█"  # none, then a quarter of the weight each
_ASCII = " .+#@"  # the same for a terminal that cannot show blocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="save the weights as a picture (needs matplotlib: numpy-sdpa[plot])"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """0, or 1 where the shape or a row sum is not what it must be."""
    if arguments.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {arguments.seed}")
    if arguments.plot:
        check_plot(arguments.plot)
    facts = quick_test(arguments.seed)
    if arguments.plot:
        save_plot(plot(facts), arguments.plot)
    print(json.dumps(facts) if arguments.json else "\n".join(_as_text(facts)))
    sums = facts["row_sums"] + facts["causal_row_sums"]
    return 0 if facts["output_shape"] == list(_SHAPE) and all(_four_digits(total) == "1.0000" for total in sums) else 1


def quick_test(seed: int) -> dict[str, Any]:
    """What the quick test looks at, causal and not: shapes, weights, their row sums."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.standard_normal(_SHAPE, dtype=np.float32) for _ in range(3))
    output, weights = scaled_dot_product_attention(query, key, value)
    _, causal_weights = scaled_dot_product_attention(query, key, value, is_causal=True)
    return {
        "output_shape": list(output.shape),
        "row_sums": weights[0, 0].sum(axis=-1).tolist(),
        "weights": weights[0, 0].tolist(),
        "causal_row_sums": causal_weights[0, 0].sum(axis=-1).tolist(),
        "causal_weights": causal_weights[0, 0].tolist(),
    }


def draw(weights: list[list[float]], shades: str = _BLOCKS) -> list[str]:
    """One line for each query: its weights as shades, as numbers (nothing where a key is masked), and their sum."""
    keys = [f"k{key}" for key in range(len(weights[0]))]
    lines = [f"     {''.join(f'{key:<4}' for key in keys)}  {''.join(f'{key:>6}' for key in keys)}     sum"]
    for query, row in enumerate(weights):
        # rounded up, so that only a masked key is blank
        picture = "".join(shades[math.ceil(weight * (len(shades) - 1))] * 4 for weight in row)
        numbers = "".join(f"{weight:6.2f}" if weight else " " * 6 for weight in row)
        lines.append(f"q{query}  |{picture}| {numbers}  {_four_digits(sum(row))}")
    return lines


def plot(facts: dict[str, Any]) -> "Figure":
    """The same two pictures as a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    all_axes = figure.subplots(1, 2)
    titles = {"weights": "Full attention", "causal_weights": "Causal attention"}
    for axes, (name, title) in zip(all_axes, titles.items(), strict=True):
        image = axes.imshow(facts[name], cmap="Greys", vmin=0, vmax=1)
        axes.set(title=title, xlabel="key position", ylabel="query position")
        for query, row in enumerate(facts[name]):
            for key, weight in enumerate(row):
                text = f"{weight:.2f}" if weight else "masked"
                axes.text(key, query, text, ha="center", va="center", color="white" if weight > 0.5 else "black")
    figure.colorbar(image, ax=all_axes, label="weight (share of 1)")
    return figure


def _as_text(facts: dict[str, Any]) -> list[str]:
    shades = _BLOCKS if _can_print(_BLOCKS) else _ASCII
    return [
        f"Output shape: {facts['output_shape']}",
        f"Weights sum check: {_four_digits(facts['row_sums'][0])}",
        "",
        "Weights, every query sees every key",
        *draw(facts["weights"], shades),
        "",
        "Weights, causal: a query sees the keys up to its own position",
        *draw(facts["causal_weights"], shades),
        "",
        f"A weight {_legend(shades)}; nothing: masked",
    ]


def _legend(shades: str) -> str:
    full = len(shades) - 1
    return ", ".join(f"{shade} up to {step / full:g}" for step, shade in enumerate(shades) if step)


def _four_digits(number: float) -> str:
    return f"{number:.4f}"


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
