"""What must hold whatever the numbers: exactly where mathematics is exact, to rounding elsewhere."""

import cases
import numpy as np
import pytest

from numpy_sdpa import attention_jacobian, sdpa_backward, sdpa_forward, softmax_jacobian

ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def run(inputs, **changes):
    """Output, residuals and gradients of a case's inputs with some options replaced."""
    options = inputs.options | changes
    output, residuals = sdpa_forward(*inputs[:3], **options)
    upstream = {"grad_output": None, **inputs.upstream}
    return output, residuals, sdpa_backward(upstream.pop("grad_output"), residuals, **upstream)


def grid(without=()):
    chosen = [case for case in cases.ALL if not case.option_names & set(without)]
    return pytest.mark.parametrize("case", chosen, ids=str)


@grid()
def test_the_gradients_of_a_row_sum_to_grad_lse(case):
    """Σ_j g_logits + the row's sink gradient = grad_lse: a shift of the whole row is a shift of lse."""
    shape = case.weights_shape
    inputs = cases.make(case)
    bias = np.broadcast_to(inputs.options.get("bias", np.zeros(())), shape)
    sinks = np.broadcast_to(inputs.options.get("sinks", np.full((), -np.inf)), (*case.batch, *case.heads))
    _, residuals, gradients = run(inputs, bias=bias, sinks=sinks)
    total = gradients.bias.sum(axis=(-2, -1)) + gradients.sinks
    grad_lse = np.where(np.isneginf(residuals.lse), 0, inputs.upstream["grad_lse"])
    np.testing.assert_allclose(total, grad_lse.sum(axis=-1), **ROUNDING)


@grid()
def test_a_shift_of_the_whole_row_moves_its_lse_alone(case):
    """A constant beside every logit of a row, the sink's too: weights and gradients stay, to rounding."""
    inputs = cases.make(case)
    sinks = np.broadcast_to(inputs.options.get("sinks", np.zeros(())), (*case.batch, *case.heads))
    shift = np.random.default_rng(7).normal(0, 30, (*case.batch, *case.heads))
    bias = np.broadcast_to(inputs.options.get("bias", np.zeros(())), case.weights_shape)
    output, residuals, gradients = run(inputs, sinks=sinks, bias=bias)
    got, shifted, of_shifted = run(inputs, sinks=sinks + shift, bias=bias + shift[..., None, None])
    loose = {"rtol": 1e-11, "atol": 1e-11}  # the shift's own rounding: 100 · eps in a logit
    np.testing.assert_allclose(shifted.lse, residuals.lse + shift[..., None], **loose)
    np.testing.assert_allclose(shifted.weights, residuals.weights, **loose)
    np.testing.assert_allclose(got, output, **loose)
    for name in ("query", "key", "value", "bias", "sinks"):
        np.testing.assert_allclose(getattr(of_shifted, name), getattr(gradients, name), err_msg=name, **loose)


@grid()
def test_row_dot_is_grad_output_times_output(case):
    """D = Σ P ∘ gP = Σ gO ∘ O + Σ P ∘ g_weights, with P, O over all keys; seen through g_sink = p_sink (g_lse − D)."""
    inputs = cases.make(case)
    sinks = np.broadcast_to(inputs.options.get("sinks", np.zeros(())), (*case.batch, *case.heads))
    output, residuals, gradients = run(inputs, sinks=sinks)
    upstream = inputs.upstream
    row_dot = np.sum(upstream["grad_output"] * output, axis=-1)
    row_dot = row_dot + np.sum(residuals.weights * upstream["grad_weights"], axis=-1)
    has_sink = ~np.isneginf(sinks)[..., None]
    sink_weight = np.exp(sinks[..., None] - np.where(has_sink, residuals.lse, 0))
    expected = np.sum(sink_weight * np.where(has_sink, upstream["grad_lse"] - row_dot, 0), axis=-1)
    np.testing.assert_allclose(gradients.sinks, expected, **ROUNDING)


def test_a_part_of_the_keys_needs_the_whole_rows_lse_and_row_dot():
    rng = np.random.default_rng(8)
    query, key, value, kept = *rng.standard_normal((3, 6, 4)), rng.random((6, 6)) < 0.7
    options = {"scale": 0.5, "dropout_p": 0.3, "dropout_mask": kept}
    output, residuals = sdpa_forward(query, key, value, **options)
    upstream = rng.standard_normal(output.shape)
    expected = sdpa_backward(upstream, residuals).key[:3]

    def grad_key_of_part(lse, row_dot):
        weights = np.exp(0.5 * query @ key[:3].T - lse)
        grad_weights = np.where(kept[:, :3], upstream @ value[:3].T / 0.7, 0)
        return (weights * (grad_weights - row_dot(weights * grad_weights))).T @ (0.5 * query)

    def of_output(_):
        return np.sum(upstream * output, axis=-1, keepdims=True)

    def of_part(products):
        return np.sum(products, axis=-1, keepdims=True)

    lse = residuals.lse[:, None]
    lse_of_part = sdpa_forward(query, key[:3], value[:3], scale=0.5)[1].lse[:, None]
    np.testing.assert_allclose(grad_key_of_part(lse, of_output), expected, **ROUNDING)
    for wrong in ((lse, of_part), (lse_of_part, of_output), (lse_of_part, of_part)):
        assert np.max(np.abs(grad_key_of_part(*wrong) - expected)) > 0.1


@grid(without=("sinks", "dropout_p"))
def test_values_that_are_the_same_for_every_key_give_no_gradient(case):
    inputs = cases.make(case)
    inputs = inputs._replace(
        value=np.broadcast_to(inputs.value[..., :1, :], inputs.value.shape),
        upstream={"grad_output": inputs.upstream["grad_output"]},
    )
    _, _, gradients = run(inputs)
    for name in ("query", "key", "bias", "alibi_slopes", "scale", "softcap"):
        if getattr(gradients, name) is not None:
            np.testing.assert_allclose(getattr(gradients, name), 0, atol=1e-12, err_msg=name)


@grid(without=("sinks", "dropout_p"))
def test_grad_value_sums_to_grad_output_over_rows_that_see_something(case):
    inputs = cases.make(case)
    _, residuals, gradients = run(inputs)
    seen = np.where(np.isneginf(residuals.lse)[..., None], 0, inputs.upstream["grad_output"])
    by_column = (*range(seen.ndim - 1),)  # value may be broadcast over batch and heads
    np.testing.assert_allclose(gradients.value.sum(axis=by_column), seen.sum(axis=by_column), **ROUNDING)


@grid(without=("bias", "alibi_slopes"))
def test_euler(case):
    """The scores are homogeneous in query, key and scale: Σ q·g_q = Σ k·g_k = scale · g_scale."""
    inputs = cases.make(case)
    _, residuals, gradients = run(inputs)
    of_scale = residuals.scale * gradients.scale
    np.testing.assert_allclose(np.sum(inputs.query * gradients.query), of_scale, **ROUNDING)
    np.testing.assert_allclose(np.sum(inputs.key * gradients.key), of_scale, **ROUNDING)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"is_causal": True}, {"scale": 1e3}], ids=str)
def test_one_key_is_exact(dtype, options):
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 3, 4), (2, 1, 4), (2, 1, 5)))
    output, residuals = sdpa_forward(query, key, value, **options)
    gradients = sdpa_backward(rng.standard_normal(output.shape).astype(dtype), residuals)
    assert (residuals.weights == 1).all()
    np.testing.assert_array_equal(output, np.broadcast_to(value, output.shape))
    assert (gradients.query == 0).all()
    assert (gradients.key == 0).all()


@grid(without=("query_lengths", "key_lengths", "query_segments", "alignment", "mask", "bias", "dropout_p"))
def test_padding_is_truncation(case):
    """Lengths hide what they cut off: the same as arrays that end there, bit for bit in what does not depend on it."""
    if len(case.batch) or min(case.query[-2], case.key[-2]) < 2:
        case = cases.Case(case.name, (2, 4, 3), (2, 5, 3), (2, 5, 2), (), case.upstream)
    inputs = cases.make(case)
    rows, columns = case.query[-2] - 1, case.key[-2] - 1
    _, padded, of_padded = run(inputs, query_lengths=rows, key_lengths=columns)
    cut = inputs._replace(
        query=inputs.query[..., :rows, :],
        key=inputs.key[..., :columns, :],
        value=inputs.value[..., :columns, :],
        upstream={
            "grad_output": inputs.upstream["grad_output"][..., :rows, :],
            "grad_lse": inputs.upstream["grad_lse"][..., :rows],
            "grad_weights": inputs.upstream["grad_weights"][..., :rows, :columns],
        },
    )
    output, short, of_short = run(cut)
    np.testing.assert_allclose(padded.output[..., :rows, :], output, **ROUNDING)
    np.testing.assert_allclose(padded.lse[..., :rows], short.lse, **ROUNDING)
    assert (padded.output[..., rows:, :] == 0).all()
    for name, kept in (("query", rows), ("key", columns), ("value", columns)):
        got = getattr(of_padded, name)
        np.testing.assert_allclose(got[..., :kept, :], getattr(of_short, name), **ROUNDING)
        assert (got[..., kept:, :] == 0).all()


@pytest.mark.parametrize("case", [case for case in cases.ALL if case.has_gqa], ids=str)
def test_grouped_heads_are_repeated_heads_with_summed_gradients(case):
    inputs = cases.make(case)
    group = case.query[-3] // case.key[-3]
    output, _, gradients = run(inputs)
    repeated = inputs._replace(key=np.repeat(inputs.key, group, -3), value=np.repeat(inputs.value, group, -3))
    expected, _, of_repeated = run(repeated, enable_gqa=False)
    np.testing.assert_allclose(output, expected, **ROUNDING)
    np.testing.assert_allclose(gradients.query, of_repeated.query, **ROUNDING)
    for name in ("key", "value"):
        apart = getattr(of_repeated, name)
        *batch, heads, length, size = apart.shape
        summed = apart.reshape(*batch, heads // group, group, length, size).sum(axis=-3)
        np.testing.assert_allclose(getattr(gradients, name), summed, **ROUNDING)


@grid(without=("is_causal", "window", "alibi_slopes", "key_lengths"))
def test_the_order_of_keys_does_not_matter(case):
    inputs = cases.make(case)
    order = np.random.default_rng(5).permutation(case.key[-2])

    def permuted(name, array):
        moves = isinstance(array, np.ndarray) and array.ndim and array.shape[-1] == case.key[-2] != 1
        return array[..., order] if moves and name in ("mask", "bias", "dropout_mask", "key_segments") else array

    shuffled = inputs._replace(
        key=inputs.key[..., order, :],
        value=inputs.value[..., order, :],
        options={name: permuted(name, array) for name, array in inputs.options.items()},
        upstream=inputs.upstream | {"grad_weights": inputs.upstream["grad_weights"][..., order]},
    )
    output, _, gradients = run(inputs)
    got, _, of_shuffled = run(shuffled)
    np.testing.assert_allclose(got, output, **ROUNDING)
    np.testing.assert_allclose(of_shuffled.query, gradients.query, **ROUNDING)
    np.testing.assert_allclose(of_shuffled.key, gradients.key[..., order, :], **ROUNDING)
    np.testing.assert_allclose(of_shuffled.value, gradients.value[..., order, :], **ROUNDING)


def test_softmax_jacobian_is_the_tangent_of_the_weights():
    rng = np.random.default_rng(6)
    query, key = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 5, 4))
    bias = rng.standard_normal((2, 3, 5))
    _, residuals = sdpa_forward(query, key, key, bias=bias)
    jacobian = softmax_jacobian(residuals.weights)
    assert jacobian.shape == (2, 3, 5, 5)
    np.testing.assert_allclose(jacobian, weights_by_bias(query, key, bias), **ROUNDING)
    np.testing.assert_allclose(jacobian.sum(axis=-1), 0, atol=1e-15)
    np.testing.assert_array_equal(jacobian, np.swapaxes(jacobian, -2, -1))


def weights_by_bias(query, key, bias, step=1e-100):
    """∂weights / ∂bias of each row, by complex steps."""
    columns = []
    for column in range(bias.shape[-1]):
        moved = bias.astype(complex)
        moved[..., column] += 1j * step
        residuals = sdpa_forward(query, key, key, bias=moved, compute_dtype="complex128")[1]
        columns.append(residuals.weights.imag / step)
    return np.stack(columns, axis=-1)


@pytest.mark.parametrize("wrt", ["query", "key", "value", "bias", "sinks", "alibi_slopes", "scale", "softcap"])
def test_attention_jacobian(wrt):
    case = cases.Case(
        f"jacobian {wrt}",
        (2, 3, 2),
        (2, 4, 2),
        (2, 4, 3),
        (
            ("bias", cases.Array((3, 4), "normal")),
            ("sinks", cases.Array((2,), "normal")),
            ("alibi_slopes", cases.Array((2,), "alibi_slopes")),
            ("softcap", 2.0),
            ("is_causal", True),
        ),
    )
    inputs = cases.make(case)
    jacobian = attention_jacobian(*inputs[:3], wrt=wrt, **inputs.options)
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "scale": 2**-0.5, **inputs.options}
    primal = np.asarray(arrays[wrt], dtype=float)
    assert jacobian.shape == (*case.output_shape, *primal.shape)
    for index in np.ndindex(primal.shape):
        moved = primal.astype(complex)
        moved[index] += 1e-100j
        changed = arrays | {wrt: moved}
        query, key, value = (changed.pop(name) for name in ("query", "key", "value"))
        output = sdpa_forward(query, key, value, compute_dtype="complex128", **changed)[0]
        np.testing.assert_allclose(jacobian[(..., *index)], output.imag / 1e-100, **ROUNDING)
