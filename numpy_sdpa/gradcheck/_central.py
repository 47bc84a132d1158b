"""Central difference quotients: which steps to try, and when another is worth it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from numpy_sdpa.gradcheck._arrays import Argument
from numpy_sdpa.gradcheck._fits import fitted
from numpy_sdpa.gradcheck._quotients import Derivatives, Direction, Line, scipy_quotients, without_a_curve

# Quotients that SciPy takes at once: some 20 values are kept of each, so this bounds the memory to a few
# megabytes.
_MAX_ELEMENTS = 2**13


def central(
    line: Line,
    directions: list[Direction],
    eps: float | None,
    suffices: Callable[[np.ndarray], np.ndarray],
    probe: np.ndarray,
) -> Derivatives:
    """Central difference quotients along every direction, by other initial steps where one is not enough.

    Parameters
    ----------
    line, directions
        What is differentiated.
    eps : float or None
        The initial step. None: a part of the argument's size and, where that leaves too much uncertainty, of
        the entry's own size, of 1, and of a thousandth and a millionth of the first.
    suffices : callable
        `suffices(value)` is the uncertainty at which no other step is tried.
    probe : (size,) array
        A direction without small components; the noise is measured along it.
    """
    shape = (len(directions), line.results)
    best = Derivatives(np.full(shape, np.nan), np.full(shape, np.inf), np.zeros(shape))
    if not best.value.size:
        return best
    chosen = np.full(shape, np.inf)  # the initial steps of the best
    by_fit = line.argument.precision.order is None
    ladder = _initial_steps(line.argument, directions, eps)
    spread = [_spread(steps, directions, probe) for steps in ladder]
    rounding = line.rounding(spread[0], 16 * probe * np.max(np.abs(spread), axis=0))
    smallest = np.array([line.smallest_step(direction) for direction in directions])
    noise, known = rounding, np.zeros(line.base.size)
    tried = np.zeros((0, len(directions)))
    for steps, vector in zip(ladder, spread, strict=True):
        without = np.isinf(best.uncertainty).any(axis=1)
        new = np.all((tried > 2 * steps) | (tried < steps / 2), axis=0) | without
        open_ = np.any(~(best.uncertainty <= suffices(best.value)), axis=1) & new & (steps > smallest)
        tried = np.vstack([tried, steps])
        if not open_.any():
            continue
        quotients = fitted if by_fit else scipy_quotients
        if not by_fit:
            noise, known = _noise(line, vector, rounding, known)
        for chunk in _chunks(np.flatnonzero(open_), line.results):
            found = quotients(line, [directions[i] for i in chunk], steps[chunk], smallest[chunk], noise)
            _merge(best, chosen, chunk, found, steps[chunk])
    return best


def _merge(best: Derivatives, chosen: np.ndarray, rows: np.ndarray, found: Derivatives, steps: np.ndarray) -> None:
    """Keeps the more certain of two derivatives, or, if they contradict each other, that of smaller steps.

    Steps too large for a function can agree on a slope that is not there. Steps too small are only noisy, and
    known to be.
    """
    value, uncertainty, tried = best.value[rows], best.uncertainty[rows], chosen[rows]
    steps = np.broadcast_to(steps[:, None], value.shape)
    with np.errstate(all="ignore"):
        contradiction = np.abs(found.value - value) > uncertainty + found.uncertainty  # False where one is nan
    better = np.where(contradiction, steps < tried, found.uncertainty < uncertainty)
    for kept, new in zip((*best, chosen), (*found, steps), strict=True):
        kept[rows] = np.where(better, new, kept[rows])


def _noise(line: Line, vector: np.ndarray, rounding: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The noise of each result, inf where `vector` is too large a step, and what is known of each entry's."""
    measured, known = line.measured_noise(vector, known)
    noise = np.maximum(rounding, measured)
    changes = np.array([line.change(vector, t) for t in (-1.0, 1.0)])
    return np.where(without_a_curve(noise, rounding, changes), np.inf, noise), known


def _initial_steps(argument: Argument, directions: list[Direction], eps: float | None) -> list[np.ndarray]:
    """The initial steps to try for every direction, in order."""
    count = len(directions)
    if eps is not None:
        return [np.full(count, eps)]
    sizes = np.abs(argument.point.reshape(-1).astype(float))
    sizes[~np.isfinite(sizes) | (sizes == 0)] = argument.size
    own = [float(np.min(sizes)) if isinstance(direction, np.ndarray) else sizes[direction] for direction in directions]
    # a thousandth, not 1/1024: halved steps that a period of the function fools must not be tried again
    size = np.full(count, argument.size)
    units = [size, np.array(own), np.ones(count), size / 1e3, size / 1e6]
    if argument.precision.order is None:
        units.insert(1, 4 * size)  # few digits: where a function is nearly linear, larger steps are less noisy
    return [argument.precision.initial_step * unit for unit in units]


def _spread(steps: np.ndarray, directions: list[Direction], probe: np.ndarray) -> np.ndarray:
    """One vector that moves every entry about as far as the steps do."""
    if isinstance(directions[0], np.ndarray):
        return probe * np.min(steps)
    vector = np.array(probe)
    vector[np.array(directions, dtype=int)] *= steps
    return vector


def _chunks(which: np.ndarray, results: int) -> Iterator[np.ndarray]:
    length = max(1, _MAX_ELEMENTS // results)
    for start in range(0, which.size, length):
        yield which[start : start + length]
