"""A masked position is never read: NaN, +∞ and −∞ there are equal to 0 there, bit for bit, in every result.

For every kind of rule that hides, alone and with the options that change the arithmetic around it; forward, backward,
tangents and double backward; in keys, values, queries, biases, upstream gradients, and the directions of all of them.
And the other side: a row that does see a NaN shows it, and passes it on to nothing that it may not see.
"""

import cases
import numpy as np
import pytest
from cases import Sizes
from reach import group_size, reached, reading_rows, visible_plane
from results import assert_same_bits, everything

POISONS = (np.nan, np.inf, -np.inf)
VECTORS = ("query", "key", "value", "grad_output")

# Every kind of rule that hides a position.
HIDING = {
    "mask": ["mask"],
    "mask of integers": ["mask of integers"],
    "bias": ["bias"],
    "causal": ["causal"],
    "lower_right": ["lower_right"],
    "query_offset": ["query_offset"],
    "offset negative": ["offset negative"],
    "window": ["window"],
    "window at lower_right": ["window at lower_right"],
    "query_lengths": ["query_lengths"],
    "key_lengths": ["key_lengths"],
    "lengths": ["window at lengths"],
    "segments": ["segments"],
    "all": ["mask", "bias", "lower_right", "window", "query_lengths", "key_lengths", "segments"],
}
BESIDE = {
    "": [],
    "gqa": ["gqa"],
    "softcap": ["softcap"],
    "sinks": ["sinks"],
    "all": ["gqa", "softcap", "sinks", "alibi", "dropout", "scale"],
}
SIZES = (Sizes(L=3, S=6), Sizes(L=6, S=3))


def poison_cases(every):
    for hiding, rules in every.items():
        for beside, others in BESIDE.items():
            features = rules + others
            for sizes in SIZES:
                if "gqa" in features:
                    sizes = Sizes(heads=(4, 2), L=sizes.L, S=sizes.S)
                options = {}
                for feature in features:
                    options |= (cases.FEATURES | cases.FORMS)[feature](sizes)
                name = " + ".join(filter(None, [hiding, f"with {beside}" if beside else ""]))
                yield sizes.case(f"{name}, L = {sizes.L}, S = {sizes.S}", options)


CASES = {case.name: case for case in poison_cases(HIDING)}
UNMASKED = list(poison_cases({"nothing": []}))


def make(case):
    """The case's arrays, with one key and one row hidden in the masks and biases, which hide pairs at random."""
    inputs = cases.make(case)
    for name, hidden in (("mask", 0), ("bias", -np.inf)):
        if name in inputs.options:
            inputs.options[name][..., 1] = hidden
            inputs.options[name][..., 1, :] = hidden
    return inputs


def hidden_places(case, inputs):
    """By name of array (as in `arrays`), where no result may read it: vectors of query, key, value, grad_output."""
    visible = visible_plane(inputs)
    rows = ~visible.any(axis=-1)
    keys = ~visible.any(axis=-2)
    if case.has_gqa:
        keys = keys.reshape(*case.batch, case.key[-3], group_size(case), case.key[-2]).all(axis=-2)
    vectors = {"query": rows, "key": keys, "value": keys, "grad_output": rows}
    places = {name: where[..., None] for name, where in vectors.items()}
    places["grad_weights"] = ~visible
    if "sinks" not in case.option_names:  # a row of nothing gives its grad_lse to its sink
        places["grad_lse"] = rows
    for name in ("query", "key", "value"):
        places[f"direction of {name}"] = places[name]
    if "bias" in case.option_names:  # of the full shape here; where another rule hides it, or it is −∞ itself
        places["direction of bias"] = ~visible
        places["bias"] = ~visible & (inputs.options["bias"] != -np.inf)
    return places


def arrays(case, inputs):
    named = {"query": inputs.query, "key": inputs.key, "value": inputs.value, **inputs.options, **inputs.upstream}
    return named | {f"direction of {name}": array for name, array in cases.directions(case).items()}


def filled(named, places, value):
    """The arrays with `value` at the places."""
    return named | {name: np.where(where, value, named[name]) for name, where in places.items()}


def evaluate(case, named):
    return everything(
        *(named[name] for name in ("query", "key", "value")),
        {name: named[name] for name, _ in case.options},
        {name: named[name] for name in case.upstream},
        {name: named[f"direction of {name}"] for name in case.differentiable},
    )


def test_every_rule_hides_keys_and_rows():
    """So that the tests below poison something for every rule: keys that no row sees, and rows that see no key."""
    for hiding in HIDING:
        of_this = [case for case in CASES.values() if case.name.split(",")[0].split(" + ")[0] == hiding]
        places = [hidden_places(case, make(case)) for case in of_this]
        assert any(place["key"].any() or place["query"].any() for place in places), hiding
        assert sum(place["grad_weights"].any() for place in places) > len(places) / 2, hiding
    every = [hidden_places(case, make(case)) for case in CASES.values()]
    assert sum(place["key"].any() for place in every) > len(every) / 2
    assert sum(place["query"].any() for place in every) > len(every) / 2
    assert sum(not place["query"].all() for place in every) > len(every) * 0.9  # and most show something


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_what_is_hidden_is_never_read(case):
    inputs = make(case)
    named, places = arrays(case, inputs), hidden_places(case, inputs)
    expected = evaluate(case, filled(named, places, 0.0))
    for poison in POISONS:
        assert_same_bits(evaluate(case, filled(named, places, poison)), expected)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_each_array_by_itself(case):
    """Poison everywhere at once could hide a NaN behind another; one array at a time cannot."""
    inputs = make(case)
    named, places = arrays(case, inputs), hidden_places(case, inputs)
    expected = evaluate(case, named)
    for name, where in places.items():
        assert_same_bits(evaluate(case, filled(named, {name: where}, np.nan)), expected)


@pytest.mark.parametrize("place", [(0, 0), (0, 1)])
@pytest.mark.parametrize("name", VECTORS)
def test_one_entry_of_a_vector_is_enough(name, place):
    """A row that sees a NaN shows it, also where the other entries of that vector are numbers."""
    mask = np.array([[True, True, False], [False, True, True]])
    named = {"query": np.ones((2, 2)), "key": np.ones((3, 2)), "value": np.ones((3, 2)), "grad_output": np.ones((2, 2))}
    named[name][place] = np.nan
    upstream = {"grad_output": named.pop("grad_output")}
    got = everything(*named.values(), {"mask": mask}, upstream)
    shown = {"query": "output", "key": "output", "value": "output", "grad_output": "grad_value"}[name]
    assert np.isnan(got[shown][place])
    assert np.isfinite(got[shown][-1]).all()  # the last row, and the last key, see nothing of it
    for gradient in ("query", "key"):
        assert np.isnan(got[f"grad_{gradient}"][0]).all()
        assert np.isfinite(got[f"grad_{gradient}"][-1]).all()


# -- what is seen shows, and goes no further ---------------------------------------------------------------------------


def one_seen_place(case, visible, name, array, rng):
    """One entry (one row of the vectors) that some row reads, as a bool array, and the rows that read it; or none."""
    is_vector = name.removeprefix("direction of ") in VECTORS
    candidates = np.ones(array.shape[:-1], bool) if is_vector else np.isfinite(array)
    for place in rng.permutation(np.argwhere(candidates)):
        chosen = np.zeros(candidates.shape, bool)
        chosen[tuple(place)] = True
        rows = reading_rows(case, visible, name, chosen)
        if rows.any():
            return (chosen[..., None] if is_vector else chosen), rows
    return None, None


@pytest.mark.parametrize("case", [*CASES.values(), *UNMASKED], ids=str)
def test_what_is_seen_shows_and_goes_no_further(case):
    inputs = make(case)
    named, visible = arrays(case, inputs), visible_plane(inputs)
    expected = evaluate(case, named)
    rng = np.random.default_rng(0)
    inputs_seen = [name for name in case.differentiable if name not in ("scale", "softcap")]
    for name in (*inputs_seen, *case.upstream, *(f"direction of {name}" for name in inputs_seen)):
        chosen, rows = one_seen_place(case, visible, name, named[name], rng)
        if rows is None:
            continue
        reach = reached(case, inputs, visible, name, rows)
        for poison in (np.nan, np.inf):
            got = evaluate(case, filled(named, {name: chosen}, poison))
            assert_same_bits(got, expected, where={result: ~np.asarray(where) for result, where in reach.items()})
            if np.isnan(poison):
                assert_all_nan(case, got, reach)


def assert_all_nan(case, got, reach):
    """A NaN takes everything that it reaches, but the logits of other keys, and what dropout has set to 0."""
    for result, where in reach.items():
        if result in got and result != "logits" and "dropout_p" not in case.option_names:
            assert np.isnan(got[result])[np.broadcast_to(where, got[result].shape)].all(), result
