"""Attention on dask arrays refuses what every other way to call it refuses, in the same words."""

import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from in_chunks import PLAIN, check, in_chunks_of

import numpy_sdpa
from numpy_sdpa import distributed

pytestmark = pytest.mark.usefixtures("one_thread")

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
