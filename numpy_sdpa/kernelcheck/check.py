"""`check_kernel`: one kernel on all the problems that catch people."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy_sdpa.kernelcheck.cases import feature_sets, listed, make_case
from numpy_sdpa.kernelcheck.comparison import compare
from numpy_sdpa.kernelcheck.problem import RESULTS
from numpy_sdpa.kernelcheck.report import Diagnosis, KernelReport
from numpy_sdpa.kernelcheck.semantics import system

_SHOWN = 12  # wrong cases in the printed summary
Kernel = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """One case: its report, or why there is none."""

    features: tuple[str, ...]
    dtype: str
    report: KernelReport | None
    skipped: str | None = None  # the kernel raised NotImplementedError
    error: str | None = None  # it raised something else, or gave what cannot be compared

    @property
    def name(self) -> str:
        return f"{' + '.join(self.features) or 'bare'}, {self.dtype}"

    @property
    def passed(self) -> bool:
        return self.error is None and (self.report is None or self.report.passed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "features": list(self.features),
            "dtype": self.dtype,
            "passed": self.passed,
            "skipped": self.skipped,
            "error": self.error,
            "report": None if self.report is None else self.report.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """A kernel on many cases.

    Attributes
    ----------
    passed : bool
        Every case that was not skipped is right, and there is one.
    cases : tuple of `CaseReport`
    diagnosis : tuple of `Diagnosis`
    mistakes : Counter of ids
    """

    passed: bool
    cases: tuple[CaseReport, ...]

    @property
    def diagnosis(self) -> tuple[Diagnosis, ...]:
        """Of the first wrong case that has a report."""
        return next((case.report.diagnosis for case in self.cases if case.report and not case.passed), ())

    @property
    def mistakes(self) -> Counter[str]:
        """How often each known mistake is the best explanation, ties included."""
        found: Counter[str] = Counter()
        for case in self.cases:
            diagnoses = () if case.report is None else case.report.diagnosis
            for number, diagnosis in enumerate(diagnoses):
                if number and not diagnosis.ties_with_previous:
                    break
                found[diagnosis.mistake] += 1
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "cases": [case.to_dict() for case in self.cases],
            "mistakes": dict(self.mistakes.most_common()),
        }

    def __str__(self) -> str:
        ran = [case for case in self.cases if case.skipped is None]
        wrong = [case for case in ran if not case.passed]
        lines = [f"{len(ran)} cases run, {len(wrong)} wrong, {len(self.cases) - len(ran)} skipped."]
        for reason, count in Counter(case.skipped for case in self.cases if case.skipped is not None).items():
            lines.append(f"  skipped {count}: {reason or 'not implemented'}")
        if wrong:
            lines.append(f"First wrong case: {wrong[0].name}")
            lines += [f"  {line}" for line in str(wrong[0].report or wrong[0].error).splitlines()]
            lines += [f"  also wrong: {_summary(case)}" for case in wrong[1:_SHOWN]]
        if len(wrong) > _SHOWN:
            lines.append(f"  and {len(wrong) - _SHOWN} more")
        if self.mistakes:
            lines.append("Mistakes, and in how many cases they explain most:")
            lines += [f"  {count:>4}  {mistake}" for mistake, count in self.mistakes.most_common()]
        return "\n".join(lines)


def _summary(case: CaseReport) -> str:
    if case.report is None:
        return f"{case.name}: {case.error}"
    arrays = ", ".join(name for name, array in case.report.arrays.items() if not array.passed)
    mistake = f": {case.report.diagnosis[0].mistake}" if case.report.diagnosis else ""
    return f"{case.name} ({arrays}){mistake}"


def check_kernel(
    kernel: Kernel,
    *,
    semantics: str = "torch",
    dtypes: str | Iterable[str] = ("float32",),
    features: str | Iterable[str] | None = None,
    backward: bool = True,
    seed: int = 0,
    **sizes: int,
) -> CheckReport:
    """Run a kernel on the problems that catch people, and judge it by `compare`.

    Parameters
    ----------
    kernel : callable
        ``kernel(arrays, options)`` returns a mapping from names (output, lse, weights, grad_query, …) to arrays: what
        it has. `arrays` holds query, key, value, the options that are arrays and, with `backward`, grad_output;
        `options` the others. NotImplementedError skips a case.
    semantics : str
        Whose meaning is right, and whose layout the arrays have: a name in `numpy_sdpa.kernelcheck.semantics`.
    dtypes : "float16", "bfloat16", "float32", "float64", or several
    features : str or iterable of str, optional
        Names of `make_case`'s features; each alone and all pairs. Default: all of them, some 400 cases a dtype.
    backward : bool
        With upstream gradients.
    seed : int
    **sizes
        As `make_case` takes them: batch, query_heads, …

    Returns
    -------
    CheckReport
        ``passed``, ``cases``, ``mistakes``; prints as a summary.

    Raises
    ------
    ValueError
        For an unknown system, feature or dtype.

    Examples
    --------
    >>> import numpy_sdpa
    >>> def kernel(arrays, options):
    ...     return {"output": numpy_sdpa.attention(arrays["query"], arrays["key"], arrays["value"], **options)}
    >>> print(check_kernel(kernel, features=["causal", "scale"], backward=False))
    4 cases run, 0 wrong, 0 skipped.
    """
    layout = system(semantics).layout
    sets = list(feature_sets(features))
    cases = tuple(
        _case(kernel, chosen, dtype, semantics, layout, backward, seed, sizes)
        for dtype in listed(dtypes)
        for chosen in sets
    )
    ran = [case for case in cases if case.skipped is None]
    return CheckReport(passed=bool(ran) and all(case.passed for case in ran), cases=cases)


def _case(
    kernel: Kernel,
    features: tuple[str, ...],
    dtype: str,
    semantics: str,
    layout: str,
    backward: bool,
    seed: int,
    sizes: Mapping[str, int],
) -> CaseReport:
    arrays, options = make_case(features, dtype=dtype, seed=seed, backward=backward, layout=layout, **sizes)
    inputs = {name: array for name, array in arrays.items() if name not in RESULTS}
    asked = {name: np.copy(array) for name, array in inputs.items()}  # a kernel may write to what it is given
    try:
        results = kernel(dict(inputs), dict(options))
    except NotImplementedError as reason:
        return CaseReport(features=features, dtype=dtype, report=None, skipped=str(reason))
    except Exception as error:  # whatever a kernel may raise: the other cases are still of use
        return CaseReport(features=features, dtype=dtype, report=None, error=f"raised {type(error).__name__}: {error}")
    if not isinstance(results, Mapping):
        given = f"gave {type(results).__name__}, not a mapping from names (output, lse, grad_query, …) to arrays"
        return CaseReport(features=features, dtype=dtype, report=None, error=given)
    unknown = [str(name) for name in results if name not in RESULTS and name not in asked]
    if unknown:
        given = f"gave {', '.join(unknown)}: the names are {', '.join(RESULTS)}"
        return CaseReport(features=features, dtype=dtype, report=None, error=given)
    try:
        report = compare({**results, **asked}, layout=layout, semantics=semantics, **options)
    except ValueError as error:
        return CaseReport(features=features, dtype=dtype, report=None, error=str(error))
    return CaseReport(features=features, dtype=dtype, report=report)
