"""The grid in float16, bfloat16, float32 and float64 against scalar loops, within the bound of `rounding.py`."""

import dataclasses

import cases
import loops
import numpy as np
import pytest
from arrays import CUPY, CUPY_STANDIN, JAX, STRICT
from hypothesis import HealthCheck, given, settings
from results import assert_same_bits, everything
from rounding import Bounds, to_dtype, unit

HALF = ("float16", "bfloat16")


def excess(case, results=everything):
    """For each result the largest error as a share of the bound: right is at most 1."""
    inputs = cases.make(case)
    got = results(*inputs)
    compute = "float64" if case.dtype == "float64" else "float32"
    eps = unit(compute) / 2  # of a rounding to nearest
    # the loops compute in float64: their own errors, of the same kind, count where eps is as small
    bounds = Bounds(case, inputs, 2 * eps if compute == "float64" else eps)
    upstream = {"grad_output": None, **inputs.upstream}
    exact = loops.backward(upstream.pop("grad_output"), *inputs[:3], **upstream, **inputs.options)
    shares = {}
    for name, bound in bounds.forward.items():
        dtype = case.dtype if name == "output" else compute
        shares[name] = share(got[name], getattr(bounds.exact, name), bound, dtype)
    for name, bound in bounds.gradients.items():
        dtype = compute if name in ("scale", "softcap") else case.dtype
        shares[f"grad_{name}"] = share(got[f"grad_{name}"], getattr(exact, name), bound, dtype)
    return shares


def share(got, expected, bound, dtype):
    assert got.dtype.name == dtype
    assert got.shape == np.shape(expected)
    got, bound = got.astype(float), to_dtype(bound, np.where(np.isfinite(expected), expected, 0), dtype)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(got == expected, 0, np.abs(got - expected) / bound)  # infinities, too, are equal
    return np.max(shares, initial=0)


def check(case, results=everything):
    worst = excess(case, results)
    assert max(worst.values()) <= 1, worst


def with_dtype(case, dtype):
    return dataclasses.replace(case, dtype=dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_against_loops(case, dtype):
    check(with_dtype(case, dtype))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases.case_strategy(dtypes=cases.DTYPES))
def test_random_combinations_against_loops(case):
    check(case)


# -- on other modules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("array_module", [STRICT, CUPY_STANDIN, CUPY], ids=repr, indirect=True)
@pytest.mark.parametrize("case", cases.ALONE + cases.SHAPES[::4], ids=str)
def test_against_loops_on_other_modules(array_module, case, dtype):
    if not array_module.supports(dtype):
        pytest.skip(f"{array_module} has no {dtype}")

    def on_module(query, key, value, options, upstream):
        arrays = [array_module.to_module(array) for array in (query, key, value)]
        options, upstream = (
            {name: array_module.to_module(a) if isinstance(a, np.ndarray) else a for name, a in named.items()}
            for named in (options, upstream)
        )
        results = everything(*arrays, options, upstream)
        array_module.assert_same_module_and_device(tuple(results.values()), arrays[0])
        return {name: array_module.to_numpy(array) for name, array in results.items()}

    check(with_dtype(case, dtype), on_module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("bare", "float16"), ("bare", "bfloat16"), ("GQA 6/2, most options", "bfloat16")]
)
def test_against_loops_compiled_by_jax(name, dtype):
    def compiled(query, key, value, options, upstream):
        import jax

        arrays = {name: option for name, option in options.items() if isinstance(option, np.ndarray)}
        function = jax.jit(lambda q, k, v, arrays, upstream: everything(q, k, v, options | arrays, upstream))
        results = function(query, key, value, arrays, upstream)
        return {name: JAX.to_numpy(array) for name, array in results.items()}

    with JAX.installed():
        check(with_dtype(cases.BY_NAME[name], dtype), compiled)


# -- once, at the end --------------------------------------------------------------------------------------------------


def round_weights(query, key, value, options, upstream):
    """An implementation that rounds to the inputs' dtype on the way, as many do."""
    results = everything(query, key, value, options, upstream)
    rounded = results["weights"].astype(query.dtype).astype(np.float32)
    return results | {"output": (rounded @ value.astype(np.float32)).astype(query.dtype)}


@pytest.mark.parametrize("dtype", HALF)
def test_the_bound_notices_one_rounding_too_many(dtype):
    shares = [
        excess(cases.Case(f"rounded {number}", (2, 8, 4), (2, 32, 4), (2, 32, 4), dtype=dtype), round_weights)["output"]
        for number in range(8)
    ]
    assert min(shares) > 1


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", cases.ALONE + cases.SHAPES, ids=str)
def test_half_results_are_the_float32_results_rounded(case, dtype):
    """Bit for bit: every product, sum and exponential is float32's; output and gradients are rounded at the end."""

    def widened(named):
        return {name: a.astype(np.float32) if is_half(a) else a for name, a in named.items()}

    def is_half(value):
        return isinstance(value, np.ndarray) and value.dtype.name == dtype

    inputs = cases.make(with_dtype(case, dtype))
    directions = cases.directions(with_dtype(case, dtype))
    arrays = dict(zip(("query", "key", "value"), inputs[:3], strict=True))
    narrow = everything(**arrays, options=inputs.options, upstream=inputs.upstream, directions=directions)
    wide = everything(
        **widened(arrays),
        options=widened(inputs.options),
        upstream=widened(inputs.upstream),
        directions=widened(directions),
    )
    rounded = {name: np.asarray(array).astype(narrow[name].dtype) for name, array in wide.items()}
    assert_same_bits(narrow, rounded)
    given = set(case.differentiable) - {"scale", "softcap"}
    half = {"output"} | {f"{order}_{name}" for name in given for order in ("grad", "second")}
    half |= {f"second_{name}" for name in inputs.upstream}
    assert {name for name, array in narrow.items() if array.dtype.name == dtype} == half


@pytest.mark.parametrize("case", cases.ALONE[:16], ids=str)
def test_a_gold_run_computes_in_float64_and_rounds_once(case):
    inputs = cases.make(with_dtype(case, "float32"))
    options = {name: a.astype(float) if is_float32(a) else a for name, a in inputs.options.items()}
    upstream = {name: array.astype(float) for name, array in inputs.upstream.items()}
    gold = everything(*inputs[:3], inputs.options | {"compute_dtype": "float64"}, inputs.upstream)
    wide = everything(*(array.astype(float) for array in inputs[:3]), options, upstream)
    assert {gold[name].dtype.name for name in ("lse", "weights", "logits", "grad_scale")} == {"float64"}
    assert {gold[name].dtype.name for name in ("output", "grad_query", "grad_key", "grad_value")} == {"float32"}
    assert_same_bits(gold, {name: np.asarray(array).astype(gold[name].dtype) for name, array in wide.items()})


def is_float32(value):
    return isinstance(value, np.ndarray) and value.dtype == np.float32


@pytest.mark.parametrize(
    ("dtypes", "compute", "output"),
    [
        (("float16", "float16", "float16"), "float32", "float16"),
        (("float16", "float32", "float16"), "float32", "float32"),
        (("float32", "float32", "float64"), "float64", "float64"),
        (("float16", "float64", "float32"), "float64", "float64"),
        (("bfloat16", "bfloat16", "bfloat16"), "float32", "bfloat16"),
        (("bfloat16", "float32", "bfloat16"), "float32", "float32"),
        (("bfloat16", "float16", "float16"), "float32", "float32"),
    ],
)
def test_mixed_dtypes(dtypes, compute, output):
    """Computed in the widest of float32 and the inputs'; each gradient in its own input's dtype."""
    inputs = cases.make(cases.BY_NAME["sinks + alibi"])
    arrays = [cases.cast(array, dtype) for array, dtype in zip(inputs[:3], dtypes, strict=True)]
    options = {name: cases.cast(array, "float16") for name, array in inputs.options.items()}
    results = everything(*arrays, options, {name: cases.cast(a, "float32") for name, a in inputs.upstream.items()})
    got = {name: array.dtype.name for name, array in results.items()}
    assert got["output"] == output
    assert tuple(got[f"grad_{name}"] for name in ("query", "key", "value")) == dtypes
    assert got["grad_sinks"] == got["grad_alibi_slopes"] == "float16"
    assert {got[name] for name in ("lse", "weights", "logits", "row_sum", "grad_scale")} == {compute}


@pytest.mark.parametrize("convert", [np.float64, np.float32, np.asarray, float], ids=lambda convert: convert.__name__)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_number_lifts_nothing(dtype, convert):
    """A float64 scalar as scale or softcap rounds to the compute dtype, whatever NumPy's promotion says."""
    inputs = cases.make(with_dtype(cases.BY_NAME["scale + softcap"], dtype))
    expected = everything(*inputs)
    options = {name: convert(number) for name, number in inputs.options.items()}
    got = everything(*inputs[:3], options, inputs.upstream)
    assert_same_bits(got, expected)
    assert {array.dtype.name for array in got.values()} <= {dtype, "float32"}
