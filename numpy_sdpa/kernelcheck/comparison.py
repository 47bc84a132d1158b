"""`compare`: is a kernel right, and if not, which mistake is it?"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from numpy_sdpa.kernelcheck.diagnosis import diagnose
from numpy_sdpa.kernelcheck.dump import Dump, DumpError, load
from numpy_sdpa.kernelcheck.gold import Gold
from numpy_sdpa.kernelcheck.mistakes import MISTAKES, Results
from numpy_sdpa.kernelcheck.problem import RESULTS, Array, Problem
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
        picture=(dump, gold, badness),
    )


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


__all__ = ["Array", "compare"]
