"""What array modules must not do: mix. And what goes with all of them: host integers, numbers, half types, poison."""

import cases
import numpy as np
import pytest
from arrays import ARRAY_MODULES, JAX, NUMPY
from results import everything

import numpy_sdpa

# JAX compiles each operation for each shape, seconds a test: `test_jax.py` has what goes for it.
EAGER = [module for module in ARRAY_MODULES if module is not JAX]
eager = pytest.mark.parametrize("array_module", EAGER, indirect=True, ids=repr)


def to_module(module, named):
    return {name: module.to_module(a) if isinstance(a, np.ndarray) else a for name, a in named.items()}


def on(module, inputs, directions=None):
    """Every result for these inputs, computed on the module, as NumPy arrays."""
    query, key, value = (module.to_module(array) for array in inputs[:3])
    options, upstream = to_module(module, inputs.options), to_module(module, inputs.upstream)
    directions = None if directions is None else to_module(module, directions)
    results = everything(query, key, value, options, upstream, directions)
    module.assert_same_module_and_device(tuple(results.values()), query)
    return {name: module.to_numpy(array) for name, array in results.items()}


def assert_equal(got, expected):
    """To rounding: the modules' exp, log and tanh may differ in the last bit."""
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-12, atol=1e-13, err_msg=name)


# -- one module for all arrays -----------------------------------------------------------------------------------------

Q, K, V = np.ones((2, 3, 4, 5)), np.ones((2, 3, 6, 5)), np.ones((2, 3, 6, 7))
ARRAYS = {
    "key": K,
    "value": V,
    "mask": np.ones((4, 6), bool),
    "bias": np.ones((4, 6)),
    "sinks": np.ones(3),
    "alibi_slopes": np.ones(3),
    "dropout_mask": np.ones((4, 6), bool),
    "scale": np.ones(()),
    "softcap": np.ones(()),
}
INTEGERS = {
    "query_offset": np.array([0, 2]),
    "query_lengths": np.array([4, 1]),
    "key_lengths": np.array([2, 6]),
    "query_segments": np.array([[0, 0, 1, 1], [0, 0, 0, 0]]),
    "key_segments": np.array([[0, 0, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]),
}
BESIDE = {
    "dropout_mask": {"dropout_p": 0.5},
    "query_segments": {"key_segments": INTEGERS["key_segments"]},
    "key_segments": {"query_segments": INTEGERS["query_segments"]},
}
beside_numpy = pytest.mark.parametrize(
    "array_module", [module for module in ARRAY_MODULES if module is not NUMPY], indirect=True, ids=repr
)


def refused(name):
    return pytest.raises(TypeError, match=rf"all arrays must belong to one array module: .*\b{name} ")


@beside_numpy
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_two_modules_are_refused(array_module, name):
    arrays = {"query": Q, "key": K, "value": V, name: ARRAYS[name], **BESIDE.get(name, {})}
    with refused(name):
        numpy_sdpa.sdpa_forward(**arrays | {name: array_module.to_module(arrays[name])})
    if name in ("scale", "softcap"):  # a NumPy number goes with every module
        return
    with refused(name):
        numpy_sdpa.sdpa_forward(**to_module(array_module, arrays) | {name: arrays[name]})


@beside_numpy
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_another_module_than_numpy_are_refused(array_module, name):
    with refused(name):
        numpy_sdpa.sdpa_forward(Q, K, V, **{name: array_module.to_module(INTEGERS[name])}, **BESIDE.get(name, {}))


@beside_numpy
def test_upstream_gradients_and_directions_of_another_module_are_refused(array_module):
    _, residuals = numpy_sdpa.sdpa_forward(Q, K, V, bias=np.ones((4, 6)))
    foreign = {
        name: array_module.to_module(np.ones(shape))
        for name, shape in {"grad_output": (2, 3, 4, 7), "grad_lse": (2, 3, 4), "grad_weights": (2, 3, 4, 6)}.items()
    }
    for name, array in foreign.items():
        arguments = {"grad_output": None, "residuals": residuals, name: array}
        for function in (numpy_sdpa.sdpa_backward, numpy_sdpa.sdpa_double_backward):
            with refused(name):
                function(**arguments)
    for name, array in {"query": Q, "key": K, "value": V, "bias": np.ones((4, 6))}.items():
        with refused(name):
            numpy_sdpa.sdpa_jvp(residuals, **{name: array_module.to_module(array)})
        with refused(name):
            numpy_sdpa.sdpa_double_backward(np.ones((2, 3, 4, 7)), residuals, **{name: array_module.to_module(array)})


# -- what goes with every module ---------------------------------------------------------------------------------------

INTEGER_CASES = [
    case for case in cases.ALONE + cases.SHAPES if case.option_names & INTEGERS.keys() and 0 not in case.weights_shape
]


@eager
@pytest.mark.parametrize("case", INTEGER_CASES, ids=str)
@pytest.mark.parametrize("form", ["numpy", "int32", "list"])
def test_integers_may_come_from_the_host(array_module, case, form):
    inputs = cases.make(case)
    forms = {"numpy": np.asarray, "int32": lambda array: array.astype(np.int32), "list": np.ndarray.tolist}
    host = {
        name: forms[form](a) for name, a in inputs.options.items() if name in INTEGERS and isinstance(a, np.ndarray)
    }
    options = to_module(array_module, inputs.options) | host
    query, key, value = (array_module.to_module(array) for array in inputs[:3])
    output, weights = numpy_sdpa.scaled_dot_product_attention(query, key, value, **options)
    expected, expected_weights = numpy_sdpa.scaled_dot_product_attention(*inputs[:3], **inputs.options)
    array_module.assert_same_module_and_device((output, weights), query)
    np.testing.assert_allclose(array_module.to_numpy(output), expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(array_module.to_numpy(weights), expected_weights, rtol=1e-12, atol=1e-13)


@eager
@pytest.mark.parametrize("form", [float, np.float32, np.float64, np.array, "0-d of the module"], ids=str)
def test_numbers_may_come_from_the_host(array_module, form):
    inputs = cases.make(cases.BY_NAME["scale + softcap"])
    form = array_module.to_module if isinstance(form, str) else form
    numbers = {"scale": 0.75, "softcap": 1.5}  # exact in float32
    expected = on(NUMPY, inputs._replace(options=numbers))
    arrays = [array_module.to_module(array) for array in inputs[:3]]
    results = everything(
        *arrays, {name: form(number) for name, number in numbers.items()}, to_module(array_module, inputs.upstream)
    )
    array_module.assert_same_module_and_device(tuple(results.values()), arrays[0])
    assert_equal({name: array_module.to_numpy(array) for name, array in results.items()}, expected)


@eager
def test_a_number_as_a_direction(array_module):
    """scale and softcap are numbers, so their directions may be."""
    inputs = cases.make(cases.BY_NAME["scale + softcap"])
    arrays = [array_module.to_module(array) for array in inputs[:3]]
    _, residuals = numpy_sdpa.sdpa_forward(*arrays, **inputs.options)
    _, expected = numpy_sdpa.sdpa_forward(*inputs[:3], **inputs.options)
    tangents = numpy_sdpa.sdpa_jvp(residuals, scale=0.3, softcap=np.float64(-0.2))
    expected = numpy_sdpa.sdpa_jvp(expected, scale=np.asarray(0.3), softcap=np.asarray(-0.2))
    for name, tangent in tangents._asdict().items():
        np.testing.assert_allclose(array_module.to_numpy(tangent), getattr(expected, name), rtol=1e-12, atol=1e-13)


def test_the_dropout_seed_means_the_same_on_every_module(array_module):
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4))
    options = {"dropout_p": 0.3, "dropout_seed": 2**40 + 7}
    expected = numpy_sdpa.sdpa_forward(x, x, x, **options)[1].dropout_mask
    array = array_module.to_module(x)
    got = numpy_sdpa.sdpa_forward(array, array, array, **options)[1].dropout_mask
    assert 0 < expected.sum() < expected.size
    np.testing.assert_array_equal(array_module.to_numpy(got), expected)


COMPLEX = (
    "bare",
    "rank 2, most options",
    "B = H, most options",
    "GQA 6/2, most options",
    "key of batch 1, most options",
)


@eager
@pytest.mark.parametrize("case", [cases.BY_NAME[name] for name in COMPLEX], ids=str)
def test_complex_numbers(array_module, case):
    inputs, directions = cases.make(case), cases.directions(case)
    moved = {
        name: array + 1e-3j * directions[name] for name, array in zip(("query", "key", "value"), inputs, strict=False)
    }
    expected, expected_residuals = numpy_sdpa.sdpa_forward(**moved, **inputs.options, compute_dtype="complex128")
    output, residuals = numpy_sdpa.sdpa_forward(
        **to_module(array_module, moved), **to_module(array_module, inputs.options), compute_dtype="complex128"
    )
    np.testing.assert_allclose(array_module.to_numpy(output), expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(array_module.to_numpy(residuals.lse), expected_residuals.lse, rtol=1e-12, atol=1e-13)


@eager
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", [case for case in cases.SHAPES if "most options" in case.name], ids=str)
def test_nan_and_infinities_go_where_they_go_in_numpy(array_module, case, poison):
    """Everywhere at once, hidden and seen: maxima, sums and products treat them alike."""
    inputs = cases.make(case)
    rng = np.random.default_rng(0)
    for array in (*inputs[:3], *inputs.upstream.values()):
        array[rng.random(array.shape) < 1 / 6] = poison
    directions = cases.directions(case)
    expected = on(NUMPY, inputs, directions)
    got = on(array_module, inputs, directions)
    assert_equal(got, expected)


@eager
def test_the_values_of_the_other_functions(array_module):
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    array = array_module.to_module(x)
    for function, arguments in (
        (numpy_sdpa.split_heads, (2,)),
        (numpy_sdpa.merge_heads, ()),
        (numpy_sdpa.softmax_jacobian, ()),
    ):
        np.testing.assert_array_equal(array_module.to_numpy(function(array, *arguments)), function(x, *arguments))
    for wrt in ("query", "key", "value", "scale"):
        expected = numpy_sdpa.attention_jacobian(x, x, x, wrt=wrt, is_causal=True)
        got = numpy_sdpa.attention_jacobian(array, array, array, wrt=wrt, is_causal=True)
        array_module.assert_same_module_and_device(got, array)
        np.testing.assert_allclose(array_module.to_numpy(got), expected, rtol=1e-12, atol=1e-13)
