"""How fast attention is on this machine: each row of the table is one time divided by another, of the same run.

Two functions are measured in turns of blocks: rest, one call to warm up, then calls that count. Without the rest the
idle threads of either side spin into the other's time (OpenMP's and OpenBLAS's for some 30 ms); without the turns a
machine that slows down meanwhile would slow one of them. A row's ratio is the median of its pairs of blocks.

Where torch is installed its ``scaled_dot_product_attention`` is measured, at its default settings and as many threads.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import numpy_sdpa
from numpy_sdpa._internal.namespace import computing
from numpy_sdpa.blockwise.workers import Buffers, Workers, default_workers
from numpy_sdpa.data import load_model_tensors

Call = Callable[[], Any]

REST = 0.1  # seconds; the idle threads of OpenMP and OpenBLAS have stopped spinning after some 30 ms
BLOCK = 0.3  # seconds that a block's counted calls take together, or one call if it takes longer
HEADS, HEAD_SIZE = 8, 64
LENGTHS = (512, 2048, 4096)
# Tile of the two products alone: scores that stay in cache, as in the engine.
_TILE = (512, 256)


class Comparison(NamedTuple):
    """One row of the table before it is measured."""

    group: str
    name: str
    ours: Call
    other: Call
    bar: float | None  # the ratio that is meant not to be exceeded; None: shown only


class Measurement(NamedTuple):
    group: str
    name: str
    ratio: float
    ours: float  # seconds
    other: float  # seconds
    bar: float | None


class Inputs(NamedTuple):
    """(1, heads, length, head size)."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    grad_output: np.ndarray


def random_inputs(length: int, heads: int = HEADS, key_heads: int | None = None, dtype: Any = np.float32) -> Inputs:
    rng = np.random.default_rng(length)
    shape, key_shape = (1, heads, length, HEAD_SIZE), (1, key_heads or heads, length, HEAD_SIZE)
    return Inputs(*(rng.standard_normal(s).astype(dtype) for s in (shape, key_shape, key_shape, shape)))


def model_inputs(length: int) -> Inputs:
    """The real model's tensors, two of its heads (of size 32) side by side, its tokens repeated up to the length."""
    tensors = load_model_tensors()

    def tiled(array: np.ndarray) -> np.ndarray:
        batch, heads, tokens, size = array.shape
        paired = array.transpose(1, 0, 2, 3).reshape(heads // 2, 2, batch * tokens, size)
        joined = np.concatenate([paired[:, 0], paired[:, 1]], axis=-1)
        return np.ascontiguousarray(
            joined[np.arange(HEADS) % len(joined)][:, np.arange(length) % (batch * tokens)][None]
        )

    return Inputs(*map(tiled, (tensors.query, tensors.key, tensors.value, tensors.grad_output)))


def blockwise(inputs: Inputs, workers: int, backward: bool, **options: Any) -> Call:
    options = {"method": "blockwise", "workers": workers, **options}
    if not backward:
        return lambda: numpy_sdpa.attention(*inputs[:3], **options)

    def both() -> Any:
        _, residuals = numpy_sdpa.sdpa_forward(*inputs[:3], **options)
        return numpy_sdpa.sdpa_backward(inputs.grad_output, residuals)

    return both


def torch_attention(inputs: Inputs, backward: bool, **options: Any) -> Call:
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    query, key, value, grad_output = (torch.from_numpy(array) for array in inputs)
    if not backward:

        def forward() -> Any:
            with torch.no_grad():
                return attention(query, key, value, **options)

        return forward
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]

    def both() -> Any:
        for leaf in leaves:
            leaf.grad = None
        attention(leaves[0], leaves[1], leaves[2], **options).backward(grad_output)

    return both


def products_alone(inputs: Inputs, workers: int) -> Call:
    """The forward's two matrix products in tiles that stay in cache, on the same threads: the floor of any softmax."""
    rows, columns = _TILE
    length = inputs.query.shape[-2]

    def tile_row(place: tuple[int, int], buffers: Buffers) -> None:
        head, row = place
        query, dtype = inputs.query[0, head, row : row + rows], inputs.query.dtype
        for column in range(0, length, columns):
            key, value = (array[0, head, column : column + columns] for array in (inputs.key, inputs.value))
            scores = np.matmul(query, key.T, out=buffers.take("scores", (len(query), len(key)), dtype))
            np.matmul(scores, value, out=buffers.take("sums", (len(query), HEAD_SIZE), dtype))

    def run() -> None:
        places = [(head, row) for head in range(inputs.query.shape[1]) for row in range(0, length, rows)]
        Workers(workers, lambda: computing(np, inputs.query)).run(tile_row, places)

    return run


def plain_numpy(inputs: Inputs) -> Call:
    """Attention in five lines."""
    query, key, value, _ = inputs

    def run() -> np.ndarray:
        scores = query @ key.mT / math.sqrt(HEAD_SIZE)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores @ value

    return run


def comparisons(workers: int, lengths: tuple[int, ...], has_torch: bool) -> Iterator[Comparison]:
    if has_torch:
        yield from _against_torch(workers, lengths)
        yield from _decoding(workers)
        yield from _dense_against_torch()
    for dtype in (np.float32, np.float64):
        inputs = random_inputs(max(lengths), dtype=dtype)
        name = f"forward / its two products, {np.dtype(dtype).name}, L = {max(lengths)}"
        yield Comparison("floor", name, blockwise(inputs, workers, False), products_alone(inputs, workers), 1.35)
    yield from _against_itself(workers, lengths)


def _against_torch(workers: int, lengths: tuple[int, ...]) -> Iterator[Comparison]:
    for length in lengths:
        for tensors, inputs in (("random", random_inputs(length)), ("model", model_inputs(length))):
            for is_causal in (False, True):
                for backward in (False, True):
                    what = "forward + backward" if backward else "forward"
                    short, long = (1.3, 1.0) if backward else (1.4, 1.1)
                    yield Comparison(
                        f"{what} / torch, L {'< 2048' if length < 2048 else '≥ 2048'}",
                        f"L = {length}, {tensors}, {'causal' if is_causal else 'full'}",
                        blockwise(inputs, workers, backward, is_causal=is_causal),
                        torch_attention(inputs, backward, is_causal=is_causal),
                        short if length < 2048 else long,
                    )


def _decoding(workers: int) -> Iterator[Comparison]:
    cache = random_inputs(32768, key_heads=2)
    for length in (1, 4, 16):
        inputs = cache._replace(query=np.ascontiguousarray(cache.query[..., :length, :]))
        yield Comparison(
            "decode / torch",
            f"L = {length}, S = 32768, 8 query heads over 2",
            blockwise(inputs, workers, False, enable_gqa=True),
            torch_attention(inputs, False, enable_gqa=True),
            1.0 if length == 1 else None,
        )


def _dense_against_torch() -> Iterator[Comparison]:
    """The reference, forward: shapes (batch, heads, length, head size), the bar when full and when causal."""
    for shape, bars in (
        ((1, 1, 16, 16), (15, None)),
        ((1, 8, 128, 64), (3, 6)),
        ((4, 8, 256, 64), (3, 6)),
        ((1, 8, 512, 64), (3, 6)),
    ):
        rng = np.random.default_rng(shape[-2])
        inputs = Inputs(*(rng.standard_normal(shape).astype(np.float32) for _ in Inputs._fields))
        for is_causal, bar in zip((False, True), bars, strict=True):
            yield Comparison(
                "dense forward / torch",
                f"{shape}, {'causal' if is_causal else 'full'}",
                partial(numpy_sdpa.attention, *inputs[:3], is_causal=is_causal),
                torch_attention(inputs, False, is_causal=is_causal),
                bar,
            )


def _against_itself(workers: int, lengths: tuple[int, ...]) -> Iterator[Comparison]:
    longest = 2 * max(lengths)
    inputs = random_inputs(longest)
    yield Comparison(
        "itself",
        f"causal / full, L = {longest}",
        blockwise(inputs, workers, False, is_causal=True),
        blockwise(inputs, workers, False),
        0.58,
    )
    short, long = random_inputs(longest), random_inputs(4 * longest)
    yield Comparison(
        "itself",
        f"window of 256, forward + backward, L = {4 * longest} / L = {longest}",
        blockwise(long, workers, True, window=(256, 0)),
        blockwise(short, workers, True, window=(256, 0)),
        4.5,
    )
    length = max(lengths)
    grouped, ungrouped = random_inputs(length, key_heads=2), random_inputs(length)
    yield Comparison(
        "itself",
        f"8 query heads over 2 / over 8, forward + backward, L = {length}",
        blockwise(grouped, workers, True, enable_gqa=True),
        blockwise(ungrouped, workers, True),
        1.0,
    )
    length = min(1024, length)
    inputs = random_inputs(length)
    yield Comparison(
        "itself",
        f"dense / plain NumPy, L = {length}",
        lambda: numpy_sdpa.attention(*inputs[:3]),
        plain_numpy(inputs),
        1.2,
    )


def measure(comparison: Comparison, pairs: int) -> Measurement:
    ours, other = [], []
    for _ in range(pairs):
        ours.append(_block(comparison.ours))
        other.append(_block(comparison.other))
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    return Measurement(
        comparison.group,
        comparison.name,
        statistics.median(ratios),
        statistics.median(ours),
        statistics.median(other),
        comparison.bar,
    )


def _block(call: Call) -> float:
    """Seconds of one call: rest, warm up, then the median of as many calls as fit."""
    time.sleep(REST)
    call()
    times: list[float] = []
    while not times or sum(times) < BLOCK:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def geometric_means(measurements: list[Measurement]) -> dict[str, float]:
    """Of the ratios of each group whose rows have one meaning."""
    groups: dict[str, list[float]] = {}
    for row in measurements:
        if row.group.endswith("torch") or "/ torch" in row.group:
            groups.setdefault(row.group, []).append(row.ratio)
    return {group: statistics.geometric_mean(ratios) for group, ratios in groups.items()}


def run(
    lengths: tuple[int, ...] = LENGTHS,
    workers: int | None = None,
    pairs: int = 5,
    only: str = "",
    report: Callable[[Measurement], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure all rows whose group or name holds `only`, each handed to `report` as soon as it is there."""
    workers = workers or default_workers()
    torch_version = _set_torch_threads(workers)
    rows = []
    for comparison in comparisons(workers, lengths, torch_version is not None):
        if only in f"{comparison.group}: {comparison.name}":
            rows.append(measure(comparison, pairs))
            report(rows[-1])
    return {
        "threads": workers,
        "numpy": np.__version__,
        "torch": torch_version,
        "blas": _blas_kernel(),
        "rows": [row._asdict() for row in rows],
        "geometric_means": geometric_means(rows),
    }


def _set_torch_threads(workers: int) -> str | None:
    """torch's version, where it is installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(workers)
    return str(torch.__version__)


def _blas_kernel() -> str:
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return "; ".join(f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}" for pool in pools)
