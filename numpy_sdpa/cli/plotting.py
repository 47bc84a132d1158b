"""What every command with ``--plot FILE`` needs: to refuse early, in one line, and to save."""

from pathlib import Path
from typing import TYPE_CHECKING

from numpy_sdpa.cli import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 100  # readable at the width of a page, and a committed picture stays below 100 kB


def check_plot(path: str) -> None:
    """UsageError where a figure could not be saved there: asked before the work, not after."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'numpy-sdpa[plot]'") from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in formats:
        raise UsageError(f"--plot {path}: the name must end with one of .{', .'.join(sorted(formats))}")
    if not Path(path).parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {Path(path).parent}")


def save_plot(figure: "Figure", path: str) -> None:
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror or error}") from None
