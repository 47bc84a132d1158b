"""Slopes by least squares, for dtypes of two or three digits.

A difference quotient of high order rests on its innermost points, and in float16 or bfloat16 these are all
noise. A polynomial through many points averages the noise instead, over steps as large as the argument.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from numpy_sdpa.gradcheck._quotients import (
    ERROR_FACTOR,
    NOISE_FACTOR,
    Derivatives,
    Direction,
    Line,
    Samples,
    without_a_curve,
)

# With 64 points on each side the slope of a quintic has 2/3 of the noise of one value at the step's end. They
# are nested: a halved step needs half of them anew.
_TIMES = np.concatenate([-np.arange(64, 0, -1), np.arange(1, 65)]) / 64
_HALVINGS = 6
# Scatter that is more than this part of what the function changes by is a misfit, not noise.
_ROUGH_PART = 0.01


class _Fit(NamedTuple):
    """Rows that turn values at `_TIMES` into the slope, half its jump at 0, and what is not fitted."""

    slope: np.ndarray
    half_jump: np.ndarray
    residual: np.ndarray
    freedom: int


@lru_cache
def _fit(degree: int) -> _Fit:
    """The least squares fit of a polynomial and a kink."""
    columns = [
        np.ones(_TIMES.size),
        _TIMES,
        np.abs(_TIMES),
        *(_TIMES**power for power in range(2, degree + 1)),
    ]
    design = np.stack(columns, axis=1)
    inverse = np.linalg.pinv(design)
    return _Fit(inverse[1], inverse[2], np.eye(_TIMES.size) - design @ inverse, _TIMES.size - design.shape[1])


class _Fitted(NamedTuple):
    """At one step: the slope, its standard deviation, half its jump at 0, and what the degree leaves out."""

    slope: np.ndarray
    deviation: np.ndarray
    jump: np.ndarray
    bias: np.ndarray


def fitted(
    line: Line, directions: list[Direction], steps: np.ndarray, smallest: np.ndarray, rounding: np.ndarray
) -> Derivatives:
    """Fits of degree 5 over one step per direction and its halves: of these the most certain.

    Every fit is compared with that of half the step: what their noise does not explain is bias.
    """
    shape = (len(directions), line.results)
    best = Derivatives(np.full(shape, np.nan), np.full(shape, np.inf), np.zeros(shape))
    samples = Samples(line, directions)
    for row in range(len(directions)):
        halved = (step for step in steps[row] * 0.5 ** np.arange(_HALVINGS) if step >= smallest[row])
        wider = None
        for step in halved:
            fit = _at_step(np.array([samples.at(row, step * time) for time in _TIMES]), step, rounding)
            if wider is not None and _keep_better(best, row, wider, fit):
                break
            wider = fit
    return best


def _keep_better(best: Derivatives, row: int, fit: _Fitted, halved: _Fitted) -> bool:
    """Takes a fit into `best` where it is more certain; True where smaller steps could only be noisier."""
    with np.errstate(all="ignore"):
        apart = np.abs(fit.slope - halved.slope) - 2 * (fit.deviation + halved.deviation)
        bias = np.maximum(fit.bias, ERROR_FACTOR * np.maximum(apart, 0.0))
        found = Derivatives(fit.slope, bias + NOISE_FACTOR * fit.deviation + fit.jump, fit.jump)
        better = found.uncertainty < best.uncertainty[row]
        for kept, new in zip(best, found, strict=True):
            kept[row] = np.where(better, new, kept[row])
        return bool(np.all(bias + fit.jump == 0))


def _at_step(values: np.ndarray, step: float, rounding: np.ndarray) -> _Fitted:
    fit, lower = _fit(5), _fit(3)
    with np.errstate(all="ignore"):
        slope, other = fit.slope @ values / step, lower.slope @ values / step
        noise = np.maximum(np.sqrt(np.sum((fit.residual @ values) ** 2, axis=0) / fit.freedom), rounding)
        noise[without_a_curve(noise, rounding, values, _ROUGH_PART)] = np.inf
        deviation = noise * np.linalg.norm(fit.slope) / step
        # the two degrees differ by noise too; the rest is what degree 3 leaves out, far more than degree 5
        # does
        bias = np.maximum(0.0, np.abs(slope - other) - 2 * deviation)
        jump = np.abs(fit.half_jump @ values) / step
        jump[~(jump > NOISE_FACTOR * noise * np.linalg.norm(fit.half_jump) / step)] = 0.0
        return _Fitted(slope, deviation, jump, bias)
