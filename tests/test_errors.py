"""Bad input: every sentence of the contract on it, with the message that a user reads."""

import re

import numpy as np
import pytest

import numpy_sdpa
from numpy_sdpa import attention, attention_jacobian, sdpa_backward, sdpa_forward, sdpa_jvp, softmax_jacobian

Q = np.ones((2, 4, 8, 16))
K = np.ones((2, 4, 6, 16))
V = np.ones((2, 4, 6, 5))
G = np.ones((2, 2, 6, 16))  # a grouped key


def a(*shape, dtype=float):
    return np.ones(shape, dtype=dtype)


def refused(error, *fragments, query=Q, key=K, value=V, **options):
    with pytest.raises(error) as caught:
        sdpa_forward(query, key, value, **options)
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} not in {caught.value}"


@pytest.mark.parametrize(
    ("arrays", "fragments"),
    [
        (
            {"key": a(2, 4, 6, 32)},
            ["key must have the same last dimension as query: query (2, 4, 8, 16), key (2, 4, 6, 32)"],
        ),
        (
            {"value": a(2, 4, 7, 5)},
            ["value must have the same length as key", "key (2, 4, 6, 16)", "value (2, 4, 7, 5)"],
        ),
        ({"key": a(4, 6, 16)}, ["same rank", "query (2, 4, 8, 16)", "key (4, 6, 16)", "value (2, 4, 6, 5)"]),
        ({"query": a(16), "key": a(16), "value": a(5)}, ["rank, 2 to 6", "query (16,)"]),
        ({"query": a(*[1] * 7), "key": a(*[1] * 7), "value": a(*[1] * 7)}, ["rank, 2 to 6", "(1, 1, 1, 1, 1, 1, 1)"]),
        ({"query": a(3, 4, 8, 16)}, ["batch axes", "must broadcast", "query (3, 4, 8, 16)", "key (2, 4, 6, 16)"]),
        ({"key": a(2, 3, 6, 16)}, ["head counts", "equal or 1", "4, 3 and 4"]),
        ({"key": a(2, 2, 6, 16), "value": a(2, 2, 6, 5)}, ["4, 2 and 2", "enable_gqa=True"]),
    ],
)
def test_shapes(arrays, fragments):
    refused(ValueError, *fragments, **arrays)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (
            {"mask": a(2, 8, 6, dtype=bool)},
            ["mask", "(2, 8, 6)", "(2, 4, 8, 6)", "mask[..., None, :, :] inserts the head axis"],
        ),
        ({"bias": a(4, 8, 6)}, ["bias", "(4, 8, 6)", "bias[..., None, :, :] inserts the head axis"]),
        ({"bias": a(1, 1, 1, 8, 6)}, ["bias must have rank at most 2, or 4", "(1, 1, 1, 8, 6)"]),
        ({"bias": a(8, 5)}, ["bias must broadcast", "(8, 5)", "(2, 4, 8, 6)"]),
        ({"mask": a(3, 1, 8, 6, dtype=bool)}, ["mask must broadcast", "(3, 1, 8, 6)", "(2, 4, 8, 6)"]),
        ({"dropout_p": 0.5, "dropout_mask": a(2, 8, 6, dtype=bool)}, ["dropout_mask", "inserts the head axis"]),
        ({"sinks": a(3)}, ["sinks", "(Hq,) = (4,)", "(2, 4)", "sinks (3,)", "query (2, 4, 8, 16)"]),
        ({"sinks": a(1, 4)}, ["sinks", "sinks (1, 4)"]),
        ({"alibi_slopes": a(4, 1)}, ["alibi_slopes", "alibi_slopes (4, 1)"]),
        ({"key_lengths": [1, 2, 3]}, ["key_lengths must have shape (2,), got (3,)", "query (2, 4, 8, 16)"]),
        ({"query_lengths": 3}, ["query_lengths must have shape (2,), got ()"]),
        ({"query_offset": [[1, 2]]}, ["query_offset must have shape (2,), got (1, 2)"]),
        (
            {"query_segments": a(8, dtype=int), "key_segments": a(2, 6, dtype=int)},
            ["query_segments must have shape (2, 8), got (8,)"],
        ),
        (
            {"query_segments": a(2, 8, dtype=int), "key_segments": a(2, 5, dtype=int)},
            ["key_segments must have shape (2, 6), got (2, 5)"],
        ),
        ({"scale": a(4)}, ["scale must be one number", "(4,)"]),
        ({"softcap": a(1)}, ["softcap must be one number", "(1,)"]),
    ],
)
def test_shapes_of_options(options, fragments):
    refused(ValueError, *fragments, **options)


def test_grouped_heads():
    refused(ValueError, "equal head counts, got 2 and 4", "value (2, 4, 6, 5)", key=G, enable_gqa=True)
    refused(ValueError, "multiple", "4 and 3", key=a(2, 3, 6, 16), value=a(2, 3, 6, 5), enable_gqa=True)
    refused(ValueError, "multiple", "4 and 0", key=a(2, 0, 6, 16), value=a(2, 0, 6, 5), enable_gqa=True)
    refused(ValueError, "mask", "query's heads", key=G, value=G, enable_gqa=True, mask=a(2, 2, 8, 6, dtype=bool))


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"key_lengths": [0, 7]}, ["key_lengths must lie in 0 … 6 (the key length S), got 0 … 7"]),
        ({"query_lengths": [-1, 8]}, ["query_lengths must lie in 0 … 8 (the query length L), got -1 … 8"]),
        ({"alignment": "bottom_right"}, ["alignment", '"upper_left"', '"lower_right"', "'bottom_right'"]),
        ({"alignment": "lower_right", "query_offset": 0}, ["query_offset", "lower_right", "one of them"]),
        ({"query_segments": a(2, 8, dtype=int)}, ["query_segments", "without key_segments"]),
        ({"key_segments": a(2, 6, dtype=int)}, ["key_segments", "without query_segments"]),
        ({"window": 3}, ["window must be (left, right)", "window=(3, 3), or (3, 0) under is_causal"]),
        ({"window": (3,)}, ["window must be (left, right)", "(3,)"]),
        ({"window": -1}, ["None for unbounded; got -1"]),
        ({"query_offset": 2**62}, ["query_offset must lie in", f"got {2**62}"]),
        ({"query_offset": [0, -(2**63)]}, ["query_offset must lie in", f"got {-(2**63)} … 0"]),
        ({"alignment": np.array(["a", "b"])}, ["alignment must be", '"lower_right"']),
        ({"method": ["dense"] * 2}, ["method must be", '"blockwise"']),
        ({"window": (-1, 0)}, ["window", "None, not −1, is unbounded", "(-1, 0)"]),
        ({"window": (1.5, 0)}, ["window", "(1.5, 0)"]),
        ({"window": (True, 0)}, ["window", "(True, 0)"]),
        ({"scale": np.inf}, ["scale must be finite", "inf"]),
        ({"scale": np.nan}, ["scale must be finite", "nan"]),
        ({"scale": 10**400}, ["scale must be finite", "1329 bits"]),
        ({"scale": [0.5]}, ["scale must be one number, got shape (1,)"]),
        ({"scale": (0.5, 2.0)}, ["scale must be one number, got shape (2,)"]),
        ({"softcap": [3.0]}, ["softcap must be one number, got shape (1,)"]),
        ({"scale": 1e300, "compute_dtype": np.float32}, ["scale must be finite in float32, got 1e+300"]),
        ({"scale": np.array(1e300), "compute_dtype": np.float32}, ["scale must be finite in float32"]),
        ({"softcap": 1e-60, "compute_dtype": np.float32}, ["softcap must be greater than 0", "which is 0 in float32"]),
        ({"softcap": 0}, ["softcap must be greater than 0 (None, not 0, turns it off), got 0"]),
        ({"softcap": -2.0}, ["softcap must be greater than 0", "-2.0"]),
        ({"softcap": np.inf}, ["softcap must be finite"]),
        ({"dropout_p": 1.5, "dropout_seed": 0}, ["dropout_p must lie in 0 … 1, got 1.5"]),
        ({"dropout_p": -0.5, "dropout_seed": 0}, ["dropout_p must lie in 0 … 1, got -0.5"]),
        ({"dropout_p": 0.5}, ["dropout_p needs dropout_mask", "dropout_seed"]),
        ({"dropout_mask": a(8, 6, dtype=bool)}, ["dropout_mask was given without dropout_p"]),
        ({"dropout_seed": 3}, ["dropout_seed was given without dropout_p"]),
        ({"dropout_p": 0.5, "dropout_seed": 3, "dropout_mask": a(8, 6, dtype=bool)}, ["dropout_mask and dropout_seed"]),
        ({"dropout_p": 0.5, "dropout_seed": -1}, ["dropout_seed", "-1"]),
        ({"dropout_p": 0.5, "dropout_seed": 2**64}, ["dropout_seed", str(2**64)]),
        ({"compute_dtype": np.float16}, ["compute_dtype", "float32, float64 or complex128", "float16"]),
        ({"method": "flash"}, ['"dense"', '"blockwise"', "'flash'"]),
        ({"block_size": 16}, ['block_size goes with method="blockwise"']),
        ({"workers": 2}, ['workers goes with method="blockwise"']),
        ({"progress": True}, ['progress goes with method="blockwise"']),
        ({"method": "blockwise", "block_size": 0}, ["block_size must be at least 1, got 0"]),
        ({"method": "blockwise", "workers": 0}, ["workers must be at least 1, got 0"]),
    ],
)
def test_ranges(options, fragments):
    refused(ValueError, *fragments, **options)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"query": a(2, 4, 8, 16, dtype=int)}, ["query must be floating, got int64"]),
        ({"key": a(2, 4, 6, 16, dtype=bool)}, ["key must be floating, got bool"]),
        (
            {"value": a(2, 4, 6, 5, dtype=complex)},
            ["value must be floating, got complex128", "compute_dtype=complex128"],
        ),
        ({"sinks": a(4, dtype=int)}, ["sinks must be floating, got int64"]),
        ({"alibi_slopes": a(4, dtype=int)}, ["alibi_slopes must be floating, got int64"]),
        ({"bias": a(8, 6, dtype=bool)}, ["bias must be floating, got bool", "mask="]),
        ({"bias": a(8, 6, dtype=int)}, ["bias must be floating, got int64", "mask="]),
        ({"mask": a(8, 6, dtype=complex)}, ["mask must be bool or integer, got complex128"]),
        (
            {"dropout_p": 0.5, "dropout_mask": a(8, 6, dtype=int)},
            ["dropout_mask must be bool (True = kept), got int64"],
        ),
        ({"dropout_p": "0.5", "dropout_seed": 1}, ["dropout_p must be a number", "'0.5'"]),
        ({"dropout_p": True, "dropout_seed": 1}, ["dropout_p must be a number", "True"]),
        ({"dropout_p": 0.5, "dropout_seed": 1.5}, ["dropout_seed must be an int, got 1.5"]),
        ({"key_lengths": [1.0, 2.0]}, ["key_lengths must be integers, got float64"]),
        ({"query_offset": 1.5}, ["query_offset must be integers"]),
        ({"query_offset": True}, ["query_offset must be integers, got bool"]),
        ({"is_causal": 1}, ["is_causal must be True or False, got 1"]),
        ({"enable_gqa": "yes"}, ["enable_gqa must be True or False, got 'yes'"]),
        ({"scale": 1j}, ["scale must be a real number", "1j"]),
        ({"scale": "auto"}, ["scale must be a real number", "'auto'"]),
        ({"scale": True}, ["scale must be a real number", "True"]),
        ({"softcap": 1j}, ["softcap must be a real number"]),
        ({"method": "blockwise", "block_size": 1.5}, ["block_size must be an int or (rows, columns), got 1.5"]),
        ({"method": "blockwise", "block_size": (1, 2, 3)}, ["block_size must be an int or (rows, columns)"]),
        ({"method": "blockwise", "workers": 1.5}, ["workers must be an int, got 1.5"]),
        ({"method": "blockwise", "progress": 1}, ["progress must be True or False, got 1"]),
        ({"query": [["a"]]}, ["query must hold numbers"]),
        ({"query": None}, ["query must be an array, got None"]),
        ({"query": object()}, ["query must be an array of NumPy, CuPy or an Array API module", "builtins.object"]),
        ({"query": np.ma.masked_array(Q)}, ["query is a numpy.ma.MaskedArray", "mask="]),
    ],
)
def test_types(arguments, fragments):
    refused(TypeError, *fragments, **arguments)


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("attn_mask", ["mask=", "bias="]),
        ("attn_bias", ["bias="]),
        ("causal", ["is_causal="]),
        ("sm_scale", ["scale="]),
        ("softmax_scale", ["scale="]),
        ("logits_soft_cap", ["softcap="]),
        ("window_size", ["window=(left, right)"]),
        ("cu_seqlens_q", ["sdpa_varlen_forward"]),
        ("no_such_option", ["the options are", "bias", "method", "progress"]),
    ],
)
def test_names_of_other_libraries(name, hints):
    refused(TypeError, repr(name), *hints, **{name: None})


@pytest.mark.parametrize("fill", [-1e9, 0.5, -np.inf, np.nan, 0.0, 2.0])
def test_a_float_mask_that_is_not_zeros_and_ones_looks_additive(fill):
    mask = np.zeros((8, 6))
    mask[0, 0] = fill
    span = f"span {mask.min()} … {mask.max()}"
    refused(ValueError, "additive", "bias=", span, mask=mask)
    mask[1] = 1
    if fill != 0:
        refused(ValueError, "additive", "bias=", mask=mask)


def test_a_float_mask_of_zeros_and_ones_is_taken():
    kept = np.arange(48).reshape(8, 6) % 3 > 0
    np.testing.assert_array_equal(attention(Q, K, V, kept.astype(np.float32)), attention(Q, K, V, kept))
    empty = np.ones((2, 4, 8, 0))
    assert attention(Q, K[..., :0, :], V[..., :0, :], empty).shape == (2, 4, 8, 5)


def test_ragged_lists():
    refused(ValueError, "query must be an array, got a list with rows of different lengths", query=[[1.0], [1.0, 2.0]])


class Foreign:
    """An array of a library that the package does not know."""

    shape, ndim, dtype = (2, 4, 8, 16), 4, np.dtype(float)

    def __array__(self, dtype=None, copy=None):
        return Q


@pytest.mark.parametrize(
    ("module", "conversion"),
    [
        ("torch", "query.detach().cpu().numpy(), or cupy.from_dlpack(query.detach())"),
        ("tensorflow.python", "query.numpy()"),
        ("dask.array.core", "numpy_sdpa.distributed"),
        ("pandas", "query.to_numpy()"),
        ("somewhere", "numpy.asarray(query)"),
    ],
)
def test_foreign_arrays_are_shown_the_conversion(module, conversion):
    foreign = type("Tensor", (Foreign,), {"__module__": module})()
    refused(TypeError, f"{module}.Foreign".replace("Foreign", "Tensor"), conversion, query=foreign)


def test_mixed_modules():
    import array_api_strict

    strict = array_api_strict.asarray(Q)
    refused(TypeError, "one array module", "query array_api_strict", "key numpy", query=strict)
    refused(TypeError, "one array module", "mask array_api_strict", mask=array_api_strict.ones((8, 6)) > 0)
    _, residuals = sdpa_forward(Q, K, V)
    with pytest.raises(TypeError, match=r"one array module.*grad_output array_api_strict"):
        sdpa_backward(array_api_strict.ones((2, 4, 8, 5)), residuals)


def forwarded(**options):
    return sdpa_forward(Q, K, V, **options)[1]


def test_upstream_gradients():
    residuals = forwarded()
    with pytest.raises(ValueError, match="at least one of grad_output, grad_lse and grad_weights"):
        sdpa_backward(None, residuals)
    for name, shape in (("grad_output", (2, 4, 8, 5)), ("grad_lse", (2, 4, 8)), ("grad_weights", (2, 4, 8, 6))):
        arguments = {"grad_output": None, name: a(3)}
        with pytest.raises(ValueError, match=re.escape(f"{name} must have shape {shape}, got (3,)")):
            sdpa_backward(arguments.pop("grad_output"), residuals, **arguments)
        arguments = {"grad_output": None, name: np.ones(shape, dtype=int)}
        with pytest.raises(TypeError, match=f"{name} must be floating, got int64"):
            sdpa_backward(arguments.pop("grad_output"), residuals, **arguments)


def test_the_backward_takes_no_options():
    with pytest.raises(TypeError, match="is_causal"):
        sdpa_backward(a(2, 4, 8, 5), forwarded(), is_causal=True)


def test_complex_residuals_have_no_backward():
    with pytest.raises(ValueError, match="complex128"):
        sdpa_backward(a(2, 4, 8, 5), forwarded(compute_dtype=np.complex128))


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes", "softcap"])
def test_directions_for_inputs_that_were_not_given(name):
    residuals = forwarded()
    with pytest.raises(ValueError, match=f"a direction for {name} was given, but the forward had no {name}"):
        sdpa_jvp(residuals, **{name: a(4)})
    with pytest.raises(ValueError, match=f"the forward had no {name}"):
        numpy_sdpa.sdpa_double_backward(a(2, 4, 8, 5), residuals, **{name: a(4)})


def test_directions_have_their_inputs_shape():
    with pytest.raises(ValueError, match=re.escape("query must have shape (2, 4, 8, 16), got (8, 16)")):
        sdpa_jvp(forwarded(), query=a(8, 16))


def test_weights_need_the_dense_method():
    with pytest.raises(ValueError, match='method="dense"'):
        numpy_sdpa.scaled_dot_product_attention(Q, K, V, method="blockwise")


@pytest.mark.parametrize(
    "residuals",
    [Q, sdpa_forward(Q, K, V), numpy_sdpa.sdpa_varlen_forward(Q[0], Q[0], Q[0], [0, 4], [0, 4])[1]],
    ids=type,
)
def test_residuals_of_something_else(residuals):
    came = re.escape(type(residuals).__qualname__)
    for function in (
        lambda: sdpa_backward(Q, residuals),
        lambda: sdpa_jvp(residuals, query=Q),
        lambda: numpy_sdpa.sdpa_double_backward(Q, residuals, query=Q),
    ):
        with pytest.raises(
            TypeError, match=f"residuals must be the SDPAResiduals that sdpa_forward returns, got .*{came}"
        ):
            function()
    with pytest.raises(TypeError, match="residuals must be the SDPAVarlenResiduals that sdpa_varlen_forward returns"):
        numpy_sdpa.sdpa_varlen_backward(Q, forwarded())


def test_a_matrix_is_refused():
    matrix = Q[0, 0].view(np.matrix)
    refused(TypeError, "query is a numpy.matrix", "numpy.asarray(query)", query=matrix, key=K[0, 0], value=V[0, 0])


def test_pieces():
    for function in (softmax_jacobian, numpy_sdpa.merge_heads, lambda hidden: numpy_sdpa.split_heads(hidden, 2)):
        with pytest.raises(TypeError, match="must be an array, got None"):
            function(None)
    with pytest.raises(ValueError, match="wrt must be one of query, key"):
        attention_jacobian(Q, K, V, wrt="mask")
    with pytest.raises(ValueError, match="no softcap was given"):
        attention_jacobian(Q, K, V, wrt="softcap")
    with pytest.raises(TypeError, match="weights must be floating, got int64"):
        softmax_jacobian([1, 2])
    with pytest.raises(ValueError, match=re.escape("weights must have the form (…, S), got shape ()")):
        softmax_jacobian(1.0)
    with pytest.raises(
        ValueError, match=re.escape("heads must divide the last axis of hidden: 3 heads, hidden (2, 4)")
    ):
        numpy_sdpa.split_heads(a(2, 4), 3)
    with pytest.raises(ValueError, match=r"at least 1|must divide"):
        numpy_sdpa.split_heads(a(2, 4), 0)
    with pytest.raises(TypeError, match=r"heads must be an int, got 2\.0"):
        numpy_sdpa.split_heads(a(2, 4), 2.0)
    with pytest.raises(TypeError, match="heads must be an int, got True"):
        numpy_sdpa.split_heads(a(2, 4), True)
    with pytest.raises(ValueError, match=re.escape("hidden must have the form (B…, L, H·E), got shape (4,)")):
        numpy_sdpa.split_heads(a(4), 2)
    with pytest.raises(ValueError, match=re.escape("heads must have the form (B…, H, L, E), got shape (2, 4)")):
        numpy_sdpa.merge_heads(a(2, 4))


def test_lists_are_converted():
    np.testing.assert_array_equal(attention([[0.0]], [[0.0], [0.0]], [[1.0], [5.0]], [True, False]), [[1.0]])


def test_a_python_number_takes_the_dtype_of_the_arrays():
    query = np.ones((2, 3), dtype=np.float32)
    residuals = sdpa_forward(query, query, query, sinks=0.5, bias=1.0, alibi_slopes=0.25)[1]
    assert residuals.lse.dtype == np.float32
    assert sdpa_backward(query, residuals).sinks.dtype == np.float32


def test_the_two_half_types_meet_in_float32():
    import ml_dtypes

    half, brain = np.ones((2, 3), dtype=np.float16), np.ones((2, 3), dtype=ml_dtypes.bfloat16)
    output, residuals = sdpa_forward(half, brain, half)
    assert output.dtype == np.float32
    gradients = sdpa_backward(output, residuals)
    assert gradients.key.dtype == ml_dtypes.bfloat16
    assert attention(half, half, half, bias=brain[:, :2]).dtype == np.float16
