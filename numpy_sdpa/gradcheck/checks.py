"""The four checks: `check_vjp`, `check_jvp`, `check_adjoint` and `check_taylor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from numpy_sdpa.gradcheck._arrays import (
    Argument,
    Layout,
    ResultError,
    check_callable,
    check_choice,
    check_number,
    coarsest,
    generator,
    host_of,
    unravel,
)
from numpy_sdpa.gradcheck._problem import (
    DOMAIN_ERRORS,
    Point,
    Problem,
    choose_directions,
    direction_vector,
    entry_index,
    random_cotangents,
)
from numpy_sdpa.gradcheck._quotients import NOISE_FACTOR, SHARED_ROUNDINGS, Derivatives, Direction, noise_of
from numpy_sdpa.gradcheck._taylor import taylor_rows, worst_of
from numpy_sdpa.gradcheck.report import (
    DECISIVE_PART,
    RIGHT,
    GradientReport,
    GradientRow,
    judge,
    wrong_structure,
)


def check_vjp(
    function: Callable[..., Any],
    vjp: Callable[..., Any],
    args: Sequence[Any],
    *,
    wrt: Sequence[int] | int | None = None,
    method: str = "central",
    direction: str = "all",
    eps: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    rng: Any = None,
    raise_exception: bool = True,
) -> GradientReport:
    """Is this hand-written backward right, and if not, where?

    With a random upstream gradient v for each output, every gradient is compared with the derivative of
    ⟨v, function⟩: ``expected[j] = d/dt ⟨v, function(x + t e_j)⟩`` at t = 0, ``got = vjp(v, *args)``.

    Parameters
    ----------
    function : callable
        `function(*args)` returns a real floating array or a tuple of them. It is called in the arguments' own
        shapes, dtypes and array module, on fresh copies.
    vjp : callable
        `vjp(grad_output, *args)` returns one gradient per argument of `wrt`, in order, each shaped like its
        argument. `grad_output` is like the result of `function`: an array, or a tuple of arrays (one of them
        random, the others zero, so that a fault shows which output it belongs to).
    args : tuple or list
        The arguments. Integers, bools, None and everything else that is not differentiated is passed on as it
        is.
    wrt : sequence of int, optional
        Positions of the arguments to differentiate. Default: all floating arrays (a Python float only if
        named).
    method : {"central", "complex"}
        Central differences, or a complex step, exact to rounding but for functions that are analytic and
        accept complex arguments only.
    direction : {"all", "random"}
        Each entry of each argument on its own, or one random direction per argument. A random direction finds
        an entry that is wrong by more than ten times the tolerance as surely (no component is below 1/2) but
        not where.
    eps : float, optional
        Initial step of the central difference (halved up to ten times), or the complex step. Default: from
        the argument's size and dtype.
    atol, rtol : float, optional
        Right means |got − expected| ≤ atol + rtol · |expected| + uncertainty. Defaults by the coarsest dtype
        of arguments and results: rtol 1e-7 in float64, 1e-4 in float32, 1e-2 in float16, 5e-2 in bfloat16;
        atol 0 in float64, else the dtype's smallest normal number.
    rng : numpy.random.Generator or seed, optional
        Default: the same draw every time.
    raise_exception : bool
        Whether a report that has not passed is raised.

    Returns
    -------
    GradientReport
        One row per argument of `wrt`. With several outputs `worst_index` starts with the output's number.

    Raises
    ------
    AssertionError
        With the whole report, unless every gradient is right. NaN, wrong shapes and missing gradients are
        wrong.
    TypeError, ValueError
        For arguments that cannot be checked; the text says which, what was expected and what came.

    Notes
    -----
    Entries of the result that are not finite at `args` are left out: their upstream gradient is 0.

    Examples
    --------
    >>> import numpy as np
    >>> from numpy_sdpa.gradcheck import check_vjp
    >>> x = np.array([0.5, 1.0])
    >>> check_vjp(np.sin, lambda grad, x: grad * np.cos(x), (x,)).passed
    True
    """
    check_callable("vjp", vjp)
    check_choice("method", method, ("central", "complex"))
    check_choice("direction", direction, ("all", "random"))
    eps = check_number("eps", eps, "above 0")
    rng = generator(rng)
    problem = Problem(function, args, wrt)
    tolerances = _tolerances(problem.precision.atol, problem.precision.rtol, atol, rtol)
    cotangents = problem.cotangents(rng)
    gradients = [_gradients(vjp, problem.point, problem.layout, row) for row in cotangents]
    rows = []
    for number, argument in enumerate(problem.point.arguments):
        directions = choose_directions(argument, direction, rng)
        try:
            got = np.array([_gradient(given, number, argument) for given in gradients])
        except ResultError as error:
            rows.append(wrong_structure(argument.position, str(error)))
            continue
        found = problem.derivatives(argument, directions, cotangents, method, eps, tolerances, rng)
        expected, uncertainty = found.value.T, found.uncertainty.T
        note = _notes(problem, found)
        if direction == "random":
            with np.errstate(all="ignore"):
                along = got * directions[0]
            # the sum over the gradient's own entries adds their roundings
            uncertainty = uncertainty + _sum_rounding(along, problem.precision.eps)[:, None]
            got = _sum(along)
        else:
            note = [*note, _transposition(expected, got, argument)]
        rows.append(
            judge(
                argument.position,
                expected,
                got,
                uncertainty,
                atol=tolerances[0],
                rtol=tolerances[1],
                index=_gradient_index(problem.layout, argument, len(directions), direction),
                note="; ".join(filter(None, note)),
            )
        )
    words = {"central": "central differences", "complex": "complex steps"}[method]
    return _finished("check_vjp", f"{words}, {_DIRECTIONS[direction]}", rows, raise_exception)


def check_jvp(
    function: Callable[..., Any],
    jvp: Callable[..., Any],
    args: Sequence[Any],
    *,
    wrt: Sequence[int] | int | None = None,
    method: str = "central",
    direction: str = "all",
    eps: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    rng: Any = None,
    raise_exception: bool = True,
) -> GradientReport:
    """Is this hand-written forward-mode derivative right, and if not, where?

    `expected` is d/dt function(x + t u) at t = 0, `got` is `jvp(u, *args)`, for every entry of the result.

    Parameters
    ----------
    function, args, wrt, method, eps, atol, rtol, rng, raise_exception
        As in `check_vjp`.
    jvp : callable
        `jvp(tangents, *args)` returns the result's tangent, laid out like the result; `tangents` is a tuple
        with one array for each argument of `wrt`, shaped like it.
    direction : {"all", "random"}
        Each entry of each argument on its own, or one random direction per argument. The direction is zero in
        all arguments but one.

    Returns
    -------
    GradientReport
        One row per argument of `wrt`. `worst_index` is an index of the result, after the output's number
        where there are several; `direction_index` is the entry that moved.

    Raises
    ------
    AssertionError, TypeError, ValueError
        As in `check_vjp`.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([0.5, 1.0])
    >>> check_jvp(np.sin, lambda tangents, x: np.cos(x) * tangents[0], (x,)).passed
    True
    """
    check_callable("jvp", jvp)
    check_choice("method", method, ("central", "complex"))
    check_choice("direction", direction, ("all", "random"))
    eps = check_number("eps", eps, "above 0")
    rng = generator(rng)
    problem = Problem(function, args, wrt)
    tolerances = _tolerances(problem.precision.atol, problem.precision.rtol, atol, rtol)
    kept = np.flatnonzero(problem.finite)
    rows = []
    for argument in problem.point.arguments:
        directions = choose_directions(argument, direction, rng)
        try:
            tangents = [_tangent(jvp, problem.point, argument, d, problem.layout) for d in directions]
        except ResultError as error:
            rows.append(wrong_structure(argument.position, str(error)))
            continue
        found = problem.derivatives(argument, directions, None, method, eps, tolerances, rng)
        got = np.array(tangents).reshape(len(directions), problem.base.size)
        rows.append(
            judge(
                argument.position,
                found.value[:, kept],
                got[:, kept],
                found.uncertainty[:, kept],
                atol=tolerances[0],
                rtol=tolerances[1],
                index=_tangent_index(problem.layout, argument, directions, kept),
                note="; ".join(_notes(problem, found)),
            )
        )
    words = {"central": "central differences", "complex": "complex steps"}[method]
    return _finished("check_jvp", f"{words}, {_DIRECTIONS[direction]}", rows, raise_exception)


def check_adjoint(
    jvp: Callable[..., Any],
    vjp: Callable[..., Any],
    args: Sequence[Any],
    *,
    wrt: Sequence[int] | int | None = None,
    direction: str = "all",
    atol: float | None = None,
    rtol: float | None = None,
    rng: Any = None,
    raise_exception: bool = True,
) -> GradientReport:
    """Are a jvp and a vjp of the same function adjoint: ⟨v, J u⟩ = ⟨Jᵀ v, u⟩?

    No difference quotient is taken, so this is exact to rounding; but where both make the same mistake it
    sees nothing.

    Parameters
    ----------
    jvp, vjp : callable
        As in `check_jvp` and `check_vjp`. `expected` is ⟨v, jvp(u)⟩, `got` is ⟨vjp(v), u⟩.
    args, wrt, direction, atol, rng, raise_exception
        As in `check_jvp`.
    rtol : float, optional
        Default: eps ** 0.75 of the coarsest dtype, 2e-12 in float64 and 6e-6 in float32: two exact
        derivatives differ by their rounding only, and a fourth of the digits is left to it.

    Returns
    -------
    GradientReport
        One row per argument of `wrt`; `worst_index` as in `check_vjp`.

    Raises
    ------
    AssertionError, TypeError, ValueError
        As in `check_vjp`.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([0.5, 1.0])
    >>> check_adjoint(lambda t, x: np.cos(x) * t[0], lambda grad, x: grad * np.cos(x), (x,)).passed
    True
    """
    check_callable("jvp", jvp)
    check_callable("vjp", vjp)
    check_choice("direction", direction, ("all", "random"))
    rng = generator(rng)
    point = Point(args, wrt)
    first = point.arguments[0]
    layout = Layout(jvp(point.tangents(first, np.zeros(first.point.size)), *point.fresh()), "jvp")
    precision = coarsest([*(argument.dtype_name for argument in point.arguments), *layout.dtype_names])
    tolerances = _tolerances(precision.atol, precision.eps**0.75, atol, rtol)
    cotangents = random_cotangents(layout, rng)
    gradients = [_gradients(vjp, point, layout, row) for row in cotangents]
    around = [_gradients_elsewhere(vjp, point, layout, row, point.nearby(rng)) for row in cotangents]
    shrunk = [_gradients_elsewhere(vjp, point, layout, row, point.shrunk()) for row in cotangents]
    rows = []
    for number, argument in enumerate(point.arguments):
        directions = choose_directions(argument, direction, rng)
        vectors = np.array([direction_vector(argument, d) for d in directions])
        vectors = vectors.reshape(len(directions), argument.point.size)
        try:
            tangents = np.array([_tangent(jvp, point, argument, d, layout) for d in directions])
            given = np.array([_gradient(given, number, argument) for given in gradients])
            _refuse_nan(tangents)
        except ResultError as error:
            rows.append(wrong_structure(argument.position, str(error)))
            continue
        with np.errstate(all="ignore"):
            left = cotangents[:, None, :] * tangents.reshape(1, len(directions), layout.size)
            right = given[:, None, :] * vectors
            noise = np.array([noise_of(_along(line, number, argument, vectors)) for line in around])
            sizes = np.array([np.abs(_along(line, number, argument, vectors)) for line in shrunk])
        # Both sides are sums, both are as noisy as the gradient is seen to be, and where that is smooth
        # because it has lost its digits (a softmax that is 1), its entries still share roundings of the
        # largest, here or around.
        expected = _sum(left)
        largest = np.max(np.abs(expected), axis=1, initial=0.0)
        largest = np.fmax(largest, np.max(np.nan_to_num(sizes, posinf=0.0), axis=(1, 2), initial=0.0))
        # In float16, forty of them would decide every verdict: there a quarter of what is decisive has to
        # suffice.
        shared = min(SHARED_ROUNDINGS * precision.eps, DECISIVE_PART / 4) * largest[:, None]
        rounding = _sum_rounding(left, precision.eps) + _sum_rounding(right, precision.eps) + shared
        rows.append(
            judge(
                argument.position,
                expected,
                _sum(right),
                NOISE_FACTOR * np.sqrt(2) * noise + rounding,
                atol=tolerances[0],
                rtol=tolerances[1],
                index=_gradient_index(layout, argument, len(directions), direction),
            )
        )
    return _finished("check_adjoint", f"⟨v, J u⟩ = ⟨Jᵀ v, u⟩, {_DIRECTIONS[direction]}", rows, raise_exception)


def check_taylor(
    function: Callable[..., Any],
    jvp: Callable[..., Any],
    args: Sequence[Any],
    *,
    wrt: Sequence[int] | int | None = None,
    direction: str = "random",
    eps: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    rng: Any = None,
    raise_exception: bool = True,
) -> GradientReport:
    """Does ‖f(x + h u) − f(x) − h J u‖ fall like h², as it does for the derivative J u and for nothing else?

    The remainder (the larger of those at h and −h) is taken at halving steps. A right tangent leaves the
    rate 2 (or more), a wrong one the rate 1. Where the function is linear in an argument the remainder is
    rounding at every step: that is exact, rate inf.

    Parameters
    ----------
    function, jvp, args, wrt, rng, raise_exception
        As in `check_jvp`.
    direction : {"random", "all"}
        One random direction per argument (the default: one table of remainders to read), or every entry on
        its own.
    eps : float, optional
        The largest step. Default: from the argument's size and dtype.
    atol, rtol : float, optional
        The rate is right where it is at least 2 − (atol + 2 rtol) − uncertainty. Defaults 0 and 0.1: rate 2
        is reached in the limit only, and 1.8 is far from 1.

    Returns
    -------
    GradientReport
        One row per argument of `wrt`: `expected` is 2, `got` the rate at the smallest steps whose remainder
        stands clear of rounding, for the output with the worst rate; `steps`, `remainders` and `rates` are
        printed below the table. With several outputs `worst_index` holds the output's number.

    Raises
    ------
    AssertionError, TypeError, ValueError
        As in `check_vjp`.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([0.5, 1.0])
    >>> round(check_taylor(np.sin, lambda tangents, x: np.cos(x) * tangents[0], (x,), rng=0).rows[0].got, 1)
    2.0
    """
    check_callable("jvp", jvp)
    check_choice("direction", direction, ("all", "random"))
    eps = check_number("eps", eps, "above 0")
    rng = generator(rng)
    problem = Problem(function, args, wrt)
    atol, rtol = _tolerances(0.0, 0.1, atol, rtol)
    rows = []
    for argument in problem.point.arguments:
        directions = choose_directions(argument, direction, rng)
        try:
            tangents = [_tangent(jvp, problem.point, argument, d, problem.layout) for d in directions]
            for tangent in tangents:
                _refuse_nan(tangent[problem.finite])
        except ResultError as error:
            rows.append(wrong_structure(argument.position, str(error)))
            continue
        candidates = taylor_rows(problem, argument, directions, tangents, eps, atol + 2 * rtol, rng)
        nothing = GradientRow(argument.position, RIGHT, expected=2.0, got=np.inf)  # an argument without entries
        rows.append(worst_of(candidates or [nothing]))
    return _finished("check_taylor", f"remainders at halving steps, {_DIRECTIONS[direction]}", rows, raise_exception)


_DIRECTIONS = {"all": "every entry", "random": "a random direction"}


def _tolerances(
    default_atol: float, default_rtol: float, atol: float | None, rtol: float | None
) -> tuple[float, float]:
    atol = check_number("atol", atol, "at least 0")
    rtol = check_number("rtol", rtol, "at least 0")
    return (default_atol if atol is None else atol, default_rtol if rtol is None else rtol)


def _gradients(
    vjp: Callable[..., Any],
    point: Point,
    layout: Layout,
    cotangent: np.ndarray,
    args: list[Any] | None = None,
) -> list[Any] | ResultError:
    """The gradients at `args` (default: the point), or what is wrong with all of them."""
    try:
        return point.gradients(vjp(layout.unflatten(cotangent), *(point.fresh() if args is None else args)))
    except ResultError as error:
        return error


def _gradients_elsewhere(
    vjp: Callable[..., Any], point: Point, layout: Layout, cotangent: np.ndarray, places: Iterable[list[Any]]
) -> list[list[Any] | ResultError]:
    """The gradients at other arguments; beyond its domain a vjp may raise."""
    found: list[list[Any] | ResultError] = []
    for args in places:
        try:
            with np.errstate(all="ignore"):
                found.append(_gradients(vjp, point, layout, cotangent, args))
        except DOMAIN_ERRORS as error:
            found.append(ResultError(str(error)))
    return found


def _along(line: list[Any], number: int, argument: Argument, vectors: np.ndarray) -> np.ndarray:
    """(places, directions): one argument's gradient at several places, along each direction; nan for none."""
    rows = []
    for given in line:
        try:
            rows.append(vectors @ _gradient(given, number, argument))
        except ResultError:
            rows.append(np.full(len(vectors), np.nan))
    return np.array(rows)


def _gradient(given: list[Any] | ResultError, number: int, argument: Argument) -> np.ndarray:
    """One argument's gradient as a flat float64 vector."""
    if isinstance(given, ResultError):
        raise given
    return host_of(given[number], argument.shape, "it").ravel()


def _tangent(
    jvp: Callable[..., Any], point: Point, argument: Argument, direction: Direction, layout: Layout
) -> np.ndarray:
    """The result's tangent in this direction as a flat float64 vector."""
    tangents = point.tangents(argument, direction_vector(argument, direction))
    return layout.flatten(jvp(tangents, *point.fresh()), "it")


def _refuse_nan(tangent: np.ndarray) -> None:
    if np.isnan(tangent).any():
        raise ResultError("the tangent has nan in it")


def _sum(terms: np.ndarray) -> np.ndarray:
    """The sum over the last axis; inf − inf is nan, quietly: nan is wrong."""
    with np.errstate(all="ignore"):
        return np.sum(terms, axis=-1)


def _sum_rounding(terms: np.ndarray, eps: float) -> np.ndarray:
    """What a sum over the last axis may be off by, every term rounded on its own: six standard deviations."""
    largest = np.max(np.abs(terms), axis=-1, initial=0.0)
    with np.errstate(all="ignore"):
        scaled = terms / np.where(largest > 0, largest, 1.0)[..., None]  # the square of a large term overflows
        return NOISE_FACTOR * eps / np.sqrt(12) * largest * np.sqrt(np.sum(scaled**2, axis=-1))


def _notes(problem: Problem, found: Derivatives) -> list[str]:
    """What the numbers of a row cannot say."""
    largest = np.max(np.abs(found.value[np.isfinite(found.value)]), initial=0.0)
    kink = np.any(found.jump > DECISIVE_PART * largest)
    return [*problem.notes, *(["the slope jumps there: a kink"] if kink else [])]


def _transposition(expected: np.ndarray, got: np.ndarray, argument: Argument) -> str:
    """Says so where the gradient is the transpose of what is expected."""
    shape = argument.shape
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] == 1:
        return ""
    matrices = expected.reshape(-1, *shape)
    swapped = np.swapaxes(got.reshape(-1, *shape), -1, -2)
    scale = np.max(np.abs(matrices[np.isfinite(matrices)]), initial=0.0)
    alike = np.all(np.abs(swapped - matrices) <= DECISIVE_PART * scale)
    symmetric = np.all(np.abs(np.swapaxes(matrices, -1, -2) - matrices) <= DECISIVE_PART * scale)
    return "got is the transpose of expected" if alike and not symmetric else ""


def _gradient_index(
    layout: Layout, argument: Argument, directions: int, kind: str
) -> Callable[[int], dict[str, tuple[int, ...]]]:
    """Places of values laid out (outputs, directions): the output's number if several, then the entry."""

    def index(flat: int) -> dict[str, tuple[int, ...]]:
        output, direction = divmod(flat, directions)
        entry = unravel(direction, argument.shape) if kind == "all" else ()
        return {"worst_index": (output, *entry) if layout.several else entry}

    return index


def _tangent_index(
    layout: Layout, argument: Argument, directions: list[Direction], kept: np.ndarray
) -> Callable[[int], dict[str, Any]]:
    """Places of values laid out (directions, kept entries of the result)."""

    def index(flat: int) -> dict[str, Any]:
        direction, entry = divmod(flat, kept.size)
        return {
            "worst_index": layout.index(int(kept[entry])),
            "direction_index": entry_index(argument, directions[direction]),
        }

    return index


def _finished(check: str, how: str, rows: list[GradientRow], raise_exception: bool) -> GradientReport:
    report = GradientReport(check, how, tuple(rows))
    if raise_exception:
        report.raise_if_failed()
    return report
