"""The derived tolerances: right kernels are inside, wrong ones are not, and the report knows what it cannot tell.

The right kernels and the random problems are those of scripts/tolerance_study.py, which does the same at length.
"""

import dataclasses

import cases
import numpy as np
import pytest
from right_kernels import KERNELS, naive
from tolerance_study import Golden, Problem, draw_problem, golden, judge, plane_of, storage_type

from numpy_sdpa.kernelcheck import tolerance
from numpy_sdpa.kernelcheck.precision import FORMATS, half_unit, precision_of
from numpy_sdpa.kernelcheck.sums import sum_variance

DTYPES = ("float32", "bfloat16", "float16")


def sigma_of(problem: Problem, gold: Golden, dtype: str | None = None) -> dict[str, np.ndarray]:
    return tolerance.rounding_sigma(gold.residuals, gold.upstream, gold.arrays, dtype or problem.dtype)


def array_dtype(name: str, problem: Problem) -> str:
    return "float32" if name == "lse" else problem.dtype


def run(kernel, problem: Problem, gold: Golden) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        return kernel(plane_of(problem, gold))


def normal_problem(shapes, largest_logit: float, dtype: str = "float32", seed: int = 0, **options) -> Problem:
    """Independent normal inputs, the query such that the largest |logit| is as given."""
    (L, S, E, Ev), rng = shapes, np.random.default_rng(seed)
    query, key = rng.standard_normal((2, 2, L, E)), rng.standard_normal((2, 2, S, E))
    query *= largest_logit / np.max(np.abs(query @ key.mT) / np.sqrt(E))
    value, grad_output = rng.standard_normal((2, 2, S, Ev)), rng.standard_normal((2, 2, L, Ev))
    arrays = (array.astype(storage_type(dtype)) for array in (query, key, value, grad_output))
    query, key, value, grad_output = arrays
    return Problem(query, key, value, options, grad_output, None, dtype, "independent")


# Right kernels


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_kernels_are_never_called_wrong(dtype):
    for seed in range(2, 18):  # without the two problems in 25 that have rows or columns of 4096
        problem = draw_problem(seed, dtype)
        gold = golden(problem)
        sigma = sigma_of(problem, gold)
        for kernel in KERNELS:
            for name, got in run(KERNELS[kernel], problem, gold).items():
                verdict = judge(got, gold.arrays[name], sigma[name], dtype, array_dtype(name, problem))
                assert not verdict.is_wrong, (seed, str(problem), kernel, name, verdict)


def with_arrays(problem: Problem, **arrays: np.ndarray) -> Problem:
    cast = {name: array.astype(getattr(problem, name).dtype) for name, array in arrays.items()}
    return dataclasses.replace(problem, **cast)


def a_long_row() -> Problem:
    problem = draw_problem(25, "float32")
    assert problem.key.shape[-2] == 4096
    return problem


def even_rows() -> Problem:
    """Logits of ± 1e-5: partial sums of like terms round alike."""
    problem = normal_problem((6, 3000, 8, 64), 1e-3)
    value, grad_output = (array[:, :, :1].astype(np.float64) for array in (problem.value, problem.grad_output))
    return with_arrays(
        problem,
        query=1e-2 * problem.query,
        value=np.broadcast_to(value, problem.value.shape),
        grad_output=np.broadcast_to(grad_output, problem.grad_output.shape),
    )


def like_weights() -> Problem:
    """Weights that bfloat16 rounds alike, values of one sign."""
    problem = normal_problem((300, 300, 8, 4), 1e-3, "bfloat16")
    return with_arrays(problem, value=problem.value.astype(np.float64) + 3)


def vanishing_weights() -> Problem:
    """Beside the sink every weight is below float16's smallest number, all of one sign in each sum."""
    problem = normal_problem((300, 400, 8, 4), 0.1, "float16", sinks=np.full(2, 19.0, np.float16))
    shifted = {name: getattr(problem, name).astype(np.float64) + 1 for name in ("query", "key", "value")}
    return with_arrays(problem, **shifted, grad_output=np.ones(problem.grad_output.shape))


HARD = {
    "a row of 4096": a_long_row,
    "even rows": even_rows,
    "weights that round alike": like_weights,
    "weights that vanish": vanishing_weights,
    # found by the study, each by a rule that was missing
    "gradients under a saturated softcap that vanish": lambda: draw_problem(1017, "float16"),
    "partial sums of smooth values": lambda: draw_problem(2028, "float32"),
    "equal rows under different queries": lambda: draw_problem(1086, "float32"),
    "gradient of the sum of the outputs": lambda: draw_problem(6005, "float32"),
    "copies that are stored before their sum": lambda: draw_problem(2040, "bfloat16"),
    "underflow of weights": lambda: draw_problem(1088, "float16"),
    "two sizes of weights under a saturated softcap": lambda: draw_problem(1250, "float16"),
    "many small terms beside a large one": lambda: draw_problem(2618, "float32"),
    "row dots that rounding takes away": lambda: draw_problem(2325, "bfloat16"),
    "row dots of weights that are hardly numbers": lambda: draw_problem(20237, "float16"),
    "slopes of a saturated softcap that are all rounding": lambda: draw_problem(1504, "float32"),
    "a row of large logits that errs as one": lambda: draw_problem(1679, "float32"),
}


@pytest.mark.parametrize("hard", HARD)
def test_right_kernels_are_right_where_errors_add_up(hard):
    problem = HARD[hard]()
    gold = golden(problem)
    sigma = sigma_of(problem, gold)
    for kernel in KERNELS:
        for name, got in run(KERNELS[kernel], problem, gold).items():
            verdict = judge(got, gold.arrays[name], sigma[name], problem.dtype, array_dtype(name, problem))
            assert not verdict.is_wrong, (kernel, name, verdict)


# Sensitivity


@pytest.mark.parametrize("largest", [1, 10, 50])
@pytest.mark.parametrize("shapes", [(33, 47, 16, 8), (64, 128, 64, 64), (5, 200, 128, 64), (150, 7, 8, 16)])
def test_independent_inputs_are_told_to_a_thousandth(shapes, largest):
    problem = normal_problem(shapes, largest)
    gold = golden(problem)
    for name, sigma in sigma_of(problem, gold).items():
        assert tolerance.sensitivity(sigma, "float32", "float32", gold.arrays[name]) < 1e-3, name


@pytest.mark.parametrize("factor", [1 + 1e-3, 1 - 1e-3])
def test_a_gradient_off_by_a_thousandth_is_wrong_wherever_the_sensitivity_says_so(factor):
    told = 0
    for seed in range(50, 90):
        problem = draw_problem(seed, "float32") if seed % 25 > 1 else normal_problem((20, 30, 16, 16), 20)
        gold = golden(problem)
        sigma = sigma_of(problem, gold)
        for kernel in ("naive, sequential", "flash"):
            for name, got in run(KERNELS[kernel], problem, gold).items():
                array = gold.arrays[name]
                if name.startswith("grad_") and tolerance.sensitivity(sigma[name], "float32", "float32", array) < 1e-3:
                    wrong = (got.astype(np.float64) * factor).astype(np.float32)
                    assert judge(wrong, array, sigma[name], "float32", "float32").is_wrong, (seed, kernel, name)
                    told += 1
    assert told > 200  # of some 250 gradients: the test has something to say


def test_what_float32_cannot_tell_is_said():
    equal_keys = normal_problem((6, 40, 16, 8), 10)
    equal_keys = dataclasses.replace(equal_keys, key=np.repeat(equal_keys.key[..., :1, :], 40, axis=-2))
    saturated = normal_problem((2, 2, 64, 8), 3000)  # one weight 1, all others 0: the scores' gradient is 0
    for problem in (equal_keys, saturated):
        gold = golden(problem)
        sigma = sigma_of(problem, gold)
        assert tolerance.sensitivity(sigma["grad_query"], "float32", "float32", gold.arrays["grad_query"]) > 1e-3
        assert tolerance.sensitivity(sigma["output"], "float32", "float32", gold.arrays["output"]) < 1e-3


# Wrong kernels: the bounds have teeth


def named_wrong(problem: Problem, arrays: dict[str, np.ndarray]) -> set[str]:
    gold = golden(problem)
    sigma = sigma_of(problem, gold)
    return {
        name
        for name, got in arrays.items()
        if judge(got, gold.arrays[name], sigma[name], problem.dtype, array_dtype(name, problem)).is_wrong
    }


def half_sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float16)
    for k in range(a.shape[-1]):
        total = total + (a[..., :, k, None] * b[..., None, k, :]).astype(np.float16)
    return total.astype(np.float32)


def test_sums_in_half_precision_are_wrong():
    problem = normal_problem((160, 160, 64, 64), 5, "float16")
    gold = golden(problem)
    wrong = named_wrong(problem, run(lambda plane: naive(plane, half_sums), problem, gold))
    assert wrong >= {"output", "grad_query", "grad_key", "grad_value"}


def test_a_float32_kernel_that_stores_half_weights_is_wrong():
    problem = normal_problem((50, 60, 32, 16), 5)
    gold = golden(problem)
    plane = dataclasses.replace(plane_of(problem, gold), storage=np.dtype(np.float16))
    assert named_wrong(problem, naive(plane)) >= {"output", "weights", "grad_query", "grad_key", "grad_value"}


@pytest.mark.parametrize("bits", [11, 16])
def test_scores_of_fewer_bits_than_float32_are_wrong(bits):
    problem = normal_problem((50, 60, 32, 16), 20)

    def coarse(array: np.ndarray) -> np.ndarray:
        fraction, exponent = np.frexp(array)
        return np.ldexp(np.round(fraction * 2.0**bits) / 2.0**bits, exponent).astype(array.dtype)

    gold = golden(problem)
    coarse_inputs = dataclasses.replace(problem, query=coarse(problem.query), key=coarse(problem.key))
    wrong = named_wrong(problem, run(naive, coarse_inputs, gold))
    assert wrong >= {"output", "weights", "grad_query", "grad_key"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigma_is_near_what_kernels_do(dtype):
    """An error is a good part of σ: bounds that are never passed because they are wide would be no use."""
    problem = normal_problem((64, 96, 64, 32), 5, dtype)
    gold = golden(problem)
    sigma = sigma_of(problem, gold)
    results = run(KERNELS["naive, sequential"], problem, gold)
    for name in ("output", "grad_query", "grad_key", "grad_value"):
        verdict = judge(results[name], gold.arrays[name], sigma[name], dtype, dtype)
        assert 0.15 < verdict.frobenius < 1.2, (name, verdict)


# The parts


@pytest.mark.parametrize("mean", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("count", [16, 300])
def test_sum_variance_is_that_of_sequential_sums(count, mean):
    rng = np.random.default_rng(1)
    left = rng.standard_normal((4000, count)).astype(np.float32)
    right = (rng.standard_normal((4000, count)) + mean).astype(np.float32)
    left = np.abs(left) if mean == 3.0 else left
    total = np.zeros(4000, np.float32)
    for k in range(count):
        total += left[:, k] * right[:, k]
    exact = left.astype(np.float64) * right
    precision = precision_of("float32")
    squares = np.sum(exact**2, axis=1)
    variance = precision.rounding**2 * sum_variance(np.sum(exact, axis=1), squares, count, precision)
    measured = np.mean((total - np.sum(exact, axis=1)) ** 2)
    assert 0.4 < measured / np.mean(variance) < 1.1  # a rounding costs half a unit / √3 only just above a power of 2


@pytest.mark.parametrize("count", [30, 1000, 4096])
def test_like_terms_drift_within_their_bound(count):
    precision = precision_of("float32")
    for term in np.random.default_rng(2).uniform(1, 2, 50).astype(np.float32):
        total = np.cumsum(np.full(count, term), dtype=np.float32)[-1]
        exact = count * float(term)
        sigma = precision.rounding * np.sqrt(sum_variance(exact, count * float(term) ** 2, count, precision))
        assert abs(total - exact) <= 3 * sigma


@pytest.mark.parametrize("dtype", FORMATS)
def test_half_unit_is_half_the_spacing(dtype):
    form, storage = FORMATS[dtype], storage_type(dtype)
    samples = np.array([1.0, 1.5, -2.0, 3.7, form.largest / 3, form.smallest_normal, form.spacing * 5, 0.0])
    array = samples.astype(storage)
    spacing = np.spacing(np.abs(array)).astype(np.float64)
    np.testing.assert_array_equal(half_unit(array.astype(np.float64), dtype), spacing / 2)


def test_tolerance_pays_the_arrays_own_rounding():
    gold = np.array([1.0, 1e-6, 0.0, 1e-40])
    zero = np.zeros(4)
    for dtype in ("float16", "bfloat16", "float32"):
        rounded = gold.astype(storage_type(dtype)).astype(np.float64)
        assert np.all(np.abs(rounded - gold) <= tolerance.tolerance(zero, "float32", dtype, gold))
    exact = tolerance.tolerance(zero, "float32", "float64", gold)
    assert exact[0] == 2.0**-53 + 2.0**-126
    assert tolerance.tolerance(zero + 1, "float32", "float64", gold)[0] == pytest.approx(8)
    assert tolerance.tolerance(zero + 1, "bfloat16", "float64", gold)[0] == pytest.approx(12)
    assert exact[3] >= 1e-40  # flushed to 0


def test_may_overflow():
    gold = np.array([65000.0, 65500.0, -70000.0, 1.0])
    over = tolerance.may_overflow(gold, np.full(4, 100.0), "float16")
    np.testing.assert_array_equal(over, [False, True, True, False])


def test_frobenius_bound_of_one_row_and_of_many():
    one, row, many = np.ones(1), np.ones((1, 100)), np.ones((100, 100))
    assert tolerance.frobenius_bound(one, "float32", "float64", one) == pytest.approx(np.hypot(1.5, 8))
    assert tolerance.frobenius_bound(row, "float32", "float64", row) == pytest.approx(np.hypot(15, 40))
    assert tolerance.frobenius_bound(many, "float32", "float64", many) == pytest.approx(np.hypot(150, 40))
    assert tolerance.frobenius_bound(many, "float16", "float64", many) == pytest.approx(np.hypot(300, 60))


def test_sensitivity_is_the_factor_that_is_always_found():
    rng = np.random.default_rng(4)
    gold, sigma = rng.standard_normal((200, 5)), np.full((200, 5), 1e-5)
    least = tolerance.sensitivity(sigma, "float32", "float32", gold)
    bound = tolerance.frobenius_bound(sigma, "float32", "float32", gold)
    against = gold * (1 - bound / np.linalg.norm(gold))  # the right array whose error hides most of the factor
    assert np.linalg.norm((1 + 1.001 * least) * against - gold) > bound
    assert np.linalg.norm((1 + 0.999 * least) * against - gold) < bound
    assert tolerance.sensitivity(sigma, "float32", "float32", gold * 1e-6) == np.inf


# rounding_sigma over the grid of cases


def golden_case(case: cases.Case, dtype: str) -> tuple[Problem, Golden]:
    inputs = cases.make(dataclasses.replace(case, dtype=dtype, upstream=("grad_output", "grad_lse")))
    upstream = inputs.upstream
    problem = Problem(
        inputs.query, inputs.key, inputs.value, inputs.options, upstream["grad_output"], upstream["grad_lse"], dtype, ""
    )
    return problem, golden(problem)


@pytest.mark.parametrize("case", [*cases.ALONE, *cases.SHAPES, *cases.random_cases(20, 6)], ids=str)
def test_sigma_has_golds_shape_and_is_finite(case):
    problem, gold = golden_case(case, "float16")
    for name, sigma in sigma_of(problem, gold).items():
        assert sigma.shape == gold.arrays[name].shape, name
        assert np.all(np.isfinite(sigma)), name


def test_hidden_poison_changes_nothing():
    problem, _ = golden_case(cases.BY_NAME["key_lengths"], "float32")
    lengths = problem.options["key_lengths"]
    hidden = (np.arange(problem.key.shape[-2]) >= lengths[:, None])[:, None, :, None]
    assert hidden.any()

    def sigma_with_hidden(fill: float) -> dict[str, np.ndarray]:
        key, value = (np.where(hidden, np.float32(fill), array) for array in (problem.key, problem.value))
        filled = dataclasses.replace(problem, key=key, value=value)
        return sigma_of(filled, golden(filled))

    expected, got = sigma_with_hidden(0), sigma_with_hidden(np.nan)
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def test_tiles_of_rows_give_what_the_whole_plane_gives(monkeypatch):
    problem = normal_problem((64, 30, 16, 8), 5, sinks=np.ones(2, np.float32), alibi_slopes=np.ones(2, np.float32) / 8)
    gold = golden(problem)
    whole = sigma_of(problem, gold)
    monkeypatch.setattr(tolerance, "_TILE", 16 * 4 * 30)  # four tiles of 16 rows
    for name, sigma in sigma_of(problem, gold).items():
        np.testing.assert_allclose(sigma, whole[name], rtol=1e-3, err_msg=name)


def test_only_inputs_output_and_lse_are_read():
    problem = normal_problem((20, 30, 16, 8), 5, is_causal=True)
    gold = golden(problem)
    kept = dataclasses.replace(gold.residuals, scores=None, capped_scores=None, logits=None, weights=None)
    got = tolerance.rounding_sigma(kept, gold.upstream, gold.arrays, "float32")
    for name, sigma in sigma_of(problem, gold).items():
        np.testing.assert_array_equal(got[name], sigma)


def test_gradients_need_their_upstream():
    gold = golden(normal_problem((4, 5, 3, 2), 1))
    with pytest.raises(ValueError, match="upstream"):
        tolerance.rounding_sigma(gold.residuals, None, gold.arrays, "float32")
    forward = {name: gold.arrays[name] for name in ("output", "lse", "weights")}
    assert set(tolerance.rounding_sigma(gold.residuals, None, forward, "float32")) == set(forward)


def test_an_unknown_precision_is_refused():
    gold = golden(normal_problem((4, 5, 3, 2), 1))
    with pytest.raises(ValueError, match="float8"):
        tolerance.rounding_sigma(gold.residuals, gold.upstream, gold.arrays, "float8")
