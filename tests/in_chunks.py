"""The same call on dask arrays, however they are cut, and by blockwise."""

import cases
import dask
import dask.array as da
import numpy as np

import numpy_sdpa
from numpy_sdpa import distributed

# float64 on both sides; sums here have at most a few dozen terms of order 1, in another order.
TOLERANCE = 1e-12


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
