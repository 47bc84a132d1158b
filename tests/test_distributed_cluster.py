"""Attention on a real cluster: worker processes with memory limits, of which one is killed."""

import multiprocessing
import os
import signal

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import SchedulerPlugin
from distributed_run import cost, local_cluster, run

from numpy_sdpa import distributed


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = set(multiprocessing.active_children())
    yield
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.kill()
    assert not left


class Killer(SchedulerPlugin):
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
        da.from_array(rng.standard_normal((2, 700, 16)), chunks=(1, 150, 16)) for _ in range(4)
    )
    _, residuals = distributed.sdpa_forward(query, key, value, is_causal=True, sinks=np.array([0.5, -1.0]))
    gradients = distributed.sdpa_backward(grad_output, residuals)
    tiles = 2 * 5 * 6 // 2
    (expected,) = dask.compute(gradients, scheduler="synchronous")
    with local_cluster(3, "1GiB") as (cluster, client):
        killer = Killer(client.run(os.getpid), after=tiles // 2)
        cluster.scheduler.add_plugin(killer)
        (found,) = client.compute((gradients,), sync=True)
        assert killer.killed is not None
        assert killer.killed not in client.run(os.getpid)  # the worker in its place has another address
    assert killer.tiles > tiles  # what the worker held was computed again
    for name in ("query", "key", "value", "sinks", "scale"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


@pytest.mark.slow
def test_workers_hold_less_than_a_quarter_of_a_long_sequence():
    """16,384 tokens, causal, 24 chunks of queries and of keys, the last ones shorter; ten workers.

    Each makes a tenth of the inputs; a quarter leaves room for the strips that it is at work on, and for chance.
    """
    length, chunk, size = 16_384, 700, 32
    with local_cluster(10, "400MiB") as (_, client):
        error, _, ledgers = run(client, length, chunk, size)
    assert error < 1e-5  # float32; sums of up to 16,384 terms
    assert len(ledgers) == 10
    tensors = cost(length, chunk, size).tensors_bytes
    held = {worker: most_held / tensors for worker, (most_held, _) in ledgers.items()}
    assert max(held.values()) < 1 / 4, held
