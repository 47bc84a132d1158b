"""A packed batch is its sequences, one by one."""

import numpy as np
import pytest
from arrays import CUPY, CUPY_STANDIN

from numpy_sdpa import sdpa_backward, sdpa_forward, sdpa_varlen_backward, sdpa_varlen_forward
from numpy_sdpa.blockwise import Results

ROUNDING = {"rtol": 1e-12, "atol": 1e-13}
# Tokens before the first sequence and after the last; an empty sequence of queries, one of keys.
CUTS_Q = (2, 5, 5, 9, 12)
CUTS_K = (1, 6, 8, 8, 12)
TOKENS, KEYS, SEQUENCES = 14, 13, 4
FIELDS = ("query", "key", "value", "sinks", "alibi_slopes", "scale", "softcap")


def inputs(query_heads=4, key_heads=2, seed=0):
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((TOKENS, query_heads, 3)), rng.standard_normal((KEYS, key_heads, 3))
    return query, key, rng.standard_normal((KEYS, key_heads, 2))


def one_by_one(query, key, value, grad_output, grad_lse, options):
    """Output, lse and gradients of every sequence by itself, put where they belong."""
    heads = query.shape[1]
    output, lse = np.zeros(grad_output.shape), np.full((heads, TOKENS), -np.inf)
    gradients = {"query": np.zeros(query.shape), "key": np.zeros(key.shape), "value": np.zeros(value.shape)}
    for name in ("sinks", "alibi_slopes"):
        if name in options:
            gradients[name] = np.zeros((SEQUENCES, heads))
    gradients |= {"scale": 0.0} | ({"softcap": 0.0} if "softcap" in options else {})
    for number in range(SEQUENCES):
        rows, columns = slice(*CUTS_Q[number : number + 2]), slice(*CUTS_K[number : number + 2])
        of_sequence = dict(options)
        for name in ("sinks", "alibi_slopes"):
            if name in options and options[name].ndim == 2:
                of_sequence[name] = options[name][number]
        if isinstance(options.get("query_offset"), np.ndarray):
            of_sequence["query_offset"] = int(options["query_offset"][number])
        parts = (np.swapaxes(array, 0, 1) for array in (query[rows], key[columns], value[columns]))
        part, residuals = sdpa_forward(*parts, **of_sequence)
        output[rows], lse[:, rows] = np.swapaxes(part, 0, 1), residuals.lse
        upstream = np.swapaxes(grad_output[rows], 0, 1)
        of_part = sdpa_backward(upstream, residuals, grad_lse=grad_lse[:, rows])
        gradients["query"][rows] += np.swapaxes(of_part.query, 0, 1)
        gradients["key"][columns] += np.swapaxes(of_part.key, 0, 1)
        gradients["value"][columns] += np.swapaxes(of_part.value, 0, 1)
        for name in gradients.keys() - {"query", "key", "value"}:
            target = (number,) if np.ndim(gradients[name]) else ()
            if target:
                gradients[name][target] += getattr(of_part, name)
            else:
                gradients[name] += getattr(of_part, name)
    for name in ("sinks", "alibi_slopes"):
        if name in options and options[name].ndim == 1:
            gradients[name] = gradients[name].sum(axis=0)
    return output, lse, gradients


OPTIONS = {
    "bare": {},
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": True, "alignment": "lower_right"},
    "query_offset": {"is_causal": True, "query_offset": 1},
    "query_offset per sequence": {"is_causal": True, "query_offset": np.array([1, 0, -2, 3])},
    "window": {"window": (1, 1), "alignment": "lower_right"},
    "sinks": {"sinks": np.array([0.5, -np.inf, -1.0, 2.0])},
    "sinks per sequence": {"sinks": np.linspace(-1, 2, 16).reshape(4, 4)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 1.0, -0.5])},
    "alibi per sequence": {"alibi_slopes": np.linspace(-1, 2, 16).reshape(4, 4), "alignment": "lower_right"},
    "scale and softcap": {"scale": -0.7, "softcap": 1.5},
}


@pytest.mark.parametrize("block_size", [None, 1, (2, 3)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_the_sequences_one_by_one(options, block_size):
    arrays = inputs()
    options = {"enable_gqa": True, **options}
    rng = np.random.default_rng(1)
    grad_output, grad_lse = rng.standard_normal((TOKENS, 4, 2)), rng.standard_normal((4, TOKENS))
    output, residuals = sdpa_varlen_forward(*arrays, CUTS_Q, CUTS_K, block_size=block_size, **options)
    gradients = sdpa_varlen_backward(grad_output, residuals, grad_lse=grad_lse)
    expected, lse, of_sequences = one_by_one(*arrays, grad_output, grad_lse, options)
    np.testing.assert_allclose(output, expected, **ROUNDING)
    np.testing.assert_allclose(residuals.lse, lse, **ROUNDING)
    outside = [0, 1, 12, 13]
    assert (residuals.row_shift[:, outside] == 0).all()
    assert (residuals.row_sum[:, outside] == 0).all()
    assert gradients.bias is None
    for name in FIELDS:
        if name in of_sequences:
            np.testing.assert_allclose(getattr(gradients, name), of_sequences[name], **ROUNDING, err_msg=name)
        else:
            assert getattr(gradients, name) is None, name


@pytest.mark.parametrize("entry", [None, 1e16, np.inf], ids=["", "a huge value", "an infinite key"])
def test_sequences_of_many_tokens(entry):
    """In default tiles of many rows, which are folded: also where some rows see a key that these cannot take."""
    cuts = (0, 150, 250)
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((250, heads, 3)) for heads in (4, 2, 2))
    if entry is not None:
        (key if entry == np.inf else value)[20, 1, 2] = entry
    grad_output = rng.standard_normal(query.shape)
    options = {"enable_gqa": True, "is_causal": True}
    output, residuals = sdpa_varlen_forward(query, key, value, cuts, cuts, **options)
    gradients = sdpa_varlen_backward(grad_output, residuals)
    for sequence in (slice(0, 150), slice(150, 250)):
        parts = [np.swapaxes(array[sequence], 0, 1) for array in (query, key, value, grad_output)]
        expected, of_sequence = sdpa_forward(*parts[:3], **options)
        wanted = sdpa_backward(parts[3], of_sequence)
        results = (output, gradients.query, gradients.key, gradients.value)
        for got, part in zip(results, (expected, *wanted[:3]), strict=True):
            largest = np.max(np.abs(part), where=np.isfinite(part), initial=1.0)
            np.testing.assert_allclose(np.swapaxes(got[sequence], 0, 1), part, rtol=1e-12, atol=1e-13 * largest)
        np.testing.assert_allclose(residuals.lse[:, sequence], of_sequence.lse, **ROUNDING)


@pytest.mark.parametrize(("query_heads", "key_heads"), [(3, 1), (1, 3), (3, 3)])
def test_heads_broadcast(query_heads, key_heads):
    arrays = inputs(query_heads, key_heads)
    rng = np.random.default_rng(1)
    grad_output, grad_lse = rng.standard_normal((TOKENS, 3, 2)), rng.standard_normal((3, TOKENS))
    output, residuals = sdpa_varlen_forward(*arrays, CUTS_Q, CUTS_K)
    gradients = sdpa_varlen_backward(grad_output, residuals, grad_lse=grad_lse)
    repeated = [np.broadcast_to(array, (array.shape[0], 3, array.shape[2])) for array in arrays]
    expected, _, of_sequences = one_by_one(*repeated, grad_output, grad_lse, {})
    np.testing.assert_allclose(output, expected, **ROUNDING)
    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        wanted = of_sequences[name]
        wanted = wanted.sum(axis=1, keepdims=True) if array.shape[1] == 1 else wanted
        np.testing.assert_allclose(getattr(gradients, name), wanted, **ROUNDING, err_msg=name)


def test_dropout_counts_sequences_as_a_batch():
    rng = np.random.default_rng(2)
    query, key, value = (rng.standard_normal((3, 2, 5, 4)) for _ in range(3))
    options = {"dropout_p": 0.5, "dropout_seed": 7, "is_causal": True}
    expected, of_batch = sdpa_forward(query, key, value, **options)
    packed = [np.swapaxes(array, 1, 2).reshape(15, 2, 4) for array in (query, key, value)]
    output, residuals = sdpa_varlen_forward(*packed, [0, 5, 10, 15], [0, 5, 10, 15], **options)
    np.testing.assert_allclose(output, np.swapaxes(expected, 1, 2).reshape(15, 2, 4), **ROUNDING)
    gradients = sdpa_varlen_backward(np.ones_like(output), residuals)
    of_batch = sdpa_backward(np.ones_like(expected), of_batch)
    np.testing.assert_allclose(gradients.key, np.swapaxes(of_batch.key, 1, 2).reshape(15, 2, 4), **ROUNDING)


def test_tokens_outside_every_sequence_are_never_read():
    clean, dirty = inputs(), [array.copy() for array in inputs()]
    for array in clean:
        array[0], array[-1] = 0, 0
    for array in dirty:
        array[0], array[-1] = np.nan, np.inf
    grad_output = np.ones((TOKENS, 4, 2))
    hidden = grad_output.copy()
    hidden[:2], hidden[12:] = np.nan, np.nan
    grad_output[:2], grad_output[12:] = 0, 0
    results = []
    for arrays, upstream in ((clean, grad_output), (dirty, hidden)):
        output, residuals = sdpa_varlen_forward(*arrays, CUTS_Q, CUTS_K, enable_gqa=True)
        gradients = sdpa_varlen_backward(upstream, residuals)
        results.append((output, residuals.lse, *gradients[:3]))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_dtypes():
    arrays = [array.astype(np.float16) for array in inputs()]
    output, residuals = sdpa_varlen_forward(*arrays, CUTS_Q, CUTS_K, enable_gqa=True)
    gradients = sdpa_varlen_backward(output, residuals)
    assert output.dtype == np.float16
    assert {residuals.output.dtype, residuals.lse.dtype, gradients.scale.dtype} == {np.dtype(np.float32)}
    assert {gradient.dtype for gradient in gradients[:3]} == {np.dtype(np.float16)}
    expected = sdpa_varlen_forward(*(array.astype(np.float32) for array in arrays), CUTS_Q, CUTS_K, enable_gqa=True)[0]
    np.testing.assert_array_equal(output, expected.astype(np.float16))


def test_no_sequences_and_lists():
    output, residuals = sdpa_varlen_forward([[[1.0]]], [[[1.0]]], [[[5.0]]], [0], np.array([0]))
    assert output.tolist() == [[[0.0]]]
    assert np.isneginf(residuals.lse).all()
    output, residuals = sdpa_varlen_forward(
        [[[1.0]]], [[[1.0]]], [[[5.0]]], np.array([0, 1]), [0, 1], bias=None, is_causal=True
    )
    assert output.tolist() == [[[5.0]]]
    named = residuals.to_dict()
    assert named.keys() == {
        *FIELDS[:3],
        "scale",
        "cu_seqlens_q",
        "cu_seqlens_k",
        *Results._fields,
        "is_causal",
        "method",
    }
    assert (named["output"] is residuals.output, named["cu_seqlens_k"], named["is_causal"]) == (True, (0, 1), True)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mask": np.ones(3, bool)}, ValueError, ["mask does not go with packed sequences"]),
        ({"bias": np.ones(3)}, ValueError, ["bias does not go with packed sequences"]),
        ({"key_lengths": [1, 1, 1, 1]}, ValueError, ["key_lengths does not go with"]),
        ({"method": "dense"}, ValueError, ['method="blockwise"', "'dense'"]),
        ({"no_such": 1}, TypeError, ["unknown option 'no_such'"]),
        ({"cu_seqlens_q": (0, 5)}, ValueError, ["same length", "2 and 5"]),
        ({"cu_seqlens_q": (0, 5, 4, 9, 12)}, ValueError, ["cu_seqlens_q must rise within 0 … 14", "(0, 5, 4, 9, 12)"]),
        (
            {"cu_seqlens_q": (-1, 4, 5, 9, 12)},
            ValueError,
            ["cu_seqlens_q must rise within 0 … 14", "(-1, 4, 5, 9, 12)"],
        ),
        ({"cu_seqlens_k": (0, 5, 6, 9, 14)}, ValueError, ["cu_seqlens_k must rise within 0 … 13"]),
        ({"cu_seqlens_k": (0.0, 1.0)}, TypeError, ["cu_seqlens_k must be one axis of integers"]),
        ({"cu_seqlens_k": (0, 1.5)}, TypeError, ["cu_seqlens_k must be one axis of integers"]),
        ({"cu_seqlens_k": ()}, TypeError, ["cu_seqlens_k must be one axis of integers"]),
        ({"cu_seqlens_k": 5}, TypeError, ["cu_seqlens_k must be one axis of integers"]),
        ({"cu_seqlens_k": (False, True)}, TypeError, ["cu_seqlens_k must be one axis of integers"]),
        ({"query": None}, TypeError, ["query must be an array, got None"]),
        ({"sinks": np.zeros(3)}, ValueError, ["sinks must have shape (Hq,) = (4,)", "(4, 4)"]),
        ({"query": np.zeros((1, 14, 4, 3))}, ValueError, ["query (1, 14, 4, 3), key (13, 2, 3), value (13, 2, 2)"]),
    ],
)
def test_bad_input(changes, error, words):
    query, key, value = inputs()
    arguments = {"query": query, "key": key, "value": value, "cu_seqlens_q": CUTS_Q, "cu_seqlens_k": CUTS_K}
    with pytest.raises(error) as caught:
        sdpa_varlen_forward(**{**arguments, "enable_gqa": True, **changes})
    for word in words:
        assert word in str(caught.value)


def test_only_modules_that_the_engine_knows():
    array_api_strict = pytest.importorskip("array_api_strict")
    arrays = [array_api_strict.asarray(array) for array in inputs()]
    with pytest.raises(TypeError, match="NumPy and CuPy"):
        sdpa_varlen_forward(*arrays, CUTS_Q, CUTS_K)
    for number in range(3):
        mixed = [*inputs()[:number], arrays[number], *inputs()[number + 1 :]]
        with pytest.raises(TypeError, match="one array module"):
            sdpa_varlen_forward(*mixed, CUTS_Q, CUTS_K)


def test_work_on_the_output_does_not_reach_the_backward():
    output, residuals = sdpa_varlen_forward(*inputs(), CUTS_Q, CUTS_K, enable_gqa=True)
    expected = sdpa_varlen_backward(np.ones_like(output), residuals)
    output += 1
    got = sdpa_varlen_backward(np.ones_like(output), residuals)
    for name in ("query", "key", "value", "scale"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize("array_module", [CUPY_STANDIN, CUPY], indirect=True, ids=repr)
def test_cupy(array_module):
    arrays = tuple(map(array_module.to_module, inputs(6)))
    output, residuals = sdpa_varlen_forward(*arrays, CUTS_Q, CUTS_K, enable_gqa=True, is_causal=True)
    gradients = sdpa_varlen_backward(array_module.to_module(np.ones(output.shape)), residuals)
    array_module.assert_same_module_and_device((output, residuals.lse, *gradients[:3], gradients.scale), arrays[0])
    expected, of_numpy = sdpa_varlen_forward(*inputs(6), CUTS_Q, CUTS_K, enable_gqa=True, is_causal=True)
    np.testing.assert_allclose(array_module.to_numpy(output), expected, **ROUNDING)
    wanted = sdpa_varlen_backward(np.ones(expected.shape), of_numpy)
    np.testing.assert_allclose(array_module.to_numpy(gradients.key), wanted.key, **ROUNDING)


def test_cumulative_lengths_in_every_form():
    expected, _ = sdpa_varlen_forward(*inputs(), CUTS_Q, CUTS_K, enable_gqa=True)
    for form in (np.asarray, list, lambda cuts: np.array(cuts, np.int32), lambda cuts: tuple(map(np.int64, cuts))):
        output, residuals = sdpa_varlen_forward(*inputs(), form(CUTS_Q), form(CUTS_K), enable_gqa=True)
        np.testing.assert_array_equal(output, expected)
        assert residuals.cu_seqlens_q == tuple(CUTS_Q)
