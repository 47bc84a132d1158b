"""Run attention and its backward over a long sequence on a Dask cluster, and say what it took.

    python scripts/distributed_run.py                                   # 131,072 tokens on a cluster on this machine
    python scripts/distributed_run.py --length 16384 --chunk 1024 --workers 8
    python scripts/distributed_run.py --scheduler tcp://10.0.0.1:8786   # on a cluster that is there
    python scripts/distributed_run.py --length 1000000 --chunk 16384 --workers 16 --plan     # compute nothing

The inputs are made by the workers; no process ever holds the whole. The last rows and keys are compared with what the
blockwise engine computes of them alone. `cost` is what docs/distributed.md says; the tests compare it with the graphs.
"""

import argparse
import contextlib
import time
from typing import NamedTuple

import dask
import dask.array as da
import distributed as dask_distributed
import numpy as np

import numpy_sdpa
from numpy_sdpa import distributed

# For workers that share a machine, as in tests.
SETTINGS = {
    # Workers are forked from a process that has imported what they need: ten of them start in the time of two.
    "distributed.worker.multiprocessing-method": "forkserver",
    # Sampling every worker's stack a hundred times a second costs more than a small tile.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.gil.enabled": False,
    # Where the machine is busy with other things, a worker is slow, not lost.
    "distributed.comm.timeouts.connect": "120s",
    "distributed.scheduler.worker-ttl": None,
}


class Cost(NamedTuple):
    """What a forward and a backward of self-attention take, of one head and one batch element, in float numbers."""

    tiles: int
    tasks: int
    scores: int  # computed: those of tiles in which somebody sees something
    flops: int
    tensors_bytes: int  # query, key, value, output, and the gradient of each
    strips_bytes: int  # on their way in the backward, when it holds the most
    moved_bytes: int  # at most: in every tile the smaller strip moves


def cost(
    length: int, chunk: int, size: int, itemsize: int = 4, is_causal: bool = True, window: int | None = None
) -> Cost:
    """Of L = S = `length`, E = Ev = `size`, chunks of `chunk` tokens; the compute dtype is the inputs'."""
    side = -(-length // chunk)
    if (
        window is not None
    ):  # to the left, and causal: the chunk's own keys, and as many chunks as the window reaches into
        reached = -(-window // chunk)
        tiles = sum(min(row, reached) + 1 for row in range(side))
    else:
        tiles = side * (side + 1) // 2 if is_causal else side * side
    numbers = size * itemsize
    rows_forward, columns_forward = 2 * numbers + 2 * itemsize, 2 * numbers  # q, sums, row_sum, row_shift; k, v
    rows_backward, columns_backward = 3 * numbers + 3 * itemsize + 1, 4 * numbers  # q, gO, gQ, statistics; k, v, gK, gV
    scores = tiles * chunk * chunk
    return Cost(
        tiles=tiles,
        # a tile and the two strips that it hands on; the strips' beginnings and ends
        tasks=2 * 3 * tiles + (2 + 1) * side + (2 + 2) * side,
        scores=scores,
        flops=14 * size * scores,  # 2 and 5 products of 2 · E · scores
        tensors_bytes=8 * length * numbers,
        strips_bytes=length * (rows_backward + columns_backward),
        moved_bytes=tiles * chunk * (min(rows_forward, columns_forward) + min(rows_backward, columns_backward)),
    )


@contextlib.contextmanager
def local_cluster(workers: int, memory_limit: str):
    """(cluster, client) of processes on this machine, each of one thread."""
    with (
        dask.config.set(SETTINGS),
        dask_distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=memory_limit,
            dashboard_address=None,
            silence_logs="CRITICAL",
        ) as cluster,
        dask_distributed.Client(cluster) as client,
    ):
        yield cluster, client


class Ledger(dask_distributed.WorkerPlugin):
    """What a worker has held at most, and received from others, in bytes of arrays."""

    name = "ledger"

    def setup(self, worker):
        self.worker = worker
        self.most_held = 0
        self.received = 0

    def transition(self, key, start, finish, **kwargs):
        if finish not in ("memory", "executing"):
            return
        self.most_held = max(self.most_held, bytes_held(tuple(dict(self.worker.data).values())))
        if start == "flight":
            self.received += bytes_held(self.worker.data[key], whole_messages=False)


def bytes_held(data, whole_messages=True):
    """Bytes of all arrays in `data`, each once. One that came from another worker keeps the whole message alive."""
    buffers = {}

    def find(value):
        if isinstance(value, np.ndarray):
            while whole_messages and isinstance(value, np.ndarray) and value.base is not None:
                value = value.base
            if not isinstance(value, np.ndarray):
                value = np.frombuffer(memoryview(value).obj, np.uint8)
            buffers[value.ctypes.data] = value.nbytes
        elif isinstance(value, dict):
            find(tuple(value.values()))
        elif isinstance(value, tuple | list):
            for item in value:
                find(item)

    find(data)
    return sum(buffers.values())


def ledger_of(dask_worker):
    """To be run on workers: (bytes held at most, bytes received)."""
    ledger = dask_worker.plugins["ledger"]
    return ledger.most_held, ledger.received


def inputs(length: int, chunk: int, size: int):
    """query, key, value and grad_output, float32, of workers' own making."""

    def normal(seed: int):
        random = da.random.default_rng(seed)
        return random.standard_normal((length, size), dtype=np.float32, chunks=(chunk, size))

    return [normal(seed) for seed in range(4)]


def run(client, length: int, chunk: int, size: int, compared: int = 1000):
    """Forward and backward, causal; (largest error of the last rows and keys, seconds, ledgers of the workers)."""
    client.register_plugin(Ledger())
    query, key, value, grad_output = inputs(length, chunk, size)
    _, residuals = distributed.sdpa_forward(query, key, value, is_causal=True)
    gradients = distributed.sdpa_backward(grad_output, residuals)
    began = time.perf_counter()
    gradients = dask.persist(gradients.query, gradients.key, gradients.value)
    dask_distributed.wait(gradients)
    seconds = time.perf_counter() - began
    last = slice(max(0, length - compared), length)  # the last keys are seen by the last queries only
    found = dask.compute(*(gradient[last] for gradient in gradients))
    ledgers = client.run(ledger_of)
    arrays = dask.compute(query[last], key, value, grad_output[last])
    return _largest_error(found, *arrays, offset=last.start), seconds, ledgers


def _largest_error(found, query, key, value, grad_output, offset: int) -> float:
    """In units of the largest number of each gradient."""
    options = {"is_causal": True, "query_offset": offset, "method": "blockwise", "compute_dtype": np.float64}
    _, residuals = numpy_sdpa.sdpa_forward(query, key, value, **options)
    gradients = numpy_sdpa.sdpa_backward(grad_output, residuals)
    expected = gradients.query, gradients.key[offset:], gradients.value[offset:]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131_072, help="tokens")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a chunk")
    parser.add_argument("--size", type=int, default=64, help="head size")
    parser.add_argument("--workers", type=int, default=4, help="processes, for a cluster on this machine")
    parser.add_argument("--memory-limit", default="2GiB", help="of each")
    parser.add_argument("--scheduler", help="address of a cluster that is there")
    parser.add_argument("--plan", action="store_true", help="say what it would take, and stop")
    parser.add_argument("--table", action="store_true", help="print the table of docs/distributed.md, and stop")
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
        return
    length, chunk, size = arguments.length, arguments.chunk, arguments.size
    plan = cost(length, chunk, size)
    print(f"{plan.tiles} tiles, {plan.tasks} tasks, {plan.flops:.3g} floating-point operations")
    print(f"tensors {mib(plan.tensors_bytes)}, strips {mib(plan.strips_bytes)}, moved at most {mib(plan.moved_bytes)}")
    if arguments.plan:
        return
    with contextlib.ExitStack() as stack:
        if arguments.scheduler:
            client = stack.enter_context(dask_distributed.Client(arguments.scheduler))
        else:
            _, client = stack.enter_context(local_cluster(arguments.workers, arguments.memory_limit))
        error, seconds, ledgers = run(client, length, chunk, size)
    print(f"{seconds:.1f} s, {plan.flops / seconds:.3g} operations a second, largest error {error:.2g}")
    for worker, (held, received) in ledgers.items():
        print(f"{worker} held {mib(held)} ({held / plan.tensors_bytes:.3f} of the tensors), received {mib(received)}")


def mib(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"


def table() -> str:
    """What docs/distributed.md says of one head of size 128 in float32 on 64 workers."""
    size, workers = 128, 64
    lines = [
        "| tokens | chunk | window | tiles | tasks | operations | tensors | strips per worker | moved per worker |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for length, chunk, window in (
        (2**17, 2**11, None),
        (2**20, 2**12, None),
        (2**20, 2**14, None),
        (10 * 2**20, 2**14, None),
        (10 * 2**20, 2**16, None),
        (10 * 2**20, 2**14, 2**14 - 1),
    ):
        of = cost(length, chunk, size, window=window)
        strips, moved = (mib(number / workers) for number in (of.strips_bytes, of.moved_bytes))
        cells = f"{length:,}", f"{chunk:,}", f"{window:,}" if window else "none", f"{of.tiles:,}", f"{of.tasks:,}"
        cells += f"{of.flops:.1e}", mib(of.tensors_bytes), strips, moved
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
