"""Where a kernel's results are held against a mistake's: everywhere, or, on a large plane, on strips of it.

Forward results and the gradient of query need some rows with all their keys. The gradients of key and value need some
columns with all their rows: these take every row's lse and D = Σ gO ∘ O from a forward pass over the heads that they
belong to.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from numpy_sdpa._internal.shapes import sum_to_shape
from numpy_sdpa.kernelcheck.kernel import Change, Forward, Kernel, Part, Statistics
from numpy_sdpa.kernelcheck.mistakes import right_change
from numpy_sdpa.kernelcheck.problem import FORWARD, Array, Problem, batch_element, element_place
from numpy_sdpa.kernelcheck.registry import MISTAKES, Results

ROWS = 64  # query rows (and key columns) of a sample of a long problem
_HEADS = 4  # query heads of its rows
_PLANE = 2**15  # elements of the plane in one of its parts: one or two milliseconds for one mistake

Arrays = dict[str, Array]
Key = tuple[str, str]  # a mistake's id and which form of it


class Sample:
    """A problem's results, or a part of them, and the changes that its mistakes make."""

    def __init__(self, problem: Problem, given: Mapping[str, Array], gold: Mapping[str, Array]) -> None:
        self.problem = problem
        self.given = given
        self.gold = gold
        self.right = right_change(problem)
        self._changes: dict[tuple[Key, ...], Change] = {(): self.right}

    def change(self, keys: tuple[Key, ...]) -> Change | None:
        """The named mistakes together, always the same object; None where one does not apply here."""
        if keys not in self._changes:
            changes = [change for key in keys if (change := self._change(key)) is not None]
            if len(changes) < len(keys):
                return None
            self._changes[keys] = functools.reduce(Change.with_, changes, self.right)
        return self._changes[keys]

    def _change(self, key: Key) -> Change | None:
        mistake, variant = key
        return next(
            (change for change in MISTAKES[mistake].all_changes(self.problem) if change.variant == variant), None
        )

    def can_try(self, change: Change) -> bool:
        raise NotImplementedError

    def can_rewrite(self, change: Change) -> bool:
        """Whether mistakes in single results can be tried on those of a kernel with this change."""
        return self.can_try(change)

    def forward(self, change: Change) -> Arrays:
        """Output, lse and weights."""
        raise NotImplementedError

    def gradients(self, change: Change, lse_of: Change, row_dot_of: Change | None) -> Arrays:
        """By a backward pass with a change in it, with lse and D from forward passes (D None: it computes its own)."""
        raise NotImplementedError

    def column_gradients(self, change: Change, lse_of: Change, row_dot_of: Change | None) -> Arrays:
        """Those that `gradients` leaves out since they need more rows, and a forward pass over these."""
        return {}

    def results(self, change: Change) -> "Compared":
        """Of a kernel with this change, forward and backward."""
        raise NotImplementedError

    def right_parts(self) -> Iterator[tuple[Kernel, Statistics | None]]:
        """The right kernel on each part of the sample; with the rows' statistics where it has not all their keys."""
        raise NotImplementedError

    def summed(self, kernel: Kernel, arrays: Mapping[str, Array]) -> Arrays:
        """The sample's results among a part's arrays: forward results, and gradients by input before any sum."""
        raise NotImplementedError


class Compared(NamedTuple):
    """Results of a mistake, and what they are compared with."""

    results: Results
    given: Mapping[str, Array]
    gold: Mapping[str, Array]


class Whole(Sample):
    """Every entry of every result."""

    def __init__(self, whole: Results) -> None:
        super().__init__(whole.problem, whole.problem.given, whole.arrays)
        self.whole = whole
        self._last: tuple[Change, Compared] | None = None

    def can_try(self, change: Change) -> bool:
        return True

    def forward(self, change: Change) -> Arrays:
        kernel = Kernel(self.problem, change)
        return self._forward_results(kernel, kernel.forward())

    def gradients(self, change: Change, lse_of: Change, row_dot_of: Change | None) -> Arrays:
        others = (lse_of, row_dot_of or change)
        if any(change.problem is not other.problem for other in others):
            return {}  # another problem's statistics are of other rows
        return self._gradient_results(*self._backward(change, lse_of, row_dot_of))

    def results(self, change: Change) -> Compared:
        if change is self.right:
            return Compared(self.whole, self.given, self.gold)
        if self._last is None or self._last[0] is not change:  # asked for again by every mistake that goes on from it
            self._last = (change, self._results(change))
        return self._last[1]

    def _results(self, change: Change) -> Compared:
        kernel = Kernel(self.problem, change)
        forward = kernel.forward()
        arrays = self._forward_results(kernel, forward)
        unsummed: Arrays = {}
        if self.problem.has_gradients():
            unsummed = kernel.backward(forward)
            arrays |= self._gradient_results(kernel, unsummed)
        scale, key_heads = float(kernel.operands.scale), kernel.key_heads
        results = Results(self.problem, arrays, self._full(unsummed).__getitem__, scale, key_heads)
        return Compared(results, self.given, self.gold)

    def right_parts(self) -> Iterator[tuple[Kernel, Statistics | None]]:
        yield Kernel(self.problem, self.right), None

    def summed(self, kernel: Kernel, arrays: Mapping[str, Array]) -> Arrays:
        forward = {name: array for name, array in arrays.items() if name in FORWARD}
        return forward | self._gradient_results(kernel, {n: a for n, a in arrays.items() if n not in FORWARD})

    def _backward(self, change: Change, lse_of: Change, row_dot_of: Change | None) -> tuple[Kernel, Arrays]:
        kernel = Kernel(self.problem, change)
        return kernel, kernel.backward(kernel.forward(), statistics_of(self.problem, change, lse_of, row_dot_of))

    def _full(self, unsummed: Arrays) -> Arrays:
        full = {}
        for name, array in unsummed.items():
            if array is not None and name in self.problem.inputs:
                array = np.sum(array, axis=-1) if name == "sinks" else array
                full[name] = np.broadcast_to(array, self.problem.full_shape(name))
        return full

    def _forward_results(self, kernel: Kernel, forward: Forward) -> Arrays:
        output, lse = forward.output, forward.lse[..., 0]
        if kernel.change.results is not None:
            output = kernel.change.results("output", output)
            lse = kernel.change.results("lse", forward.lse)[..., 0]
        return {
            "output": output,
            "lse": self.problem.lse_of_system(lse, self.given.get("lse")),
            "weights": forward.weights,
        }

    def _gradient_results(self, kernel: Kernel, unsummed: Arrays) -> Arrays:
        results = {}
        for name, array in unsummed.items():
            if array is None or name not in self.problem.inputs:
                continue
            if name == "sinks":
                array = np.sum(array, axis=-1)
            array = kernel.problem.in_groups(name, array, kernel.key_heads)
            array = sum_to_shape(np, array, kernel.problem.inputs[name].shape)
            if kernel.change.results is not None and name in ("query", "key", "value"):
                array = kernel.change.results(f"grad_{name}", array)
            results[f"grad_{name}"] = array
        return results


def statistics_of(
    problem: Problem, change: Change, lse_of: Change, row_dot_of: Change | None, part: Part | None = None
) -> Statistics | None:
    """lse and D of a part's rows from the forward passes with these changes; None where a kernel uses all its own."""
    if lse_of is change and row_dot_of in (change, None):
        return None
    of = {}
    for other in {lse_of, row_dot_of or lse_of}:
        kernel = Kernel(problem, other, part)
        of[other] = kernel.statistics(kernel.forward())
    return Statistics(of[lse_of].lse, None if row_dot_of is None else of[row_dot_of].row_dot)


class Rest(Whole):
    """Every entry, for those mistakes that strips cannot show."""

    def can_try(self, change: Change) -> bool:
        return change.whole

    def can_rewrite(self, change: Change) -> bool:
        return True


class Strips(Sample):
    """Some rows and some columns of one batch element: around the worst ones, and spread over the rest.

    `badness` has for each result |error| / tolerance, in the result's shape; `skip` rows and columns of an earlier
    sample.
    """

    def __init__(self, whole: Results, badness: Mapping[str, Array], earlier: "Strips | None" = None) -> None:
        problem = whole.problem
        rows = _badness(badness, [name for name in ROW_RESULTS if _is_usable(problem, name)], problem.plane[:-1])
        keys = (*problem.lead[:-1], problem.inputs["key"].shape[-3], problem.plane[-1])
        columns = _badness(badness, [name for name in COLUMN_RESULTS if _is_usable(problem, name)], keys)
        element = int(np.argmax(_by_element(rows, problem) + _by_element(columns, problem)))
        place = element_place(element, problem.lead[:-1])
        self.whole = whole
        self.problem = problem.element(element)
        self._statistics_of: dict[Change, Statistics] = {}
        self.right_results = {name: batch_element(name, array, place) for name, array in whole.arrays.items()}
        self.rows: Part = self._row_part(rows[place], () if earlier is None else earlier.rows.rows)
        self.columns: tuple[slice, ...]
        self.key_head, self.columns = self._columns(columns[place], () if earlier is None else earlier.columns)
        super().__init__(self.problem, self._cut(self.problem.given), self._cut(self.right_results))

    def _row_part(self, badness: Array, earlier: tuple[slice, ...]) -> Part:
        *_, query_heads, _, key_length = self.problem.plane
        worst = int(np.argmax(np.max(badness, axis=-1)))
        spread = np.linspace(worst, worst + query_heads, min(_HEADS, query_heads), endpoint=False).astype(int)
        heads = np.unique(spread % query_heads)
        count = min(max(_PLANE // (len(heads) * key_length), 8), ROWS)
        rows = strips_of(badness[worst], count, earlier)
        return Part(heads, rows, (slice(0, key_length),))

    def _columns(self, badness: Array, earlier: tuple[slice, ...]) -> tuple[int, tuple[slice, ...]]:
        *_, query_length, _ = self.problem.plane
        worst = int(np.argmax(np.max(badness, axis=-1)))
        count = min(max(_PLANE // (self.problem.resolved[1].group * query_length), 8), ROWS)
        return worst, strips_of(badness[worst], count, earlier)

    def _column_part(self, change: Change) -> Part:
        key_heads = self.problem.key_heads if change.key_heads is None else change.key_heads
        if self.problem.resolved[1].group == 1:
            return Part(np.array([self.key_head]), (slice(0, self.problem.plane[-2]),), self.columns)
        return Part(np.flatnonzero(key_heads == self.key_head), (slice(0, self.problem.plane[-2]),), self.columns)

    def _cut(self, arrays: Mapping[str, Array]) -> Arrays:
        """The sample of whole results: of those in the right shape that are no sum over more than the sample."""
        cut = {}
        rows, columns = self.rows.row_indices(), _indices(self.columns)
        for name in (*ROW_RESULTS, *COLUMN_RESULTS):
            if name not in arrays or not _is_usable(self.whole.problem, name):
                continue
            if name in COLUMN_RESULTS:
                cut[name] = arrays[name][..., [self.key_head], :, :][..., columns, :]
            elif name == "lse":
                cut[name] = arrays[name][..., self.rows.heads, :][..., rows]
            else:
                cut[name] = arrays[name][..., self.rows.heads, :, :][..., rows, :]
        return cut

    def can_try(self, change: Change) -> bool:
        return not change.whole

    def forward(self, change: Change) -> Arrays:
        forward = Kernel(self.problem, change, self.rows).forward()
        lse = self.problem.lse_of_system(forward.lse[..., 0], self.given.get("lse"), self.rows.row_indices())
        return {"output": forward.output, "lse": lse, "weights": forward.weights}

    def gradients(self, change: Change, lse_of: Change, row_dot_of: Change | None) -> Arrays:
        kernel = Kernel(self.problem, change, self.rows)
        statistics = statistics_of(self.problem, change, lse_of, row_dot_of, self.rows)
        gradients = kernel.backward(kernel.forward(), statistics)
        results = {"grad_query": gradients["query"]}
        if gradients["bias"] is not None:
            results["grad_bias"] = gradients["bias"]
        return results

    def column_gradients(self, change: Change, lse_of: Change, row_dot_of: Change | None) -> Arrays:
        unsummed = self._of_columns(change, lse_of, row_dot_of)
        return {f"grad_{name}": np.sum(array, axis=-3, keepdims=True) for name, array in unsummed.items()}

    def _of_columns(self, change: Change, lse_of: Change, row_dot_of: Change | None) -> Arrays:
        """Gradients of the sample's keys and values by query head; none where that takes too long."""
        part = self._column_part(change)
        if row_dot_of is None or not len(part.heads) or not all(self._is_quick(part, c) for c in (lse_of, row_dot_of)):
            return {}
        kernel = Kernel(self.problem, change, part)
        lse, row_dot = self._statistics(lse_of, part).lse, self._statistics(row_dot_of, part).row_dot
        gradients = kernel.backward(kernel.forward(), Statistics(lse, row_dot))
        return {name: gradients[name] for name in ("key", "value")}

    def _is_quick(self, part: Part, change: Change) -> bool:
        """Whether a forward pass over all keys of the part's heads is a matter of a second, or none is needed."""
        return change is self.right or len(part.heads) * math.prod(self.problem.plane[-2:]) <= _FORWARD_PLANE

    def _statistics(self, change: Change, part: Part) -> Statistics:
        """Every row's, for the part's heads."""
        if change is self.right:
            lse = self.right_results["lse"][..., part.heads, :][..., None]
            output = self.right_results["output"][..., part.heads, :, :]
            grad_output = self.problem.upstream.get("grad_output")
            if grad_output is None:
                return Statistics(lse, np.zeros_like(lse))
            grad_output = grad_output[..., part.heads, :, :]
            row_dot = np.sum(np.where(output == 0, 0, grad_output * output), axis=-1, keepdims=True)
            return Statistics(lse, row_dot)
        if change not in self._statistics_of:
            kernel = Kernel(self.problem, change, part._replace(columns=(slice(0, self.problem.plane[-1]),)))
            self._statistics_of[change] = kernel.statistics(kernel.forward())
        return self._statistics_of[change]

    def results(self, change: Change) -> Compared:
        """The sample's own, without what would have to be summed; of the right kernel, everything."""
        if change is self.right:
            return Compared(self.whole, self.whole.problem.given, self.whole.arrays)
        arrays = self.forward(change)
        unsummed: Arrays = {}
        if self.problem.has_gradients():
            unsummed = self._of_columns(change, change, change)
            arrays |= self.gradients(change, change, change)
            arrays |= {f"grad_{name}": np.sum(array, axis=-3, keepdims=True) for name, array in unsummed.items()}
        scale = change.inputs.get("scale", self.problem.resolved[0].scale)
        key_heads = np.zeros(self.problem.resolved[1].group, int)  # of the sample's one key head
        of_copies = unsummed.__getitem__ if unsummed else None
        results = Results(self.problem, arrays, of_copies, float(scale), key_heads, is_whole=False)
        return Compared(results, self.given, self.gold)

    def right_parts(self) -> Iterator[tuple[Kernel, Statistics | None]]:
        yield Kernel(self.problem, self.right, self.rows), None
        if self.problem.has_gradients():
            part = self._column_part(self.right)
            yield Kernel(self.problem, self.right, part), self._statistics(self.right, part)

    def summed(self, kernel: Kernel, arrays: Mapping[str, Array]) -> Arrays:
        if kernel.part is self.rows:
            results = {name: array for name, array in arrays.items() if name in FORWARD}
            return results | ({"grad_query": arrays["query"]} if "query" in arrays else {})
        return {f"grad_{name}": np.sum(arrays[name], axis=-3, keepdims=True) for name in ("key", "value")}


ROW_RESULTS = ("output", "lse", "weights", "grad_query", "grad_bias")
COLUMN_RESULTS = ("grad_key", "grad_value")
_FORWARD_PLANE = 2**26  # elements of the plane: a second


def _is_usable(problem: Problem, name: str) -> bool:
    """Whether a result was given, in its shape, and is no sum over what a sample leaves out."""
    if name not in problem.given or problem.given[name].shape != problem.shape_of(name):
        return False
    return not name.startswith("grad_") or not problem.repeated_axes(name.removeprefix("grad_"))


def _badness(badness: Mapping[str, Array], names: list[str], shape: tuple[int, ...]) -> Array:
    """The largest of each row or column (…, heads, positions), over the named results."""
    worst = np.zeros(shape)
    for name in names:
        array = badness[name] if name == "lse" else np.max(badness[name], axis=-1, initial=0)
        worst = np.maximum(worst, np.where(np.isnan(array), np.inf, array))
    return worst


def _by_element(badness: Array, problem: Problem) -> Array:
    return np.max(badness.reshape(math.prod(problem.lead[:-1]), -1), axis=-1, initial=0)


def strips_of(badness: Array, count: int, taken: tuple[slice, ...]) -> tuple[slice, ...]:
    """Up to four strips with `count` positions together: around the worst one, and spread over the rest."""
    length = len(badness)
    if length <= count:
        return (slice(0, length),)
    free = badness.copy()
    for strip in taken:
        free[strip] = -1
    size = count // 4
    first = min(max(int(np.argmax(free)) - size // 2, 0), length - size)  # all of it inside
    # a quarter of the length apart, and not where an earlier sample was
    starts = sorted((first + number * length // 4) % length for number in range(4))
    strips: list[slice] = []
    for start in starts:
        start = min(max(start, strips[-1].stop if strips else 0), length)
        if start < min(start + size, length):
            strips.append(slice(start, min(start + size, length)))
    return tuple(strips)


def _indices(strips: tuple[slice, ...]) -> Array:
    return np.concatenate([np.arange(strip.start, strip.stop) for strip in strips])
