"""How `mistakes` is written down: what a mistake is, and the decorators that enter one into the table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy_sdpa.kernelcheck.kernel import Change
from numpy_sdpa.kernelcheck.problem import Array, Problem

Changes = Callable[[Problem], Iterator[Change]]
Rewritten = Callable[["Results", str], Iterator[tuple[str, Array]]]


class Results(NamedTuple):
    """What a kernel gives for a whole problem, right or with a forward mistake in it."""

    problem: Problem
    arrays: dict[str, Array]  # by result name, in this package's shapes
    # an input's gradient before any sum over what was repeated (`Problem.full_shape`); None where that is not at hand
    unsummed: Callable[[str], Array] | None
    scale: float | None = None  # with which it computed, and which key head each query head read, where a mistake
    key_heads: Array | None = None  # changed that
    is_whole: bool = True  # not a sample


@dataclass
class Mistake:
    id: str
    remedy: str
    is_backward: bool  # in the backward pass only
    changes: Changes | None = None
    rewritten: Rewritten | None = None

    def all_changes(self, problem: Problem) -> Iterator[Change]:
        return iter(()) if self.changes is None else self.changes(problem)


MISTAKES: dict[str, Mistake] = {}  # in the order of `mistakes`, which also orders ties


def _add(mistake_id: str, remedy: str, is_backward: bool, **functions: Any) -> None:
    mistake = MISTAKES.setdefault(mistake_id, Mistake(mistake_id, remedy, is_backward))
    for name, function in functions.items():
        setattr(mistake, name, function)


def forward(mistake_id: str, remedy: str) -> Callable[[Changes], None]:
    return lambda changes: _add(mistake_id, remedy, False, changes=changes)


def backward(mistake_id: str, remedy: str) -> Callable[[Changes], None]:
    return lambda changes: _add(mistake_id, remedy, True, changes=changes)


def rewritten(mistake_id: str, remedy: str, *, is_backward: bool = True) -> Callable[[Rewritten], None]:
    return lambda function: _add(mistake_id, remedy, is_backward, rewritten=function)
