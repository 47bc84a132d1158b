"""The generated problems have what their features say, and a kernel is run on all of them."""

import json

import numpy as np
import pytest
import wrong_kernels

from numpy_sdpa.kernelcheck import check_kernel, compare, make_case
from numpy_sdpa.kernelcheck.cases import FEATURES, MEANINGS, feature_sets

RESULTS = ("output", "lse", "grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks", "grad_alibi_slopes")


@pytest.mark.parametrize("features", [set_ for set_ in feature_sets() if len(set_) < 2], ids="+".join)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden_results_are_right(features, dtype):
    arrays, options = make_case(features, dtype=dtype)
    report = compare(arrays, **options)
    assert report.passed, str(report)
    assert arrays["query"].dtype == dtype
    assert arrays["output"].dtype == np.float64
    json.dumps(options)


def test_the_same_seed_is_the_same_case():
    first, second, other = (make_case(["mask"], seed=seed)[0] for seed in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    assert not np.array_equal(first["query"], other["query"])


def test_features_mean_what_they_say():
    def made(*features, **keywords):
        arrays, options = make_case(features, **keywords)
        return arrays, options, arrays["query"].shape, arrays["key"].shape

    assert made("empty_rows")[0]["output"].any(axis=-1).all(axis=-1).sum() == 0
    arrays, _, query, key = made("huge_logits", dtype="float16")
    products = arrays["query"].astype(float) @ arrays["key"].astype(float).swapaxes(-1, -2)
    assert np.abs(products).max() > 65504
    arrays, *_ = made("poison")
    assert np.isnan(arrays["key"]).any()
    assert np.isnan(arrays["query"]).any()
    assert np.isnan(arrays["grad_output"]).any()
    assert np.isfinite(arrays["output"]).all()
    assert not made("strided")[0]["query"].flags.c_contiguous
    _, _, query, key = made("batch_equals_heads")
    assert query[0] == query[1]
    _, _, query, key = made("heads_equal_keys")
    assert query[1] == key[2]
    _, _, query, key = made("more_queries")
    assert query[2] > key[2]
    _, options, query, key = made("gqa")
    assert (query[1], key[1], options["enable_gqa"]) == (4, 2, True)
    _, options, query, key = made(query_heads=6, key_heads=2)
    assert (query[1], key[1], options["enable_gqa"]) == (6, 2, True)
    assert made("is_causal")[1] == {"is_causal": True}
    assert "grad_output" not in make_case(backward=False)[0]
    assert make_case(layout="blhd")[0]["output"].shape[1:3] == (48, 4)
    assert made("lse_gradient")[0]["grad_lse"].shape == (2, 4, 48)


def test_every_feature_has_a_meaning():
    assert tuple(MEANINGS) == FEATURES
    assert "".join(MEANINGS.values()).isascii()


def test_what_make_case_refuses():
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        make_case(seed=-1)
    with pytest.raises(ValueError, match="unknown feature 'nonsense'"):
        make_case(["nonsense"])
    with pytest.raises(ValueError, match="exclude each other: bias, broadcast_bias"):
        make_case(["bias", "broadcast_bias"])
    with pytest.raises(ValueError, match="dtype must be one of"):
        make_case(dtype="int8")
    with pytest.raises(ValueError, match="layout must be"):
        make_case(layout="lbhd")
    with pytest.raises(ValueError, match="at least 1"):
        make_case(query_length=0)


SMALL = {"query_length": 13, "key_length": 30, "head_size": 6}


def test_a_right_kernel_is_right_on_all_of_them():
    report = check_kernel(wrong_kernels.run, dtypes=["float32", "bfloat16"], **SMALL)
    assert report.passed, str(report)
    assert len(report.cases) == 2 * len(list(feature_sets()))
    assert {name for case in report.cases for name in case.features} == set(FEATURES)


def test_a_wrong_kernel_is_named_over_all_cases():
    def kernel(arrays, options):
        if "bias" in arrays:
            raise NotImplementedError("no bias")
        return wrong_kernels.run(arrays, options, {"causal-strict"})

    report = check_kernel(kernel, features=["causal", "window", "bias"], **SMALL)
    assert not report.passed
    assert [case.name for case in report.cases if not case.passed] == ["causal, float32", "causal + window, float32"]
    assert report.mistakes == {"causal-strict": 2}
    assert report.diagnosis[0].mistake == "causal-strict"
    text = str(report)
    assert "4 cases run, 2 wrong, 3 skipped" in text
    assert "skipped 3: no bias" in text
    assert "causal-strict" in text
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["passed"] is False


def test_a_kernel_that_fails_or_gives_nonsense_is_wrong_on_that_case():
    def kernel(arrays, options):
        if options.get("is_causal"):
            raise ZeroDivisionError("oh")
        return {"output": np.zeros(3, np.float32)}

    report = check_kernel(kernel, features=["causal"])
    assert not report.passed
    assert "output must have shape" in report.cases[0].error
    assert report.cases[1].error == "raised ZeroDivisionError: oh"

    report = check_kernel(lambda arrays, options: arrays["query"], features="causal", dtypes="float16")
    assert len(report.cases) == 2
    assert all(case.error.startswith("gave ndarray, not a mapping") for case in report.cases)

    def lazy(arrays, options):
        raise NotImplementedError

    assert not check_kernel(lazy, features=["causal"]).passed


@pytest.mark.parametrize("given", [None, (np.zeros(3),), {"out": np.zeros(3)}], ids=["None", "a tuple", "a new name"])
def test_what_a_kernel_gives_must_be_a_mapping_of_results(given):
    report = check_kernel(lambda arrays, options: given, features=[])
    assert not report.passed
    assert report.cases[0].error.startswith("gave ")


def test_one_feature_and_one_dtype_need_no_list():
    report = check_kernel(wrong_kernels.run, features="causal", dtypes="float16")
    assert report.passed
    assert {case.dtype for case in report.cases} == {"float16"}


def test_a_kernel_that_writes_to_its_inputs_is_judged_by_what_it_was_asked():
    def kernel(arrays, options):
        results = wrong_kernels.run(arrays, options)
        arrays["query"] *= 2
        return {**arrays, **results}

    assert check_kernel(kernel, features=[]).passed


def test_the_inputs_are_the_kernels_own_and_without_the_answers():
    def kernel(arrays, options):
        assert not set(arrays) & set(RESULTS)
        arrays.clear()
        options.clear()
        raise NotImplementedError

    check_kernel(kernel, features=["causal"])
