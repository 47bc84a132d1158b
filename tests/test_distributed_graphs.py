"""The graphs of attention on dask arrays: nothing is computed early, and nothing that nobody needs."""

import collections
import graphlib
import re
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from dask.callbacks import Callback
from distributed_run import bytes_held, cost, table
from in_chunks import PLAIN, assert_close, check, in_chunks_of, random_inputs

import numpy_sdpa
from numpy_sdpa import distributed
from numpy_sdpa.distributed import tasks

pytestmark = pytest.mark.usefixtures("one_thread")


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
