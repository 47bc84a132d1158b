"""Each mistake is planted by a kernel written from scratch, and named first among those its inputs can separate."""

import numpy as np
import pytest
import wrong_kernels

from numpy_sdpa.kernelcheck import compare, make_case
from numpy_sdpa.kernelcheck.mistakes import MISTAKES
from numpy_sdpa.kernelcheck.report import HALF_PRECISION_SUMS

RNG_SEED = 20


def problem(batch=2, heads=(4, 4), L=9, S=12, E=6, Ev=5, dtype="float32", seed=RNG_SEED, **extra):
    """Random inputs; `extra` are callables of the generator, by name, or options as they are."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return as_dtype(rng.standard_normal(shape), dtype)

    arrays = {
        "query": normal(batch, heads[0], L, E),
        "key": normal(batch, heads[1], S, E),
        "value": normal(batch, heads[1], S, Ev),
        "grad_output": normal(batch, heads[0], L, Ev),
    }
    options = {}
    for name, value in extra.items():
        if callable(value):
            array = value(rng)
            arrays[name] = as_dtype(array, dtype) if array.dtype == np.float64 else array
        else:
            options[name] = value
    return arrays, options


def as_dtype(array, dtype):
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        return array.astype(ml_dtypes.bfloat16)
    return array.astype(dtype)


def normal(*shape, factor=1.0):
    return lambda rng: factor * rng.standard_normal(shape)


def mask(*shape, empty_row=None):
    def draw(rng):
        drawn = rng.random(shape) < 0.7
        drawn[..., 0] = True
        if empty_row is not None:
            drawn[..., empty_row, :] = False
        return drawn

    return draw


def lengths(*values):
    return lambda rng: np.array(values)


MASKED = {"mask": mask(2, 1, 9, 12)}
EMPTY = {"mask": mask(2, 1, 9, 12, empty_row=3)}
CAUSAL = {"is_causal": True}
GROUPED = {"heads": (4, 2), "enable_gqa": True}
BIAS = {"bias": normal(2, 4, 9, 12)}
ALIBI = {"alibi_slopes": lambda rng: np.array([0.5, 0.25, 0.1, 0.4])}
SINKS = {"sinks": normal(4)}
DROPOUT = {"dropout_p": 0.3, "dropout_mask": lambda rng: rng.random((2, 4, 9, 12)) < 0.7}
SQUARE = {"heads": (3, 3), "L": 8, "S": 8, "Ev": 6}

# (mistake, form, problem)
PLANTED = [
    ("scale-missing", "", {}),
    ("scale-missing", "", {"scale": 0.3}),
    ("scale-by-d", "", {}),
    ("scale-from-value-size", "", {}),
    ("mask-inverted", "", MASKED),
    ("mask-ignored", "", MASKED),
    ("mask-ignored", "key_lengths", {"key_lengths": lengths(7, 12)}),
    (
        "mask-ignored",
        "segments",
        {
            "query_segments": lambda rng: np.sort(rng.integers(0, 2, (2, 9))),
            "key_segments": lambda rng: np.sort(rng.integers(0, 2, (2, 12))),
        },
    ),
    ("mask-as-bias", "", MASKED),
    ("causal-ignored", "", CAUSAL),
    ("causal-alignment", "lower-right", CAUSAL),
    ("causal-alignment", "upper-left", CAUSAL | {"alignment": "lower_right"}),
    ("causal-alignment", "upper-left", CAUSAL | {"query_offset": 2}),
    ("causal-alignment", "lower-right", CAUSAL | {"alignment": "lower_right", "key_lengths": lengths(7, 11)}),
    ("causal-strict", "", CAUSAL),
    *[
        ("window-off-by-one", f"{side},{step}", {"window": (3, 2)})
        for side in ("left", "right", "both")
        for step in ("1", "-1")
    ],
    ("window-off-by-one", "left,1", {"window": (3, None), **CAUSAL}),
    ("window-ignored", "", {"window": (3, 2)}),
    ("window-ignored", "left", {"window": (3, 2)}),
    ("window-ignored", "right", {"window": (3, 2)}),
    ("gqa-tiled", "", GROUPED),
    ("softcap-ignored", "", {"softcap": 1.5}),
    ("softcap-after-mask", "", {"softcap": 1.5, **MASKED}),
    ("softcap-after-mask", "", {"softcap": 3.0, **BIAS, **CAUSAL}),
    ("bias-ignored", "", BIAS),
    ("bias-before-softcap", "", {"softcap": 1.5, **BIAS}),
    ("bias-before-softcap", "", {"softcap": 1.5, **ALIBI, **CAUSAL}),
    ("alibi-ignored", "", ALIBI),
    ("alibi-sign", "", ALIBI),
    ("alibi-sign", "signed", ALIBI),
    ("sinks-ignored", "", SINKS),
    ("sinks-ignored-in-lse", "", SINKS),
    ("dropout-not-rescaled", "", DROPOUT),
    ("lse-base-2", "", {}),
    ("softmax-wrong-axis", "queries", {}),
    ("softmax-wrong-axis", "heads", {}),
    ("softmax-wrong-axis", "batch", MASKED),
    ("layout-swapped", "output", {}),
    ("layout-swapped", "memory", {}),
    ("layout-swapped", "inputs", {}),
    ("layout-swapped", "heads", SQUARE),
    ("fully-masked-mean", "", EMPTY),
    ("fully-masked-mean", "-1e4", EMPTY),
    ("fully-masked-mean", "-3e38", EMPTY),
    *[("fully-masked-mean", f"added,{fill}", EMPTY) for fill in ("-1e4", "-1e6", "-1e9")],
    ("fully-masked-mean", "", EMPTY | CAUSAL),
    ("fully-masked-mean", "", EMPTY | BIAS),
    ("fully-masked-nan", "", EMPTY),
    ("row-dot-missing", "", {}),
    ("grad-query-key-swapped", "", SQUARE),
    ("grad-query-key-swapped", "", {}),
    ("grad-query-key-swapped", "operands", SQUARE),
    *[(f"scale-{kind}-in-backward", form, {}) for kind in ("missing", "twice") for form in ("", "query", "key")],
    ("softcap-derivative-missing", "", {"softcap": 1.5}),
    *[("group-sum-missing", form, GROUPED) for form in ("0", "1", "mean", "unreduced")],
    *[
        ("broadcast-sum-missing", form, {"bias": normal(1, 1, 9, 12)})
        for form in ("first", "last", "mean", "unreduced", "mean,0", "first,1", "unreduced,1")
    ],
    ("broadcast-sum-missing", "mean", {"bias": normal(1, 4, 1, 12)}),
    ("broadcast-sum-missing", "first", {"bias": normal(12)}),
    ("broadcast-sum-missing", "unreduced", {"heads": (4, 1)}),
    ("broadcast-sum-missing", "mean", {"heads": (4, 1)}),
    ("broadcast-sum-missing", "last", SINKS),
    ("grad-value-undropped", "", DROPOUT),
    ("grad-bias-scaled", "", BIAS),
    ("grad-bias-scaled", "softcap", {"softcap": 1.5, **BIAS}),
    ("grad-sinks-sign", "", SINKS),
    ("causal-ignored-in-backward", "", CAUSAL),
    ("lse-gradient-ignored", "", {"grad_lse": normal(2, 4, 9)}),
]


def test_every_mistake_is_planted():
    assert {mistake for mistake, _, _ in PLANTED} == set(MISTAKES)
    assert set(MISTAKES) | {HALF_PRECISION_SUMS} == set(IDS.split(", "))


IDS = (
    "scale-missing, scale-by-d, scale-from-value-size, mask-inverted, mask-ignored, mask-as-bias, "
    "causal-ignored, causal-alignment, causal-strict, window-off-by-one, window-ignored, gqa-tiled, "
    "softcap-ignored, softcap-after-mask, bias-ignored, bias-before-softcap, alibi-ignored, alibi-sign, "
    "sinks-ignored, sinks-ignored-in-lse, dropout-not-rescaled, lse-base-2, softmax-wrong-axis, "
    "layout-swapped, fully-masked-mean, fully-masked-nan, row-dot-missing, grad-query-key-swapped, "
    "scale-missing-in-backward, scale-twice-in-backward, softcap-derivative-missing, group-sum-missing, "
    "broadcast-sum-missing, grad-value-undropped, grad-bias-scaled, grad-sinks-sign, "
    "causal-ignored-in-backward, lse-gradient-ignored, half-precision-sums"
)


def identifier(planted):
    mistake, form, extra = planted
    return f"{mistake}:{form}-{'+'.join(extra)}"


def first_ties(report):
    """The ids of the best diagnosis and of those with the same numbers."""
    ids = []
    for number, diagnosis in enumerate(report.diagnosis):
        if number and not diagnosis.ties_with_previous:
            break
        ids.append(diagnosis.mistake)
    return ids


def check_named_first(mistake, form, extra, dtype):
    arrays, options = problem(dtype=dtype, **extra)
    entry = f"{mistake}:{form}" if form else mistake
    report = compare({**arrays, **wrong_kernels.run(arrays, options, {entry})}, **options)
    assert not report.passed
    assert mistake in first_ties(report), str(report)
    wrong = {name for name, array in report.arrays.items() if not array.passed}
    assert set(report.diagnosis[0].explains) == wrong, str(report)
    return report


@pytest.mark.parametrize("planted", PLANTED, ids=identifier)
def test_a_planted_mistake_is_named_first(planted):
    check_named_first(*planted, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("planted", PLANTED, ids=identifier)
def test_in_other_precisions(planted, dtype):
    check_named_first(*planted, dtype)


FORWARD_MISTAKES = [planted for planted in PLANTED if planted[0] in (
    "scale-missing", "mask-inverted", "causal-strict", "causal-alignment", "window-off-by-one", "softcap-ignored",
    "alibi-sign", "sinks-ignored", "sinks-ignored-in-lse", "gqa-tiled", "dropout-not-rescaled",
)]  # fmt: skip


@pytest.mark.parametrize("planted", FORWARD_MISTAKES, ids=identifier)
def test_a_forward_mistake_without_its_backward(planted):
    mistake, form, extra = planted
    arrays, options = problem(**extra)
    entry = f"{mistake}:{form}" if form else mistake
    report = compare({**arrays, **wrong_kernels.run(arrays, options, {entry, wrong_kernels.FORWARD_ONLY})}, **options)
    assert mistake in first_ties(report), str(report)


RIGHT = {
    "bare": {}, "mask": MASKED, "empty rows": EMPTY, "causal": CAUSAL, "grouped": GROUPED, "bias": BIAS, "alibi": ALIBI,
    "sinks": SINKS, "dropout": DROPOUT, "window": {"window": (3, 2)}, "softcap": {"softcap": 1.5},
    "lower right": CAUSAL | {"alignment": "lower_right", "key_lengths": lengths(7, 11)},
    "lse gradient": {"grad_lse": normal(2, 4, 9)}, "broadcast bias": {"bias": normal(1, 1, 9, 12)}, "one key head":
    {"heads": (4, 1)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_right(name, dtype):
    arrays, options = problem(dtype=dtype, **RIGHT[name])
    report = compare({**arrays, **wrong_kernels.run(arrays, options)}, **options)
    assert report.passed, str(report)
    assert report.diagnosis == ()


TWO = [
    ({"causal-strict", "row-dot-missing"}, CAUSAL),
    ({"softcap-ignored", "scale-twice-in-backward"}, {"softcap": 1.5}),
    ({"window-off-by-one:left,1", "scale-missing-in-backward:query"}, {"window": (3, 2)}),
    ({"gqa-tiled", "row-dot-missing"}, GROUPED),
    ({"scale-missing", "group-sum-missing:mean"}, GROUPED),
    ({"gqa-tiled", "broadcast-sum-missing:first"}, {**GROUPED, "key": normal(1, 2, 12, 6)}),
    ({"alibi-sign", "broadcast-sum-missing:mean"}, {**ALIBI, "bias": normal(1, 1, 9, 12)}),
    ({"mask-inverted", "grad-value-undropped"}, {**MASKED, **DROPOUT}),
    ({"sinks-ignored-in-lse", "grad-sinks-sign"}, SINKS),
    ({"causal-alignment:lower-right", "lse-gradient-ignored"}, CAUSAL | {"grad_lse": normal(2, 4, 9)}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("planted", "extra"), TWO, ids=lambda value: "+".join(sorted(value)))
def test_a_forward_and_a_backward_mistake_at_once(planted, extra, dtype):
    arrays, options = problem(dtype=dtype, **extra)
    report = compare({**arrays, **wrong_kernels.run(arrays, options, planted)}, **options)
    named = {diagnosis.mistake for diagnosis in report.diagnosis}
    assert {entry.partition(":")[0] for entry in planted} <= named, str(report)
    wrong = {name for name, array in report.arrays.items() if not array.passed}
    assert wrong == {name for diagnosis in report.diagnosis for name in diagnosis.explains}, str(report)


@pytest.mark.parametrize("length", [9, 160])
def test_the_forward_mistake_of_two_is_first_and_each_explains_its_own(length):
    """The gradient of value shows the forward mistake alone: it says nothing of the backward one."""
    arrays, options = problem(L=length, S=length)
    report = compare({**arrays, **wrong_kernels.run(arrays, options, {"scale-missing", "row-dot-missing"})}, **options)
    assert [(diagnosis.mistake, diagnosis.explains) for diagnosis in report.diagnosis] == [
        ("scale-missing", ("output", "lse", "grad_value")),
        ("row-dot-missing", ("grad_query", "grad_key")),
    ]
    arrays, options = problem(L=length, S=length, is_causal=True)
    planted = {"scale-by-d", "causal-ignored-in-backward"}  # which all gradients show
    report = compare({**arrays, **wrong_kernels.run(arrays, options, planted)}, **options)
    assert [diagnosis.mistake for diagnosis in report.diagnosis] == ["scale-by-d", "causal-ignored-in-backward"]


@pytest.mark.parametrize(("planted", "extra"), TWO, ids=lambda value: "+".join(sorted(value)))
def test_gradients_alone_tell_as_well(planted, extra):
    """Without output and lse: either mistake by itself, and where one leaves a gradient as it is, both."""
    arrays, options = problem(**extra)
    for wrong in planted:
        results = wrong_kernels.run(arrays, options, {wrong})
        gradients = {name: array for name, array in results.items() if name.startswith("grad_")}
        report = compare({**arrays, **gradients}, **options)
        if not report.passed:
            assert wrong.partition(":")[0] in first_ties(report), str(report)


def test_two_mistakes_in_gradients_alone():
    arrays, options = problem(**CAUSAL)
    results = wrong_kernels.run(arrays, options, {"causal-strict", "row-dot-missing"})
    gradients = {name: array for name, array in results.items() if name.startswith("grad_")}
    report = compare({**arrays, **gradients}, **options)
    assert {"causal-strict", "row-dot-missing"} <= {diagnosis.mistake for diagnosis in report.diagnosis}, str(report)


@pytest.mark.parametrize("keep", ["output", "lse", "grad_query", "grad_key", "grad_value"])
def test_one_array_is_enough(keep):
    arrays, options = problem(**CAUSAL)
    results = wrong_kernels.run(arrays, options, {"causal-strict"})
    report = compare({**arrays, keep: results[keep]}, **options)
    assert "causal-strict" in first_ties(report), str(report)


def test_ties_stand_together_in_the_order_of_the_table():
    """With one query the causal rule and its strict form hide the same keys but one, and with S = 1 …"""
    arrays, options = problem(L=1, S=1, window=(0, 0), is_causal=True)
    results = wrong_kernels.run(arrays, options, {"causal-strict"})
    report = compare({**arrays, **results}, **options)
    ties = first_ties(report)
    assert "causal-strict" in ties
    assert len(ties) > 1
    order = list(MISTAKES)
    assert ties == sorted(ties, key=order.index)
    assert "or, with the same numbers here, " in str(report)


def half_sum_kernel(arrays, dtype, block):
    """Attention whose sums are kept in a half type, rounded after each block of terms."""

    def rounded(array):
        return as_dtype(array, dtype).astype(np.float64)

    def product(left, right):
        total = np.zeros((*left.shape[:-1], right.shape[-1]))
        for start in range(0, left.shape[-1], block):
            total = rounded(total + left[..., start : start + block] @ right[..., start : start + block, :])
        return total

    q, k, v, grad_output = (arrays[name].astype(np.float64) for name in ("query", "key", "value", "grad_output"))
    scale = 1 / np.sqrt(q.shape[-1])
    scores = scale * product(q, k.swapaxes(-1, -2))
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = exponentials / product(exponentials, np.ones((*k.shape[:-1], 1)))
    output = product(weights, v)
    grad_weights = product(grad_output, v.swapaxes(-1, -2))
    grad_scores = weights * (grad_weights - (grad_output * output).sum(axis=-1, keepdims=True))
    return {
        "output": output,
        "grad_query": scale * product(grad_scores, k),
        "grad_key": scale * product(grad_scores.swapaxes(-1, -2), q),
        "grad_value": product(weights.swapaxes(-1, -2), grad_output),
    }


@pytest.mark.parametrize(
    ("stored", "summed"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
@pytest.mark.parametrize("block", [1, 16])
def test_sums_in_half_precision_are_told_by_the_size_of_the_error(stored, summed, block):
    arrays, _ = problem(L=48, S=200, E=32, Ev=32, dtype=stored)
    results = half_sum_kernel(arrays, summed, block)
    report = compare({**arrays, **{name: array.astype(np.float32) for name, array in results.items()}})
    assert [diagnosis.mistake for diagnosis in report.diagnosis] == ["half-precision-sums"], str(report)
    assert set(report.diagnosis[0].explains) == {n for n, array in report.arrays.items() if not array.passed}


def test_an_error_in_a_key_that_nobody_sees_is_not_put_down_to_half_precision():
    arrays, options = make_case("causal")
    assert not arrays["grad_value"][..., -1, :].any()
    arrays["grad_value"] = arrays["grad_value"] + 0.01 * np.sin(np.arange(32))
    report = compare(arrays, **options)
    assert not report.passed
    assert report.diagnosis == ()


@pytest.mark.parametrize("factor", [1.001, 0.997])
def test_a_result_that_is_off_by_a_factor_is_not_put_down_to_half_precision(factor):
    """The error is as large as that of sums in a half type, but not as random."""
    arrays, options = make_case("causal")
    wrong = arrays | {"output": arrays["output"] * np.float32(factor)}
    report = compare(wrong, **options)
    assert not report.passed
    assert not report.diagnosis


def test_nor_where_sums_in_a_half_type_are_off_by_a_factor_themselves():
    """A thousand like terms added in bfloat16 stop growing: most of that error is a factor, but not all of it."""
    arrays, _ = problem(batch=1, L=32, S=1024, E=64, Ev=64)
    results = wrong_kernels.run(arrays, {})
    report = compare({**arrays, **results, "output": results["output"] * np.float32(1.01)})
    assert not report.passed
    assert report.diagnosis == ()
    results = half_sum_kernel(arrays, "bfloat16", 16)
    report = compare({**arrays, **{name: array.astype(np.float32) for name, array in results.items()}})
    assert first_ties(report) == [HALF_PRECISION_SUMS], str(report)


def test_a_large_error_is_not_put_down_to_half_precision():
    arrays, options = problem(dtype="bfloat16")
    results = wrong_kernels.run(arrays, options)
    results["output"] = (1.5 * results["output"].astype(np.float32)).astype(arrays["query"].dtype)
    report = compare({**arrays, **results}, **options)
    assert not report.passed
    assert report.diagnosis == ()
    assert "no known mistake" in str(report)
