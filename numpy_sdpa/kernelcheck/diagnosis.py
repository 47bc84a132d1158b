"""Which known mistakes reproduce a kernel's arrays: forward ones, backward ones, and one of each at once.

A candidate is a mistake in one of its forms, and one way for the rest of the kernel to go with it. It is tried on a
sample of the plane first; what explains something there is confirmed on another sample, or on everything where that
is small.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from numpy_sdpa.kernelcheck.gold import Gold
from numpy_sdpa.kernelcheck.half_sums import explained_by_half_sums
from numpy_sdpa.kernelcheck.problem import FORWARD, GRADIENTS, Array
from numpy_sdpa.kernelcheck.registry import MISTAKES, Mistake
from numpy_sdpa.kernelcheck.report import HALF_PRECISION_SUMS, Diagnosis
from numpy_sdpa.kernelcheck.sample import Key, Rest, Sample, Strips, Whole

# Elements of the plane up to which everything is the sample (one mistake takes a millisecond), and up to which
# everything confirms.
_TRY_WHOLE = 2**13
_CONFIRM_WHOLE = 2**20
_TRY_ALL_AGAIN = 2**17  # on everything, where strips do not show what is wrong: some seconds

# Forms of forward mistakes that backward ones are tried after.
_FORMS = 10

# What rounding may leave between a wrong kernel and the mistake that it made, relative (Frobenius): the arrays of a
# wrong kernel carry errors like those of a right one, but their size is that of other numbers.
_LEFT = {"float64": 1e-6, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
_LEFT_AT_MOST = 0.1
# Of what should be 0 under a mistake rounding leaves a noise that no prediction has: predictions count as large as this
# share of the right array at least.
_LEAST = 1e-3
# A mistake explains an array only if it takes away this much of its error.
_GAIN = 3.0
# Two candidates are ties if what they leave differs by less: the numbers are the same but for float64 rounding.
_TIE = 1.001
# A rival that leaves up to this many times the best one's error is listed after it: noise may have swapped the two.
_RIVAL = 2.0


class Candidate(NamedTuple):
    """A mistake in one of its forms, and how the rest of the kernel goes with it."""

    mistake: str
    variant: str = ""
    forward: tuple[Key, ...] = ()  # what the forward pass has wrong
    chain: tuple[Key, ...] = ()  # what the backward pass has wrong
    lse: tuple[Key, ...] = ()  # what the forward pass has wrong whose lse the backward takes
    row_dot: tuple[Key, ...] | None = ()  # and that whose D; None: it computes its own
    is_rewritten: bool = False  # changes single results, any of them or several


class Outcome(NamedTuple):
    """What a candidate makes of one result, beside what the kernel and the reference make of it."""

    predicted: list[tuple[str, Array]]  # each way that it may come out
    given: Array
    gold: Array


class Explanation(NamedTuple):
    candidate: Candidate
    residuals: dict[str, float]  # of the wrong results that it reproduces

    def error(self, names: Iterable[str]) -> float:
        return max((self.residuals[name] for name in names if name in self.residuals), default=math.inf)


def diagnose(
    gold: Gold, wrong: set[str], badness: Mapping[str, Array], sensitivity: Mapping[str, float]
) -> tuple[Diagnosis, ...]:
    """Which mistakes reproduce the wrong results of a problem, best first.

    `badness` is |error| / tolerance of each result in its right shape, `sensitivity` what the precision can tell of it.
    """
    if not wrong:
        return ()
    from threadpoolctl import threadpool_limits

    # Hundreds of small products: on a busy machine the threads that BLAS keeps waiting cost more than they do.
    with np.errstate(all="ignore"), threadpool_limits(1, user_api="blas"):
        return tuple(_Diagnoser(gold, wrong, badness, sensitivity).diagnose())


class _Diagnoser:
    def __init__(
        self, gold: Gold, wrong: set[str], badness: Mapping[str, Array], sensitivity: Mapping[str, float]
    ) -> None:
        self.problem = gold.problem
        self.wrong = wrong
        self.left = {name: self._left(sensitivity.get(name, 0.0)) for name in self.problem.given}
        self.results = gold.as_results()
        self.badness = badness

    def _left(self, sensitivity: float) -> float:
        return min(max(_LEFT[self.problem.dtype], 2 * sensitivity), _LEFT_AT_MOST)

    def diagnose(self) -> list[Diagnosis]:
        size = math.prod(self.problem.plane)
        whole = Whole(self.results)
        sample: Sample = whole
        if size <= _TRY_WHOLE:
            chosen = self._chosen(whole, self.wrong)
        else:
            sample = strips = Strips(self.results, self.badness)
            second = whole if size <= _CONFIRM_WHOLE else Strips(self.results, self.badness, earlier=strips)
            chosen = self._confirmed(self._chosen(strips, self.wrong), second)
            unexplained = self.wrong - explained(chosen)
            if unexplained and size <= _CONFIRM_WHOLE:
                # everything again only for what the strips cannot show at all
                everything = size <= _TRY_ALL_AGAIN and not unexplained <= set(strips.given)
                bases = [explanation.candidate.forward for explanation in chosen if explanation.candidate.forward]
                chosen += self._chosen(whole if everything else Rest(self.results), unexplained, bases)
        unexplained = self.wrong - explained(chosen)
        diagnoses = named(best(chosen, self.wrong))
        errors = explained_by_half_sums(sample, unexplained, self.problem.dtype) if unexplained else None
        if errors:
            diagnoses.append(Diagnosis(HALF_PRECISION_SUMS, _in_order(errors), max(errors.values())))
        return diagnoses

    # Candidates

    def _chosen(self, sample: Sample, wrong: set[str], earlier: Iterable[tuple[Key, ...]] = ()) -> list[Explanation]:
        """The best explanations of what is wrong, as far as this sample goes; `earlier` are forward mistakes found."""
        forward, gradients = wrong & set(FORWARD), wrong & set(GRADIENTS)
        chosen: list[Explanation] = []
        if forward:
            tried = self._tried(_forward_candidates(sample), sample, FORWARD)
            # forms that give the same forward results may differ in their gradients
            chosen = best(tried, forward, each_form=bool(gradients))
        if not gradients:
            return chosen
        chosen = [self._with_backward(explanation, sample) for explanation in chosen]
        # forms alike in all that they explain may differ in what a backward mistake leaves of the rest
        forms = {explanation.candidate.forward for explanation in best(chosen, wrong, each_form=True)}
        in_order = [candidate.forward for candidate in _forward_candidates(sample) if candidate.forward in forms]
        bases = [*filter(None, [*in_order[:_FORMS], *earlier])]
        chosen = best(chosen, wrong, each_form=isinstance(sample, Strips))
        for base in [*dict.fromkeys(bases), ()]:
            chosen += self._backward_over(base, sample, gradients - explained(chosen))
        # gradients alone may have a forward mistake and a backward one in them
        for base in {explanation.candidate.chain for explanation in chosen} - {*bases, ()}:
            if all(not MISTAKES[mistake].is_backward for mistake, _ in base):
                chosen += self._backward_over(base, sample, gradients - explained(chosen))
        return chosen

    def _backward_over(self, base: tuple[Key, ...], sample: Sample, wrong: set[str]) -> list[Explanation]:
        if not wrong:
            return []
        candidates = list(_backward_candidates(sample, base))
        if not base:
            candidates += _forward_mistakes_in_backward(sample)
        # forms that strips do not tell apart may be told apart by what strips do not show
        found = best(self._tried(candidates, sample, GRADIENTS), wrong, each_form=isinstance(sample, Strips))
        # what the base explains alone is not the backward mistake's
        return [Explanation(e.candidate, {n: r for n, r in e.residuals.items() if n in wrong}) for e in found]

    def _with_backward(self, explanation: Explanation, sample: Sample) -> Explanation:
        """A forward mistake with the kind of backward pass that explains most gradients."""
        candidate = explanation.candidate
        tried = self._tried([candidate] if candidate.is_rewritten else _meetings(candidate), sample, GRADIENTS)
        if not tried:
            return explanation
        most = max(tried, key=lambda other: (len(other.residuals), -other.error(other.residuals)))
        return Explanation(most.candidate, {**explanation.residuals, **most.residuals})

    # Trying

    def _tried(self, candidates: Iterable[Candidate], sample: Sample, names: Iterable[str]) -> list[Explanation]:
        explanations = []
        for candidate in candidates:
            explanation = self._explanation(candidate, sample, names)
            if explanation is not None and explanation.residuals:
                explanations.append(explanation)
        return explanations

    def _explanation(
        self, candidate: Candidate, sample: Sample, names: Iterable[str], gain: float = _GAIN
    ) -> Explanation | None:
        """The wrong results that the candidate reproduces; None if it contradicts one that is right."""
        residuals: dict[str, float] = {}
        variant = candidate.variant
        for name, outcome in _outcomes(
            candidate, sample, names, worth_more=lambda: bool(residuals or candidate.forward)
        ):
            now = residual(outcome.given, outcome.gold)
            least = _LEAST * float(np.linalg.norm(outcome.gold[np.isfinite(outcome.gold)]))
            then, form = min(
                ((residual(outcome.given, array, least), form) for form, array in outcome.predicted),
                default=(math.inf, ""),
            )
            if name in self.wrong and then <= self.left[name] and then * gain <= now:
                residuals[name] = then
                variant = form or variant
            elif name not in self.wrong and not candidate.is_rewritten and then > max(self.left[name], 2 * now):
                return None
        return Explanation(candidate._replace(variant=variant), residuals)

    def _confirmed(self, chosen: list[Explanation], sample: Sample) -> list[Explanation]:
        """What holds on another sample as well."""
        confirmed = []
        for explanation in chosen:
            kinds = (FORWARD, GRADIENTS)
            names = [name for kind in kinds if any(name in kind for name in explanation.residuals) for name in kind]
            # where this sample happens to have no error there is none to be taken away
            again = self._explanation(explanation.candidate, sample, names, gain=0.0)
            if again is not None:
                tested = {name for name, _ in _outcomes(explanation.candidate, sample, explanation.residuals)}
                untested = {name: error for name, error in explanation.residuals.items() if name not in tested}
                # what a forward mistake explains alone is not that of the backward one that goes on from it
                others = set() if explanation.candidate.forward else explained(chosen) - set(explanation.residuals)
                more = {name: error for name, error in again.residuals.items() if name not in others}
                confirmed.append(Explanation(again.candidate, {**untested, **more}))
        return confirmed


def _outcomes(
    candidate: Candidate, sample: Sample, names: Iterable[str], worth_more: Callable[[], bool] = lambda: True
) -> Iterator[tuple[str, Outcome]]:
    """What the candidate makes of the sample's results; of those that cost much only if it is worth it by then."""
    if candidate.is_rewritten:
        yield from _rewritten(candidate, sample, names)
        return
    asked = [name for name in names if name in sample.given]

    def outcomes(predicted: Mapping[str, Array]) -> Iterator[tuple[str, Outcome]]:
        for name in asked:
            if name in predicted:
                yield name, Outcome([("", predicted[name])], sample.given[name], sample.gold[name])

    if any(name in FORWARD for name in asked):
        change = sample.change(candidate.forward)
        if change is not None and sample.can_try(change):
            yield from outcomes(sample.forward(change))
    if any(name in GRADIENTS for name in asked):
        change, lse_of = sample.change(candidate.chain), sample.change(candidate.lse)
        row_dot_of = None if candidate.row_dot is None else sample.change(candidate.row_dot)
        missing = lse_of is None or (candidate.row_dot is not None and row_dot_of is None)
        if change is not None and lse_of is not None and not missing and sample.can_try(change):
            yield from outcomes(sample.gradients(change, lse_of, row_dot_of))
            if lse_of is row_dot_of is sample.right or worth_more():
                yield from outcomes(sample.column_gradients(change, lse_of, row_dot_of))


def _rewritten(candidate: Candidate, sample: Sample, names: Iterable[str]) -> Iterator[tuple[str, Outcome]]:
    change, rewritten = sample.change(candidate.chain), MISTAKES[candidate.mistake].rewritten
    if change is None or rewritten is None or not sample.can_rewrite(change):
        return
    compared = sample.results(change)
    for name in names:
        if name in compared.given and name in compared.results.arrays:
            forms = list(rewritten(compared.results, name))
            yield name, Outcome(forms, compared.given[name], compared.gold[name])


# Which candidates there are


def _forms(sample: Sample, is_backward: bool) -> Iterator[tuple[Mistake, Key]]:
    for mistake in MISTAKES.values():
        if mistake.is_backward == is_backward:
            for change in mistake.all_changes(sample.problem):
                yield mistake, (mistake.id, change.variant)


def _forward_candidates(sample: Sample) -> Iterator[Candidate]:
    for mistake, key in _forms(sample, is_backward=False):
        yield Candidate(mistake.id, key[1], forward=(key,))
    for mistake in MISTAKES.values():
        if not mistake.is_backward and mistake.rewritten is not None:
            yield Candidate(mistake.id, is_rewritten=True)


def _meetings(candidate: Candidate) -> Iterator[Candidate]:
    """How a backward pass meets a forward mistake: it has it too, or takes its lse and D, or one of them alone."""
    wrong = candidate.forward
    yield candidate._replace(chain=wrong, lse=wrong, row_dot=wrong)
    yield candidate._replace(chain=(), lse=wrong, row_dot=wrong)
    yield candidate._replace(chain=(), lse=wrong, row_dot=None)
    yield candidate._replace(chain=(), lse=(), row_dot=wrong)


def _backward_candidates(sample: Sample, base: tuple[Key, ...]) -> Iterator[Candidate]:
    """Backward mistakes after a forward pass: the backward goes with that, or has that right."""
    before = sample.change(base)
    has_own_softmax = before is not None and "softmax" in before.steps  # no lse tells its weights
    for mistake, key in _forms(sample, is_backward=True):
        change = sample.change((key,))
        for chain in dict.fromkeys([(*base, key), (key,)]):
            # whose mistake is in the logits computes the softmax again, if it does not take the forward pass's lse
            in_logits = change is not None and bool(change.options)
            again = [chain] if in_logits or (has_own_softmax and base == chain[:-1]) else []
            for lse in dict.fromkeys([base, *again]):
                for row_dot in dict.fromkeys([base, lse if lse in again else None]):
                    yield Candidate(mistake.id, key[1], chain=chain, lse=lse, row_dot=row_dot)
    for mistake in MISTAKES.values():
        if mistake.rewritten is not None:
            yield Candidate(mistake.id, chain=base, is_rewritten=True)


def _forward_mistakes_in_backward(sample: Sample) -> Iterator[Candidate]:
    """Forward mistakes in gradients alone: the backward computes a forward again, or takes the right lse, D or both."""
    for mistake, key in _forms(sample, is_backward=False):
        candidate = Candidate(mistake.id, key[1], chain=(key,))
        yield candidate._replace(lse=(key,), row_dot=(key,))
        yield candidate
        yield candidate._replace(row_dot=None)
        yield candidate._replace(lse=(key,))


# Comparing and choosing


def residual(given: Array, predicted: Array, least: float = 0.0) -> float:
    """Relative Frobenius error of a prediction, which counts as `least` at least; inf where shapes or NaN differ."""
    reshaped = _in_shape(predicted, given.shape)
    if reshaped is None:
        return math.inf
    finite = np.isfinite(given)
    if not np.array_equal(given[~finite], reshaped[~finite], equal_nan=True):
        return math.inf
    error = np.where(finite, given - reshaped, 0.0)
    # a fill of −1e9 that agrees must not make every other error small
    size = np.linalg.norm(reshaped[finite & ((error != 0) | (np.abs(reshaped) < 1e3))])
    size = max(np.float64(size), np.float64(least))
    distance = np.linalg.norm(error)
    if not np.isfinite(distance):
        return math.inf
    return float(distance / size) if size else (0.0 if distance == 0 else math.inf)


def _in_shape(array: Array, shape: tuple[int, ...]) -> Array | None:
    """The array in this shape, if only leading axes of size 1 differ."""

    def core(sizes: tuple[int, ...]) -> tuple[int, ...]:
        leading = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
        return tuple(sizes[leading:])

    return array.reshape(shape) if core(array.shape) == core(shape) else None


def best(explanations: list[Explanation], wrong: Iterable[str], each_form: bool = False) -> list[Explanation]:
    """The explanation of most results, with its ties and rivals; then the best one of the rest; and so on.

    Of each mistake the best form alone, unless `each_form`.
    """
    chosen: list[Explanation] = []
    remaining = set(wrong)
    while remaining:
        usable = [e for e in explanations if remaining & set(e.residuals)]
        if not usable:
            break
        first = max(usable, key=lambda e: (len(remaining & set(e.residuals)), -e.error(remaining)))
        covered = remaining & set(first.residuals)
        limit = max(first.error(covered) * _RIVAL, 1e-12)  # below that, float64 has no opinion
        group = [e for e in explanations if covered <= set(e.residuals) and e.error(covered) <= limit]
        seen = {e.candidate.mistake for e in chosen}
        for explanation in sorted(group, key=lambda e: e.error(covered)):
            if each_form or explanation.candidate.mistake not in seen:
                seen.add(explanation.candidate.mistake)
                chosen.append(explanation)
        remaining -= covered
    return chosen


def explained(explanations: Iterable[Explanation]) -> set[str]:
    return {name for explanation in explanations for name in explanation.residuals}


def named(explanations: list[Explanation]) -> list[Diagnosis]:
    """Ties stand together, in the order of the table; forward mistakes before backward ones that go on from them."""
    order = {mistake: number for number, mistake in enumerate(MISTAKES)}
    groups: list[list[Explanation]] = []
    for explanation in explanations:
        if groups and _are_ties(groups[-1][0], explanation):
            groups[-1].append(explanation)
        else:
            groups.append([explanation])
    groups.sort(key=lambda group: not any(name in FORWARD for name in group[0].residuals))
    diagnoses = []
    for group in groups:
        for number, explanation in enumerate(sorted(group, key=lambda e: order[e.candidate.mistake])):
            candidate, residuals = explanation
            diagnoses.append(
                Diagnosis(
                    candidate.mistake, _in_order(residuals), max(residuals.values()), candidate.variant, number > 0
                )
            )
    return diagnoses


def _are_ties(first: Explanation, second: Explanation) -> bool:
    if set(first.residuals) != set(second.residuals):
        return False
    return second.error(second.residuals) <= max(first.error(first.residuals) * _TIE, 1e-12)


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    names = set(names)
    return tuple(name for name in (*FORWARD, *GRADIENTS) if name in names)
