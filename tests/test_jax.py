"""jax.numpy under its transformations: traced over the whole grid, compiled for each option, and as an oracle.

JAX differentiates our forward by itself; what it finds must be our backward, and its forward mode our JVP.
"""

import cases
import numpy as np
import pytest
from arrays import JAX, JAX_32
from results import everything

import numpy_sdpa

# XLA takes a second or two to compile a case, whatever its size: each option by itself, and most of them at once.
MOST = ("GQA 6/2, most options", "batch and head of 1, most options")
COMPILED = [case for case in cases.ALONE if case.name in cases.FEATURES] + [cases.BY_NAME[name] for name in MOST]

# Compiled code runs once and is thrown away: XLA's optimisations would cost more than the test.
UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

INPUTS = ("query", "key", "value")

pytestmark = pytest.mark.slow


def traceable(case, dtype="float64"):
    """The function of a case's arrays that gives every result, and those arrays by name, of NumPy."""
    inputs, directions = cases.make(case), cases.directions(case)
    fixed = {name: option for name, option in inputs.options.items() if not isinstance(option, np.ndarray)}
    arrays = {
        "inputs": dict(zip(INPUTS, inputs[:3], strict=True)),
        "options": {name: option for name, option in inputs.options.items() if name not in fixed},
        "upstream": inputs.upstream,
        "directions": {name: array for name, array in directions.items() if name not in fixed},
    }
    for group in arrays.values():
        for name, array in group.items():
            if array.dtype == np.float64:
                group[name] = array.astype(dtype)

    def results(arrays):
        options = {**fixed, **arrays["options"]}
        query, key, value = (arrays["inputs"][name] for name in INPUTS)
        return everything(query, key, value, options, arrays["upstream"], arrays["directions"])

    return results, arrays


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_every_case_can_be_traced(case):
    """Nothing asks for a value, and shapes and dtypes are those of NumPy."""
    results, arrays = traceable(case)
    expected = results(arrays)
    with JAX.installed():
        import jax

        traced = jax.eval_shape(results, arrays)
    assert {name: (array.shape, array.dtype) for name, array in traced.items()} == {
        name: (array.shape, array.dtype) for name, array in expected.items()
    }


@pytest.mark.parametrize("case", cases.ALONE[::4], ids=str)
def test_as_it_comes_without_64_bit_types(case):
    """JAX warns where a 64-bit type is asked for, and a warning is an error here."""
    results, arrays = traceable(case, "float32")
    with JAX_32.installed():
        import jax

        traced = jax.eval_shape(results, arrays)
    assert {array.dtype.name for array in traced.values()} == {"float32"}


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_values_and_the_derivatives_that_jax_finds(case):
    results, arrays = traceable(case)
    expected = results(arrays)
    with JAX.installed():
        import jax

        # float64 on both sides: 1e-12 is some thousand eps of numbers of order 1
        function = jax.jit(with_derivatives(case, results), compiler_options=UNOPTIMISED)
        compiled, found = function(jax.tree.map(JAX.to_module, arrays))
        JAX.assert_same_module_and_device(tuple(compiled.values()), JAX.to_module(arrays["inputs"]["query"]))
        for name, array in compiled.items():
            np.testing.assert_allclose(JAX.to_numpy(array), expected[name], rtol=1e-12, atol=1e-12, err_msg=name)
        for name, array in found.items():
            np.testing.assert_allclose(JAX.to_numpy(array), expected[name], rtol=1e-12, atol=1e-12, err_msg=name)
    assert {f"grad_{name}" for name in arrays["directions"]} | {"tangent_output"} <= found.keys()


def with_derivatives(case, results):
    """Our results, and beside them JAX's own derivatives of our forward, under the same names."""
    import jax

    fixed = {name: option for name, option in case.options if not isinstance(option, cases.Array)}

    def derivatives(arrays):
        differentiable = {name: (arrays["inputs"] | arrays["options"])[name] for name in arrays["directions"]}

        def forward(differentiable):
            named = {**arrays["inputs"], **arrays["options"], **fixed, **differentiable}
            query, key, value = (named.pop(name) for name in INPUTS)
            output, residuals = numpy_sdpa.sdpa_forward(query, key, value, **named)
            # an lse of −∞ depends on nothing; ∞ · 0 would be NaN
            lse = jax.numpy.where(residuals.lse == -np.inf, 0, residuals.lse)
            return {"grad_output": output, "grad_lse": lse, "grad_weights": residuals.weights}

        primal, pullback = jax.vjp(forward, differentiable)
        (gradients,) = pullback({name: arrays["upstream"][name] for name in primal})
        _, tangents = jax.jvp(forward, (differentiable,), (arrays["directions"],))
        found = {f"grad_{name}": gradient for name, gradient in gradients.items()}
        return found | {name.replace("grad_", "tangent_"): tangent for name, tangent in tangents.items()}

    return lambda arrays: (results(arrays), derivatives(arrays))


@pytest.mark.parametrize("compute_dtype", ["float64", "complex128"])
def test_a_compute_dtype_that_jax_would_cut_to_half_is_refused(compute_dtype):
    with JAX_32.installed():
        import jax.numpy as jnp

        query = jnp.ones((2, 3))
        with pytest.raises(ValueError, match=f"compute_dtype={compute_dtype}: .*jax_enable_x64"):
            numpy_sdpa.attention(query, query, query, compute_dtype=compute_dtype)


def test_a_side_that_reaches_everything_is_unbounded_in_32_bits():
    with JAX_32.installed():
        import jax.numpy as jnp

        query = jnp.zeros((2, 1, 3, 2))
        lse = numpy_sdpa.sdpa_forward(query, query, query, query_offset=[-3, 2], window=(2**31 - 1,) * 2)[1].lse
        np.testing.assert_allclose(np.asarray(lse), np.log(3), rtol=1e-6)
        with pytest.raises(ValueError, match="query_offset must lie in"):
            numpy_sdpa.attention(query, query, query, query_offset=2**40, is_causal=True)
