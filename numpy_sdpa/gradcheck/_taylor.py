"""Taylor remainders at halving steps, and the rate at which they fall."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpy_sdpa.gradcheck._arrays import Argument, random_direction, unit_of
from numpy_sdpa.gradcheck._problem import Problem, entry_index
from numpy_sdpa.gradcheck._quotients import NOISE_FACTOR, Direction, Line
from numpy_sdpa.gradcheck.report import DECISIVE_PART, RIGHT, UNDECIDED, WRONG, GradientRow

# A remainder ten times its rounding has a rate that is known to log2(1 ± 1/10): 0.3 at worst, and mostly much
# better.
_CLEAR = 10.0
# 80 halvings lead from any size to the last digits of float64; rounding ends the sequence after some 25.
_MAX_STEPS = 80


class _Remainders(NamedTuple):
    """For one output: steps, the larger of ‖r(±h)‖, its rounding, and ‖r(h) + r(−h)‖ / 2."""

    steps: np.ndarray
    size: np.ndarray
    rounding: np.ndarray
    even: np.ndarray


def taylor_rows(
    problem: Problem,
    argument: Argument,
    directions: list[Direction],
    tangents: list[np.ndarray],
    eps: float | None,
    tolerance: float,
    rng: np.random.Generator,
) -> list[GradientRow]:
    """One row for each direction and each output of the function."""
    finite = [np.where(problem.finite, tangent, 0.0) for tangent in tangents]
    # what is small beside the argument's largest tangent needs no rate of its own
    largest = max((norm for tangent in finite for norm in _norms(problem, tangent)), default=0.0)
    line = Line(lambda point: problem.call(argument, point), argument, problem.base, problem.resolution)
    # the larger of the argument's size and 1: halving leads down to where the function is smooth, never up
    start = argument.precision.initial_step * max(argument.size, 1.0) if eps is None else eps
    noise = _noise(line, start, random_direction(rng, argument.point.size))
    rows = []
    for direction, tangent in zip(directions, finite, strict=True):
        entry = entry_index(argument, direction)
        for output, remainders in enumerate(_remainders(problem, line, direction, tangent, start, noise)):
            place = (output,) if problem.layout.several else ()
            rows.append(_row(argument, remainders, largest, tolerance, place, entry, problem.notes))
    return rows


def _noise(line: Line, start: float, probe: np.ndarray) -> np.ndarray:
    """The standard deviation of every entry of the result near the point."""
    size = line.argument.size
    step = line.argument.precision.initial_step * size
    rounding = line.rounding(step * probe, max(start, size) * probe)
    measured, _ = line.measured_noise(min(size, 1.0) * probe, rounding)
    return np.maximum(rounding, measured)


def _norms(problem: Problem, entries: np.ndarray) -> np.ndarray:
    """The norm of each output."""
    parts = [problem.layout.part(output) for output in range(problem.layout.outputs)]
    unit = unit_of(entries)
    return np.array([unit * float(np.linalg.norm(entries[part] / unit)) for part in parts])


def worst_of(rows: list[GradientRow]) -> GradientRow:
    """The row that says most against the tangent: wrong, then undecided, then right; then the lowest rate."""
    severity = {WRONG: 0, UNDECIDED: 1, RIGHT: 2}
    return min(rows, key=lambda row: (severity[row.verdict], row.got))


def _remainders(
    problem: Problem,
    line: Line,
    direction: Direction,
    tangent: np.ndarray,
    start: float,
    noise: np.ndarray,
) -> list[_Remainders]:
    """The remainders in one direction, for each output, down to where rounding ends them."""
    # a tangent is not asked for more than three quarters of its digits
    slack = problem.precision.eps**0.75 * _norms(problem, tangent)
    noise_level = NOISE_FACTOR * _norms(problem, noise)
    steps, sizes, levels, evens = [], [], [], []
    smallest = line.smallest_step(direction)
    for step in start * 0.5 ** np.arange(_MAX_STEPS):
        if step < smallest:
            break
        with np.errstate(all="ignore"):
            ahead = line.change(direction, step) - step * tangent
            behind = line.change(direction, -step) + step * tangent
            steps.append(step)
            # both sides: |x| at 0 has no remainder on one of them
            sizes.append(np.maximum(_norms(problem, ahead), _norms(problem, behind)))
            evens.append(_norms(problem, ahead + behind) / 2)
            levels.append(noise_level + slack * step)
        if len(sizes) > 2 and all(np.all(sizes[-back] <= _CLEAR * levels[-back]) for back in (1, 2)):
            break
    columns = (np.array(rows).reshape(len(steps), problem.layout.outputs).T for rows in (sizes, levels, evens))
    return [_Remainders(np.array(steps), *output) for output in zip(*columns, strict=True)]


def _row(
    argument: Argument,
    remainders: _Remainders,
    largest_tangent: float,
    tolerance: float,
    place: tuple[int, ...],
    entry: tuple[int, ...] | None,
    notes: list[str],
) -> GradientRow:
    clear = remainders.size > _CLEAR * remainders.rounding  # False for nan, beyond the function's domain
    with np.errstate(all="ignore"):
        rates = np.log2(remainders.size[:-1] / remainders.size[1:])
    if not np.any(clear[:-1] & clear[1:]):
        verdict, rate, uncertainty, note = _without_rate(remainders, largest_tangent)
    else:
        verdict, rate, uncertainty, note = _by_rate(remainders, rates, clear, tolerance)
    short = max(0.0, 2.0 - rate)
    return GradientRow(
        argument.position,
        verdict,
        max_abs_error=short,
        max_rel_error=short / 2,
        worst_index=place,
        expected=2.0,
        got=rate,
        tolerance=tolerance,
        uncertainty=uncertainty,
        entries=1,
        wrong_entries=int(verdict == WRONG),
        direction_index=entry,
        note="; ".join([*notes, *([note] if note else [])]),
        steps=tuple(remainders.steps.tolist()),
        remainders=tuple(remainders.size.tolist()),
        rates=tuple(rates.tolist()),
    )


def _without_rate(remainders: _Remainders, largest_tangent: float) -> tuple[str, float, float, str]:
    """The remainder does not stand clear of rounding: exact, provided that the tangent does."""
    known = np.isfinite(remainders.size)
    # what may hide below the rounding is at most a tenth of the tangent
    decided = _CLEAR * remainders.rounding <= remainders.steps * largest_tangent / 10
    if np.any(known & decided):
        return RIGHT, np.inf, 0.0, "exact: the remainder is rounding at every step"
    return UNDECIDED, np.inf, np.inf, "the remainder is rounding at every step, and so is the tangent"


def _by_rate(
    remainders: _Remainders, rates: np.ndarray, clear: np.ndarray, tolerance: float
) -> tuple[str, float, float, str]:
    """The verdict from the smallest steps at which the rate is known well."""
    size, rounding = remainders.size, remainders.rounding
    with np.errstate(all="ignore"):
        from_rounding = rates - np.log2((size[:-1] - rounding[:-1]) / (size[1:] + rounding[1:]))
    pairs = np.flatnonzero(clear[:-1] & clear[1:])
    well_known = pairs[from_rounding[pairs] <= tolerance / 2]
    pair = int(well_known[-1] if well_known.size else pairs[np.argmin(from_rounding[pairs])])
    rate = float(rates[pair])
    uncertainty = float(from_rounding[pair])
    if pair > 0 and clear[pair - 1]:
        # a rate that still rises towards 2 will rise on; one that falls towards 1 has no excuse
        uncertainty += max(0.0, rate - float(rates[pair - 1]))
    if rate - uncertainty >= 2 - tolerance:
        return RIGHT, rate, uncertainty, ""
    if rate + uncertainty < 2 - tolerance:
        if pair == 0 or not clear[pair - 1]:  # the first rate may be anything: the steps are still large
            return UNDECIDED, rate, np.inf, "too few remainders stand clear of rounding"
        even = remainders.even[pair : pair + 2]
        if even[1] > size[pair + 1] / 3 and even[0] < 2**1.5 * even[1]:  # falls like h, on both sides alike
            return UNDECIDED, rate, np.inf, "the slope jumps there: a kink"
        return WRONG, rate, uncertainty, ""
    decided = uncertainty <= max(tolerance, DECISIVE_PART * 2)
    return RIGHT if decided else UNDECIDED, rate, uncertainty, ""
