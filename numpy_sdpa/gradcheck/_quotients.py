"""Derivatives of any function along lines: difference quotients, complex steps, and how far to trust them.

A difference quotient has two errors. What the series leaves out, SciPy estimates by comparing two step sizes.
What the function itself loses to rounding is measured here, from values so close together that only rounding
tells them from a smooth curve. The uncertainty that the checks report is the sum of both, and of the jump of
the slope at the point, if the function has a kink there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from numpy_sdpa.gradcheck._arrays import Argument, unit_of

# The entries of one gradient come from the same intermediate sums, so that each may be off by some roundings
# of the largest. A quotient is never that exact, a complex step and a product with a tangent are. In 600
# random functions, with tanh and softmax saturated in many, a right gradient was off by 30 of them at most.
SHARED_ROUNDINGS = 40.0
# SciPy's error estimate is the difference of the last two quotients; in a trial over many functions it was at
# times too small, and ten times it was not.
ERROR_FACTOR = 10.0
# The noise of a quotient, in standard deviations. The standard deviation is measured with 15 degrees of
# freedom: Student's t leaves 2e-5 of the quotients of pure noise outside.
NOISE_FACTOR = 6.0
NOISE_TIMES = np.arange(20) - 9.5
_NOISE_DEGREE = 4  # 20 points less 5 coefficients: 15 degrees of freedom
# Where a quotient's polynomial is tried: between two of its points, where no period that they share leads.
# Its error there, per step, is 1.4 times the slope's at order 8, of which SciPy's estimate is 256 times.
_BETWEEN = 0.3717
# Rough: scatter beyond what thirty roundings explain, and more than a part of the function's change. At
# 1e-3 a quotient is uncertain by a tenth of its slope or more.
_ROUGH_ROUNDINGS = 30.0
_ROUGH_PART = 1e-3
# At 1e-10 SciPy stops within two or three halvings on a smooth function; what it has not reached in ten it
# will not.
_SCIPY_RTOL = 1e-10
_MAX_HALVINGS = 10
# A step below four spacings of the numbers around x is no longer the step that was asked for.
_SPACINGS = 4.0

Direction = int | np.ndarray  # one entry of the flat argument, or a vector of the argument's size


class Derivatives(NamedTuple):
    """All (directions, results). `uncertainty` is inf where there is no value; `jump`, a part of it, is half
    the jump of the slope at a kink."""

    value: np.ndarray
    uncertainty: np.ndarray
    jump: np.ndarray


class Line:
    """A function near one argument's point: the change `weights @ (f(x + t · direction) − f(x))`.

    Parameters
    ----------
    evaluate : callable
        The flat result at a point, an array shaped like the argument.
    argument : Argument
        The argument that moves.
    base, resolution : (entries,) arrays
        The flat result at the argument's point, and the eps of each entry's dtype.
    weights : (results, entries) array, optional
        Without it every entry of the result is followed by itself.
    """

    def __init__(
        self,
        evaluate: Callable[[np.ndarray], np.ndarray],
        argument: Argument,
        base: np.ndarray,
        resolution: np.ndarray,
        weights: np.ndarray | None = None,
    ):
        self.evaluate = evaluate
        self.argument = argument
        self.base = base
        self.resolution = resolution
        self.weights = weights

    @property
    def results(self) -> int:
        return self.base.size if self.weights is None else self.weights.shape[0]

    def moved(self, direction: Direction, t: float | complex) -> np.ndarray:
        point = self.argument.point
        if isinstance(direction, np.ndarray):
            return point + t * direction.reshape(point.shape)
        moved = point.astype(np.result_type(point, type(t)), order="C")
        moved.reshape(-1)[direction] += t  # moved is contiguous, the reshape is a view
        return moved

    def entry_changes(self, direction: Direction, t: float) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.evaluate(self.moved(direction, t)) - self.base

    def project(self, changes: np.ndarray) -> np.ndarray:
        if self.weights is None:
            return changes
        with np.errstate(all="ignore"):
            return self.weights @ changes

    def project_deviations(self, deviations: np.ndarray) -> np.ndarray:
        """The standard deviation of each result from those of the entries, which are independent."""
        if self.weights is None:
            return deviations
        unit = unit_of(deviations)
        return unit * np.sqrt(self.weights**2 @ (deviations / unit) ** 2)

    def change(self, direction: Direction, t: float) -> np.ndarray:
        return self.project(self.entry_changes(direction, t))

    @property
    def magnitudes(self) -> np.ndarray:
        """|x|, flat; 0 for entries that are nan or inf, which no step moves."""
        point = self.argument.point.reshape(-1).astype(float)
        return np.where(np.isfinite(point), np.abs(point), 0.0)

    def smallest_step(self, direction: Direction) -> float:
        """Below this step the argument's own dtype rounds too much of the step away."""
        precision = self.argument.precision
        spacing = np.maximum(precision.eps * self.magnitudes, precision.smallest_subnormal)
        if isinstance(direction, np.ndarray):
            return _SPACINGS * float(np.max(spacing / np.abs(direction), initial=0.0))
        return _SPACINGS * float(spacing[direction])

    def rounding(self, step: np.ndarray, reach: np.ndarray) -> np.ndarray:
        """The standard deviation of each result's rounding, every entry rounded once: eps · |f| / √12.

        An entry that is the same at ± `step` and ± `reach`, a vector beyond every step that will be taken, is
        a constant, without noise. One that changes at `reach` only is flat to its last digit near the point;
        what hides below that digit is then part of the uncertainty.
        """
        changes = np.array([self.entry_changes(vector, t) for vector in (step, reach) for t in (-1.0, 1.0)])
        with np.errstate(all="ignore"):
            nearby = np.abs(self.base + changes[:2])
            size = np.fmax(np.fmax(*nearby), np.abs(self.base))  # fmax: a nan beyond the domain says nothing
            rounding = np.where(np.all(changes == 0, axis=0), 0.0, self.resolution * size) / np.sqrt(12.0)
        return self.project_deviations(rounding)

    def measured_noise(self, scale: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The standard deviation of each result about a smooth curve, by steps too small to show a shape.

        `known` is the noise of every entry that larger steps have shown: a function rounded coarser than
        its dtype (float32 inside) looks flat to small ones. It comes back with what these steps add to it.
        """
        root = self.argument.precision.eps**0.5
        # steps of four spacings at least: where x absorbs the steps, the function seems to have no noise
        least = _SPACINGS * root * self.magnitudes
        unit = root * np.copysign(np.maximum(np.abs(scale), least), scale)
        entries = np.array([self.entry_changes(unit, time) for time in NOISE_TIMES])
        flat = np.mean(np.diff(entries, axis=0) == 0, axis=0) > 0.25
        hidden = self.project_deviations(np.where(flat, known, 0.0))
        seen = noise_of(np.array([self.project(changes) for changes in entries]))
        each = noise_of(entries)
        return np.hypot(seen, hidden), np.where(np.isfinite(each), np.maximum(each, known), known)


def noise_of(values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """The standard deviation of values at `NOISE_TIMES` about the quartic through them; inf where not finite.

    With √eps of the argument's size between two of them, a quartic leaves eps ** 2.5 of a smooth function,
    and each step is still 1 / √eps roundings of the argument: what is left is the noise.
    """
    series = np.array(values)
    basis = np.linalg.qr(np.polynomial.legendre.legvander(NOISE_TIMES / NOISE_TIMES[-1], _NOISE_DEGREE)).Q
    with np.errstate(all="ignore"):
        residual = series - basis @ (basis.T @ series)
        noise = np.sqrt(np.sum(residual**2, axis=0) / (NOISE_TIMES.size - _NOISE_DEGREE - 1))
    return np.where(np.isfinite(noise), noise, np.inf)


def without_a_curve(
    noise: np.ndarray, rounding: np.ndarray, values: np.ndarray, part: float = _ROUGH_PART
) -> np.ndarray:
    """Where a function is so rough over these values that no step of this size says anything about its slope.

    A sine of 10⁸ looks like noise to steps of 10⁷, and its quotients are small and agree. Roughness that
    rounding explains is another matter: the sum of a softmax is rough as well, and its slope is 0.
    """
    with np.errstate(all="ignore"):
        return (noise > _ROUGH_ROUNDINGS * rounding) & (noise > part * np.max(np.abs(values), axis=0))


class Stencil(NamedTuple):
    """Weights for the points ± h, ± h/2, ± h/4 … that SciPy's central quotient of this order uses.

    The value at h · _BETWEEN of the polynomial through all of them is Σ between_weights · (f − f(0)).
    slope = Σ slope_weights · (f(+) − f(−)) / 2h, half_jump = Σ jump_weights · (f(+) + f(−) − 2 f(0)) / 2h
    """

    nodes: np.ndarray
    slope_weights: np.ndarray
    jump_weights: np.ndarray
    between_weights: np.ndarray

    @property
    def slope_noise(self) -> float:
        """Standard deviation of slope · h where every f has standard deviation 1."""
        return float(np.sqrt(np.sum(self.slope_weights**2) / 2))

    @property
    def jump_noise(self) -> float:
        """The same of half_jump; f(0) is common to all its terms."""
        return float(np.sqrt(np.sum(self.jump_weights**2) / 2 + np.sum(self.jump_weights) ** 2))

    @property
    def between_noise(self) -> float:
        """The same of what is missed between the points; f there has noise of its own."""
        return float(np.sqrt(np.sum(self.between_weights**2) + 1))


@lru_cache
def stencil(order: int) -> Stencil:
    count = order // 2
    nodes = 0.5 ** np.arange(count)
    odd = np.array([nodes ** (2 * power + 1) for power in range(count)])  # (f(+) − f(−)) / 2 has h, h³, h⁵ …
    even = np.array([nodes] + [nodes ** (2 * power) for power in range(1, count)])  # a kink: h; a curve: h², h⁴ …
    first = np.eye(count)[0]
    powers = np.arange(1, 2 * count + 1)
    signed = np.concatenate([nodes, -nodes])
    between = np.linalg.solve(signed ** powers[:, None], _BETWEEN**powers)
    return Stencil(nodes, np.linalg.solve(odd, first), np.linalg.solve(even, first), between)


def scipy_quotients(
    line: Line, directions: list[Direction], steps: np.ndarray, smallest: np.ndarray, noise: np.ndarray
) -> Derivatives:
    """SciPy's quotients from one initial step per direction: of all its halvings the most certain.

    SciPy returns its last halving. In a narrow dtype the one before is often better, and always as honest.
    """
    from scipy.differentiate import derivative

    weights = stencil(line.argument.precision.order)
    samples = Samples(line, directions)
    elements = np.arange(len(directions) * line.results)
    of_direction, of_result = np.divmod(elements, line.results)
    noise_each = noise[of_result]
    shape = (len(directions), line.results)
    best = Derivatives(np.full(shape, np.nan), np.full(shape, np.inf), np.zeros(shape))
    value, uncertainty, jumps = (array.reshape(-1) for array in best)  # views

    def keep_best(state) -> None:
        if np.max(state.nit) < 2:  # one quotient has nothing to be compared with
            return
        step = steps[of_direction] / 2.0 ** (state.nit - 1)
        with np.errstate(all="ignore"):
            deviation = weights.slope_noise * noise_each / step
            newest = state.nit == np.max(state.nit)
            jump, missed = np.zeros(shape), np.zeros(shape)
            for d in np.unique(of_direction[newest]):
                outermost = steps[d] / 2.0 ** (np.max(state.nit) - 1)
                jump[d] = samples.half_jump(d, outermost, weights)
                missed[d] = samples.missed(d, outermost, weights)
            # noise tells two quotients apart as well: only what it does not explain shows the series' rest
            unexplained = np.maximum(0.0, state.error - 2 * deviation)
            found = ERROR_FACTOR * unexplained + NOISE_FACTOR * deviation + jump.ravel()
            innermost = step * weights.nodes[-1]
            explained = unexplained + NOISE_FACTOR * weights.between_noise * noise_each / step + jump.ravel()
            # Steps too large for a function: its quotients still move by a good part of themselves, or the
            # polynomial through the points misses it between them.
            unresolved = (unexplained > np.abs(state.df) / 10) | ~(missed.ravel() <= explained)
        found[unresolved | (innermost < smallest[of_direction])] = np.inf
        better = newest & (found < uncertainty)
        # what noise may feign widens the uncertainty, but is not reported as a kink
        feigned = NOISE_FACTOR * weights.jump_noise * noise_each / step
        seen = np.where(jump.ravel() > feigned, jump.ravel(), 0.0)
        for kept, new in ((value, state.df), (uncertainty, found), (jumps, seen)):
            kept[better] = new[better]
        # the next halving doubles the noise
        promising = (2 * NOISE_FACTOR * deviation < uncertainty) & (innermost / 2 >= smallest[of_direction])
        if not promising.any():
            raise StopIteration

    with np.errstate(all="ignore"):
        derivative(
            lambda t, element: samples.take(t, of_direction[element], of_result[element]),
            np.zeros(elements.size),
            args=(elements,),
            initial_step=steps[of_direction],
            order=line.argument.precision.order,
            tolerances={"rtol": _SCIPY_RTOL},
            maxiter=_MAX_HALVINGS,
            callback=keep_best,
        )
    return best


class Samples:
    """The function along every direction, called once for each point: SciPy asks for results one by one."""

    def __init__(self, line: Line, directions: list[Direction]):
        self.line = line
        self.directions = directions
        self.seen: dict[tuple[int, float], np.ndarray] = {}

    def at(self, direction: int, t: float) -> np.ndarray:
        if t == 0:
            return np.zeros(self.line.results)
        if (direction, t) not in self.seen:
            self.seen[direction, t] = self.line.change(self.directions[direction], t)
        return self.seen[direction, t]

    def take(self, t: np.ndarray, direction: np.ndarray, result: np.ndarray) -> np.ndarray:
        """The results numbered `result` along `direction` at `t`; rows of one direction share their steps."""
        rows = t.reshape(t.shape[0], -1)
        direction, result = direction.reshape(-1), result.reshape(-1)
        values = np.empty(rows.shape)
        starts = np.flatnonzero(np.diff(direction, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], direction.size], strict=True):
            changes = np.array([self.at(int(direction[start]), float(point)) for point in rows[start]])
            values[start:stop] = changes[:, result[start:stop]].T
        return values.reshape(t.shape)

    def missed(self, direction: int, step: float, weights: Stencil) -> np.ndarray:
        """How far the function is, between the points, from the polynomial through them, per step.

        Halved steps can agree on a slope that is not there, as those do that are nearly periods of a sine.
        """
        points = [self.at(direction, h) for h in step * np.concatenate([weights.nodes, -weights.nodes])]
        between = self.at(direction, step * _BETWEEN)
        return np.abs(weights.between_weights @ np.array(points) - between) / step

    def half_jump(self, direction: int, step: float, weights: Stencil) -> np.ndarray:
        """Half the jump of the slope at the point, 0 where what is seen is curvature.

        A central quotient of |x| at 0 is 0, without any error; only the values' mean above f(0) shows the
        kink: it shrinks with h there, and with h² where the function is smooth.
        """
        means = [(self.at(direction, h) + self.at(direction, -h)) / 2 for h in step * weights.nodes]
        jump = np.abs(weights.jump_weights @ np.array(means)) / step
        innermost = np.abs(means[-1]) / (step * weights.nodes[-1])  # at a kink this is the jump
        return np.where(jump > innermost / 2, jump, 0.0)


def complex_step(
    line: Line,
    evaluate_complex: Callable[[np.ndarray], np.ndarray],
    directions: list[Direction],
    eps: float | None,
) -> Derivatives:
    """Im f(x + i · step · direction) / step: no difference, no cancellation; right for analytic functions.

    The step may be as small as one likes (Squire and Trapp, 1998, doi:10.1137/S003614459631241X). Four steps
    that are no powers of two apart round differently, and show what the function loses to rounding.
    """
    argument = line.argument
    # its square, relative to the argument, is the error: below eps² / 10⁶, and far above the smallest float32
    step = argument.precision.eps / 1024 * argument.size if eps is None else eps
    shape = (len(directions), line.results)
    found = Derivatives(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    if not found.value.size:
        return found
    moves = np.zeros(line.base.size, dtype=bool)
    for row, direction in enumerate(directions):
        with np.errstate(all="ignore"):
            slopes = [
                evaluate_complex(line.moved(direction, 1j * part * step)).imag / (part * step)
                for part in (1.0, 1.25, 1.5, 1.75)
            ]
            results = np.array([line.project(slope) for slope in slopes])
        moves |= slopes[0] != 0
        found.value[row] = np.mean(results, axis=0)
        rounding = line.project_deviations(line.resolution * np.abs(slopes[0]))
        found.uncertainty[row] = NOISE_FACTOR * (np.std(results, axis=0, ddof=1) + rounding)
    # A gradient in floating point is not that exact: it shares roundings of its largest entry, and those of
    # the function itself (1 − tanh² has lost its digits where tanh is 1). A function that never moves loses
    # nothing.
    noise = line.project_deviations(np.where(moves, line.resolution * np.abs(line.base), 0.0))
    shared = argument.precision.eps * np.max(np.abs(found.value), axis=0) + noise / argument.size
    return found._replace(uncertainty=found.uncertainty + SHARED_ROUNDINGS * shared)
