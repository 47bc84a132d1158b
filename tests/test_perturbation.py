"""Change one key, one value, one query, one entry of a bias, one sink, one slope: what may not see it is equal bit for
bit, and what sees it differs. Forward, backward, and both second-order functions."""

import cases
import loops
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from reach import reached, reading_rows, visible_plane
from results import everything, same_bits

VECTORS = ("query", "key", "value", "grad_output")  # one entry of these is one row


def perturbable(case):
    inputs = [name for name in case.differentiable if name not in ("scale", "softcap")]
    return (*inputs, *case.upstream, *(f"direction of {name}" for name in inputs))


def arrays_by_name(case, inputs):
    named = {"query": inputs.query, "key": inputs.key, "value": inputs.value, **inputs.options, **inputs.upstream}
    return named | {f"direction of {name}": array for name, array in cases.directions(case).items()}


def evaluate(case, arrays):
    return everything(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        {name: arrays[name] for name, _ in case.options},
        {name: arrays[name] for name in case.upstream},
        {name: arrays[f"direction of {name}"] for name in case.differentiable},
    )


def choose_one(rng, array, name):
    """True at one random entry (one row of a vector array); never one that is −∞. None where there is none."""
    is_vector = name.removeprefix("direction of ") in VECTORS
    candidates = np.ones(array.shape[:-1], bool) if is_vector else np.isfinite(array)
    places = np.argwhere(candidates)
    if len(places) == 0 or array.size == 0:
        return None
    chosen = np.zeros(candidates.shape, bool)
    chosen[tuple(places[rng.integers(len(places))])] = True
    return chosen


def check_forward_differs(case, arrays, moved, before, after):
    """What changes by more than rounding in the loops changes in the package."""

    def by_loops(named):
        options = {name: named[name] for name, _ in case.options}
        return loops.forward(named["query"], named["key"], named["value"], **options)

    first, second = by_loops(arrays), by_loops(moved)
    for name in ("output", "lse", "weights"):
        with np.errstate(invalid="ignore"):
            must_differ = np.abs(getattr(second, name) - getattr(first, name)) > 1e-9
        assert not (must_differ & same_bits(before[name], after[name])).any(), name


def check(case):
    inputs = cases.make(case)
    arrays = arrays_by_name(case, inputs)
    visible = visible_plane(inputs)
    before = evaluate(case, arrays)
    rng = np.random.default_rng(len(case.name))
    for name in perturbable(case):
        chosen = choose_one(rng, np.asarray(arrays[name]), name)
        if chosen is None:
            continue
        is_vector = name.removeprefix("direction of ") in VECTORS
        change = np.where(chosen[..., None] if is_vector else chosen, rng.normal(size=arrays[name].shape), 0)
        moved = arrays | {name: arrays[name] + change}
        after = evaluate(case, moved)
        may_differ = reached(case, inputs, visible, name, reading_rows(case, visible, name, chosen))
        for result, array in before.items():
            same = same_bits(array, after[result])
            leaked = ~same & ~np.broadcast_to(may_differ[result], same.shape)
            assert not leaked.any(), f"{name} shows in {result} at {np.argwhere(leaked)[:5].tolist()}"
        if name in case.differentiable:
            check_forward_differs(case, arrays, moved, before, after)


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_one_change_reaches_what_may_see_it(case):
    check(case)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases.case_strategy())
def test_one_change_reaches_what_may_see_it_in_random_combinations(case):
    check(case)
