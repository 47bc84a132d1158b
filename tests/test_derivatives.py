"""The backward against two oracles that know nothing of it: complex steps and central differences of the forward."""

import cases
import numpy as np
import pytest

import numpy_sdpa
from numpy_sdpa import dense
from numpy_sdpa._internal.namespace import computing
from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.chain import like_inputs
from numpy_sdpa.residuals import Upstream

# No cancellation in a complex step: it may be so small that its square vanishes beside 1.
STEP = 1e-100


def forward(inputs, moved, **options):
    """The residuals with some inputs replaced, by name."""
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value, **inputs.options} | moved
    query, key, value = (arrays.pop(name) for name in ("query", "key", "value"))
    return numpy_sdpa.sdpa_forward(query, key, value, **arrays, **options)[1]


def weighted_results(inputs, residuals):
    """Σ⟨upstream, result⟩, rows with an lse of −inf left out as the contract says."""
    total = 0.0
    for name, gradient in inputs.upstream.items():
        result = getattr(residuals, name.removeprefix("grad_"))
        total = total + np.sum(np.where(np.isneginf(result.real), 0, result) * gradient)
    return total


def gradients_of(inputs):
    upstream = {"grad_output": None, **inputs.upstream}
    return numpy_sdpa.sdpa_backward(upstream.pop("grad_output"), forward(inputs, {}), **upstream)


def given_inputs(case, inputs):
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value, **inputs.options}
    arrays.setdefault("scale", 1 / np.sqrt(case.query[-1]) if case.query[-1] else 1.0)
    names = (*case.differentiable, *(() if "scale" in case.differentiable else ("scale",)))
    return {name: np.asarray(arrays[name], dtype=float) for name in names}


@pytest.mark.parametrize("case", cases.ALONE + cases.PAIRS + cases.SHAPES[::3], ids=str)
def test_complex_step(case):
    """Each gradient entry by entry, to 1e-12 of the array's largest."""
    inputs = cases.make(case)
    gradients = gradients_of(inputs)
    for name, array in given_inputs(case, inputs).items():
        expected = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            stepped = array.astype(complex)
            stepped[index] += 1j * STEP
            results = forward(inputs, {name: stepped}, compute_dtype=np.complex128)
            expected[index] = weighted_results(inputs, results).imag / STEP
        largest = np.max(np.abs(expected), initial=1.0)
        np.testing.assert_allclose(getattr(gradients, name), expected, rtol=0, atol=1e-12 * largest, err_msg=name)


@pytest.mark.parametrize("case", cases.ALONE + cases.PAIRS[::4], ids=str)
def test_central_difference(case):
    """Each gradient along a random direction. The error is a third derivative times h², and eps · |f| / h."""
    inputs = cases.make(case)
    gradients = gradients_of(inputs)
    h = 1e-5
    directions = cases.directions(case)
    for name, array in given_inputs(case, inputs).items():
        direction = directions.get(name, np.ones(()))
        up, down = (weighted_results(inputs, forward(inputs, {name: array + sign * h * direction})) for sign in (1, -1))
        got = np.sum(np.asarray(getattr(gradients, name)) * direction)
        np.testing.assert_allclose(got, (up - down) / (2 * h), rtol=0, atol=1e-7 * max(1, abs(got)), err_msg=name)


@pytest.mark.parametrize("case", cases.ALONE, ids=str)
def test_complex_step_of_the_backward(case):
    """The double backward's input fields: the change of the backward along the directions."""
    inputs = cases.make(case)
    directions = cases.directions(case)
    upstream = {"grad_output": None, **inputs.upstream}
    second = numpy_sdpa.sdpa_double_backward(upstream.pop("grad_output"), forward(inputs, {}), **upstream, **directions)
    moved = {name: array + 1j * STEP * directions.get(name, 0) for name, array in given_inputs(case, inputs).items()}
    arrays = inputs.options | {"compute_dtype": np.complex128} | moved
    query, key, value = (arrays.pop(name) for name in ("query", "key", "value"))
    residuals = dense.forward(*resolve(query, key, value, arrays.pop("mask", None), arrays))
    complex_upstream = Upstream(
        *(
            None if array is None else array.astype(complex)
            for array in (inputs.upstream.get(name) for name in cases.UPSTREAM)
        )
    )
    with computing(np, query):
        stepped = like_inputs(dense.backward(residuals, complex_upstream), residuals, residuals.options)
    for name in given_inputs(case, inputs):
        expected = getattr(stepped, name).imag / STEP
        largest = np.max(np.abs(expected), initial=1.0)
        np.testing.assert_allclose(getattr(second, name), expected, rtol=0, atol=1e-12 * largest, err_msg=name)


@pytest.mark.parametrize("case", cases.ALONE + cases.PAIRS, ids=str)
def test_adjoint(case):
    """⟨v, JVP u⟩ = ⟨VJP v, u⟩."""
    inputs = cases.make(case)
    residuals = forward(inputs, {})
    directions = cases.directions(case)
    tangents = numpy_sdpa.sdpa_jvp(residuals, **directions)
    forwards = sum(np.sum(v * getattr(tangents, name.removeprefix("grad_"))) for name, v in inputs.upstream.items())
    gradients = gradients_of(inputs)
    backwards = sum(np.sum(getattr(gradients, name) * u) for name, u in directions.items())
    np.testing.assert_allclose(forwards, backwards, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", cases.ALONE + cases.PAIRS[::5], ids=str)
def test_second_derivatives_are_symmetric(case):
    """⟨w, H u⟩ = ⟨u, H w⟩ for the Hessian H of the weighted results."""
    inputs = cases.make(case)
    residuals = forward(inputs, {})
    upstream = {"grad_output": None, **inputs.upstream}
    grad_output = upstream.pop("grad_output")
    u, w = cases.directions(case, seed=0), cases.directions(case, seed=1)
    along_u = numpy_sdpa.sdpa_double_backward(grad_output, residuals, **upstream, **u)
    along_w = numpy_sdpa.sdpa_double_backward(grad_output, residuals, **upstream, **w)
    left = sum(np.sum(getattr(along_u, name) * w[name]) for name in w)
    right = sum(np.sum(getattr(along_w, name) * u[name]) for name in u)
    np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-11)
