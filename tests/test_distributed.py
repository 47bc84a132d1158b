"""Attention on dask arrays: blockwise's results whatever the chunks are, and graphs that do no more than they must."""

import collections
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import cases
import dask
import dask.array as da
import numpy as np
import pytest
from dask.callbacks import Callback
from distributed_run import bytes_held, cost, table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import numpy_sdpa
from numpy_sdpa import distributed
from numpy_sdpa.distributed import tasks

# float64 on both sides; sums here have at most a few dozen terms of order 1, in another order.
TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def assert_close(got, expected, name, tolerance=TOLERANCE):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, name
    assert got.dtype == expected.dtype, name
    largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * largest, err_msg=name)


def whole(array):
    return tuple((size,) for size in array.shape)


def in_chunks_of(size):
    """Along every axis; the last chunk is what is left."""
    return lambda array: tuple(da.core.normalize_chunks(size, (length,))[0] for length in array.shape)


def at_random(rng):
    """Up to three chunks along every axis; some may be empty."""

    def chunks_of_axis(length):
        cuts = np.sort(rng.integers(0, length + 1, rng.integers(0, 3)))
        return tuple(np.diff([0, *cuts, length]).tolist())

    return lambda array: tuple(chunks_of_axis(length) for length in array.shape)


def both(inputs, chunks, of_dask=lambda name: True, **more):
    """(results of blockwise, results of distributed), each a mapping of names to arrays or None.

    `of_dask(name)`: whether this option is given as a dask array.
    """
    options = {**inputs.options, **more}
    upstream = {name: array for name, array in inputs.upstream.items() if name != "grad_weights"}

    def cut(array):
        array = np.asarray(array)
        return da.from_array(array, chunks=chunks(array))

    lazy = {
        name: cut(option) if isinstance(option, np.ndarray) and of_dask(name) else option
        for name, option in options.items()
    }
    results = []
    for module, arrays, kwargs, flowing in (
        (numpy_sdpa, inputs[:3], {**options, "method": "blockwise"}, dict(upstream)),
        (distributed, map(cut, inputs[:3]), lazy, {name: cut(array) for name, array in upstream.items()}),
    ):
        output, residuals = module.sdpa_forward(*arrays, **kwargs)
        found = {"output": output, "lse": residuals.lse, "row_sum": residuals.row_sum}
        if flowing:
            gradients = module.sdpa_backward(flowing.pop("grad_output", None), residuals, **flowing)
            found |= {f"gradient of {name}": array for name, array in gradients._asdict().items()}
        results.append(found)
    (lazily,) = dask.compute(results[1])
    shapes = {name: (array.shape, array.dtype) for name, array in results[1].items() if array is not None}
    for name, array in lazily.items():  # what was announced is what came
        assert array is None or shapes[name] == (np.shape(array), np.asarray(array).dtype), name
    return results[0], lazily


def check(inputs, chunks, tolerance=TOLERANCE, **more):
    expected, got = both(inputs, chunks, **more)
    for name, array in expected.items():
        if array is None:
            assert got[name] is None, name
        elif name != "row_sum":  # what it is relative to, the shift, may differ
            assert_close(got[name], array, name, tolerance)


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


def random_inputs(query, key, value, seed=0, dtype="float64", **options):
    rng = np.random.default_rng(seed)
    batch = np.broadcast_shapes(query[:-3], key[:-3], value[:-3])
    heads = (max(query[-3], 1 if options.get("enable_gqa") else key[-3]),) if len(query) > 2 else ()
    rows = (*batch, *heads, query[-2])

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    upstream = {"grad_output": normal(*rows, value[-1]), "grad_lse": normal(*rows)}
    return cases.Inputs(normal(*query), normal(*key), normal(*value), options, upstream)


PLAIN = random_inputs((2, 3, 11, 4), (2, 3, 13, 4), (2, 3, 13, 5), is_causal=True, alignment="lower_right")


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


# Graphs: nothing is computed early, and nothing that nobody needs


def tasks_of(collection, what):
    return [key for key in dict(collection.__dask_graph__()) if isinstance(key, tuple) and re.match(what, key[0])]


def optimized(array):
    """Which tasks each of those that Dask runs waits for; what it would run in one go is still in parts."""
    with dask.config.set({"optimization.fuse.active": False}):
        graph = dict(da.Array.__dask_optimize__(array.__dask_graph__(), array.__dask_keys__()))
    return {key: dask.core.get_dependencies(graph, key) for key in graph}


def causal(length, chunk, **options):
    arrays = (da.zeros((length, 4), chunks=(chunk, 4)) for _ in range(3))
    return distributed.sdpa_forward(*arrays, is_causal=True, **options)


def test_calls_are_lazy():
    def fail(block):
        raise RuntimeError("computed")

    arrays = [da.zeros((8, 4), chunks=(3, 4)).map_blocks(fail, dtype=float, meta=np.empty((0, 0))) for _ in range(4)]
    _, residuals = distributed.sdpa_forward(*arrays[:3])
    gradients = distributed.sdpa_backward(arrays[3], residuals)
    with pytest.raises(RuntimeError, match="computed"):
        gradients.query.compute()


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, 4 * 4),
        ({"is_causal": True}, 4 * 5 // 2),
        ({"is_causal": True, "query_offset": 1}, 4 * 5 // 2 + 3),
        ({"is_causal": True, "query_offset": -4}, 3 * 4 // 2),
        ({"window": (4, 0)}, 4 + 3),
        ({"window": (0, 0)}, 4),
        ({"window": (5, 0)}, 4 + 3 + 2),
        ({"query_lengths": np.array(5), "key_lengths": np.array(9)}, 2 * 3),
        ({"is_causal": True, "alignment": "lower_right", "key_lengths": np.array(8)}, 1 + 2),
        ({"query_segments": np.arange(16) // 4, "key_segments": np.arange(16) // 4}, 4),
        ({"mask": np.arange(16) // 4 != 1}, 4 * 3),
        ({"mask": da.from_array(np.arange(16) // 4 != 1)}, 4 * 4),  # nobody can know yet
        ({"is_causal": True, "alignment": "lower_right", "key_lengths": da.from_array(np.array(8))}, 4 * 4),
    ],
    ids=str,
)
def test_tiles_that_nobody_sees_make_no_task(options, seen):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((16, 4)) for _ in range(4)]
    query, key, value, grad_output = (da.from_array(array, chunks=(4, 4)) for array in arrays)
    output, residuals = distributed.sdpa_forward(query, key, value, **options)
    gradients = distributed.sdpa_backward(grad_output, residuals)
    assert len(tasks_of(output, "sdpa-forward-tile")) == seen
    assert len(tasks_of(gradients.key, "sdpa-gradients-tile")) == seen
    known = {name: np.asarray(option) if name != "window" else option for name, option in options.items()}
    known |= {name: option for name, option in options.items() if isinstance(option, bool | int | str)}
    residuals = numpy_sdpa.sdpa_forward(*arrays[:3], method="blockwise", **known)[1]
    assert_close(output.compute(), residuals.output, "output")
    assert_close(gradients.key.compute(), numpy_sdpa.sdpa_backward(arrays[3], residuals).key, "key")


def test_batches_are_looked_at_one_by_one():
    """Each of two chunks of the batch has tiles of its own."""
    arrays = (da.zeros((2, 1, 16, 4), chunks=(1, 1, 4, 4)) for _ in range(3))
    output, _ = distributed.sdpa_forward(*arrays, key_lengths=[4, 12])
    by_batch = collections.Counter(key[1] for key in tasks_of(output, "sdpa-forward-tile"))
    assert by_batch == {0: 4 * 1, 1: 4 * 3}


def test_a_state_of_a_strip_has_one_reader():
    """So it is gone when the next one is there: no tile's results stay for later."""
    _, residuals = causal(16, 4)
    gradients = distributed.sdpa_backward(da.zeros((16, 4), chunks=(4, 4)), residuals)
    readers = collections.Counter(read for reads in optimized(gradients.key).values() for read in reads)
    states = {
        key: count
        for key, count in readers.items()
        if isinstance(key, tuple) and re.match("sdpa-(forward|gradients)-(begin-)?(rows|columns)-[0-9a-f]+$", key[0])
    }
    tiles = 4 * 5 // 2
    assert len(states) > 2 * 2 * tiles
    assert set(states.values()) == {1}


class Peak(Callback):
    """The most bytes that results of tasks hold at the same time, each array counted once."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def _posttask(self, key, result, graph, state, worker):
        self.bytes = max(self.bytes, bytes_held(state["cache"]))


@pytest.mark.parametrize("tiles_a_side", [4, 16])
def test_memory_is_that_of_the_tensors_however_many_tiles_there_are(tiles_a_side):
    """The tensors of the call are 8 · L · E. Strips on their way are 7 of these, their inputs 4 more, and one output.

    All tiles' results together would be n / 2 · 7 · L · E.
    """
    length, size = 512, 16
    arrays = [np.random.default_rng(i).standard_normal((length, size)) for i in range(4)]
    query, key, value, grad_output = (da.from_array(array, chunks=(length // tiles_a_side, size)) for array in arrays)
    output, residuals = distributed.sdpa_forward(query, key, value, is_causal=True)
    with Peak() as peak:
        dask.compute(output, distributed.sdpa_backward(grad_output, residuals))
    tensor = length * size * 8
    assert 8 * tensor <= peak.bytes <= 12.5 * tensor


def test_a_strip_that_came_from_another_worker_does_not_keep_the_message():
    """What is unpacked from a message is a view of all of it: kept, it would keep the sums that it came with."""

    def received(array):
        return np.frombuffer(bytearray(array.tobytes()), array.dtype).reshape(array.shape)

    call = tasks.Call((), 3, np.dtype(float), 0, {"method": "blockwise"})
    place = tasks.Place((), 0, 0, 0)
    statistics = tasks.RowStatistics(*(received(np.ones(4)) for _ in range(3)))
    known = tasks.Known(received(np.ones((4, 3))), received(np.ones(4, bool)), statistics)
    columns = tasks.begin(["key", "value"], [received(np.ones((4, 3))) for _ in range(2)])
    rows = tasks.begin(["query"], [received(np.ones((4, 3)))])
    after = tasks.forward_tile(call, place, [], rows, columns, [])
    after += tasks.backward_tile(call, place, [], rows._replace(known=known), columns, [], None)
    owners = list(owners_in(after))
    assert len(owners) == (1 + 3) + 2 + (1 + 2 + 5) + (2 + 2)
    assert owners == [None] * len(owners)


def owners_in(value):
    """For every array whose memory it is a view of; None where it is an array's own."""
    if isinstance(value, np.ndarray | np.generic):
        while isinstance(value, np.ndarray):
            value = value.base
        yield None if isinstance(value, np.generic) else value
    elif isinstance(value, dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from owners_in(item)


def test_many_keys_are_shared_out_among_strips():
    """Decoding: 64 chunks of keys for one of queries are worked on at once, not one after the other."""
    query = da.zeros((2, 4), chunks=(2, 4))
    key, value = (da.zeros((64 * 8, 4), chunks=(8, 4)) for _ in range(2))
    output, residuals = distributed.sdpa_forward(query, key, value)
    gradients = distributed.sdpa_backward(da.zeros((2, 4)), residuals)
    assert residuals.plan.row_strips == 64
    assert longest_chain(output, "sdpa-forward-tile") == 1
    assert longest_chain(gradients.query, "sdpa-gradients-tile") == 1
    inputs = random_inputs((2, 3, 4), (2, 31, 4), (2, 31, 4), is_causal=True, query_offset=28, sinks=np.ones(2))
    check(inputs, in_chunks_of(3))
    check(random_inputs((2, 31, 4), (2, 3, 4), (2, 3, 4), bias=np.ones((31, 3)), sinks=np.ones(2)), in_chunks_of(3))


def test_strips_meet_as_in_a_ring():
    """n × n tiles in n steps: as many tiles at once as there are strips."""
    arrays = (da.zeros((8, 4), chunks=(1, 4)) for _ in range(3))
    output, residuals = distributed.sdpa_forward(*arrays)
    assert longest_chain(output, "sdpa-forward-tile") == 8
    gradients = distributed.sdpa_backward(da.zeros((8, 4), chunks=(1, 4)), residuals)
    assert longest_chain(gradients.key, "sdpa-gradients-tile") == 8
    output, _ = causal(8, 1)
    assert longest_chain(output, "sdpa-forward-tile") == 8


def longest_chain(collection, what):
    """The most tasks of this name that wait for each other."""
    reads = optimized(collection)
    lengths = {}
    for key in graphlib.TopologicalSorter(reads).static_order():
        before = max((lengths[other] for other in reads[key]), default=0)
        lengths[key] = before + (isinstance(key, tuple) and re.match(what, key[0]) is not None)
    return max(lengths.values())


def test_residuals_can_be_kept():
    query, key, value, grad_output = (da.from_array(a, chunks=4) for a in (*PLAIN[:3], PLAIN.upstream["grad_output"]))
    output, residuals = distributed.sdpa_forward(query, key, value, is_causal=True)
    expected = distributed.sdpa_backward(grad_output, residuals).key.compute()
    kept_output, kept = dask.persist(output, residuals)
    assert tasks_of(output, "sdpa-forward-tile")
    gradients = distributed.sdpa_backward(grad_output, kept)
    assert not tasks_of(gradients.key, "sdpa-forward-tile")
    np.testing.assert_array_equal(gradients.key.compute(), expected)
    np.testing.assert_array_equal(kept_output.compute(), output.compute())


# What docs/distributed.md says that a call costs


@pytest.mark.parametrize(("length", "chunk", "window"), [(96, 12, None), (100, 12, None), (96, 12, 24), (96, 12, 25)])
def test_the_cost_is_what_the_graph_says(length, chunk, window):
    size = 16
    arrays = [np.random.default_rng(seed).standard_normal((length, size)) for seed in range(4)]
    query, key, value, grad_output = (da.from_array(array, chunks=(chunk, size)) for array in arrays)
    options = {"is_causal": True, "window": None if window is None else (window, None)}
    _, residuals = distributed.sdpa_forward(query, key, value, **options)
    gradients = distributed.sdpa_backward(grad_output, residuals)
    expected = cost(length, chunk, size, itemsize=8, window=window)
    tiles = tasks_of(gradients.key, "sdpa-gradients-tile")
    assert len(tiles) == len(tasks_of(gradients.key, "sdpa-forward-tile")) == expected.tiles
    kinds = "(tile|rows|columns|(begin|end)-(rows|columns))"
    assert len(tasks_of(gradients.key, f"sdpa-(forward|gradients)-{kinds}-[0-9a-f]+$")) == expected.tasks
    with Sizes() as sizes:
        dask.compute(gradients, optimize_graph=False)
    moved = sum(min(pair) for pair in sizes.of_strips_that_enter("sdpa-.*-tile", gradients.key))
    # at most: strips carry no sums before their first tile, and the last chunk may be short
    assert 0.7 * expected.moved_bytes < moved <= expected.moved_bytes
    at_the_end = sum(sum(strips) for strips in sizes.of_strips_that_enter("sdpa-gradients-end", gradients.key))
    assert at_the_end == expected.strips_bytes


class Sizes(Callback):
    """The bytes of every task's result."""

    def __init__(self):
        super().__init__()
        self.by_key = {}

    def _posttask(self, key, result, graph, state, worker):
        self.by_key[key] = bytes_held(result, whole_messages=False)

    def of_strips_that_enter(self, what, collection):
        """For every task of this name the sizes of the strips that it takes."""
        graph = dict(collection.__dask_graph__())
        for key in graph:
            if isinstance(key, tuple) and re.match(what, key[0]):
                yield [self.by_key[read] for read in dask.core.get_dependencies(graph, key) if "sdpa" in read[0]]


def test_the_table_of_the_docs_is_what_the_graphs_say():
    text = (Path(__file__).parent.parent / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert table() in text
    length, chunk = 2**20, 2**14  # a graph of a million tokens, of which nothing is computed
    query, key, value, grad_output = (da.zeros((length, 128), chunks=(chunk, 128), dtype=np.float32) for _ in range(4))
    _, residuals = distributed.sdpa_forward(query, key, value, is_causal=True)
    gradients = distributed.sdpa_backward(grad_output, residuals)
    assert len(tasks_of(gradients.key, "sdpa-gradients-tile")) == cost(length, chunk, 128).tiles == 64 * 65 // 2


# Bad input: the texts of every other way to call attention

Q, K, V = np.ones((2, 4, 8, 16)), np.ones((2, 4, 6, 16)), np.ones((2, 4, 6, 5))


def cut(array):
    return da.from_array(array, chunks=3)


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        ({"key": np.ones((2, 4, 6, 32))}, {}),
        ({"value": np.ones((2, 4, 7, 5))}, {}),
        ({"query": np.ones((3, 4, 8, 16))}, {}),
        ({"key": np.ones((2, 3, 6, 16))}, {}),
        ({"key": np.ones((2, 2, 6, 16))}, {"enable_gqa": True}),
        ({"query": np.ones((2, 4, 8, 16), int)}, {}),
        ({}, {"mask": np.ones((2, 8, 6), bool)}),
        ({}, {"mask": np.ones((8, 6), complex)}),
        ({}, {"bias": np.ones((8, 6), int)}),
        ({}, {"bias": np.ones((8, 5))}),
        ({}, {"sinks": np.ones(3)}),
        ({}, {"key_lengths": np.array([1, 2, 3])}),
        ({}, {"key_lengths": np.array([0.5, 2])}),
        ({}, {"query_segments": np.ones((2, 8), int)}),
        ({}, {"scale": np.ones(4)}),
        ({}, {"dropout_mask": np.ones((8, 6), bool)}),
        ({}, {"dropout_p": 0.5, "dropout_mask": np.ones((8, 6))}),
        ({}, {"alignment": "lower_right", "query_offset": np.array([1, 2])}),
    ],
    ids=str,
)
def test_what_can_be_told_without_the_numbers_is_told_when_called(arrays, options):
    arrays = {"query": Q, "key": K, "value": V, **arrays}
    with pytest.raises((TypeError, ValueError)) as expected:
        numpy_sdpa.sdpa_forward(**arrays, **options)
    lazy = {name: cut(array) for name, array in arrays.items()}
    for given_options in (
        {name: cut(option) if isinstance(option, np.ndarray) else option for name, option in options.items()},
        options,
    ):
        with pytest.raises(expected.type) as caught:
            distributed.sdpa_forward(**lazy, **given_options)
        assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize(
    "options",
    [
        {"key_lengths": np.array([0, 7])},
        {"query_lengths": np.array([-1, 8])},
        {"scale": np.array(np.nan)},
        {"softcap": np.array(0.0)},
        {"mask": np.where(np.eye(8, 6), 0, -10000.0)},
        {"mask": np.zeros((8, 6))},
        {"mask": np.full((8, 6), 0.5)},
    ],
    ids=str,
)
def test_what_only_numbers_tell_is_told_when_computed(options):
    with pytest.raises(ValueError) as expected:
        numpy_sdpa.sdpa_forward(Q, K, V, **options)
    with pytest.raises(ValueError) as caught:
        distributed.sdpa_forward(cut(Q), cut(K), cut(V), **options)
    assert str(caught.value) == str(expected.value)
    (name, option), *_ = options.items()
    output, _ = distributed.sdpa_forward(cut(Q), cut(K), cut(V), **{name: cut(option)})
    with pytest.raises(ValueError) as caught:
        output.compute()
    assert str(caught.value) == str(expected.value)


def refused(error, match, *arrays, **options):
    with pytest.raises(error, match=match):
        distributed.sdpa_forward(*(arrays or (cut(Q), cut(K), cut(V))), **options)


def test_what_is_distributed_s_own():
    refused(ValueError, 'method must be "blockwise"', method="dense")
    refused(ValueError, "'flash'", method="flash")
    refused(ValueError, "progress", progress=True)
    refused(TypeError, "unknown option 'attn_mask': use mask= ", attn_mask=np.ones((8, 6), bool))
    refused(TypeError, "query must be an array, got None", None, cut(K), cut(V))
    unknown = cut(Q)[cut(Q)[:, 0, 0, 0] > 0]
    refused(ValueError, "query has chunks of unknown size.*compute_chunk_sizes", unknown, cut(K), cut(V))
    jax = pytest.importorskip("jax.numpy")
    refused(TypeError, "one array module: query numpy.*bias jax", bias=jax.ones((8, 6)))
    refused(TypeError, "chunks of NumPy and CuPy", *(da.from_array(jax.ones((4, 3)), asarray=False) for _ in range(3)))
    refused(TypeError, "dask arrays", dask.delayed(Q), cut(K), cut(V))


def test_options_of_the_engine_reach_it():
    check(PLAIN, in_chunks_of(7), block_size=(2, 3), workers=2)
    refused(ValueError, "block_size must be at least 1", block_size=0)


def test_upstream_gradients_are_checked():
    output, residuals = distributed.sdpa_forward(cut(Q), cut(K), cut(V))
    eager = numpy_sdpa.sdpa_forward(Q, K, V)[1]
    for upstream in (
        {"grad_output": None},
        {"grad_output": np.ones((2, 4, 8, 16))},
        {"grad_output": np.ones(output.shape, int)},
        {"grad_output": None, "grad_lse": np.ones((2, 4, 6))},
    ):
        with pytest.raises((TypeError, ValueError)) as expected:
            numpy_sdpa.sdpa_backward(upstream["grad_output"], eager, grad_lse=upstream.get("grad_lse"))
        for wrap in (lambda array: array, lambda array: None if array is None else cut(array)):
            lazy = {name: wrap(array) for name, array in upstream.items()}
            flowing = lazy.pop("grad_output")
            with pytest.raises(expected.type) as caught:
                distributed.sdpa_backward(flowing, residuals, **lazy)
            assert str(caught.value) == str(expected.value)


def test_without_dask_the_import_works_and_a_call_says_what_is_missing():
    script = (
        "import sys; sys.modules['dask'] = None; sys.modules['dask.array'] = None\n"
        "from numpy_sdpa import distributed\n"
        "try: distributed.sdpa_forward(None, None, None)\n"
        "except ImportError as error: print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "numpy_sdpa.distributed needs Dask: pip install 'numpy_sdpa[dask]'"


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
