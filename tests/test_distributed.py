"""Attention on dask arrays: blockwise's results whatever the chunks are."""

import cases
import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_chunks import PLAIN, assert_close, at_random, both, check, in_chunks_of, random_inputs, whole

import numpy_sdpa
from numpy_sdpa import distributed

pytestmark = pytest.mark.usefixtures("one_thread")

# The same results as blockwise


@pytest.mark.parametrize("case", cases.ALONE, ids=str)
def test_every_option(case):
    rng = np.random.default_rng(len(case.name))
    check(cases.make(case), at_random(rng), of_dask=lambda name: rng.integers(2) == 1)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(cases.case_strategy(), st.integers(0, 2**16))
def test_random_options_and_chunks(case, seed):
    rng = np.random.default_rng(seed)
    check(cases.make(case), at_random(rng), of_dask=lambda name: rng.integers(2) == 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_chunk_sizes_that_do_not_divide_and_one_chunk(size):
    check(PLAIN, in_chunks_of(size))


def test_empty_chunks():
    def chunks(array):
        return tuple((0, size // 2, 0, size - size // 2, 0) for size in array.shape)

    check(PLAIN, chunks)


def test_query_heads_meet_their_key_heads():
    grouped = random_inputs((6, 5, 2), (3, 7, 2), (3, 7, 2), enable_gqa=True)
    query, key, value = (da.from_array(array, chunks=(2, 3, 1)) for array in grouped[:3])
    check(grouped, lambda array: ((1,) * array.shape[0], *whole(array)[1:]))
    _, residuals = distributed.sdpa_forward(query.rechunk((3, 3, 1)), key, value, enable_gqa=True)
    assert residuals.output.chunks == ((4, 2), (3, 2), (2,))  # a cut within a group moves up to its end
    assert residuals.inputs["key"].array.chunks == ((2, 1), (3, 3, 1), (2,))


@pytest.mark.parametrize("form", ["int offset", "offsets", "lengths", "segments"])
def test_what_is_hidden_is_so_whether_known_when_the_graph_is_built_or_not(form):
    rng = np.random.default_rng(3)
    options = {
        "int offset": {"is_causal": True, "query_offset": -2, "window": (4, None)},
        "offsets": {"is_causal": True, "query_offset": np.array([-3, 4]), "alibi_slopes": rng.normal(size=3)},
        "lengths": {
            "is_causal": True,
            "alignment": "lower_right",
            "query_lengths": np.array([3, 11]),
            "key_lengths": np.array([13, 5]),
        },
        "segments": {
            "query_segments": np.sort(rng.integers(0, 4, (2, 11))),
            "key_segments": np.sort(rng.integers(0, 4, (2, 13))),
        },
    }[form]
    inputs = PLAIN._replace(options=options)
    check(inputs, in_chunks_of(4), of_dask=lambda name: True)
    check(inputs, in_chunks_of(4), of_dask=lambda name: False)
    check(inputs, in_chunks_of(4), of_dask=lambda name: name.startswith("key"))


@pytest.mark.parametrize("size", [2, 3, 100])
def test_dropout_by_seed_drops_the_same_weights_in_any_chunks(size):
    """Chunks of the first batch axis are not in one piece in the flat index of (3, 2) batches."""
    inputs = random_inputs((3, 2, 4, 9, 3), (3, 2, 4, 8, 3), (3, 2, 4, 8, 3), dropout_p=0.4, dropout_seed=2**40 + 7)
    check(inputs, in_chunks_of(size))


def test_numbers_of_dask_arrays():
    check(PLAIN._replace(options={"scale": np.float64(0.3), "softcap": np.float64(1.5)}), in_chunks_of(4))
    query, key, value = (da.from_array(array, chunks=4) for array in PLAIN[:3])
    scale, softcap = da.from_array(np.array(0.3)), da.from_array(np.array(1.5))
    output, residuals = distributed.sdpa_forward(query, key, value, scale=scale, softcap=softcap)
    gradients = distributed.sdpa_backward(np.ones(output.shape), residuals)
    expected = numpy_sdpa.sdpa_forward(*PLAIN[:3], scale=0.3, softcap=1.5)
    wanted = numpy_sdpa.sdpa_backward(np.ones(output.shape), expected[1])
    assert_close(output.compute(), expected[0], "output")
    for name in ("scale", "softcap"):
        gradient = getattr(gradients, name)
        assert gradient.shape == ()
        assert_close(gradient.compute(), getattr(wanted, name), name)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("float32", 1e-6)])
def test_half_and_single_precision(dtype, tolerance):
    """Rounded once, at the end: to float16 by half an eps of 10⁻³. Sums in float32 have some dozen terms."""
    inputs = random_inputs((2, 7, 4), (2, 9, 4), (2, 9, 4), dtype=dtype, sinks=np.zeros(2, dtype))
    check(inputs, in_chunks_of(3), tolerance)


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    inputs = random_inputs((2, 7, 4), (2, 9, 4), (2, 9, 4), dtype=ml_dtypes.bfloat16)
    expected, got = both(inputs, in_chunks_of(3))
    for name, array in expected.items():
        if array is not None and name != "row_sum":
            assert got[name].dtype == array.dtype, name
            np.testing.assert_allclose(got[name].astype(float), array.astype(float), atol=0.02, err_msg=name)


def test_complex_numbers_go_forward_and_not_back():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(5, 3)) + 1e-3j * rng.normal(size=(5, 3)) for _ in range(3))
    lazy = (da.from_array(array, chunks=2) for array in (query, key, value))
    output, residuals = distributed.sdpa_forward(*lazy, compute_dtype=complex, sinks=np.array(0.5))
    expected = numpy_sdpa.attention(query, key, value, compute_dtype=complex, sinks=np.array(0.5))
    assert_close(output.compute(), expected, "output")
    with pytest.raises(ValueError, match="residuals of real numbers"):
        distributed.sdpa_backward(np.ones(output.shape), residuals)


def test_large_logits_keep_their_digits():
    """lse of 10⁵ in float32 is rounded to 0.004; shift and sum, as which it goes from tile to tile, are not."""
    rng = np.random.default_rng(0)
    query, key = (rng.integers(-8, 9, (16, 4)).astype(np.float32) for _ in range(2))
    query[:, 0], key[:, 0] = 320.0, 320.0
    value = rng.standard_normal((16, 4)).astype(np.float32)
    lazy = (da.from_array(array, chunks=(4, 4)) for array in (query, key, value))
    output, residuals = distributed.sdpa_forward(*lazy, scale=1.0)
    gradients = distributed.sdpa_backward(np.ones((16, 4), np.float32), residuals)
    gold = numpy_sdpa.sdpa_forward(query, key, value, scale=1.0, compute_dtype=np.float64)
    wanted = numpy_sdpa.sdpa_backward(np.ones((16, 4), np.float32), gold[1])
    assert np.abs(residuals.lse.compute()).min() > 9e4
    np.testing.assert_allclose(output.compute(), gold[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(gradients.value.compute(), wanted.value, rtol=0, atol=1e-5)


def test_a_tile_that_a_row_does_not_see_leaves_its_shift_alone():
    """All logits are −10⁵: against a shift of 0, from a tile without keys for the row, they would all be 0."""
    query, key = np.full((8, 1), -400.0, np.float32), np.full((8, 1), 250.0, np.float32)
    value = np.arange(8, dtype=np.float32)[:, None]
    lazy = (da.from_array(array, chunks=(2, 1)) for array in (query, key, value))
    seen = np.arange(8) % 4 < 2
    output, residuals = distributed.sdpa_forward(*lazy, scale=1.0, mask=da.from_array(np.tile(seen, (8, 1)), chunks=2))
    np.testing.assert_allclose(output.compute(), value[seen].mean(), rtol=1e-6)
    np.testing.assert_allclose(residuals.lse.compute(), -1e5 + np.log(4), rtol=1e-6)


def test_two_calls_on_halves_of_the_keys_merge():
    query, key, value = (da.from_array(array, chunks=(1, 2, 4, 9)) for array in PLAIN[:3])
    sinks = np.array([0.5, -1.0, 0.0])
    parts = [
        distributed.sdpa_forward(query, key[..., :6, :], value[..., :6, :], sinks=sinks),  # a sink is in one part
        distributed.sdpa_forward(query, key[..., 6:, :], value[..., 6:, :]),
    ]
    (output_a, lse_a), (output_b, lse_b) = dask.compute(*((output, part.lse) for output, part in parts))
    output, lse = numpy_sdpa.merge_attention(output_a, lse_a, output_b, lse_b)
    expected = distributed.sdpa_forward(query, key, value, sinks=sinks)
    assert_close(output, expected[0].compute(), "output")
    assert_close(lse, expected[1].lse.compute(), "lse")


def test_runs_are_equal_bit_for_bit_whatever_the_scheduler():
    def run(scheduler):
        query, key, value, grad_output = (
            da.from_array(a, chunks=3) for a in (*PLAIN[:3], PLAIN.upstream["grad_output"])
        )
        output, residuals = distributed.sdpa_forward(query, key, value, is_causal=True, softcap=2.0)
        return dask.compute(output, distributed.sdpa_backward(grad_output, residuals), scheduler=scheduler)

    first, second, threaded = run("synchronous"), run("synchronous"), run("threads")
    for arrays in (second, threaded):
        np.testing.assert_array_equal(arrays[0], first[0])
        for name, array in first[1]._asdict().items():
            np.testing.assert_array_equal(getattr(arrays[1], name), array, err_msg=name)


# Rows that see nothing, and numbers that nobody may read


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_hidden_nan_changes_nothing(with_sinks):
    rng = np.random.default_rng(5)
    query, key, value = (rng.standard_normal((2, 8, 3)) for _ in range(3))
    grad_output, grad_lse = rng.standard_normal((2, 8, 3)), rng.standard_normal((2, 8))
    mask = rng.random((8, 8)) < 0.6
    mask[2], mask[:, 5] = False, False  # row 2 sees nothing, key 5 is seen by nobody
    options = {"sinks": rng.standard_normal(2)} if with_sinks else {}

    def run(poison):
        arrays = [array.copy() for array in (query, key, value, grad_output)]
        arrays[0][:, 2], arrays[3][:, 2] = poison, poison
        arrays[1][:, 5], arrays[2][:, 5] = poison, poison
        lazy = [da.from_array(array, chunks=(1, 3, 3)) for array in arrays]
        output, residuals = distributed.sdpa_forward(*lazy[:3], mask=da.from_array(mask, chunks=3), **options)
        gradients = distributed.sdpa_backward(lazy[3], residuals, grad_lse=grad_lse)
        return dask.compute(output, residuals.lse, *(array for array in gradients if array is not None))

    for poisoned, clean in zip(run(np.nan), run(0.0), strict=True):
        np.testing.assert_array_equal(poisoned, clean)
        assert not np.isnan(poisoned).any()


# Row statistics


def test_statistics_of_a_chunk_alone_would_give_other_gradients():
    """The gradients by the lse and D of each half of the keys alone, as a ring that forgets to share them would."""
    query, key, value = PLAIN[:3]
    grad_output = PLAIN.upstream["grad_output"]
    local = {"query": 0.0, "key": [], "value": []}
    for half in (slice(0, 6), slice(6, None)):
        residuals = numpy_sdpa.sdpa_forward(query, key[..., half, :], value[..., half, :], method="blockwise")[1]
        gradients = numpy_sdpa.sdpa_backward(grad_output, residuals)
        local["query"] = local["query"] + gradients.query
        local["key"].append(gradients.key)
        local["value"].append(gradients.value)
    expected, got = both(PLAIN._replace(options={}, upstream={"grad_output": grad_output}), in_chunks_of(6))
    for name in ("query", "key", "value"):
        right = expected[f"gradient of {name}"]
        wrong = local[name] if name == "query" else np.concatenate(local[name], axis=-2)
        assert_close(got[f"gradient of {name}"], right, name)
        assert np.abs(wrong - right).max() > 0.1 * np.abs(right).max(), name


# Chunks of CuPy


def test_chunks_of_cupy():
    """On the stand-in; Dask's own operations on it are NumPy's protocols, which CuPy has too."""
    import cupy_standin

    with cupy_standin.installed() as cupy:
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal((2, 7, 4)) for _ in range(4)]
        options = {"is_causal": True, "dropout_p": 0.3, "dropout_seed": 1, "sinks": rng.standard_normal(2)}
        query, key, value, grad_output = (
            da.from_array(cupy.asarray(array), chunks=(1, 3, 4), asarray=False) for array in arrays
        )
        lazy = options | {"sinks": cupy.asarray(options["sinks"])}
        output, residuals = distributed.sdpa_forward(query, key, value, key_lengths=5, **lazy)
        gradients = distributed.sdpa_backward(grad_output, residuals)
        found = {"output": output, "lse": residuals.lse}
        found |= {name: array for name, array in gradients._asdict().items() if array is not None}
        found = {name: array.compute() for name, array in found.items()}
        for name, array in found.items():
            assert isinstance(array, cupy.ndarray), name
    expected = numpy_sdpa.sdpa_forward(*arrays[:3], key_lengths=5, method="blockwise", **options)
    wanted = numpy_sdpa.sdpa_backward(arrays[3], expected[1])
    wanted = {"output": expected[0], "lse": expected[1].lse, **wanted._asdict()}
    for name, array in found.items():
        assert_close(array.get(), wanted[name], name)
