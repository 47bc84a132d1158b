"""Attention on a real cluster: worker processes with memory limits, of which one is killed."""

import contextlib
import multiprocessing
import os
import signal

import dask
import dask.array as da
import numpy as np
import pytest

import numpy_sdpa
from numpy_sdpa import distributed

dask_distributed = pytest.importorskip("distributed")

SETTINGS = {
    # Workers are forked from a process that has imported what they need: ten of them start in the time of two.
    "distributed.worker.multiprocessing-method": "forkserver",
    # Sampling every worker's stack a hundred times a second costs more than the small tiles here.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.gil.enabled": False,
    # Where a test machine is busy with other things, a worker is slow, not lost.
    "distributed.comm.timeouts.connect": "120s",
    "distributed.scheduler.worker-ttl": None,
}


@contextlib.contextmanager
def cluster(workers, memory_limit):
    """(cluster, client); every process is gone afterwards, whatever happens."""
    before = set(multiprocessing.active_children())
    with (
        dask.config.set(SETTINGS),
        dask_distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=memory_limit,
            dashboard_address=None,
            silence_logs="CRITICAL",
        ) as local,
        dask_distributed.Client(local) as client,
    ):
        yield local, client
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.kill()
    assert not left


class Killer(dask_distributed.SchedulerPlugin):
    """Kills the worker that has just computed a given number of tiles of the backward, and counts what is computed."""

    def __init__(self, pids, after):
        self.pids = pids
        self.after = after
        self.tiles = 0
        self.killed = None

    def transition(self, key, start, finish, *args, worker=None, **kwargs):
        is_tile = isinstance(key, tuple) and str(key[0]).startswith("sdpa-gradients-tile")
        if is_tile and start == "processing" and finish == "memory":
            self.tiles += 1
            if self.tiles == self.after:
                self.killed = worker
                os.kill(self.pids[worker], signal.SIGKILL)


def test_a_worker_killed_in_the_middle_of_the_backward_changes_nothing():
    rng = np.random.default_rng(0)
    query, key, value, grad_output = (
        da.from_array(rng.standard_normal((2, 1000, 16)), chunks=(1, 150, 16)) for _ in range(4)
    )
    output, residuals = distributed.sdpa_forward(query, key, value, is_causal=True, sinks=np.array([0.5, -1.0]))
    gradients = distributed.sdpa_backward(grad_output, residuals)
    tiles = 2 * 7 * 8 // 2
    (expected,) = dask.compute(gradients, scheduler="synchronous")
    with cluster(3, "1GiB") as (local, client):
        killer = Killer(client.run(os.getpid), after=tiles // 2)
        local.scheduler.add_plugin(killer)
        (found,) = client.compute((gradients,), sync=True)
        assert killer.killed is not None
        assert killer.killed not in client.run(os.getpid)  # the worker in its place has another address
    assert killer.tiles > tiles  # what the worker held was computed again
    for name in ("query", "key", "value", "sinks", "scale"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


class Peak(dask_distributed.WorkerPlugin):
    """The most bytes of arrays that a worker has held between two events, each counted once, and whole messages."""

    name = "peak"

    def setup(self, worker):
        self.worker = worker
        self.bytes = 0

    def transition(self, key, start, finish, **kwargs):
        if finish in ("memory", "executing"):
            self.bytes = max(self.bytes, _bytes_held(dict(self.worker.data)))


def _bytes_held(data):
    buffers = {}

    def find(value):
        if isinstance(value, np.ndarray):
            while isinstance(value, np.ndarray) and value.base is not None:
                value = value.base
            if not isinstance(value, np.ndarray):  # a message from another worker
                value = np.frombuffer(memoryview(value).obj, np.uint8)
            buffers[value.ctypes.data] = value.nbytes
        elif isinstance(value, dict):
            find(tuple(value.values()))
        elif isinstance(value, tuple | list):
            for item in value:
                find(item)

    find(data)
    return sum(buffers.values())


def peak_bytes(dask_worker):
    return dask_worker.plugins["peak"].bytes


@pytest.mark.slow
def test_workers_hold_less_than_a_quarter_of_a_long_sequence():
    """16,384 tokens, causal, 24 chunks of queries and of keys, the last one shorter; ten workers."""
    length, size, chunk = 16_384, 32, 700

    def normal(seed):
        random = da.random.default_rng(seed)
        return random.standard_normal((length, size), dtype=np.float32, chunks=(chunk, size))

    query, key, value, grad_output = (normal(seed) for seed in range(4))
    output, residuals = distributed.sdpa_forward(query, key, value, is_causal=True)
    gradients = distributed.sdpa_backward(grad_output, residuals)
    whole = 8 * length * size * 4  # query, key, value, output, and the gradient of each
    with cluster(10, "400MiB") as (_, client):
        client.register_plugin(Peak())
        gradients = dask.persist(*(getattr(gradients, name) for name in ("query", "key", "value")))
        last = slice(length - 1000, length)
        found = dask.compute(*(gradient[last] for gradient in gradients))
        held = client.run(peak_bytes)
    print({worker: round(peak / whole, 3) for worker, peak in held.items()})
    assert len(held) == 10
    assert max(held.values()) < whole / 4
    # the last keys are seen by the last queries only
    arrays = (query[last].compute(), key.compute(), value.compute())
    residuals = numpy_sdpa.sdpa_forward(
        *arrays, is_causal=True, query_offset=length - 1000, method="blockwise", compute_dtype=np.float64
    )[1]
    expected = numpy_sdpa.sdpa_backward(grad_output[last].compute(), residuals)
    for name, gradient in zip(("query", "key", "value"), found, strict=True):
        # float32; sums of up to 16,384 terms
        np.testing.assert_allclose(gradient, getattr(expected, name)[-1000:], rtol=0, atol=2e-5, err_msg=name)
