"""A function at its arguments: called on fresh arrays of its own kind, answered in flat float64 vectors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from numpy_sdpa.gradcheck._arrays import (
    Argument,
    Layout,
    ResultError,
    check_callable,
    coarsest,
    find_arguments,
    random_direction,
    unravel,
)
from numpy_sdpa.gradcheck._central import central
from numpy_sdpa.gradcheck._quotients import NOISE_TIMES, Derivatives, Direction, Line, complex_step
from numpy_sdpa.gradcheck.report import DECISIVE_PART

# What a function may raise beyond its domain, where only the quotient's step has taken it.
DOMAIN_ERRORS = (ValueError, ArithmeticError)


class Point:
    """The arguments of a check: which are differentiated, and fresh copies of them for every call."""

    def __init__(self, args: Any, wrt: Any):
        self.arguments = find_arguments(args, wrt)
        self.args = list(args)

    def fresh(self, moved: dict[int, np.ndarray] | None = None) -> list[Any]:
        """The arguments, some moved. The differentiated ones are copies: a callee may write into them."""
        args = list(self.args)
        for argument in self.arguments:
            args[argument.position] = argument.restore((moved or {}).get(argument.position, argument.point))
        return args

    def tangents(self, which: Argument, vector: np.ndarray) -> tuple[Any, ...]:
        """One tangent per differentiated argument: `vector` for one of them, zeros for the others."""
        return tuple(
            argument.restore(vector.reshape(argument.shape) if argument is which else np.zeros(argument.shape))
            for argument in self.arguments
        )

    def nearby(self, rng: np.random.Generator) -> Iterator[list[Any]]:
        """The arguments at `NOISE_TIMES` along a line, √eps of their size from one to the next."""
        units = [
            argument.precision.eps**0.5
            * argument.size
            * random_direction(rng, argument.point.size).reshape(argument.shape)
            for argument in self.arguments
        ]
        for time in NOISE_TIMES:
            yield self.fresh({a.position: a.point + time * unit for a, unit in zip(self.arguments, units, strict=True)})

    def shrunk(self) -> Iterator[list[Any]]:
        """The arguments scaled down: where a softmax or a tanh is not saturated, and signs are the same."""
        for factor in (0.5, 0.2, 0.05):
            yield self.fresh({argument.position: factor * argument.point for argument in self.arguments})

    def gradients(self, result: Any) -> list[Any]:
        """What a vjp returned, one gradient per argument; a single one may come without its tuple."""
        gradients = list(result) if isinstance(result, tuple | list) else [result]
        if len(gradients) != len(self.arguments):
            positions = ", ".join(str(argument.position) for argument in self.arguments)
            raise ResultError(
                f"vjp returned {len(gradients)} gradients, expected {len(self.arguments)}, one for each of "
                f"arguments {positions}"
            )
        return gradients


class Problem:
    """A function at a point."""

    def __init__(self, function: Callable[..., Any], args: Any, wrt: Any):
        check_callable("function", function)
        self.point = Point(args, wrt)
        self.function = function
        self.raised = ""
        with np.errstate(all="ignore"):
            result = function(*self.point.fresh())
        self.layout = Layout(result, "function")
        self.base = self.layout.flatten(result, "the function's result")
        self.finite = np.isfinite(self.base)
        if self.base.size and not self.finite.any():
            raise ValueError("function must return a finite value somewhere at args; every entry is nan or inf")
        self.base = np.where(self.finite, self.base, 0.0)
        self.resolution = self.layout.per_entry([coarsest([name]).eps for name in self.layout.dtype_names])
        self.precision = coarsest(
            [*(argument.dtype_name for argument in self.point.arguments), *self.layout.dtype_names]
        )

    @property
    def notes(self) -> list[str]:
        """What no verdict shows: entries that no quotient can follow (a log-sum-exp of −inf), and errors."""
        count = int(np.sum(~self.finite))
        left_out = f"{count} entries of the result are not finite and were left out" if count else ""
        return [note for note in (left_out, self.raised) if note]

    def call(self, argument: Argument, point: np.ndarray) -> np.ndarray:
        """The flat result with one argument at `point`: 0 where not finite at args, nan off the domain."""
        try:
            result = self.function(*self.point.fresh({argument.position: point}))
        except DOMAIN_ERRORS as error:
            self.raised = f"function raised {type(error).__name__} at some of the points around args: {error}"
            return np.full(self.base.size, np.nan)
        return np.where(self.finite, self._flat(result), 0.0)

    def call_complex(self, argument: Argument, point: np.ndarray) -> np.ndarray:
        """The same for a complex point; ValueError says what is not analytic about the function."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", np.exceptions.ComplexWarning)
                result = self.function(*self.point.fresh({argument.position: point}))
        except Exception as error:
            raise ValueError(
                f'method="complex" needs a function that accepts complex input; with argument '
                f"{argument.position} complex it raised {type(error).__name__}: {error} "
                f'(use method="central")'
            ) from error
        return np.where(self.finite, self._flat(result, complex_result=True), 0.0)

    def _flat(self, result: Any, complex_result: bool = False) -> np.ndarray:
        try:
            return self.layout.flatten(result, "the function's result", complex_result)
        except ResultError as error:
            raise ValueError(f"function must return the same shapes at every call: {error}") from None

    def cotangents(self, rng: np.random.Generator) -> np.ndarray:
        """`random_cotangents`, zero where the result is not finite."""
        return np.where(self.finite, random_cotangents(self.layout, rng), 0.0)

    def derivatives(
        self,
        argument: Argument,
        directions: list[Direction],
        weights: np.ndarray | None,
        method: str,
        eps: float | None,
        tolerances: tuple[float, float],
        rng: np.random.Generator,
    ) -> Derivatives:
        """(directions, results): the derivative of `weights @ result` along each direction, by the method."""
        line = Line(lambda point: self.call(argument, point), argument, self.base, self.resolution, weights)
        self.raised = ""
        probe = random_direction(rng, argument.point.size)
        if not argument.point.size:
            shape = (len(directions), line.results)
            return Derivatives(np.zeros(shape), np.zeros(shape), np.zeros(shape))
        if method == "complex":
            self._check_analytic(argument, tolerances, probe)
            return complex_step(line, lambda point: self.call_complex(argument, point), directions, eps)
        return central(line, directions, eps, _suffices(*tolerances), probe)

    def _check_analytic(self, argument: Argument, tolerances: tuple[float, float], probe: np.ndarray) -> None:
        """ValueError where complex step and difference quotient contradict each other along one direction."""
        if argument.point.dtype.itemsize > argument.dtype.itemsize and argument.dtype_name != "float32":
            raise ValueError(
                f'method="complex" needs float32 or float64 arguments: argument {argument.position} is '
                f'{argument.dtype_name}, which has no complex dtype (use method="central")'
            )
        line = Line(lambda point: self.call(argument, point), argument, self.base, self.resolution)
        step = complex_step(line, lambda point: self.call_complex(argument, point), [probe], None)
        difference = central(line, [probe], None, _suffices(*tolerances), probe)
        atol, rtol = tolerances
        with np.errstate(all="ignore"):
            allowed = atol + rtol * np.abs(difference.value) + difference.uncertainty + step.uncertainty
            apart = np.abs(step.value - difference.value) > allowed
            # |x| at 0: its quotient is 0 ± 1, its complex step (a real result) 0
            apart |= (difference.jump > 0) & (difference.jump > atol + rtol * np.abs(difference.value))
        if apart.any():
            worst = int(np.argmax(apart[0]))
            raise ValueError(
                f'method="complex" needs an analytic function; in argument {argument.position} the entry '
                f"{self.layout.index(worst)} of the result is not: the complex step gives "
                f"{step.value[0, worst]:.9g}, the difference quotient {difference.value[0, worst]:.9g} "
                f"± {difference.uncertainty[0, worst]:.1g} (an absolute value, a maximum, a conjugate or a "
                f'real part inside; use method="central")'
            )


def _suffices(atol: float, rtol: float) -> Callable[[np.ndarray], np.ndarray]:
    """The uncertainty that decides every entry: the largest tolerance, or half of what is decisive."""

    def suffices(value: np.ndarray) -> np.ndarray:
        scale = np.max(np.abs(value[np.isfinite(value)]), initial=0.0)
        return np.full(value.shape, atol + min(rtol, DECISIVE_PART / 2) * scale)

    return suffices


def random_cotangents(layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """(outputs, entries): a random upstream gradient for each output, zero for the others."""
    rows = np.zeros((layout.outputs, layout.size))
    for output, row in enumerate(rows):
        part = layout.part(output)
        row[part] = random_direction(rng, layout.sizes[output])
        row[:] = layout.flatten(layout.unflatten(row), "a cotangent")
    return rows


def choose_directions(argument: Argument, kind: str, rng: np.random.Generator) -> list[Direction]:
    """Every entry of the argument, or one random direction, rounded to the argument's dtype."""
    if kind == "all":
        return list(range(argument.point.size))
    return [argument.rounded(random_direction(rng, argument.point.size)).astype(float)]


def direction_vector(argument: Argument, direction: Direction) -> np.ndarray:
    if isinstance(direction, np.ndarray):
        return direction
    vector = np.zeros(argument.point.size)
    vector[direction] = 1.0
    return vector


def entry_index(argument: Argument, direction: Direction) -> tuple[int, ...] | None:
    return None if isinstance(direction, np.ndarray) else unravel(direction, argument.shape)
