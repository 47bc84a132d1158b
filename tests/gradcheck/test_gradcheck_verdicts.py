"""What the checks say of right and of wrong derivatives."""

import json

import numpy as np
import pytest
from smooth_functions import Case, attention, attention_jvp, attention_vjp, dense, dense_jvp, dense_vjp

from numpy_sdpa.gradcheck import (
    GradientReport,
    GradientRow,
    check_adjoint,
    check_jvp,
    check_taylor,
    check_vjp,
)

RNG = np.random.default_rng(7)
X, W, B = RNG.normal(size=(3, 4)), RNG.normal(size=(4, 2)), RNG.normal(size=2)
DENSE = Case("dense", dense, dense_vjp, dense_jvp, (X, W, B))
Q, K, V = RNG.normal(size=(3, 4)), RNG.normal(size=(5, 4)), RNG.normal(size=(5, 2))
ATTENTION = Case("attention", attention, attention_vjp, attention_jvp, (Q, K, V))


def verdicts(report):
    return [row.verdict for row in report.rows]


def altered(vjp, position, change):
    """`vjp` with one of its gradients changed."""

    def wrong(grad, *args):
        gradients = list(vjp(grad, *args))
        gradients[position] = change(gradients[position])
        return gradients

    return wrong


# --- right -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [DENSE, ATTENTION], ids=lambda case: case.name)
@pytest.mark.parametrize("direction", ["all", "random"])
@pytest.mark.parametrize("method", ["central", "complex"])
def test_right_derivatives_pass(case, direction, method):
    report = check_vjp(case.function, case.vjp, case.args, method=method, direction=direction)
    assert verdicts(report) == ["right"] * 3
    assert [row.argument for row in report.rows] == [0, 1, 2]
    assert report.passed
    assert bool(report)
    report = check_jvp(case.function, case.jvp, case.args, method=method, direction=direction)
    assert verdicts(report) == ["right"] * 3


@pytest.mark.parametrize("case", [DENSE, ATTENTION], ids=lambda case: case.name)
@pytest.mark.parametrize("direction", ["all", "random"])
def test_right_derivatives_are_adjoint_and_of_second_order(case, direction):
    assert check_adjoint(case.jvp, case.vjp, case.args, direction=direction).passed
    assert check_taylor(case.function, case.jvp, case.args, direction=direction).passed


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_functions_are_called_in_their_own_dtype_and_shape(dtype):
    seen = set()

    def function(x, n):
        seen.add((x.dtype.name, x.shape, n))
        return x * x

    def vjp(grad, x, n):
        seen.add((grad.dtype.name, x.dtype.name))
        return 2 * x * grad

    x = np.array([[0.5, 1.0, 2.0]], dtype)
    assert check_vjp(function, vjp, (x, 3)).passed
    assert seen == {(dtype, (1, 3), 3), (dtype, dtype)}


def test_half_precision_can_be_decided():
    """One rounding of float16, as a kernel that accumulates in float32 has it."""

    def up(arrays):
        return [array.astype(np.float32) for array in arrays]

    def function(*arrays):
        return attention(*up(arrays))[0].astype(np.float16)

    def vjp(grad, *arrays):
        grads = (grad.astype(np.float32), np.zeros(len(arrays[0]), np.float32))
        return [g.astype(np.float16) for g in attention_vjp(grads, *up(arrays))]

    args = tuple(array.astype(np.float16) for array in (Q[:2], K[:3], V[:3]))
    assert check_vjp(function, vjp, args).passed
    wrong = altered(vjp, 1, lambda g: g * np.float16(1.1))
    report = check_vjp(function, wrong, args, raise_exception=False)
    assert verdicts(report) == ["right", "wrong", "right"]


# --- wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("direction", ["all", "random"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda g: -g, id="sign"),
        pytest.param(lambda g: 2 * g, id="factor"),
        pytest.param(lambda g: 0 * g, id="zero"),
        pytest.param(lambda g: g * (1 + 3e-7), id="factor 1 + 3e-7"),
        pytest.param(lambda g: np.roll(g, 1), id="rolled"),
        pytest.param(lambda g: np.where(np.arange(g.size).reshape(g.shape) == 1, np.nan, g), id="one nan"),
        pytest.param(lambda g: np.where(np.arange(g.size).reshape(g.shape) == 1, np.inf, g), id="one inf"),
        pytest.param(lambda g: np.where(np.arange(g.size).reshape(g.shape) == 1, 1e300, g), id="one huge"),
        pytest.param(lambda g: g[None], id="shape"),
        pytest.param(lambda g: np.sum(g), id="sum"),
        pytest.param(lambda g: g + 0j, id="complex"),
        pytest.param(lambda g: None, id="None"),
    ],
)
def test_a_wrong_gradient_is_found_and_no_other_is_accused(position, direction, change):
    report = check_vjp(
        dense, altered(dense_vjp, position, change), DENSE.args, direction=direction, raise_exception=False
    )
    assert verdicts(report) == ["wrong" if row == position else "right" for row in range(3)]
    assert not report.passed


def test_one_wrong_entry_is_found_where_it_is():
    def change(gradient):
        gradient = gradient.copy()
        gradient[2, 1] += 1e-6
        return gradient

    report = check_vjp(dense, altered(dense_vjp, 0, change), DENSE.args, raise_exception=False)
    row = report.rows[0]
    assert row.worst_index == (2, 1)
    assert row.wrong_entries == 1
    assert row.max_abs_error == pytest.approx(1e-6, rel=1e-3)
    assert row.got - row.expected == pytest.approx(1e-6, rel=1e-3)
    assert abs(row.got - row.expected) > row.tolerance + row.uncertainty


@pytest.mark.parametrize("seed", range(20))
def test_every_draw_finds_an_entry_wrong_by_more_than_ten_tolerances(seed):
    """The direction has no component below 1/2."""
    x = np.random.default_rng(seed).normal(size=30)
    exact = check_vjp(
        lambda x: x * x, lambda grad, x: 2 * x * grad, (x,), direction="random", rng=seed, atol=1e-6, rtol=0
    )
    error = 10.1 * exact.rows[0].tolerance
    entry = seed % 30

    def vjp(grad, x):
        gradient = 2 * x * grad
        gradient[entry] += error
        return gradient

    report = check_vjp(
        lambda x: x * x, vjp, (x,), direction="random", rng=seed, atol=1e-6, rtol=0, raise_exception=False
    )
    assert verdicts(report) == ["wrong"]


def test_with_several_outputs_the_index_starts_with_the_outputs_number():
    def wrong(grads, q, k, v):
        p = attention_vjp((grads[0], 0 * grads[1]), q, k, v)
        lse = attention_vjp((0 * grads[0], grads[1]), q, k, v)
        gradient = lse[0].copy()
        gradient[2, 3] *= -1
        return p[0] + gradient, p[1] + lse[1], p[2] + lse[2]

    report = check_vjp(attention, wrong, ATTENTION.args, raise_exception=False)
    assert verdicts(report) == ["wrong", "right", "right"]
    assert report.rows[0].worst_index == (1, 2, 3)

    def wrong_tangent(tangents, q, k, v):
        output, lse = attention_jvp(tangents, q, k, v)
        lse = lse.copy()
        lse[1] *= 1.5
        return output, lse

    report = check_jvp(attention, wrong_tangent, ATTENTION.args, raise_exception=False)
    assert verdicts(report) == ["wrong", "wrong", "right"]  # lse does not depend on v
    assert report.rows[0].worst_index == (1, 1)
    assert len(report.rows[0].direction_index) == 2
    report = check_taylor(attention, wrong_tangent, ATTENTION.args, raise_exception=False)
    assert verdicts(report) == ["wrong", "wrong", "right"]
    assert report.rows[0].worst_index == (1,)


def test_a_wrong_number_of_gradients_is_a_verdict():
    def two(grad, *args):
        return dense_vjp(grad, *args)[:2]

    report = check_vjp(dense, two, DENSE.args, raise_exception=False)
    assert verdicts(report) == ["wrong"] * 3
    assert "vjp returned 2 gradients, expected 3" in report.rows[0].note
    report = check_adjoint(dense_jvp, two, DENSE.args, raise_exception=False)
    assert verdicts(report) == ["wrong"] * 3


@pytest.mark.parametrize("check", [check_jvp, check_taylor])
@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda t: t, "right"),
        (lambda t: t * 1.001, "wrong"),
        (lambda t: t * np.nan, "wrong"),
        (lambda t: t[0], "wrong"),
        (lambda t: (t, t), "wrong"),
        (lambda t: None, "wrong"),
    ],
)
def test_wrong_tangents(check, change, verdict):
    report = check(dense, lambda t, *args: change(dense_jvp(t, *args)), DENSE.args, raise_exception=False)
    assert verdicts(report) == [verdict] * 3


def test_an_adjoint_that_is_not_one():
    for position in range(3):
        wrong = altered(dense_vjp, position, lambda g: g * (1 + 1e-10))
        for direction in ("all", "random"):
            report = check_adjoint(dense_jvp, wrong, DENSE.args, direction=direction, raise_exception=False)
            assert verdicts(report) == ["wrong" if row == position else "right" for row in range(3)]
    report = check_adjoint(
        dense_jvp, lambda grad, *args: [g + 1e-9 for g in dense_vjp(grad, *args)], DENSE.args, atol=1e-8
    )
    assert report.passed
    report = check_adjoint(lambda *a: dense_jvp(*a) * np.nan, dense_vjp, DENSE.args, raise_exception=False)
    assert verdicts(report) == ["wrong"] * 3


def test_taylor_remainders_of_a_wrong_tangent_fall_with_rate_one():
    report = check_taylor(dense, lambda t, *args: 1.01 * dense_jvp(t, *args), DENSE.args, raise_exception=False)
    for row in report.rows:
        assert row.verdict == "wrong"
        assert row.got == pytest.approx(1, abs=0.1)
        assert row.expected == 2
        assert len(row.steps) == len(row.remainders) == len(row.rates) + 1
        np.testing.assert_allclose(np.diff(np.log2(row.steps)), -1)
        np.testing.assert_allclose(row.rates, -np.diff(np.log2(row.remainders)))
    right = check_taylor(dense, dense_jvp, DENSE.args)
    for row in right.rows:
        assert row.got == pytest.approx(2, abs=0.05)


def test_taylor_of_a_linear_function_is_exact_not_a_rate():
    def function(x, w):
        return x @ w

    def jvp(tangents, x, w):
        return tangents[0] @ w + x @ tangents[1]

    report = check_taylor(function, jvp, (X, W))
    assert [row.got for row in report.rows] == [np.inf, np.inf]
    assert "exact" in report.rows[0].note
    report = check_taylor(function, lambda t, x, w: 1.0001 * t[0] @ w + x @ t[1], (X, W), raise_exception=False)
    assert verdicts(report) == ["wrong", "right"]


def test_taylor_rates_above_two_are_right():
    report = check_taylor(lambda x: x**3, lambda t, x: 3 * x * x * t[0], (np.zeros(3),))
    assert report.rows[0].got == pytest.approx(3, abs=0.05)


# --- undecided -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("got", [-1.0, 0.0, 0.3, 1.0])
def test_a_kink_is_undecided_whatever_slope_between_its_sides_is_claimed(got):
    def vjp(grad, x):
        return grad * np.where(x == 0, got, np.sign(x))

    def jvp(tangents, x):
        return tangents[0] * np.where(x == 0, got, np.sign(x))

    x = np.array([1.0, 0.0, -2.0])
    for report in (
        check_vjp(np.abs, vjp, (x,), raise_exception=False),
        check_vjp(np.abs, vjp, (x,), direction="random", raise_exception=False),
        check_jvp(np.abs, jvp, (x,), raise_exception=False),
        check_taylor(np.abs, jvp, (np.zeros(2),), raise_exception=False),
    ):
        assert verdicts(report) == ["undecided"]
        assert "kink" in report.rows[0].note
    report = check_vjp(np.abs, vjp, (x,), raise_exception=False)
    assert report.rows[0].worst_index == (1,)
    with pytest.raises(AssertionError, match="undecided at index"):
        check_vjp(np.abs, vjp, (x,))


def test_a_slope_outside_a_kink_is_wrong():
    report = check_vjp(
        np.abs, lambda g, x: g * np.where(x == 0, 3.0, np.sign(x)), (np.zeros(2),), raise_exception=False
    )
    assert verdicts(report) == ["wrong"]


def test_a_kink_nearby_is_no_hindrance():
    x = np.array([1.0, 1e-3, -1e-5, -2.0])
    assert check_vjp(lambda x: np.maximum(x, 0), lambda g, x: g * (x > 0), (x,)).passed


def test_a_noisy_function_is_undecided_and_a_clear_mistake_in_it_still_wrong():
    x = np.linspace(-1, 1, 5)

    def noisy(x):
        return np.sin(x) + 1e-3 * np.random.default_rng(int(abs(x).sum() * 1e12)).normal(size=x.shape)

    report = check_vjp(noisy, lambda g, x: g * np.cos(x), (x,), raise_exception=False)
    assert verdicts(report) == ["undecided"]

    def less_noisy(x):
        return np.sin(x).astype(np.float32).astype(float)

    assert check_vjp(less_noisy, lambda g, x: g * np.cos(x), (x,)).passed
    report = check_vjp(less_noisy, lambda g, x: g * np.cos(x) * 1.001, (x,), raise_exception=False)
    assert verdicts(report) == ["wrong"]
    assert 1e-7 < report.rows[0].uncertainty < 1e-4


def test_a_gradient_that_is_rounding_only_needs_an_atol():
    def function(x):  # the sum of a softmax: 1
        e = np.exp(x - x.max())
        return np.sum(e / e.sum())

    x = np.random.default_rng(0).normal(size=5)
    report = check_vjp(function, lambda g, x: 0 * x, (x,), raise_exception=False)
    assert verdicts(report) == ["undecided"]
    assert check_vjp(function, lambda g, x: 0 * x, (x,), atol=1e-9).passed
    report = check_vjp(function, lambda g, x: 0 * x + 1e-8, (x,), atol=1e-9, raise_exception=False)
    assert verdicts(report) == ["wrong"]


@pytest.mark.parametrize("method", ["central", "complex"])
def test_a_constant_function_has_no_uncertainty(method):
    def function(x):
        return np.ones((2, 2))

    x = np.array([1.0, 0.0, -2.0])
    report = check_vjp(function, lambda g, x: 0 * x, (x,), method=method)
    assert report.rows[0].uncertainty == 0
    report = check_vjp(function, lambda g, x: 0 * x + 1e-30, (x,), method=method, raise_exception=False)
    assert verdicts(report) == ["wrong"]
    assert check_jvp(function, lambda t, x: np.zeros((2, 2)), (x,), method=method).passed
    assert check_taylor(function, lambda t, x: np.zeros((2, 2)), (x,)).passed
    assert check_adjoint(lambda t, x: np.zeros((2, 2)), lambda g, x: 0 * x, (x,)).passed


def test_constant_to_the_last_digit_is_not_constant():
    """A saturated softmax does not move; its gradient of 1e-22 is right, or too small to tell."""

    def function(x):
        e = np.exp(x - x.max())
        return e / e.sum()

    def vjp(grad, x):
        p = function(x)
        return p * (grad - np.sum(grad * p))

    report = check_vjp(function, vjp, (np.array([0.0, 50.0, 100.0]),), raise_exception=False)
    assert verdicts(report) == ["undecided"]
    assert check_vjp(function, vjp, (np.array([0.0, 50.0, 100.0]),), atol=1e-12).passed


# --- the report ------------------------------------------------------------------------------------------


def test_a_failure_says_in_words_what_is_wrong_and_where():
    def change(gradient):
        gradient = gradient.copy()
        gradient[2, 1] *= -1
        return gradient

    with pytest.raises(AssertionError) as failure:
        check_vjp(dense, altered(dense_vjp, 0, change), DENSE.args)
    text = str(failure.value)
    report = check_vjp(dense, altered(dense_vjp, 0, change), DENSE.args, raise_exception=False)
    row = report.rows[0]
    assert text == str(report)
    head = text.splitlines()
    assert head[0] == "check_vjp (central differences, every entry): FAILED"
    assert head[1].startswith("the gradient of argument 0 is wrong at index (2, 1): expected ")
    assert f"got {row.got:.9g}" in head[1]
    assert "1 of 12 values are wrong" in head[1]
    assert "argument" in head[3]
    assert "verdict" in head[3]
    assert "uncertainty" in head[3]
    assert [line.split()[:2] for line in head[4:7]] == [["0", "wrong"], ["1", "right"], ["2", "right"]]
    assert len({len(line) for line in head[3:7]}) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: -g, "got is -1 × expected everywhere"),
        (lambda g: 0.5 * g, "got is 0.5 × expected everywhere"),
        (lambda g: g.T, "got is the transpose of expected"),
        (lambda g: g[:2], "it has shape (2, 3), expected (3, 3)"),
        (lambda g: None, "it is None, expected an array of shape (3, 3)"),
    ],
)
def test_what_explains_a_wrong_gradient_is_said(change, words):
    w, x = RNG.normal(size=(3, 3)), RNG.normal(size=3)
    with pytest.raises(AssertionError) as failure:
        check_vjp(lambda w, x: w @ x, lambda g, w, x: change(np.outer(g, x)), (w, x), wrt=0)
    assert words in str(failure.value)


def test_the_remainders_are_printed():
    text = str(check_taylor(dense, dense_jvp, DENSE.args))
    for argument in range(3):
        assert f"argument {argument}: ‖f(x + h u) − f(x) − h J u‖" in text
    row = check_taylor(dense, dense_jvp, DENSE.args).rows[1]
    assert f"{row.steps[3]:.3e}  {row.remainders[3]:.3e}  {row.rates[2]:.3f}" in text


def test_the_report_goes_into_json():
    report = check_taylor(lambda x: 2 * x, lambda t, x: 2 * t[0], (X,))
    assert isinstance(report, GradientReport)
    assert isinstance(report.rows[0], GradientRow)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["check"] == "check_taylor"
    assert data["passed"] is True
    assert data["rows"][0]["verdict"] == "right"
    assert data["rows"][0]["got"] == "inf"


def test_two_runs_are_equal_and_rng_draws_anew():
    def run(rng):
        return check_vjp(dense, dense_vjp, DENSE.args, direction="random", rng=rng)

    assert run(None) == run(None)
    assert run(3) == run(np.random.default_rng(3))
    assert run(3).rows[0].expected != run(4).rows[0].expected
