"""`compare`: is a kernel right, and if not, which mistake is it?"""

import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from numpy_sdpa.kernelcheck.diagnosis import diagnose
from numpy_sdpa.kernelcheck.dump import Dump, DumpError, load
from numpy_sdpa.kernelcheck.gold import Gold
from numpy_sdpa.kernelcheck.pictures import Picture, drawn
from numpy_sdpa.kernelcheck.problem import RESULTS, Problem
from numpy_sdpa.kernelcheck.registry import MISTAKES, Results
from numpy_sdpa.kernelcheck.report import ArrayReport, Judged, KernelReport, judge
from numpy_sdpa.kernelcheck.tolerance import frobenius_bound, sensitivity
from numpy_sdpa.kernelcheck.tolerance import tolerance as elementwise_tolerance


def compare(
    arrays: Mapping[str, Any] | str | os.PathLike[str],
    *,
    layout: str | None = None,
    semantics: str | None = None,
    tolerance: float | Mapping[str, float] | None = None,
    **options: Any,
) -> KernelReport:
    """Is what a kernel gave for one problem right, array by array; and if not, which known mistake gives these numbers?

    Parameters
    ----------
    arrays : mapping, or path of an ``.npz`` or ``.safetensors`` file
        ``query, key, value``; the options that are arrays under this package's names; what the kernel gave of
        ``output, lse, weights, grad_query, grad_key, grad_value, grad_bias, grad_sinks, grad_alibi_slopes``, with the
        upstream ``grad_output`` (and ``grad_lse``). Other options: a JSON object under ``options`` (a string array;
        in safetensors the file's metadata). With ``cu_seqlens_q`` and ``cu_seqlens_k`` the arrays are packed
        sequences (T, H, E), lse (Hq, T).
    layout : "bhld" (B…, H, L, E) or "blhd" (B…, L, H, E), optional
        Of query, key, value, output and their gradients; default: that of `semantics`, or "bhld". lse is (B…, Hq, L),
        mask, bias and weights are (B…, Hq, L, S) in either.
    semantics : str, optional
        The system whose meaning is right where systems disagree: a row of docs/semantics.md. Default: this package's.
    tolerance : float or mapping from names to floats, optional
        The error to allow in every entry. Default: what the precision of `query` must cost, derived element by element
        (docs/tolerance.md).
    **options
        Options of attention, overriding those in the dump; None turns one off.

    Returns
    -------
    KernelReport
        ``passed``, ``arrays``, ``diagnosis``; prints as a table and a sentence; ``to_dict()`` and ``to_json()`` for
        programs, ``plot(path)`` for a picture.

    Raises
    ------
    DumpError (a ValueError)
        For a dump that cannot be read, lacks something or has a shape that no known mistake explains, and for a
        tolerance below 0; one line.

    Examples
    --------
    >>> from numpy_sdpa.kernelcheck import make_case
    >>> arrays, options = make_case("softcap")
    >>> arrays["output"] = arrays["output"][:, ::-1]  # a kernel that mixes up its heads
    >>> report = compare(arrays, **options)
    >>> report.passed, report.arrays["lse"].passed, report.diagnosis
    (False, True, ())
    """
    _check_tolerance(tolerance)
    dump = load(arrays, layout, semantics, options)
    problem = dump.problem
    _require_known_shapes(problem)
    gold = Gold(problem)
    judged = {name: _judged(name, dump, gold, tolerance) for name in RESULTS if name in problem.given}
    wrong = {name for name, one in judged.items() if not one.report.passed}
    badness = {name: one.badness for name, one in judged.items() if one.badness is not None}
    told = {name: one.report.sensitivity for name, one in judged.items() if one.report.sensitivity is not None}
    reports = {name: _in_layout(name, one.report, dump) for name, one in judged.items()}
    return KernelReport(
        passed=not wrong,
        arrays=reports,
        diagnosis=diagnose(gold, wrong, badness, told),
        dtype=problem.dtype,
        golden=_golden(problem, gold, reports),
        picture=Picture(
            {name: drawn(name, problem.given[name], gold.results[name], badness[name]) for name in badness}
        ),
    )


def _check_tolerance(tolerance: float | Mapping[str, float] | None) -> None:
    given = tolerance if isinstance(tolerance, Mapping) else {"tolerance": 0.0 if tolerance is None else tolerance}
    for name, bound in given.items():
        if isinstance(tolerance, Mapping) and name not in RESULTS:
            raise DumpError(f"tolerance has unknown name {name!r}: the names are {', '.join(RESULTS)}")
        if not isinstance(bound, numbers.Real) or not 0 <= bound < math.inf:
            raise DumpError(f"tolerance must be a finite number ≥ 0, got {bound!r}")


def _judged(name: str, dump: Dump, gold: Gold, tolerance: float | Mapping[str, float] | None) -> Judged:
    given, right = dump.problem.given[name], gold.results[name]
    if given.shape != right.shape:
        report = ArrayReport(
            passed=False, max_abs_error=None, max_rel_error=None, worst_index=None, expected=right.shape,
            got=given.shape, tolerance=None, sensitivity=None, non_finite=0,
        )  # fmt: skip
        return Judged(report, None)
    arguments = (gold.sigma[name], dump.problem.dtype, dump.dtypes[name], right)
    tells = sensitivity(*arguments)
    own = tolerance.get(name) if isinstance(tolerance, Mapping) else tolerance
    if own is not None:
        return judge(given, right, own, None, tells)
    return judge(given, right, elementwise_tolerance(*arguments), frobenius_bound(*arguments), tells)


def _golden(problem: Problem, gold: Gold, reports: Mapping[str, ArrayReport]) -> tuple[str, ...]:
    """Results that are gold's to the last bit. Of a float64 kernel only all together: one may well be."""
    exact = tuple(name for name, report in reports.items() if report.max_abs_error == 0)
    if problem.dtype == "float64":
        return exact if len(exact) == len(reports) else ()
    # a kernel in less than float64 has no such numbers, save 0 and the like
    return tuple(name for name in exact if _needs_float64(gold.results[name]))


def _needs_float64(array: np.ndarray) -> bool:
    finite = array[np.isfinite(array)]
    with np.errstate(all="ignore"):
        return not np.array_equal(finite.astype(np.float32), finite)


def _in_layout(name: str, report: ArrayReport, dump: Dump) -> ArrayReport:
    if report.worst_index is None:
        return report
    return replace(report, worst_index=dump.layout.place(name, report.worst_index))


def _require_known_shapes(problem: Problem) -> None:
    """A wrong shape is unusable, unless a mistake is known that makes it."""
    for name, array in problem.given.items():
        expected = problem.shape_of(name)
        if array.shape != expected and array.shape not in _shapes_of_mistakes(problem, name):
            raise DumpError(f"{name} must have shape {expected}, got {array.shape}")


def _shapes_of_mistakes(problem: Problem, name: str) -> set[tuple[int, ...]]:
    """The shapes that mistakes give to a result, with and without leading axes of size 1."""
    zeros = {other: np.broadcast_to(0.0, problem.shape_of(other)) for other in problem.given}
    results = Results(problem, zeros, lambda argument: np.broadcast_to(0.0, problem.full_shape(argument)))
    shapes = set()
    for mistake in MISTAKES.values():
        for _, array in mistake.rewritten(results, name) if mistake.rewritten else ():
            shape = array.shape
            while shape and shape[0] == 1:
                shapes.add(shape)
                shape = shape[1:]
            shapes.add(shape)
    return shapes
