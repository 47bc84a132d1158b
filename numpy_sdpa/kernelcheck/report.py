"""What `compare` says: array by array, then the mistakes that reproduce the kernel's numbers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa.kernelcheck.pictures import Picture, draw
from numpy_sdpa.kernelcheck.problem import Array
from numpy_sdpa.kernelcheck.registry import MISTAKES

# Errors above this share of an array are what anyone would call wrong; an array whose precision cannot tell them gets
# a note. 1e-3 for float32; a half type has an eps of its own: 16 of them.
_BLIND = {"float16": 16 * 2.0**-10, "bfloat16": 16 * 2.0**-7}


@dataclass(frozen=True, kw_only=True)
class ArrayReport:
    """One array against the golden result.

    Attributes
    ----------
    passed : bool
    max_abs_error, max_rel_error : float
        inf where one side alone is not finite; None for a wrong shape.
    worst_index : tuple of int or None
        Where |error| / tolerance is largest, in the array as it was given.
    expected, got : float
        There. For a wrong shape, the two shapes.
    tolerance : float
        The bound of |error| there.
    sensitivity : float
        The relative error (Frobenius) that this precision surely tells from a right result; inf where it cannot.
    non_finite : int
        Entries where the two sides are not the same NaN, infinity or number.
    share : float
        ‖error‖ over its bound (Frobenius): above 1 is wrong even where every entry is inside its own bound.
    """

    passed: bool
    max_abs_error: float | None
    max_rel_error: float | None
    worst_index: tuple[int, ...] | None
    expected: Any
    got: Any
    tolerance: float | None
    sensitivity: float | None
    non_finite: int
    share: float | None = None

    @property
    def has_wrong_shape(self) -> bool:
        return self.max_abs_error is None

    @property
    def worst_share(self) -> float:
        """|error| / tolerance at the worst place."""
        if self.worst_index is None or self.expected == self.got:
            return 0.0
        error = abs(self.got - self.expected)
        if not math.isfinite(error):
            return 0.0 if math.isnan(self.got) and math.isnan(self.expected) else math.inf
        return error / self.tolerance if self.tolerance else math.inf

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "max_abs_error": _number(self.max_abs_error),
            "max_rel_error": _number(self.max_rel_error),
            "worst_index": None if self.worst_index is None else list(self.worst_index),
            "expected": _number(self.expected),
            "got": _number(self.got),
            "tolerance": _number(self.tolerance),
            "sensitivity": _number(self.sensitivity),
            "non_finite": self.non_finite,
        }


class Diagnosis(NamedTuple):
    """A known mistake that reproduces the kernel's numbers."""

    mistake: str  # its id
    explains: tuple[str, ...]  # results that are wrong, and right under this mistake
    residual_error: float  # the largest relative Frobenius error over them that remains
    variant: str = ""  # which form of the mistake
    ties_with_previous: bool = False  # gives the same numbers here as the one before it

    @property
    def remedy(self) -> str:
        return MISTAKES[self.mistake].remedy if self.mistake in MISTAKES else _OTHER_REMEDIES[self.mistake]

    def to_dict(self) -> dict[str, Any]:
        return {
            "mistake": self.mistake,
            "explains": list(self.explains),
            "residual_error": _number(self.residual_error),
        }


HALF_PRECISION_SUMS = "half-precision-sums"
_OTHER_REMEDIES = {
    HALF_PRECISION_SUMS: "add up in float32: the error is as large as that of sums in a half type, and as random",
}


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Is a kernel right, and if not, which mistake is it?

    Attributes
    ----------
    passed : bool
    arrays : mapping from names to `ArrayReport`
    diagnosis : tuple of `Diagnosis`, best first
    dtype : str
        The precision by which it was judged.
    golden : tuple of str
        Arrays that are the golden result itself, as `make_case` wrote it: the kernel's may not have been put there.
    """

    passed: bool
    arrays: Mapping[str, ArrayReport]
    diagnosis: tuple[Diagnosis, ...]
    dtype: str
    golden: tuple[str, ...] = ()
    picture: Picture = field(default=Picture({}), repr=False, compare=False)  # what `plot` draws

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON knows. What is not finite is a string that float() reads: "nan", "inf", "-inf"."""
        return {
            "passed": self.passed,
            "arrays": {name: array.to_dict() for name, array in self.arrays.items()},
            "diagnosis": [diagnosis.to_dict() for diagnosis in self.diagnosis],
        }

    def to_json(self, **options: Any) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, **options)

    def __str__(self) -> str:
        return "\n".join([*self._table(), "", *self._notes(), *self.sentences()])

    def plot(self, path: Any) -> None:
        """Write a picture: error maps over heads and positions, and the worst row of each array, expected and given."""
        draw(self, path)

    def _table(self) -> list[str]:
        lines = [
            f"{'':<19}{'verdict':<9}{'max error':>10}{'of allowed':>12}{'tells from':>12}   worst at: expected, got"
        ]
        for name, array in self.arrays.items():
            verdict = f"{name:<19}{'right' if array.passed else 'WRONG':<9}"
            if array.sensitivity is None:  # a wrong shape
                lines.append(f"{verdict}shape {tuple(array.got)}, expected {tuple(array.expected)}")
                continue
            tells = f"{array.sensitivity:.0e}" if math.isfinite(array.sensitivity) else "nothing"
            where = (
                ""
                if array.worst_index is None
                else (f"   [{', '.join(map(str, array.worst_index))}]: {array.expected:.6g}, {array.got:.6g}")
            )
            lines.append(f"{verdict}{array.max_abs_error:>10.3g}{array.worst_share:>12.2g}{tells:>12}{where}")
        return lines

    def _notes(self) -> list[str]:
        notes = []
        for name, array in self.arrays.items():
            if array.non_finite:
                notes.append(f"{name}: {array.non_finite} entries are NaN or infinite on one side only.")
            elif array.share is not None and array.share > 1 and array.worst_share <= 1:
                notes.append(
                    f"{name}: every entry is inside its bound, "
                    f"all together are {array.share:.1f} times what they may be."
                )
        blind = [
            name
            for name, array in self.arrays.items()
            if array.sensitivity is not None and array.sensitivity > _BLIND.get(self.dtype, 1e-3)
        ]
        if blind:
            notes.append(
                f"In {self.dtype} these inputs cannot tell a small error in {', '.join(blind)}: "
                "only one above the share of the array under “tells from”."
            )
        if self.golden:
            names = ", ".join(self.golden)
            notes.append(f"{names}: the golden result itself, entry by entry: was the kernel's put in its place?")
        return notes

    def sentences(self) -> list[str]:
        """The verdict, and the diagnosis with its remedies."""
        if self.passed:
            return [f"Right: no array is further from the float64 result than {self.dtype} accounts for."]
        if not self.diagnosis:
            return ["Wrong, and no known mistake reproduces these numbers."]
        sentences = []
        for diagnosis in self.diagnosis:
            start = "or, with the same numbers here, " if diagnosis.ties_with_previous else ""
            variant = f" ({diagnosis.variant})" if diagnosis.variant else ""
            sentences.append(
                f"{start}{diagnosis.mistake}{variant} reproduces {', '.join(diagnosis.explains)} "
                f"to {diagnosis.residual_error:.1g}: {diagnosis.remedy}."
            )
        explained = {name for diagnosis in self.diagnosis for name in diagnosis.explains}
        rest = [name for name, array in self.arrays.items() if not array.passed and name not in explained]
        if rest:
            sentences.append(f"No known mistake reproduces {', '.join(rest)}.")
        return ["Wrong:", *(f"  {sentence}" for sentence in sentences)]


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, tuple | list):
        return [int(size) for size in value]
    if value is None or isinstance(value, int | str):
        return value
    value = float(value)
    return value if math.isfinite(value) else repr(value)


class Judged(NamedTuple):
    report: ArrayReport
    badness: Array | None  # |error| / tolerance, elementwise; None for a wrong shape


def judge(given: Array, gold: Array, bound: Array | float, frobenius_bound: float | None, sensitivity: float) -> Judged:
    """One array of the right shape; its index is in gold's layout still."""
    with np.errstate(all="ignore"):
        same = (given == gold) | (np.isnan(given) & np.isnan(gold))
        both_finite = np.isfinite(given) & np.isfinite(gold)
        error = np.where(same, 0.0, np.where(both_finite, np.abs(given - gold), np.inf))
        badness = np.where(error == 0, 0.0, error / bound)  # a bound of 0 allows no error at all
        relative = np.where(error == 0, 0.0, error / np.abs(gold))
    non_finite = int(np.sum(~same & ~both_finite))
    share = (
        None if frobenius_bound is None else float(np.linalg.norm(error) / max(frobenius_bound, np.finfo(float).tiny))
    )
    worst = np.unravel_index(int(np.argmax(badness)), badness.shape) if badness.size else None
    report = ArrayReport(
        passed=bool(np.all(badness <= 1)) and (share is None or share <= 1),
        max_abs_error=float(np.max(error, initial=0.0)),
        max_rel_error=float(np.max(relative, initial=0.0)),
        worst_index=None if worst is None else tuple(int(i) for i in worst),
        expected=None if worst is None else float(gold[worst]),
        got=None if worst is None else float(given[worst]),
        tolerance=None if worst is None else float(np.broadcast_to(bound, gold.shape)[worst]),
        sensitivity=sensitivity,
        non_finite=non_finite,
        share=share,
    )
    return Judged(report, badness)
