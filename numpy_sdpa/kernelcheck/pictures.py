"""Where a kernel is wrong, as a picture: error maps over heads and positions, and the worst row of each array.

Drawn with matplotlib, which the extra ``plot`` brings.
"""

import os
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numpy_sdpa.kernelcheck.problem import Array

if TYPE_CHECKING:
    from numpy_sdpa.kernelcheck.report import KernelReport

PER_HEAD = ("grad_sinks", "grad_alibi_slopes")
_COLUMNS = 512  # of an error map: more positions than that share a column, which shows the worst of them
_DECADES = 8  # of |error| / allowed, to either side of 1, at most: a wrong float32 array is some 1e7 times over it


class Drawn(NamedTuple):
    """One array as it is drawn: (B…, heads, positions, entries)."""

    given: Array
    gold: Array
    badness: Array  # |error| / allowed


class Picture(NamedTuple):
    """What a report keeps for its picture, by result name; a wrong shape has none."""

    arrays: dict[str, Drawn]


def draw(report: "KernelReport", path: str | os.PathLike[str]) -> None:
    """Write the picture; its format is that of the path's ending."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'numpy-sdpa[plot]'") from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(report.arrays)
    figure = Figure(figsize=(12, 1.1 + 1.75 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    decades = _decades(report.picture)
    panels = figure.subplots(len(names), 2, squeeze=False, width_ratios=(1, 1.3))
    image = None
    for (map_panel, row_panel), name in zip(panels, names, strict=True):
        drawn = report.picture.arrays.get(name)
        if drawn is None:
            array = report.arrays[name]
            shapes = f"{name} has shape {tuple(array.got)}, expected {tuple(array.expected)}"
            _tell(map_panel, row_panel, shapes)
            continue
        if not drawn.gold.size:
            _tell(map_panel, row_panel, f"{name} has no entries")
            continue
        image = _draw_map(map_panel, name, report, drawn, matplotlib.colormaps["RdBu_r"], decades)
        _draw_row(row_panel, drawn)
    if image is not None:
        bar = figure.colorbar(image, ax=panels[:, 0].tolist(), shrink=0.6, pad=0.01)
        bar.set_ticks([-decades, 0, decades], labels=[f"1e−{decades}", "1", f"1e+{decades}"])
        bar.set_label("|error| / allowed")
    verdict = " ".join(line.strip() for line in report.sentences())
    figure.suptitle(textwrap.fill(verdict, 130), fontsize=10)
    figure.savefig(path, dpi=110)


def _tell(map_panel: Any, row_panel: Any, text: str) -> None:
    row_panel.set_axis_off()
    map_panel.set_axis_off()
    map_panel.text(0, 0.5, text, transform=map_panel.transAxes)


def _decades(picture: Picture) -> int:
    """As many as the worst entry needs."""
    worst = max(
        (np.max(np.nan_to_num(drawn.badness, nan=np.inf), initial=0) for drawn in picture.arrays.values()), default=0
    )
    return int(np.clip(np.ceil(np.log10(max(worst, 1))), 1, _DECADES))


def _draw_map(panel: Any, name: str, report: "KernelReport", drawn: Drawn, colors: Any, decades: int) -> Any:
    """Heads down, positions across; each place shows the worst entry there."""
    badness = np.max(drawn.badness, axis=-1, initial=0)
    badness = badness.reshape(-1, badness.shape[-1])
    shown = np.log10(np.clip(np.nan_to_num(_pooled(badness), nan=np.inf), 10.0**-decades, 10.0**decades))
    extent = (-0.5, badness.shape[1] - 0.5, len(badness) - 0.5, -0.5)
    image = panel.imshow(
        shown, aspect="auto", interpolation="nearest", cmap=colors, vmin=-decades, vmax=decades, extent=extent
    )
    panel.set_title(f"{name}: {'right' if report.arrays[name].passed else 'WRONG'}", loc="left", fontsize=10)
    per_head = name in PER_HEAD
    panel.set_ylabel("batch" if per_head else "batch × head", fontsize=8)
    panel.set_xlabel("head" if per_head else "key" if name in ("grad_key", "grad_value") else "query", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.xaxis.get_major_locator().set_params(integer=True)
    return image


def _pooled(badness: Array) -> Array:
    """At most `_COLUMNS` columns, each the largest of those that it stands for: no lone error gets lost."""
    rows, columns = badness.shape
    width = -(-columns // _COLUMNS)
    padded = np.pad(badness, ((0, 0), (0, -columns % width)))
    return np.max(padded.reshape(rows, -1, width), axis=-1)


def _draw_row(panel: Any, drawn: Drawn) -> None:
    """The worst entry's row, or, where a row is one number, its head: expected and given."""
    worst = np.unravel_index(int(np.argmax(drawn.badness)), drawn.badness.shape)
    along = -1 if drawn.gold.shape[-1] > 1 else -2
    place: list[Any] = list(worst)
    place[along] = slice(None)
    expected, given = drawn.gold[tuple(place)], drawn.given[tuple(place)]
    marker = {"marker": ".", "markersize": 4} if len(expected) <= 64 else {}
    panel.plot(expected, color="0.35", linewidth=2.5, label="expected", **marker)
    panel.plot(given, color="C3", linewidth=1, label="given", **marker)
    panel.axvline(worst[along], color="0.8", linewidth=0.8, zorder=0)
    where = [str(int(i)) for i in worst]
    where[along] = ":"
    panel.set_title(f"worst row [{', '.join(where if along == -1 else where[:-1])}]", loc="left", fontsize=10)
    panel.tick_params(labelsize=7)
    panel.legend(fontsize=7, loc="best", frameon=False)


def drawn(name: str, given: Array, gold: Array, badness: Array) -> Drawn:
    """An array with a head, a position and an entry axis, whatever it has."""

    def shaped(array: Array) -> Array:
        if name == "lse":
            return array[..., None]
        if name in PER_HEAD:
            return array[..., None, :, None]
        return array[(None,) * max(0, 3 - array.ndim)]

    return Drawn(shaped(given), shaped(gold), shaped(badness))
