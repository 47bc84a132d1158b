"""Every public function gives on each array module what it gives on NumPy, on the inputs' device, without waiting."""

import functools

import cases
import numpy as np
import pytest
from arrays import ARRAY_MODULES, CUPY_STANDIN, JAX, NUMPY
from cupy_standin import synchronisations

import numpy_sdpa
from numpy_sdpa import steps

CASES = cases.ALL
# JAX compiles each operation anew for each shape and dtype, some five seconds a case: it gets two, and one half
# precision. `test_jax.py` has the rest, traced and compiled whole.
FOR_JAX = frozenset({"bare", "S = 0", "bfloat16"})
RESIDUALS = (
    "scores capped_scores logits weights dropout_mask row_shift row_sum lse output query key value mask bias sinks "
    "alibi_slopes scale softcap"
)


def converted(module, named):
    return {name: module.to_module(value) if isinstance(value, np.ndarray) else value for name, value in named.items()}


def first_and_second_order(module, case):
    """Forward, backward, JVP and double backward: all their arrays by name, and what each waited for."""
    inputs = cases.make(case)
    query, key, value = (module.to_module(array) for array in inputs[:3])
    options, upstream = converted(module, inputs.options), converted(module, inputs.upstream)
    directions = converted(module, cases.directions(case))
    waits = {}

    def counted(function, *args, **kwargs):
        synchronisations.reset()
        result = function(*args, **kwargs)
        waits[function.__name__] = synchronisations.reasons
        return result

    output, residuals = counted(numpy_sdpa.sdpa_forward, query, key, value, **options)
    arrays = {
        "output": output,
        **{name: getattr(residuals, name) for name in RESIDUALS.split() if name != "output"},
    }
    grad_output = upstream.pop("grad_output", None)
    for prefix, results in (
        ("gradient", counted(numpy_sdpa.sdpa_backward, grad_output, residuals, **upstream)),
        ("tangent", counted(numpy_sdpa.sdpa_jvp, residuals, **directions)),
        (
            "second gradient",
            counted(numpy_sdpa.sdpa_double_backward, grad_output, residuals, **upstream, **directions),
        ),
    ):
        arrays |= {f"{prefix}: {name}": array for name, array in results._asdict().items()}
    module.assert_same_module_and_device(tuple(arrays.values()), query)
    return {name: array for name, array in arrays.items() if array is not None}, waits


@functools.cache
def on_numpy(case):
    return first_and_second_order(NUMPY, case)[0]


def on_modules(name, values):
    """Parametrise by module and by one more argument: JAX's share only is FOR_JAX."""
    pairs = [
        pytest.param(module, value, id=f"{module}-{value}")
        for module in ARRAY_MODULES
        for value in values
        if module is not JAX or str(value) in FOR_JAX
    ]
    return pytest.mark.parametrize(("array_module", name), pairs, indirect=["array_module"])


@on_modules("case", CASES)
def test_as_on_numpy_on_the_inputs_device(array_module, case):
    arrays, waits = first_and_second_order(array_module, case)
    expected = on_numpy(case)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        # float64: 1e-13 of the largest entry is some hundred eps, for sums in another order
        scale = np.max(np.abs(expected[name]), where=np.isfinite(expected[name]), initial=1e-3)
        np.testing.assert_allclose(
            array_module.to_numpy(array), expected[name], rtol=1e-12, atol=1e-13 * scale, err_msg=name
        )
    if array_module is CUPY_STANDIN:
        assert len(waits.pop("sdpa_forward")) <= 1  # the values of lengths, offsets, segments, asked at once
        assert not any(waits.values()), waits


@on_modules("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtypes_of_results(array_module, dtype):
    if not array_module.supports(dtype):
        pytest.skip(f"{array_module} has no {dtype}")
    case = next(case for case in cases.ALONE if str(case) == "bias finite")
    inputs = cases.make(case)
    query, key, value, bias, grad_output = (
        array_module.to_module(cases.cast(array, dtype))
        for array in (*inputs[:3], inputs.options["bias"], inputs.upstream["grad_output"])
    )
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, bias=bias)
    gradients = numpy_sdpa.sdpa_backward(grad_output, residuals)
    assert output.dtype == query.dtype
    assert {g.dtype for g in (gradients.query, gradients.key, gradients.value, gradients.bias)} == {query.dtype}
    assert "float32" in str(residuals.lse.dtype)
    array_module.assert_same_module_and_device((output, residuals.lse, *gradients), query)


def test_the_other_functions(array_module):
    x = np.arange(24.0).reshape(2, 3, 4) / 24
    query = array_module.to_module(x)
    mask = array_module.to_module(np.tri(3, dtype=bool))
    split = numpy_sdpa.split_heads(query, 2)
    results = (
        numpy_sdpa.attention(query, query, query, mask),
        *numpy_sdpa.scaled_dot_product_attention(query, query, query, mask),
        split,
        numpy_sdpa.merge_heads(split),
        numpy_sdpa.attention_jacobian(query[0, ...], query[0, ...], query[0, ...], wrt="key"),
        numpy_sdpa.softmax_jacobian(query),
    )
    array_module.assert_same_module_and_device(results, query)
    np.testing.assert_array_equal(array_module.to_numpy(results[4]), x)


@pytest.mark.parametrize("wrong", [[1, 4], [-1, 2]])
def test_lengths_out_of_range_are_refused_wherever_they_are(array_module, wrong):
    x = array_module.to_module(np.ones((2, 1, 3, 4)))
    with pytest.raises(ValueError, match="key_lengths"):
        numpy_sdpa.attention(x, x, x, key_lengths=array_module.to_module(np.array(wrong)))


def test_all_values_are_asked_for_at_once():
    with CUPY_STANDIN.installed():
        x = CUPY_STANDIN.to_module(np.ones((2, 1, 3, 4)))
        lengths = CUPY_STANDIN.to_module(np.array([1, 3]))
        synchronisations.reset()
        numpy_sdpa.attention(x, x, x, query_lengths=lengths, key_lengths=lengths)
        assert synchronisations.count == 1, synchronisations.reasons


def test_a_planted_synchronisation_is_counted(monkeypatch):
    """The rule of this file that no result shows: a branch on an array's values inside the mathematics."""
    honest = steps.scores_forward

    def waiting(xp, query, *args):
        assert bool(xp.any(query > 0))
        return honest(xp, query, *args)

    monkeypatch.setattr(steps, "scores_forward", waiting)
    with CUPY_STANDIN.installed():
        _, waits = first_and_second_order(CUPY_STANDIN, cases.ALONE[0])
    assert waits["sdpa_forward"] == ("bool",)
