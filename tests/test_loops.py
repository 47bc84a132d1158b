"""The two oracles confirm each other, the loops know the hand-made answers, and the fixtures are whole."""

import math

import cases
import fixtures
import loops
import numpy
import pytest
from hypothesis import given as drawn
from hypothesis import settings

EVERY = pytest.mark.parametrize(("family", "case"), fixtures.EVERY, ids=[case.name for _, case in fixtures.EVERY])

inf = math.inf


def assert_close(got, expected, tolerance):
    """Same shape, and every entry within the tolerance, absolute and relative; infinities are equal."""
    assert numpy.shape(got) == numpy.shape(expected)
    numpy.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=False)


# -- the loops and torch ---------------------------------------------------------------------------


@EVERY
def test_forward_agrees_with_torch(family, case):
    fixture = fixtures.get(family, case)
    query, key, value, options, _ = fixture.inputs
    result = loops.forward(query, key, value, **options)
    assert_close(result.output, fixture.output, 1e-12)
    assert_close(result.lse, fixture.lse, 1e-12)
    assert_close(result.weights, fixture.weights, 1e-12)


@EVERY
def test_backward_agrees_with_torch(family, case):
    fixture = fixtures.get(family, case)
    query, key, value, options, upstream = fixture.inputs
    gradients = loops.backward(upstream.get("grad_output"), query, key, value, **without_output(upstream), **options)
    assert given(gradients) == set(fixture.gradients)
    for name, expected in fixture.gradients.items():
        assert_close(getattr(gradients, name), expected, 1e-11)
    if fixture.sdpa_gradients:
        of_output = loops.backward(upstream["grad_output"], query, key, value, **options)
        for name, expected in fixture.sdpa_gradients.items():
            assert_close(getattr(of_output, name), expected, 1e-11)


@EVERY
def test_second_order_agrees_with_torch(family, case):
    fixture = fixtures.get(family, case)
    query, key, value, options, upstream = fixture.inputs
    gradients, tangents = loops.double_backward(
        fixture.directions,
        upstream.get("grad_output"),
        query,
        key,
        value,
        **without_output(upstream),
        **options,
    )
    for name, expected in fixture.tangents.items():
        assert_close(getattr(tangents, name), expected, 1e-11)
    assert given(gradients) | set(upstream) == set(fixture.second)
    for name, expected in fixture.second.items():
        got = getattr(tangents, name.removeprefix("grad_")) if name in upstream else getattr(gradients, name)
        assert_close(got, expected, 1e-11)


def without_output(upstream):
    return {name: array for name, array in upstream.items() if name != "grad_output"}


def given(gradients):
    return {name for name, gradient in gradients._asdict().items() if gradient is not None}


# -- the fixtures ----------------------------------------------------------------------------------


def test_the_manifest_describes_the_present_grid():
    """A change to `cases.py` makes stored results stale: run `scripts/make_torch_fixtures.py` again."""
    entries = [
        {name: entry for name, entry in stored.items() if name not in ("oracles", "sha256")}
        for stored in fixtures.manifest()["cases"]
    ]
    assert entries == [{"family": family, **fixtures.describe(case)} for family, case in fixtures.EVERY]


def test_the_manifest_names_what_computed_it():
    manifest = fixtures.manifest()
    assert {"torch", "numpy", "seed"} <= set(manifest)
    called = {oracle for entry in manifest["cases"] for oracle in entry["oracles"].values()}
    assert called == {"composition", "flex_attention", "scaled_dot_product_attention"}


def test_stored_inputs_are_those_of_the_manifest():
    for (family, case), entry in zip(fixtures.EVERY, fixtures.manifest()["cases"], strict=True):
        fixture = fixtures.get(family, case)
        assert fixtures.sha256(fixture.inputs, fixture.directions) == entry["sha256"], case.name


@EVERY
def test_a_case_makes_the_same_arrays_everywhere(family, case):
    """To the last bits of the machine's own logarithm, from which normal numbers are drawn."""
    fixture = fixtures.get(family, case)
    stored = fixtures.input_arrays(fixture.inputs, fixture.directions)
    made = fixtures.input_arrays(cases.make(case), cases.directions(case))
    assert made.keys() == stored.keys()
    for name, array in made.items():
        assert array.dtype == stored[name].dtype
        assert_close(array, stored[name], 1e-15)


# -- the grid --------------------------------------------------------------------------------------


def test_names_are_unique():
    names = [case.name for _, case in fixtures.EVERY]
    assert len(names) == len(set(names))


def test_pairs_hold_every_pair_that_may_go_together():
    names = set(cases.FEATURES)
    pairs = {frozenset(case.name.split(" + ")) for case in cases.PAIRS}
    every = {frozenset({a, b}) for a in names for b in names if a < b}
    assert every - pairs == {frozenset({"lower_right", "query_offset"})}


def test_many_cases_have_rows_that_see_nothing():
    stored = [fixtures.get(family, case) for family, case in fixtures.EVERY]
    assert sum((fixture.lse == -inf).any() for fixture in stored) > len(stored) / 3


@settings(max_examples=150, deadline=None, derandomize=True)
@drawn(cases.case_strategy(dtypes=cases.DTYPES))
def test_backward_is_the_adjoint_of_the_jvp(case):
    """⟨v, JVP u⟩ = ⟨VJP v, u⟩ over the whole grid, zero sizes too."""
    query, key, value, options, upstream = cases.make(case)
    assert "query_offset" not in options or options.get("alignment") != "lower_right"
    directions = cases.directions(case)
    tangents = loops.jvp(directions, query, key, value, **options)
    gradients = loops.backward(upstream.get("grad_output"), query, key, value, **without_output(upstream), **options)
    forward = sum(numpy.vdot(v, getattr(tangents, name.removeprefix("grad_"))) for name, v in upstream.items())
    reverse = sum(numpy.vdot(getattr(gradients, name), u) for name, u in directions.items())
    scale = sum(numpy.vdot(abs(getattr(gradients, name)), abs(u)) for name, u in directions.items())
    assert abs(forward - reverse) <= 1e-13 * (1 + scale)


# -- answers worked out by hand --------------------------------------------------------------------


def column(*numbers):
    return numpy.array(numbers, dtype=float)[:, None]


def uniform(**options):
    """One query of 0 against two keys, with values 1 and 5."""
    return loops.forward(column(0), column(0, 0), column(1, 5), **options).output.item()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mask": [False, False]}, 0),
        ({"mask": [True, False]}, 1),
        ({"mask": [False, True]}, 5),
        ({"bias": [-inf, -inf]}, 0),
        ({"bias": [-1e30, -1e30]}, 3),
        ({"bias": [1.0, 0.0]}, 2.0757656854799804),
        ({"bias": [1.0, 0.0], "mask": [False, True]}, 5),
        ({"sinks": 0.0}, 2),
        ({"sinks": -inf}, 3),
        ({"sinks": inf}, 0),
        ({"sinks": 0.0, "mask": [False, False]}, 0),
        ({"dropout_p": 0.5, "dropout_mask": [True, False]}, 1),
        ({"dropout_p": 1.0, "dropout_mask": [True, True]}, 0),
        ({"alibi_slopes": math.log(3)}, 2),
        ({"alibi_slopes": math.log(3), "query_offset": 1}, 4),
        ({"window": (0, 0)}, 1),
        ({"window": (0, None), "query_offset": 1}, 5),
        ({"query_segments": [4], "key_segments": [3, 4]}, 5),
        ({"query_lengths": 0}, 0),
        ({"key_lengths": 1}, 1),
    ],
)
def test_two_keys(options, expected):
    assert uniform(**options) == pytest.approx(expected, abs=1e-15)


def test_lse_of_two_keys():
    def lse(**options):
        return loops.forward(column(0), column(0, 0), column(1, 5), **options).lse.item()

    assert lse() == pytest.approx(math.log(2), abs=1e-15)
    assert lse(sinks=0.0) == pytest.approx(math.log(3), abs=1e-15)
    assert lse(mask=[False, False]) == -inf
    assert lse(mask=[False, False], sinks=0.7) == 0.7


def test_causal_composes_with_a_mask():
    result = loops.forward(column(0, 0), column(0, 0), column(1, 5), mask=[False, True], is_causal=True)
    numpy.testing.assert_array_equal(result.output, column(0, 5))
    numpy.testing.assert_array_equal(result.weights, [[0, 0], [0, 1]])
    numpy.testing.assert_array_equal(result.logits, [[-inf, -inf], [-inf, 0]])


def test_alignment():
    query, key, value = column(0, 0), column(0, 0, 0, 0, 0), column(1, 2, 3, 4, 5)
    upper_left = loops.forward(query, key, value, is_causal=True)
    lower_right = loops.forward(query, key, value, is_causal=True, alignment="lower_right")
    one = loops.forward(query[:1], key, value, is_causal=True, alignment="lower_right", key_lengths=3)
    assert_close(upper_left.output, column(1, 1.5), 1e-15)
    assert_close(lower_right.output, column(2.5, 3), 1e-15)
    assert_close(one.output, column(2), 1e-15)


def test_scale():
    query, key, value = column(1), column(1, 0), column(1, 5)
    negative = loops.forward(query, key, value, scale=-2.0)
    assert_close(negative.weights, [[0.11920292202211755, 0.8807970779778823]], 1e-15)
    default = loops.forward(column(2), key, value)
    assert_close(default.weights, [[0.8807970779778823, 0.11920292202211755]], 1e-15)

    zero = loops.forward(query, key, value, scale=0.0)
    numpy.testing.assert_array_equal(zero.weights, [[0.5, 0.5]])
    gradients = loops.backward([[1.0]], query, key, value, scale=0.0)
    assert not gradients.query.any()
    assert not gradients.key.any()
    assert gradients.scale == -1  # of (1·e^s + 5) / (e^s + 1) at s = 0: (1 − 5) / 4


def test_zero_padding_of_the_head_size():
    query, key, value, *_ = cases.make(cases.BY_NAME["bare"])
    padded = [numpy.pad(array, [(0, 0)] * 3 + [(0, 2)]) for array in (query, key)]
    numpy.testing.assert_array_equal(
        loops.forward(*padded, value, scale=0.3).output, loops.forward(query, key, value, scale=0.3).output
    )


def test_softcap():
    result = loops.forward(column(1), column(3), column(1), scale=1.0, softcap=2.0)
    assert result.scores.item() == 3
    assert result.capped_scores.item() == result.logits.item() == pytest.approx(2 * math.tanh(1.5), abs=1e-15)


def test_masks_and_biases_of_minus_infinity_are_one():
    """`mask` is bias = where(mask, 0, −inf); with a bias, where(mask, bias, −inf); gradients too."""
    query, key, value, options, upstream = cases.make(cases.BY_NAME["mask + bias"])
    mask, bias = options["mask"], options["bias"]
    grad_output, rest = upstream["grad_output"], without_output(upstream)
    for masked, biased in [
        ({"mask": mask}, numpy.where(mask, 0.0, -inf)),
        ({"mask": mask, "bias": bias}, numpy.where(mask, bias, -inf)),
    ]:
        one, other = loops.forward(query, key, value, **masked), loops.forward(query, key, value, bias=biased)
        numpy.testing.assert_array_equal(one.output, other.output)
        one = loops.backward(grad_output, query, key, value, **rest, **masked)
        other = loops.backward(grad_output, query, key, value, **rest, bias=biased)
        for name in given(one):
            numpy.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_the_two_forms_of_alibi():
    """−m·(i − j) and m·j differ by a constant of each row under a causal mask: in lse, not in output."""
    query, key, value, *_ = cases.make(cases.BY_NAME["causal"])
    slopes = numpy.array([0.3, 0.7])
    bias = slopes[None, :, None, None] * numpy.arange(key.shape[-2])
    distance = loops.forward(query, key, value, is_causal=True, alibi_slopes=slopes)
    position = loops.forward(query, key, value, is_causal=True, bias=bias)
    assert_close(distance.output, position.output, 1e-14)
    row_constants = slopes[None, :, None] * numpy.arange(query.shape[-2])
    assert_close(position.lse - distance.lse, numpy.broadcast_to(row_constants, distance.lse.shape), 1e-14)


def test_all_ranks_agree():
    query, key, value, *_ = cases.make(cases.BY_NAME["rank 2"])
    expected = loops.forward(query, key, value).output
    for rank in (3, 4, 5, 6):
        lead = (1,) * (rank - 2)
        arrays = [array.reshape(lead + array.shape) for array in (query, key, value)]
        numpy.testing.assert_array_equal(loops.forward(*arrays).output, expected.reshape(lead + expected.shape))


def test_grouped_heads_are_repeated_heads():
    query, key, value, options, upstream = cases.make(cases.BY_NAME["GQA 6/2"])
    grouped = loops.backward(upstream["grad_output"], query, key, value, **options)
    repeated = loops.backward(upstream["grad_output"], query, key.repeat(3, axis=1), value.repeat(3, axis=1))
    assert_close(grouped.query, repeated.query, 1e-15)
    assert_close(grouped.key, repeated.key.reshape(1, 2, 3, *key.shape[-2:]).sum(axis=2), 1e-14)
    assert_close(grouped.value, repeated.value.reshape(1, 2, 3, *value.shape[-2:]).sum(axis=2), 1e-14)


def test_a_broadcast_batch_gets_a_summed_gradient():
    query, key, value, _, upstream = cases.make(cases.BY_NAME["key of batch 1"])
    whole_key = numpy.repeat(key, 3, axis=0)
    broadcast = loops.backward(upstream["grad_output"], query, key, value)
    whole = loops.backward(upstream["grad_output"], query, whole_key, value)
    assert broadcast.key.shape == key.shape
    assert_close(broadcast.key, whole.key.sum(axis=0, keepdims=True), 1e-14)


def test_what_is_masked_is_never_read():
    """Keys and values that no query sees; queries and upstream gradients of rows that see nothing."""
    query, key, value, *_ = cases.make(cases.BY_NAME["rank 2"])
    grad_output, grad_lse = numpy.ones((4, 2)), numpy.ones(4)
    mask = numpy.ones((4, 5), dtype=bool)
    mask[:, 3] = mask[1, :] = False

    def poisoned(poison):
        arrays = [array.copy() for array in (query, key, value, grad_output, grad_lse)]
        for array, row in zip(arrays, (1, 3, 3, 1, 1), strict=True):
            array[row] = poison
        return arrays

    def results(poison):
        *tensors, grad_output, grad_lse = poisoned(poison)
        forward = loops.forward(*tensors, mask=mask)
        gradients = loops.backward(grad_output, *tensors, mask=mask, grad_lse=grad_lse)
        return [forward.output, forward.lse, forward.weights, forward.logits, *gradients[:3], gradients.scale]

    expected = results(0.0)
    for poison in (math.nan, inf, -inf):
        for got, clean in zip(results(poison), expected, strict=True):
            numpy.testing.assert_array_equal(got, clean)

    seen = loops.forward(query, numpy.where(numpy.arange(5)[:, None] == 0, math.nan, key), value, mask=mask)
    assert numpy.isnan(seen.output[[0, 2, 3]]).all()
    assert not seen.output[1].any()


def test_a_row_of_nothing_gives_its_lse_gradient_to_the_sink_alone():
    tensors = column(2), column(1, 0), column(1, 5)
    gradients = loops.backward([[1.0]], *tensors, grad_lse=[0.3], sinks=0.5, mask=[False, False])
    assert gradients.sinks == 0.3
    assert not any(gradient.any() for gradient in gradients[:3])
    no_sink = loops.backward([[1.0]], *tensors, grad_lse=[math.nan], sinks=-inf, mask=[False, False])
    assert no_sink.sinks == 0


def test_an_infinite_sink_takes_everything():
    tensors = column(2), column(1, 0), column(1, 5)
    assert loops.forward(*tensors, sinks=inf).lse == inf
    gradients = loops.backward([[1.0]], *tensors, grad_lse=[0.3], sinks=inf)
    assert gradients.sinks == 0.3
    assert not any(gradient.any() for gradient in gradients[:3])


def test_slope_gradient_by_differences():
    query, key, value, _, upstream = cases.make(cases.BY_NAME["rank 2"])
    grad_output = upstream["grad_output"]

    def function(slope):
        return (loops.forward(query, key, value, alibi_slopes=slope).output * grad_output).sum()

    step = 1e-5  # error step² times a third derivative of order 1, and 1e-16 / step
    quotient = (function(0.3 + step) - function(0.3 - step)) / (2 * step)
    gradients = loops.backward(grad_output, query, key, value, alibi_slopes=0.3)
    assert gradients.alibi_slopes == pytest.approx(quotient, abs=1e-8)
