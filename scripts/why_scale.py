"""Make docs/why_scale.png and print the tables of docs/why_scale.md: a minute or two on two cores.

With --coverage RUNS only the table of how often the joint intervals hold, from that many experiments.
"""

import argparse
import math
from pathlib import Path

from numpy_sdpa import why_scale
from numpy_sdpa.why_scale_figure import plot

FIGURE = Path(__file__).parents[1] / "docs" / "why_scale.png"
LENGTHS = (4, 8, 16, 64, 256, 1024)
CROSSING_D_K = tuple(2**power for power in range(1, 13))
COVERAGE_D_K = (4, 16, 64)  # where q·k is far from normal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coverage", type=int, metavar="RUNS")
    runs = parser.parse_args().coverage
    if runs:
        print_table(coverage_rows(runs))
        return
    results = {distribution: why_scale.measure(distribution=distribution) for distribution in why_scale.DISTRIBUTIONS}
    save_figure(results["normal"], FIGURE)
    print_table(variance_rows(results))
    print_table(measure_rows(results["normal"]))
    print_table(length_rows())


def save_figure(result: dict, path: Path) -> None:
    """As the command does, and then with 64 colours, a third of the size."""
    from PIL import Image

    plot(result).savefig(path, dpi=100)
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


def variance_rows(results: dict[str, dict]) -> list[list[str]]:
    rows = [["d_k", *results]]
    for position, d_k in enumerate(why_scale.D_K):
        seen = [result["rows"][position * len(why_scale.SCALES)] for result in results.values()]
        rows.append([str(d_k), *(_interval(row["score_variance"], row["score_variance_ci"], ".4g") for row in seen)])
    exponents = [
        _interval(result["variance_exponent"], result["variance_exponent_ci"], ".4f") for result in results.values()
    ]
    return [*rows, ["exponent", *exponents]]


def measure_rows(result: dict) -> list[list[str]]:
    names = [name for name in result["rows"][0] if name not in ("d_k", "scale") and not name.startswith("score")]
    head = ["d_k", "scale", *(name.replace("_", " ") for name in names)]
    return [head, *([str(row["d_k"]), row["scale"], *(f"{row[name]:.3g}" for name in names)] for row in result["rows"])]


def length_rows() -> list[list[str]]:
    rows = [["length", "below from d_k", "predicted", "saturated without scale, there", "√(e / length)", "scaled norm"]]
    for length in LENGTHS:
        result = why_scale.measure(CROSSING_D_K, length=length, samples=why_scale.MIN_SAMPLES)
        since = why_scale.jacobian_below_since(result)
        saturated = {row["d_k"]: row["saturated"] for row in result["rows"] if row["scale"] == why_scale.UNSCALED}
        scaled = result["rows"][-len(why_scale.SCALES)]["jacobian_norm"]
        rows.append(
            [
                str(length),
                str(since or f"above {CROSSING_D_K[-1]}"),
                f"{why_scale.predicted_crossing(length):.0f}",
                f"{saturated[since or CROSSING_D_K[-1]]:.0%}",
                f"{math.sqrt(math.e / length):.3f}",
                f"{scaled:.3f}",
            ]
        )
    return rows


def coverage_rows(runs: int) -> list[list[str]]:
    rows = [["pairs", "entries", "means", "variances", "exponent", "joint"]]
    for samples in (why_scale.MIN_SAMPLES, 1000, why_scale.SAMPLES):
        for distribution in why_scale.DISTRIBUTIONS:
            shares = why_scale.joint_coverage(COVERAGE_D_K, samples=samples, distribution=distribution, runs=runs)
            rows.append([str(samples), distribution, *(f"{share:.2%}" for share in shares.values())])
    return rows


def print_table(rows: list[list[str]]) -> None:
    head, *body = rows
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body]]
    print(*lines, "", sep="\n", flush=True)


def _interval(value: float, interval: list[float], digits: str) -> str:
    return f"{value:{digits}} [{interval[0]:{digits}}, {interval[1]:{digits}}]"


if __name__ == "__main__":
    main()
