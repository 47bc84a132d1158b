"""How often the checks are mistaken, over many random functions and some awkward ones."""

from collections import Counter

import numpy as np
import pytest
from scipy.differentiate import derivative
from smooth_functions import draw

from numpy_sdpa.gradcheck import check_adjoint, check_jvp, check_taylor, check_vjp
from numpy_sdpa.gradcheck._arrays import random_direction
from numpy_sdpa.gradcheck._fits import _TIMES, _fit
from numpy_sdpa.gradcheck._quotients import _BETWEEN, NOISE_TIMES, noise_of, stencil

CASES = 20


def count(run, dtype):
    """The verdicts of `run` over random functions."""
    found = Counter()
    for seed in range(CASES):
        case = draw(np.random.default_rng(seed), dtype)
        with np.errstate(over="ignore"):
            found.update(row.verdict for row in run(case, seed).rows)
    return found


RUNS = {
    "vjp": lambda case, seed, **options: check_vjp(
        case.function, case.vjp, case.args, rng=seed, raise_exception=False, **options
    ),
    "jvp": lambda case, seed, **options: check_jvp(
        case.function, case.jvp, case.args, rng=seed, raise_exception=False, **options
    ),
    "adjoint": lambda case, seed, **options: check_adjoint(
        case.jvp, case.vjp, case.args, rng=seed, raise_exception=False, **options
    ),
    "taylor": lambda case, seed, **options: check_taylor(
        case.function, case.jvp, case.args, rng=seed, raise_exception=False, **options
    ),
}


@pytest.mark.parametrize("check", RUNS)
@pytest.mark.parametrize("direction", ["all", "random"])
@pytest.mark.parametrize(("dtype", "least"), [("float64", 1.0), ("float32", 0.95)])
def test_right_derivatives_are_never_wrong_and_nearly_always_right(check, direction, dtype, least):
    """The rest are tanh of 9 or more, whose slope lies below the rounding of 1."""
    found = count(lambda case, seed: RUNS[check](case, seed, direction=direction), dtype)
    assert found["wrong"] == 0
    assert found["right"] >= least * found.total()


@pytest.mark.parametrize(("dtype", "least"), [("float64", 1.0), ("float32", 0.95)])
def test_right_derivatives_by_complex_steps(dtype, least):
    found = count(lambda case, seed: RUNS["vjp"](case, seed, method="complex"), dtype)
    assert found["wrong"] == 0
    assert found["right"] >= least * found.total()


@pytest.mark.parametrize(("dtype", "relative"), [("float64", 1.1e-6), ("float32", 3e-3)])
@pytest.mark.parametrize("direction", ["all", "random"])
def test_one_wrong_entry_is_nearly_always_wrong_and_never_right(dtype, relative, direction):
    """The largest entry of one gradient, off by a relative error of ten tolerances or more."""

    def broken(case, seed):
        position = seed % len(case.args)
        changed = []

        def vjp(grad, *args):
            gradients = [np.array(g) for g in case.vjp(grad, *args)]
            gradient = gradients[position]
            worst = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
            changed.append(gradient[worst] != 0)
            gradient[worst] += relative * gradient[worst]
            return gradients

        report = RUNS["vjp"](case._replace(vjp=vjp), seed, direction=direction)
        return report.rows[position].verdict if all(changed) else "unchanged"

    found = Counter(broken(draw(np.random.default_rng(seed), dtype), seed) for seed in range(CASES))
    assert found["wrong"] >= 0.9 * (CASES - found["unchanged"])
    if direction == "all":
        assert found["right"] == 0


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e-8, 1e8, 1e30, 1e150])
def test_any_scale_of_the_argument(scale):
    x = scale * np.random.default_rng(0).normal(size=4)
    assert check_vjp(lambda x: np.sin(x / scale), lambda g, x: g * np.cos(x / scale) / scale, (x,)).passed
    report = check_vjp(
        lambda x: np.sin(x / scale),
        lambda g, x: g * np.cos(x / scale) / scale * (1 + 1e-6),
        (x,),
        raise_exception=False,
    )
    assert report.rows[0].verdict == "wrong"


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1e3, 1e5])
def test_a_function_with_a_scale_of_its_own(scale):
    """The first step is the argument's size; the function changes over 1."""
    x = scale * np.random.default_rng(0).normal(size=4)
    assert check_vjp(np.sin, lambda g, x: g * np.cos(x), (x,)).passed
    assert check_jvp(np.sin, lambda t, x: t[0] * np.cos(x), (x,)).passed
    assert check_taylor(np.sin, lambda t, x: t[0] * np.cos(x), (x,)).passed


def test_small_float32_arguments():
    x = (1e-8 * np.random.default_rng(0).normal(size=4)).astype(np.float32)
    assert check_vjp(np.exp, lambda g, x: g * np.exp(x), (x,)).passed


def test_entries_of_very_different_size():
    x = np.array([1e-8, 1e-3, 1.0, 1e5])
    assert check_vjp(np.log, lambda g, x: g / x, (x,)).passed


@pytest.mark.parametrize(("dtype", "highest"), [("float64", 7), ("float32", 5)])
def test_steps_far_too_large_for_a_function_do_not_make_its_gradient_wrong(dtype, highest):
    """sin(ω x): the first steps are up to 10⁶ periods, and agree by chance."""
    found = Counter()
    for seed in range(4):
        x = np.random.default_rng(seed).normal(size=2)
        for exponent in np.arange(1, highest + 0.1, 0.5):
            for scale in (1.0, 1e4):
                frequency = np.asarray(10**exponent / (scale if seed % 2 else 1.0), dtype)
                point = (x if seed % 2 == 0 else scale * x).astype(dtype)
                report = check_vjp(
                    lambda x, w=frequency: np.sin(w * x),
                    lambda g, x, w=frequency: w * g * np.cos(w * x),
                    (point,),
                    raise_exception=False,
                )
                found[report.rows[0].verdict] += 1
    assert found["wrong"] == 0
    assert found["right"] > (0.9 if dtype == "float64" else 0.25) * found.total()


@pytest.mark.parametrize("frequency", [1e5, 1e6])
def test_one_step_far_too_large_is_not_trusted(frequency):
    """Halvings of 0.1 pass a quotient that three of them agree on, and the next refutes."""
    for x in np.linspace(0.1, 1, 20):
        report = check_vjp(
            lambda x: np.sin(frequency * x),
            lambda g, x: frequency * g * np.cos(frequency * x),
            (np.array(x),),
            eps=0.1,
            raise_exception=False,
        )
        assert report.rows[0].verdict == "undecided"


def test_a_function_of_a_large_argument():
    x = 1e8 * np.random.default_rng(0).normal(size=5)
    report = check_vjp(np.sin, lambda g, x: g * np.cos(x), (x,), raise_exception=False)
    assert report.rows[0].verdict != "wrong"
    assert check_taylor(np.sin, lambda t, x: t[0] * np.cos(x), (x,)).passed


@pytest.mark.parametrize(("dtype", "seed"), [("bfloat16", 77), ("bfloat16", 107), ("float16", 107)])
def test_a_misfit_in_half_precision_is_not_trusted(dtype, seed):
    """A tanh that turns within a few spacings of its argument."""
    pytest.importorskip("ml_dtypes")
    case = draw(np.random.default_rng(seed), dtype)
    for direction in ("all", "random"):
        report = RUNS["vjp"](case, seed, direction=direction)
        assert "wrong" not in {row.verdict for row in report.rows}


@pytest.mark.parametrize(("dtype", "seed"), [("float64", 295), ("float64", 429), ("float32", 77), ("float32", 207)])
def test_a_gradient_is_not_asked_for_digits_that_rounding_took(dtype, seed):
    """1 − tanh² where tanh is 1: the complex step is exact, and no gradient in floating point can be."""
    case = draw(np.random.default_rng(seed), dtype)
    report = RUNS["vjp"](case, seed, method="complex")
    assert "wrong" not in {row.verdict for row in report.rows}


def test_a_step_of_ones_own():
    def function(x):
        return np.sin(50 * x)

    def vjp(grad, x):
        return 50 * grad * np.cos(50 * x)

    x = np.array([0.1, 0.2])
    assert check_vjp(function, vjp, (x,), eps=1e-2).passed
    report = check_vjp(function, vjp, (x,), eps=1e-13, raise_exception=False)
    assert report.rows[0].verdict == "undecided"
    report = check_taylor(function, lambda t, x: 50 * t[0] * np.cos(50 * x), (x,), eps=1e-3)
    assert report.rows[0].steps[0] == 1e-3
    report = check_taylor(function, lambda t, x: t[0], (x,), eps=1e-300, raise_exception=False)
    assert report.rows[0].verdict == "undecided"
    seen = []

    def watched(x):
        seen.append(x)
        return x * x

    check_vjp(watched, lambda g, x: 2 * x * g, (x,), method="complex", eps=1e-5)
    assert max(abs(np.imag(s)).max() for s in seen) == pytest.approx(1.75e-5)


def test_the_stencil_is_scipys():
    """The noise and the jump are estimated from the very points that SciPy's quotient weighs."""
    for order in (4, 6, 8):
        points = stencil(order)
        half = order // 2
        values = np.random.default_rng(order).normal(size=2 * half + 1)

        def function(t, points=points, values=values, half=half):
            place = np.rint(np.sign(t) * (half - np.log2(1 / np.maximum(np.abs(t), 1e-9)))).astype(int)
            return values[np.where(t == 0, 0, place) + half]

        found = derivative(function, 0.0, initial_step=1.0, order=order, maxiter=1).df
        odd = [(function(np.array(h)) - function(np.array(-h))) / 2 for h in points.nodes]
        np.testing.assert_allclose(points.slope_weights @ odd, found, rtol=1e-12)
        # exact for polynomials, and for a kink
        even = points.nodes[:, None] ** np.arange(2, order, 2)
        np.testing.assert_allclose(points.jump_weights @ even, 0, atol=1e-12)
        assert points.jump_weights @ points.nodes == pytest.approx(1)
        signed = np.concatenate([points.nodes, -points.nodes])
        for power in range(1, order + 1):
            assert points.between_weights @ signed**power == pytest.approx(_BETWEEN**power)


def test_the_noise_is_measured():
    rng = np.random.default_rng(0)
    times = NOISE_TIMES[:, None]
    curve = 3 + 0.1 * times - 0.02 * times**2 + 1e-3 * times**3 + 1e-5 * times**4
    noise = noise_of(curve + 0.5 * rng.normal(size=(NOISE_TIMES.size, 400)))
    assert np.sqrt(np.mean(noise**2)) == pytest.approx(0.5, rel=0.05)
    assert noise_of(curve) < 1e-12
    assert np.isinf(noise_of(np.where(times == 0.5, np.nan, curve)))


def test_the_fit_of_half_precision():
    fit = _fit(5)
    for power in range(6):
        assert fit.slope @ _TIMES**power == pytest.approx(float(power == 1), abs=1e-10)
        assert fit.half_jump @ _TIMES**power == pytest.approx(0, abs=1e-9)
    assert fit.half_jump @ np.abs(_TIMES) == pytest.approx(1)
    assert np.linalg.norm(fit.slope) == pytest.approx(2 / 3, rel=0.02)


def test_a_quotient_evaluates_each_point_once():
    calls = Counter()

    def function(x):
        calls[x.tobytes()] += 1
        return np.stack([np.sin(x), np.cos(x), x * x])

    x = np.array([0.3, 0.7])
    check_jvp(function, lambda t, x: np.stack([np.cos(x), -np.sin(x), 2 * x]) * t[0], (x,))
    assert calls.pop(x.tobytes()) == 1
    # twenty points of noise, six far ones, and 18 for each direction: SciPy's 8, three halvings, one between
    assert calls.total() <= 20 + 6 + 2 * 18


def test_no_component_of_a_direction_is_near_zero():
    direction = random_direction(np.random.default_rng(0), 10000)
    assert np.min(np.abs(direction)) >= 0.5
    assert abs(np.mean(direction)) < 0.05


@pytest.mark.parametrize("size", [1e150, 1e200, 1e300])
def test_numbers_whose_squares_overflow_raise_no_warning(size):
    """A right gradient is right or, where the quotient's uncertainty is past the range, undecided; never wrong."""
    point = np.array([1.0, 2.0, -1.5])

    def function(x):
        return size * np.sin(x)

    def vjp(grad, x):
        return size * np.cos(x) * grad

    def jvp(tangents, x):
        return size * np.cos(x) * tangents[0]

    quiet = {"raise_exception": False}
    reports = [
        check_vjp(function, vjp, (point,), **quiet),
        check_vjp(function, vjp, (point,), direction="random", rng=0, **quiet),
        check_jvp(function, jvp, (point,), **quiet),
        check_adjoint(jvp, vjp, (point,), **quiet),
        check_taylor(function, jvp, (point,), **quiet),
    ]
    for report in reports:
        assert report.rows[0].verdict in (("right",) if size < 1e154 else ("right", "undecided")), str(report)
