"""What holds to the last bit: two runs, every layout of inputs, inputs never written, results that own their memory."""

import copy
import pickle

import cases
import numpy as np
import pytest
from arrays import NUMPY
from results import FORWARD, assert_same_bits, everything

import numpy_sdpa


def run(case, convert=np.asarray, dtype="float64"):
    """Every result of a case, with its arrays converted."""
    inputs, directions = cases.make(case), cases.directions(case)

    def converted(array):
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            return array
        return convert(cases.cast(array, dtype) if array.dtype == np.float64 else array)

    def named(arrays):
        return {name: converted(array) for name, array in arrays.items()}

    return everything(*map(converted, inputs[:3]), named(inputs.options), named(inputs.upstream), named(directions))


# -- two runs, and how arrays lie in memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", cases.ALONE + cases.SHAPES, ids=str)
def test_two_runs_are_equal(case, dtype):
    assert_same_bits(run(case, dtype=dtype), run(case, dtype=dtype))


def negative_steps(array):
    return np.flip(np.flip(array).copy())


def every_second(array):
    """A view that skips every other entry of each axis of a larger array."""
    larger = np.full([2 * size for size in array.shape], np.nan if array.dtype.kind == "f" else 0, array.dtype)
    view = larger[(slice(None, None, 2),) * array.ndim]
    view[...] = array
    return view


def last_axis_first(array):
    """The last axis has the largest stride."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, -1, 0)), 0, -1)


def unaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def heads_last(array):
    """(B, L, H, E) in memory, as most models make it."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, -3, -2)), -2, -3)


LAYOUTS = [np.asfortranarray, negative_steps, every_second, last_axis_first, unaligned]


def test_bytes_in_the_other_order_are_the_same_numbers():
    """As read from a file of another machine."""
    case = cases.BY_NAME["bias + sinks"]
    got = run(case, lambda array: array.astype(array.dtype.newbyteorder()))
    for name, expected in run(case).items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("case", cases.ALONE + cases.SHAPES, ids=str)
def test_strides_do_not_matter(case, layout):
    assert_same_bits(run(case, layout), run(case))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strides_do_not_matter_at_sizes_where_blas_blocks(dtype):
    """OpenBLAS takes other paths for transposed and for large operands; sums in another order would show."""
    case = cases.Case("large", (2, 130, 64), (2, 257, 64), (2, 257, 96), (("is_causal", True),))
    expected = run(case, dtype=dtype)
    for layout in LAYOUTS:
        assert_same_bits(run(case, layout, dtype), expected)


def rows_repeated(array):
    return np.broadcast_to(array[..., :1, :], array.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("block_size", [None, 16], ids=["steps", "folded"])
@pytest.mark.parametrize("lengths", [(1, 8), (1, 107), (7, 1), (130, 90)], ids=str)
def test_strides_do_not_matter_to_tiles(lengths, block_size, dtype):
    """A product with a vector is summed in another order where the matrix, or the vector, is strided or unaligned."""
    length, key_length = lengths
    options = {"method": "blockwise", "block_size": block_size}
    for seed in range(8):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 9, 2)
        shapes = [
            (2, 2, n, size)
            for n, size in zip((length, key_length, key_length, length), sizes[[0, 0, 1, 1]], strict=True)
        ]
        arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        for layout in (*LAYOUTS, heads_last, rows_repeated):
            laid = [layout(array) for array in arrays]
            expected = everything(*(array.copy() for array in laid[:3]), options, {"grad_output": laid[3].copy()})
            assert_same_bits(everything(*laid[:3], options, {"grad_output": laid[3]}), expected)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_an_axis_of_stride_0_is_a_repeated_one(name):
    case = cases.BY_NAME["bias + sinks"]
    inputs = cases.make(case)
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    repeated = {**arrays, name: np.broadcast_to(arrays[name][:1], arrays[name].shape)}
    assert repeated[name].strides[0] == 0
    written_out = {**arrays, name: repeated[name].copy()}
    got, expected = (
        everything(**named, options=inputs.options, upstream=inputs.upstream) for named in (repeated, written_out)
    )
    assert_same_bits(got, expected)


# -- inputs are read, outputs are owned --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_inputs_are_never_written(case):
    inputs, directions = cases.make(case), cases.directions(case)
    before = copy.deepcopy((inputs, directions))
    everything(*inputs[:3], inputs.options, inputs.upstream, directions)
    for now, then in zip((inputs._asdict(), directions), (before[0]._asdict(), before[1]), strict=True):
        flat_now, flat_then = (dict(flattened(named)) for named in (now, then))
        assert_same_bits(flat_now, flat_then)
    run(case, NUMPY.to_module)  # read-only arrays: a write that undoes itself raises


def flattened(named):
    for name, value in named.items():
        if isinstance(value, dict):
            yield from flattened(value)
        elif isinstance(value, np.ndarray):
            yield name, value


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_results_own_their_memory(case, dtype):
    """No result is a view, of an input or of another result: to write into one changes nothing else."""
    inputs, directions = cases.make(case), cases.directions(case)
    ours = [cases.cast(array, dtype) for array in inputs[:3]]
    results = everything(*ours, inputs.options, inputs.upstream, directions)
    arrays = [*flattened(inputs._asdict()), *flattened(directions), *zip(("query", "key", "value"), ours, strict=True)]
    for name, result in results.items():
        assert result.flags.writeable, name
        # the other residuals may be reshaped, and so views of what nothing else refers to
        assert result.base is None or (name in FORWARD and name != "weights"), name
        for other_name, other in [*arrays, *((n, r) for n, r in results.items() if n != name)]:
            assert not np.may_share_memory(result, other), (name, other_name)


def test_pieces_own_their_memory():
    x = np.arange(24.0).reshape(2, 3, 4)
    split = numpy_sdpa.split_heads(x, 2)
    pieces = {
        "split_heads": (split, x),
        "split_heads of one": (numpy_sdpa.split_heads(x, 1), x),
        "merge_heads": (numpy_sdpa.merge_heads(split), split),
        "merge_heads of one": (numpy_sdpa.merge_heads(x[:, None]), x),
        "softmax_jacobian": (numpy_sdpa.softmax_jacobian(x), x),
        "attention_jacobian": (numpy_sdpa.attention_jacobian(x, x, x, wrt="key"), x),
        "attention": (numpy_sdpa.attention(x, x, x), x),
    }
    for name, (result, source) in pieces.items():
        assert result.flags.writeable, name
        assert not np.may_share_memory(result, source), name


def test_work_on_the_output_does_not_reach_the_backward():
    inputs = cases.make(cases.BY_NAME["bare"])
    output, residuals = numpy_sdpa.sdpa_forward(*inputs[:3])
    expected = numpy_sdpa.sdpa_backward(inputs.upstream["grad_output"], residuals)
    output += 1
    got = numpy_sdpa.sdpa_backward(inputs.upstream["grad_output"], residuals)
    assert_same_bits(dict(enumerate(got[:3])), dict(enumerate(expected[:3])))


@pytest.mark.parametrize("method", ["dense", "blockwise"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda residuals: pickle.loads(pickle.dumps(residuals))])
def test_residuals_can_be_copied_and_sent(method, copied):
    inputs = cases.make(cases.BY_NAME["B = H, most options"])
    residuals = numpy_sdpa.sdpa_forward(*inputs[:3], **inputs.options, method=method)[1]
    upstream = inputs.upstream["grad_output"]
    expected = numpy_sdpa.sdpa_backward(upstream, residuals)
    got = numpy_sdpa.sdpa_backward(upstream, copied(residuals))
    assert_same_bits(got._asdict(), expected._asdict())


def test_an_empty_jacobian_has_the_inputs_dtype():
    query, key = np.ones((0, 2), np.float32), np.ones((3, 2))
    jacobian = numpy_sdpa.attention_jacobian(query, key, key, wrt="query")
    assert jacobian.dtype == np.float32
    assert jacobian.shape == (0, 2, 0, 2)
