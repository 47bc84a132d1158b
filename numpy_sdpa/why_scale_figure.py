"""The picture of `why_scale.measure`: four panels, legible in grey."""

from typing import TYPE_CHECKING, Any

import numpy as np

from numpy_sdpa.why_scale import OVERSCALED, SCALED, SCALES, UNSCALED, at_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito's palette a dark, a middle and a light colour, which grey tells apart; so do marker and line style.
_STYLES: dict[str, dict[str, Any]] = {
    SCALED: {"color": "#000000", "marker": "o", "linestyle": "-"},
    UNSCALED: {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    OVERSCALED: {"color": "#56B4E9", "marker": "^", "linestyle": ":"},
}
_LABELS = {SCALED: r"scale $1/\sqrt{d_k}$", UNSCALED: "scale 1 (none)", OVERSCALED: r"scale $1/d_k$"}
_HATCHES = {SCALED: "", UNSCALED: "///", OVERSCALED: "..."}
_BARS = 16  # more bars than this in one panel are too thin to tell apart


def plot(result: dict[str, Any]) -> "Figure":
    """Four panels: variance of the logits, weights of one row, softmax Jacobian, gradient of a query.

    Parameters
    ----------
    result : dict
        From `measure`.

    Returns
    -------
    matplotlib.figure.Figure
        To be saved with ``figure.savefig(path)``. matplotlib is the extra ``numpy-sdpa[plot]``.
    """
    from matplotlib.figure import Figure

    parameters = result["parameters"]
    figure = Figure(figsize=(10, 7.6), layout="constrained")
    (variance, weights), (jacobian, gradient) = figure.subplots(2, 2)
    _plot_variance(variance, result)
    _plot_weights(weights, result["example_weights"])
    _plot_measure(jacobian, result, "jacobian_norm")
    jacobian.set(
        title=f"Softmax Jacobian, mean over rows of {parameters['length']} keys",
        ylabel=r"$\|\mathrm{diag}(p) - pp^T\|_F$ (weight per nat of logit)",
    )
    _plot_measure(gradient, result, "grad_query_norm")
    gradient.set(
        title=f"Gradient of a query, mean over rows of {parameters['length']} keys",
        ylabel="norm (per unit of upstream gradient)",
    )
    (star, *_), (lines, labels) = variance.get_lines()[-1:], jacobian.get_legend_handles_labels()
    figure.legend([*lines, star], [*labels, star.get_label()], loc="outside lower center", ncols=3)
    figure.suptitle(
        rf"Why divide by $\sqrt{{d_k}}$?  {parameters['distribution'].capitalize()} entries of mean 0 and variance 1, "
        f"{parameters['samples']:,} pairs, seed {parameters['seed']}"
    )
    return figure


def _plot_variance(axes: "Axes", result: dict[str, Any]) -> None:
    for name, style in _STYLES.items():
        rows = at_scale(result, name)
        d_k = np.array([row["d_k"] for row in rows])
        squared_scale = np.array([SCALES[name](size) ** 2 for size in d_k])
        variance = squared_scale * [row["score_variance"] for row in rows]
        low, high = squared_scale * np.transpose([row["score_variance_ci"] for row in rows])
        axes.errorbar(d_k, variance, yerr=[variance - low, high - variance], capsize=4, label=_LABELS[name], **style)
    model = result["model"]
    axes.plot(
        [model["d_k"]] * 2,
        [model["score_variance"], model["score_variance_scaled"]],
        color="black",
        markerfacecolor="white",
        marker="*",
        markersize=12,
        linestyle="none",
        label="a trained model, without and with its scale",
    )
    _finish_log_axes(axes)
    axes.set(title="Variance of the logits", ylabel="variance of scale · q·k (nat²)")


def _plot_weights(axes: "Axes", example: dict[str, Any]) -> None:
    length, width = len(example[SCALED]), 0.27
    order = np.argsort(example[SCALED])[::-1][:_BARS]
    keys = np.arange(1, len(order) + 1)
    for position, name in enumerate(SCALES):
        axes.bar(
            keys + (position - 1) * width,
            np.array(example[name])[order],
            width,
            label=_LABELS[name],
            color=_STYLES[name]["color"],
            hatch=_HATCHES[name],
            edgecolor="white",
        )
    axes.set(
        title=f"Weights of one row, $d_k$ = {example['d_k']}",
        xlabel=f"key, by falling weight (first {len(order)} of {length})",
        ylabel="weight (share of 1)",
        ylim=(0, 1.05),
    )
    axes.legend()


def _plot_measure(axes: "Axes", result: dict[str, Any], measure: str) -> None:
    """Its mean over rows against d_k, for each scale; without the scale also the median, which parts from the mean."""
    for name, style in _STYLES.items():
        rows = at_scale(result, name)
        d_k = [row["d_k"] for row in rows]
        axes.plot(d_k, [row[measure] for row in rows], label=_LABELS[name], **style)
        if name == UNSCALED:
            medians = [row[f"{measure}_median"] for row in rows]
            axes.plot(d_k, medians, label=f"{_LABELS[name]}, median row", **{**style, "marker": "x", "linestyle": "-."})
    _finish_log_axes(axes)
    smallest_mean = min(row[measure] for row in result["rows"])
    axes.set_ylim(bottom=smallest_mean / 10)  # the median falls by ten decades and would press everything else flat


def _finish_log_axes(axes: "Axes") -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("key size $d_k$ (number of entries)")
    axes.grid(alpha=0.3)
