"""What a check found: a verdict for every argument, where it is worst, and a table to read it from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"

# An uncertainty above this part of the argument's largest expected value decides nothing (unless the
# tolerance is wider still).
DECISIVE_PART = 0.01


@dataclass(frozen=True)
class GradientRow:
    """What a check found for one argument.

    Attributes
    ----------
    argument : int
        The argument's position in `args`.
    verdict : str
        "right", "wrong" or "undecided". Right: |got − expected| ≤ tolerance + uncertainty at every entry.
        Undecided: that holds, but at some entry the uncertainty exceeds both the tolerance and 1 % of the
        argument's largest |expected|.
    max_abs_error, max_rel_error : float
        The largest |got − expected|, and the largest |got − expected| / |expected| over the entries whose
        expected value exceeds its own uncertainty (of the others a ratio says nothing). nan where a value is
        nan.
    worst_index : tuple of int or None
        Where the error is largest in units of what is allowed there (for an undecided row: where the
        uncertainty is). With several outputs it starts with the output's number. None where nothing could be
        compared.
    expected, got, tolerance, uncertainty : float
        The two values there, atol + rtol · |expected|, and what the expected value is uncertain by.
    entries, wrong_entries : int
        How many values were compared, and how many of them are wrong.
    direction_index : tuple of int or None
        `check_jvp` and `check_taylor` with direction="all": the entry of the argument that moved.
    note : str
        What else is known: a wrong shape, a factor that explains every error, a kink.
    steps, remainders, rates : tuple of float
        `check_taylor`: the halving steps, ‖f(x + h u) − f(x) − h J u‖ for each, and the rate from each to the
        next.
    """

    argument: int
    verdict: str
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    worst_index: tuple[int, ...] | None = None
    expected: float = 0.0
    got: float = 0.0
    tolerance: float = 0.0
    uncertainty: float = 0.0
    entries: int = 0
    wrong_entries: int = 0
    direction_index: tuple[int, ...] | None = None
    note: str = ""
    steps: tuple[float, ...] = field(default=(), repr=False)
    remainders: tuple[float, ...] = field(default=(), repr=False)
    rates: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class GradientReport:
    """The result of a check; `print` shows it as a table, `bool` says whether it passed.

    Attributes
    ----------
    check : str
        The function that made it, as "check_vjp".
    how : str
        What the gradient was compared with, in words.
    rows : tuple of GradientRow
        One for each argument, in the order of `wrt`.
    """

    check: str
    how: str
    rows: tuple[GradientRow, ...]

    @property
    def passed(self) -> bool:
        """Whether every row is right; an undecided row has not passed."""
        return all(row.verdict == RIGHT for row in self.rows)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        sentences = [_sentence(self.check, row) for row in self.rows if row.verdict != RIGHT]
        sentences += [f"argument {row.argument}: {row.note}." for row in self.rows if row.verdict == RIGHT and row.note]
        remainders = [_remainder_table(row) for row in self.rows if row.steps]
        head = f"{self.check} ({self.how}): {'passed' if self.passed else 'FAILED'}"
        return "\n\n".join(["\n".join([head, *sentences]), _table(self.rows), *remainders])

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types for `json.dumps`; numbers that JSON has not (nan, inf) become strings."""
        return {
            "check": self.check,
            "how": self.how,
            "passed": self.passed,
            "rows": [{name: _plain(value) for name, value in asdict(row).items()} for row in self.rows],
        }

    def raise_if_failed(self) -> None:
        """AssertionError with the whole report, unless it passed."""
        if not self.passed:
            raise AssertionError(str(self))


def judge(
    argument: int,
    expected: np.ndarray,
    got: np.ndarray,
    uncertainty: np.ndarray,
    *,
    atol: float,
    rtol: float,
    index: Callable[[int], dict[str, tuple[int, ...]]],
    note: str = "",
) -> GradientRow:
    """The row of one argument from all its values; `index` names the place of a flat position."""
    expected, got, uncertainty = (np.asarray(a, dtype=float).ravel() for a in (expected, got, uncertainty))
    if not expected.size:
        return GradientRow(argument, RIGHT, note=note)
    with np.errstate(all="ignore"):
        error = np.abs(got - expected)
        tolerance = atol + rtol * np.abs(expected)
        # no value at all (the function is not finite around the point) contradicts nothing that is a number
        unknown = ~np.isfinite(expected) | ~np.isfinite(uncertainty)
        uncertainty = np.where(unknown, np.inf, uncertainty)
        tolerance = np.where(unknown, atol, tolerance)
        inside = np.where(unknown, np.isfinite(got), error <= tolerance + uncertainty)
        scale = np.max(np.abs(expected[~unknown]), initial=0.0)
        decisive = np.maximum(tolerance, DECISIVE_PART * scale)
        doubt = uncertainty > decisive
        wrong = ~inside
        if wrong.any():
            verdict = WRONG
            worst = _first_largest(np.where(wrong, error / (tolerance + uncertainty), -1.0))
        elif doubt.any():
            verdict, worst = UNDECIDED, _first_largest(np.where(doubt, uncertainty - decisive, -1.0))
        else:
            verdict, worst = (
                RIGHT,
                _first_largest(np.where(error > 0, error / (tolerance + uncertainty), 0.0)),
            )
        known = np.abs(expected) > uncertainty
        relative = error[known] / np.abs(expected[known])
    return GradientRow(
        argument,
        verdict,
        max_abs_error=_largest(error, got),
        max_rel_error=_largest(relative, got[known]),
        expected=float(expected[worst]),
        got=float(got[worst]),
        tolerance=float(tolerance[worst]),
        uncertainty=float(uncertainty[worst]),
        entries=int(expected.size),
        wrong_entries=int(np.sum(wrong)),
        note=_joined(note, _explanation(expected, got, tolerance + uncertainty) if verdict == WRONG else ""),
        **index(worst),
    )


def wrong_structure(argument: int, text: str) -> GradientRow:
    """The row of an argument whose gradient could not be compared at all."""
    nan = math.nan
    return GradientRow(argument, WRONG, nan, nan, None, nan, nan, nan, nan, note=text)


def _first_largest(values: np.ndarray) -> int:
    """The position of the largest value; nan counts as larger than any."""
    return int(np.argmax(np.where(np.isnan(values), np.inf, values)))


def _largest(values: np.ndarray, got: np.ndarray) -> float:
    """The largest number among `values`; nan only where what was got is nan."""
    if np.any(np.isnan(got)):
        return math.nan
    return float(np.max(values[~np.isnan(values)], initial=0.0))


def _explanation(expected: np.ndarray, got: np.ndarray, allowed: np.ndarray) -> str:
    """The factor between got and expected, if one factor explains all of a wrong gradient."""
    finite = np.isfinite(expected) & np.isfinite(got) & np.isfinite(allowed)
    norm = float(np.sum(expected[finite] ** 2))
    if expected.size == 1 or not finite.all() or norm == 0:
        return ""
    with np.errstate(all="ignore"):
        factor = float(np.sum(expected * got)) / norm
        explained = np.all(np.abs(got - factor * expected) <= max(1.0, abs(factor)) * allowed)
    return f"got is {factor:.6g} × expected everywhere" if explained else ""


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


_SUBJECTS = {
    "check_vjp": "the gradient of argument {}",
    "check_jvp": "the tangent in the direction of argument {}",
    "check_adjoint": "⟨Jᵀ v, u⟩ (got) against ⟨v, J u⟩ (expected) for argument {}",
    "check_taylor": "the tangent in the direction of argument {}",
}


def _sentence(check: str, row: GradientRow) -> str:
    """One failure in words."""
    subject = _SUBJECTS[check].format(row.argument)
    if row.worst_index is None:
        return f"{subject} is {row.verdict}: {row.note}."
    place = f" at index {row.worst_index}" if row.worst_index else ""
    if row.direction_index is not None:
        place += f" when entry {row.direction_index} of the argument moves"
    many = f"; {row.wrong_entries} of {row.entries} values are wrong" if row.entries > 1 else ""
    note = f"; {row.note}" if row.note else ""
    if row.steps:
        values = f"the remainder's rate is {row.got:.3g} ± {row.uncertainty:.1g}, 2 is expected"
    else:
        values = (
            f"expected {row.expected:.9g} ± {row.uncertainty:.1g}, got {row.got:.9g}"
            f" (error {abs(row.got - row.expected):.3g}, tolerance {row.tolerance:.3g})"
        )
    if row.verdict == UNDECIDED:
        note = note or ("" if row.steps else "; the function is too noisy, too steep or not smooth there")
        return f"{subject} is undecided{place}: {values}{note}."
    return f"{subject} is wrong{place}: {values}{many}{note}."


def _table(rows: tuple[GradientRow, ...]) -> str:
    head = (
        "argument",
        "verdict",
        "worst index",
        "expected",
        "got",
        "abs error",
        "rel error",
        "tolerance",
        "uncertainty",
    )
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        where = "-" if row.worst_index is None else str(row.worst_index)
        if row.direction_index is not None:
            where += f" by {row.direction_index}"
        long = [f"{value:.9g}" for value in (row.expected, row.got)]
        errors = (row.max_abs_error, row.max_rel_error, row.tolerance, row.uncertainty)
        lines.append((str(row.argument), row.verdict, where, *long, *(f"{value:.2e}" for value in errors)))
    return _aligned(lines)


def _remainder_table(row: GradientRow) -> str:
    lines = [("step", "remainder", "rate")]
    rates = ("", *(f"{rate:.3f}" for rate in row.rates))
    for step, remainder, rate in zip(row.steps, row.remainders, rates, strict=True):
        lines.append((f"{step:.3e}", f"{remainder:.3e}", rate))
    return f"argument {row.argument}: ‖f(x + h u) − f(x) − h J u‖\n{_aligned(lines)}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
