"""The blockwise engine: dense's results on many ragged tiles, whatever the block size and the number of workers."""

import tracemalloc

import cases
import loops
import numpy as np
import pytest
from arrays import CUPY, CUPY_STANDIN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from results import assert_same_bits
from test_poison import CASES as POISON_CASES
from test_poison import POISONS, arrays, filled, hidden_places
from test_poison import make as make_poison_case

import numpy_sdpa
from numpy_sdpa import blockwise
from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.blockwise import folded, forward_pass, parts, slabs, tiles

# float64 on both sides; sums here have at most a few dozen terms of order 1, in another order.
TOLERANCE = 1e-12


def assert_close(got, expected, name, tolerance=TOLERANCE):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, name
    largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * largest, err_msg=name)


def run(query, key, value, options, upstream):
    """Output, lse and gradients by name; grad_weights, which blockwise has not, is left out."""
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, **options)
    results = {"output": output, "lse": residuals.lse}
    upstream = {"grad_output": None, "grad_lse": None} | {n: a for n, a in upstream.items() if n != "grad_weights"}
    if any(array is not None for array in upstream.values()):
        gradients = numpy_sdpa.sdpa_backward(upstream.pop("grad_output"), residuals, **upstream)
        results |= {f"grad_{name}": array for name, array in gradients._asdict().items() if array is not None}
    return results


def of_case(inputs, **options):
    return run(*inputs[:3], {**inputs.options, **options}, inputs.upstream)


def by_loops(inputs):
    forward = loops.forward(*inputs[:3], **inputs.options)
    grad_output, grad_lse = inputs.upstream.get("grad_output"), inputs.upstream.get("grad_lse")
    results = {"output": forward.output, "lse": forward.lse}
    if grad_output is not None or grad_lse is not None:
        gradients = loops.backward(grad_output, *inputs[:3], grad_lse=grad_lse, **inputs.options)
        results |= {f"grad_{name}": array for name, array in gradients._asdict().items() if array is not None}
    return results


def assert_all_close(got, expected, tolerance=TOLERANCE):
    assert got.keys() == expected.keys()
    for name in expected:
        assert_close(got[name], expected[name], name, tolerance)


# ---- every case of the grid, against scalar loops


@pytest.mark.parametrize("block_size", [1, (2, 3), (3, 2), None], ids=str)
@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_every_case(case, block_size):
    inputs = cases.make(case)
    got = of_case(inputs, method="blockwise", block_size=block_size, workers=2)
    assert_all_close(got, by_loops(inputs))


@pytest.mark.parametrize("compute_dtype", [np.complex128, np.longdouble])
@pytest.mark.parametrize("name", ["bare", "mask", "causal", "sinks", "softcap", "alibi", "bias", "dropout"])
def test_other_numbers_than_those_that_are_folded(name, compute_dtype):
    """In default tiles, where a float32 or float64 would be folded: dense's results, to float64's rounding at least."""
    sizes = cases.Sizes(heads=(2, 2), L=70, S=80)
    case = sizes.case(name, cases.FEATURES[name](sizes) if name != "bare" else {})
    inputs = cases.make(case)
    query, options = inputs.query, {**inputs.options, "compute_dtype": compute_dtype}
    if compute_dtype is np.complex128:
        query = query + 1e-3j * query[::-1]
    expected, dense = numpy_sdpa.sdpa_forward(query, *inputs[1:3], **options)
    got, blocks = numpy_sdpa.sdpa_forward(query, *inputs[1:3], **options, method="blockwise")
    assert_close(got, expected, "output")
    assert_close(blocks.lse, dense.lse, "lse", 1e-17 if compute_dtype is np.longdouble else TOLERANCE)
    assert blocks.lse.dtype == compute_dtype


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases.case_strategy(), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_random_combinations(case, block_size):
    inputs = cases.make(case)
    got = of_case(inputs, method="blockwise", block_size=block_size, workers=3)
    assert_all_close(got, by_loops(inputs))


def test_the_residuals_are_a_softmax_of_known_shift():
    inputs = cases.make(cases.ALONE[0])
    _, residuals = numpy_sdpa.sdpa_forward(*inputs[:3], method="blockwise", block_size=2)
    np.testing.assert_allclose(residuals.row_shift + np.log(residuals.row_sum), residuals.lse, rtol=1e-14)
    for name in ("scores", "capped_scores", "logits", "weights", "dropout_mask"):
        assert getattr(residuals, name) is None, name


# ---- sizes where the default tiles are several

SIZES = {"many tiles": (1100, 700), "one row of tiles": (40, 5000), "decode": (2, 9000)}
LONG = {
    "bare": {},
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": True, "alignment": "lower_right"},
    "window": {"window": (100, 60), "alignment": "lower_right"},
    "gqa": {"enable_gqa": True, "is_causal": True},
    "sinks": {"sinks": np.array([1.0, -np.inf, 300.0, -300.0])},
    "softcap, alibi": {"softcap": 2.0, "alibi_slopes": np.array([0.1, 0.2, 0.01, 0.0])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "bias": {"bias": "drawn for keys"},
    "bias of rows": {"bias": "drawn for rows"},
    "mask": {"mask": "drawn for pairs"},
}


def long_inputs(rows, columns, options, dtype=np.float64):
    """Arguments of `run` at these sizes; options that say so are drawn."""
    rng = np.random.default_rng(rows)
    key_heads = 2 if options.get("enable_gqa") else 4
    query, grad_output = (rng.standard_normal((4, rows, 16)).astype(dtype) for _ in range(2))
    key, value = (rng.standard_normal((key_heads, columns, 16)).astype(dtype) for _ in range(2))
    drawn = {
        "drawn for keys": rng.standard_normal(columns),
        "drawn for rows": rng.standard_normal((rows, 1)),
        "drawn for pairs": rng.random((4, rows, columns)) < 0.5,
    }
    options = {
        name: drawn.get(option, option) if isinstance(option, str) else option for name, option in options.items()
    }
    options |= {name: options[name].astype(dtype) for name in options.keys() & {"sinks", "alibi_slopes", "bias"}}
    return query, key, value, options, {"grad_output": grad_output, "grad_lse": rng.standard_normal((4, rows))}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LONG)
def test_default_tiles_give_what_dense_gives(name, size):
    query, key, value, options, upstream = long_inputs(*SIZES[size], LONG[name])
    expected = run(query, key, value, options, upstream)
    got = run(query, key, value, {**options, "method": "blockwise"}, upstream)
    assert_all_close(got, expected, 1e-11)  # sums of up to 9000 terms of order 1


@pytest.mark.parametrize("name", LONG)
def test_results_do_not_depend_on_workers(name):
    query, key, value, options, upstream = long_inputs(700, 1300, LONG[name], np.float32)
    options |= {"method": "blockwise", "block_size": (128, 100)}
    expected = run(query, key, value, {**options, "workers": 1}, upstream)
    for workers in (2, 5, 2):
        assert_same_bits(run(query, key, value, {**options, "workers": workers}, upstream), expected)


def test_long_rows_are_cut_into_pieces_where_there_are_few_blocks_of_them():
    """So that a decoder's one token keeps every thread busy."""
    blocks = [slice(start, start + 10) for start in range(0, 400, 10)]
    pieces = forward_pass._pieces(blocks, row_blocks=2)
    assert [block for piece in pieces for block in piece] == blocks
    assert len(pieces) == 8
    assert forward_pass._pieces(blocks, row_blocks=16) == [blocks]
    assert forward_pass._pieces(blocks[:2], row_blocks=1) == [blocks[:2]]
    assert forward_pass._pieces([], row_blocks=1) == [[]]


# ---- exactness


@pytest.mark.parametrize("size", [3.0, 60.0, 1e4])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 50.0}], ids=str)
def test_rows_sum_to_one_forward_and_backward_at_any_size_of_logits(options, size):
    """Values of 1: the output is the weights' sum. Upstream gradients of 1: Σ_j grad_value is the sum rebuilt."""
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((2, 700, 64)).astype(np.float32) for _ in range(2))
    query *= size
    value = np.ones((2, 700, 1), np.float32)
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, method="blockwise", **options)
    if "softcap" not in options:
        assert np.abs(residuals.lse).max() > size  # the logits are as large as meant
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(output, 1, atol=8 * eps)
    for row in (0, 1, 300, 699):
        upstream = np.zeros_like(output)
        upstream[:, row] = 1
        gradients = numpy_sdpa.sdpa_backward(upstream, residuals)
        np.testing.assert_allclose(gradients.value.sum(axis=(1, 2)), 1, atol=8 * eps)


@pytest.mark.parametrize("shift", [-1e5, 1e5])
def test_logits_shifted_by_a_constant(shift):
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((600, 8)).astype(np.float32) for _ in range(3))
    bias = np.full((600, 1), shift, np.float32)
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, bias=bias, method="blockwise")
    expected, dense = numpy_sdpa.sdpa_forward(query, key, value, bias=bias)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(residuals.lse, dense.lse, rtol=1e-6)


def test_one_visible_key_gives_its_value_and_no_gradient_of_query_and_key():
    rng = np.random.default_rng(2)
    query, key, value = (rng.standard_normal((1, 600, 8)).astype(np.float32) for _ in range(3))
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, window=(0, 0), method="blockwise")
    gradients = numpy_sdpa.sdpa_backward(np.ones_like(output), residuals)
    np.testing.assert_allclose(output, value, rtol=4e-7)
    np.testing.assert_allclose(gradients.value, 1, rtol=4e-7)
    np.testing.assert_allclose(gradients.query, 0, atol=1e-5)
    np.testing.assert_allclose(gradients.key, 0, atol=1e-5)


# ---- the folded form is the steps in another arrangement


def folded_rows_only(monkeypatch, possible):
    monkeypatch.setattr(folded, "is_plain", lambda options, inputs: possible and PLAIN(options, inputs))


PLAIN = folded.is_plain


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (30, 10)}, {"key_lengths": 333}], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_folded_tiles_are_the_steps(options, heads, dtype, monkeypatch):
    rng = np.random.default_rng(3)
    query, grad_output = (rng.standard_normal((heads[0], 300, 32)).astype(dtype) for _ in range(2))
    key, value = (rng.standard_normal((heads[1], 400, 32)).astype(dtype) for _ in range(2))
    options = {**options, "method": "blockwise", "block_size": (64, 50), "enable_gqa": True}
    upstream = {"grad_output": grad_output, "grad_lse": rng.standard_normal((heads[0], 300)).astype(dtype)}
    calls = []
    monkeypatch.setattr(folded, "_exponentials", lambda *args: calls.append(1) or EXPONENTIALS(*args))
    got = run(query, key, value, options, upstream)
    assert calls
    del calls[:]
    folded_rows_only(monkeypatch, False)
    expected = run(query, key, value, options, upstream)
    assert not calls
    assert_all_close(got, expected, {"float16": 1e-3, "float32": 3e-5, "float64": 1e-13}[dtype])


EXPONENTIALS = folded._exponentials


def test_rows_beyond_the_folded_range_are_done_by_the_steps():
    """Rows of very different sizes in one block: some folded, some not, each right."""
    rng = np.random.default_rng(4)
    query, key, value, grad_output = (rng.standard_normal((1, 300, 16)) for _ in range(4))
    query *= np.geomspace(1e-3, 1e4, 300)[:, None]
    grad_output *= np.roll(np.geomspace(1e-40, 1e20, 300), 100)[:, None]
    upstream = {"grad_output": grad_output}
    got = run(query, key, value, {"method": "blockwise"}, upstream)
    expected = run(query, key, value, {}, upstream)
    assert np.ptp(expected["lse"]) > 1e4
    scale = np.abs(grad_output).max(axis=-1, keepdims=True) * np.abs(key).max()
    np.testing.assert_allclose(got["output"], expected["output"], atol=1e-11)
    np.testing.assert_allclose(got["lse"], expected["lse"], rtol=1e-13)
    np.testing.assert_allclose(got["grad_query"] / scale, expected["grad_query"] / scale, atol=1e-11)
    assert_all_close({"grad_value": got["grad_value"]}, {"grad_value": expected["grad_value"]})


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_whose_exponentials_all_leave_the_range(sign):
    """In float32, from a row's logits all near ±1 to all near ±400, where each exp is 0 or ∞."""
    rng = np.random.default_rng(10)
    query, key, value, grad_output = (0.3 * rng.standard_normal((1, 300, 16)) for _ in range(4))
    key[..., 0], query[..., 0] = 4, sign * np.geomspace(1, 400, 300)
    single = [np.float32(array) for array in (query, key, value, grad_output)]
    got = run(*single[:3], {"method": "blockwise"}, {"grad_output": single[3]})
    wide = [np.float64(array) for array in single]
    expected = run(*wide[:3], {}, {"grad_output": wide[3]})
    for name in got.keys() - {"grad_scale"}:  # which is a small difference of numbers as large as the logits
        largest = np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-3 * largest, err_msg=name)


@pytest.mark.parametrize("beside", [1.0, 60.0], ids=["a folded row", "a row beyond the folded range"])
def test_a_row_of_nothing_gives_nothing_whatever_is_beside_it(beside):
    """A query of −∞ sees keys, and 0 · ∞ in its part of their gradient would be NaN."""
    rng = np.random.default_rng(0)
    query, key, value, upstream = np.abs(rng.standard_normal((4, 1, 100, 4)))
    query[0, 7] = beside
    mask = np.ones((100, 100), dtype=bool)
    mask[3] = False
    expected = numpy_sdpa.sdpa_backward(upstream, numpy_sdpa.sdpa_forward(query, key, value, mask)[1])
    query[0, 3] = -np.inf
    residuals = numpy_sdpa.sdpa_forward(query, key, value, method="blockwise")[1]
    assert residuals.lse[0, 3] == -np.inf
    for name in ("query", "key", "value", "scale"):
        assert_close(getattr(numpy_sdpa.sdpa_backward(upstream, residuals), name), getattr(expected, name), name)


@pytest.mark.parametrize("value_size", [1e12, 1e-12])
def test_upstream_gradients_that_only_the_division_by_the_row_sum_takes_out_of_range(value_size):
    """A row sum of e^-39 beneath 1e14, and one of e^38 beneath 1e-12, in float32: digits are kept all the same."""
    rng = np.random.default_rng(9)
    query, key, value, grad_output = (0.3 * rng.standard_normal((1, 200, 16)) for _ in range(4))
    even = np.arange(200) % 2 == 0
    key[..., 0], query[..., 0] = 4, np.where(even, -44, 33)
    grad_output *= np.where(even, 1e14, 1e-12)[:, None]
    single = [np.float32(array) for array in (query, key, value * value_size, grad_output)]
    got = run(*single[:3], {"method": "blockwise"}, {"grad_output": single[3]})
    wide = [np.float64(array) for array in single]
    expected = run(*wide[:3], {}, {"grad_output": wide[3]})
    assert np.abs(got["lse"]).max() < folded.LARGEST_LSE
    for rows in (even, ~even):
        largest = np.abs(expected["grad_query"][:, rows]).max()
        np.testing.assert_allclose(
            got["grad_query"][:, rows], expected["grad_query"][:, rows], rtol=0, atol=1e-4 * largest
        )


@pytest.mark.parametrize("value_size", [1.0, 1e30])
def test_huge_values(value_size):
    rng = np.random.default_rng(5)
    query, key, value = (rng.standard_normal((1, 200, 16)).astype(np.float32) for _ in range(3))
    query *= 8
    got = numpy_sdpa.attention(query, key, value * np.float32(value_size), method="blockwise", block_size=64)
    expected = numpy_sdpa.attention(query, key, value * np.float32(value_size))
    np.testing.assert_allclose(got / value_size, expected / value_size, atol=1e-5)


# ---- a masked position is never read


@pytest.mark.parametrize("case", POISON_CASES.values(), ids=POISON_CASES)
def test_poison_in_hidden_places_changes_no_bit(case):
    inputs = make_poison_case(case)
    named, places = arrays(case, inputs), hidden_places(case, inputs)
    for options in ({"block_size": (2, 3)}, {}):

        def evaluate(named, options=options):
            given = {name: named[name] for name, _ in case.options} | {"method": "blockwise"} | options
            upstream = {name: named[name] for name in case.upstream}
            return run(named["query"], named["key"], named["value"], given, upstream)

        expected = evaluate(filled(named, places, 0.0))
        for poison in POISONS:
            assert_same_bits(evaluate(filled(named, places, poison)), expected)


def test_poison_beside_default_tiles():
    """Several default tiles: keys past the length, keys that one head may not see, and rows that see nothing."""
    rng = np.random.default_rng(6)
    query, key, value, grad_output = (rng.standard_normal((2, 1100, 8)).astype(np.float32) for _ in range(4))
    mask = rng.random((2, 1100, 1100)) < 0.7
    mask[0, :, [0, 77, 78]] = False
    mask[:, 400] = False
    options = {"mask": mask, "key_lengths": 1090, "method": "blockwise"}
    results = []
    for poison in (0, np.nan, np.inf, -np.inf, 1e30):
        q, k, v, g = (array.copy() for array in (query, key, value, grad_output))
        # not all in the same keys: a key may be one that no product can take, and its value not, or the other way round
        k[:, 1090:], v[:, 1095:], k[0, [0, 77]], v[0, 78], q[:, 400], g[:, 400] = (np.float32(poison),) * 6
        given = {"query": q, "key": k, "value": v, "grad_output": g}
        before = {name: array.copy() for name, array in given.items()}
        results.append(run(q, k, v, options, {"grad_output": g}))
        assert_same_bits(given, before)
    assert not np.isnan(results[0]["grad_key"]).any()
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize("first", [300, 1100])  # rows are looked at 1024 at a time
def test_a_seen_nan_shows_in_the_rows_that_see_it_only(first):
    rng = np.random.default_rng(7)
    query, key, value, grad_output = (rng.standard_normal((1, first + 300, 8)).astype(np.float32) for _ in range(4))
    options, upstream = {"is_causal": True, "method": "blockwise"}, {"grad_output": grad_output}
    clean = run(query, key, value, options, upstream)
    for key_entry, value_entry in ((np.nan, 0.0), (0.0, np.inf), (np.nan, np.inf)):
        k, v = key.copy(), value.copy()
        k[0, first] += np.float32(key_entry)
        v[0, first, 3] += np.float32(value_entry)
        v[0, first + 150, 2] = np.inf
        got = run(query, k, v, options, upstream)
        np.testing.assert_array_equal(got["output"][:, :first], clean["output"][:, :first])
        np.testing.assert_array_equal(got["grad_query"][:, :first], clean["grad_query"][:, :first])
        for name in ("output", "grad_query"):
            shown = np.isnan(got[name]) if np.isnan(key_entry) else ~np.isfinite(got[name])
            assert shown[:, first:].any(axis=-1).all(), name
    q = query.copy()
    q[0, first] = np.nan
    got = run(q, key, value, options, upstream)
    others = np.arange(first + 300) != first
    np.testing.assert_array_equal(got["output"][:, others], clean["output"][:, others])
    np.testing.assert_array_equal(got["grad_query"][:, others], clean["grad_query"][:, others])
    np.testing.assert_array_equal(got["grad_key"][:, first + 1 :], clean["grad_key"][:, first + 1 :])
    for name in ("output", "grad_query"):
        assert np.isnan(got[name][:, first]).all()
    assert np.isnan(got["grad_key"][:, : first + 1]).all()
    grad_lse = np.zeros((1, first + 300), np.float32)
    grad_lse[0, first] = np.nan
    got = run(query, key, value, options, upstream | {"grad_lse": grad_lse})
    np.testing.assert_array_equal(got["grad_query"][:, others], clean["grad_query"][:, others])
    np.testing.assert_array_equal(got["grad_key"][:, first + 1 :], clean["grad_key"][:, first + 1 :])
    assert np.isnan(got["grad_query"][:, first]).all()


# ---- tiles


def counted_tiles(monkeypatch, **options):
    """How many tiles a forward and a backward pass compute."""
    rng = np.random.default_rng(8)
    query, key, value = (rng.standard_normal((1, 1024, 4)).astype(np.float32) for _ in range(3))
    calls = []
    monkeypatch.setattr(folded, "_exponentials", lambda *args: calls.append(args[2]) or EXPONENTIALS(*args))
    output, residuals = numpy_sdpa.sdpa_forward(
        query, key, value, method="blockwise", block_size=64, workers=1, **options
    )
    forward = len(calls)
    numpy_sdpa.sdpa_backward(output, residuals)
    return forward, len(calls) - forward, sum(visible is not None for visible in calls[:forward])


def test_tiles_that_nobody_sees_are_skipped_and_full_ones_are_not_masked(monkeypatch):
    segments = np.repeat(np.arange(16), 64)
    scattered = np.zeros((1024, 1024), bool)
    scattered[70:80, 900] = True
    for options, expected in (
        ({}, (256, 256, 0)),
        ({"is_causal": True}, (136, 136, 16)),
        ({"window": (64, 0)}, (31, 31, 31)),
        ({"key_lengths": 500}, (128, 128, 0)),
        ({"query_lengths": 500}, (128, 128, 0)),
        ({"query_segments": segments, "key_segments": segments}, (16, 16, 0)),
        ({"mask": scattered}, (1, 1, 1)),
        ({"mask": np.ones((1, 1024), bool)}, (256, 256, 0)),
    ):
        assert counted_tiles(monkeypatch, **options) == expected, options


# ---- memory


def peak_of(function):
    """The result, and the most MiB that were allocated on the way, what is returned included."""
    tracemalloc.start()
    result = function()
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return result, peak


def forward_and_backward(query, key, value, grad_output, **options):
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, method="blockwise", **options)
    return output, numpy_sdpa.sdpa_backward(grad_output, residuals)


def test_65536_tokens_in_128_mib():
    rng = np.random.default_rng(9)
    arrays = [rng.standard_normal((1, 65536, 64), np.float32) for _ in range(4)]
    (output, gradients), peak = peak_of(
        lambda: forward_and_backward(*arrays, is_causal=True, window=(2048, 0), workers=2)
    )
    assert peak < 128
    rows = slice(65000, 65010)
    keys = slice(65000 - 2048, 65010)
    expected = numpy_sdpa.attention(
        arrays[0][:, rows],
        arrays[1][:, keys],
        arrays[2][:, keys],
        is_causal=True,
        window=(2048, 0),
        alignment="lower_right",
    )
    np.testing.assert_allclose(output[:, rows], expected, atol=1e-5)
    assert np.isfinite(gradients.key).all()


def test_memory_grows_with_the_length_not_its_square():
    rng = np.random.default_rng(10)
    peaks = []
    for length in (1024, 4096):
        arrays = [rng.standard_normal((1, length, 16), np.float32) for _ in range(4)]
        peaks.append(peak_of(lambda arrays=arrays: forward_and_backward(*arrays, workers=1))[1])
    assert peaks[1] - peaks[0] < 3 * 3072 * 16 * 4 * 6 / 2**20  # output, copies and gradients; a plane would be 64 MiB


def test_a_mask_or_bias_is_never_expanded():
    rng = np.random.default_rng(11)
    arrays = [rng.standard_normal((8, 1024, 4), np.float32) for _ in range(4)]
    bias, mask = rng.standard_normal(1024).astype(np.float32), rng.random((1024, 1)) < 0.9
    _, peak = peak_of(lambda: forward_and_backward(*arrays, bias=bias, mask=mask, workers=1))
    assert peak < 16  # one head's plane is 4 MiB in float32, all heads' 32


def test_half_precision_is_converted_tile_by_tile():
    rng = np.random.default_rng(12)
    query, key, value = (rng.standard_normal((1, 16384, 64)).astype(np.float16) for _ in range(3))
    _, peak = peak_of(lambda: numpy_sdpa.attention(query, key, value, window=(64, 0), method="blockwise", workers=1))
    whole = 16384 * 64 * 4 / 2**20
    assert peak < 2.9 * whole + 2  # the output in float32 and float16, and scratch: not query, key or value as well


# ---- parts, for attention that is spread over machines


@pytest.mark.parametrize("block_size", [(3, 2), None], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"softcap": 1.5}, {"scale": -0.7}, {"bias": 0}, {"alibi_slopes": 0}], ids=str
)
def test_backward_of_a_part_of_the_keys_from_what_is_known_of_the_rows(options, block_size):
    rng = np.random.default_rng(13)
    query, upstream = rng.standard_normal((2, 9, 3)), rng.standard_normal((2, 9, 4))
    key, value = rng.standard_normal((2, 7, 3)), rng.standard_normal((2, 7, 4))
    upstream_lse = rng.standard_normal((2, 9))
    drawn = {"bias": rng.standard_normal((9, 7)), "alibi_slopes": np.array([0.3, -0.2])}
    options = {name: drawn.get(name, value) for name, value in options.items()}
    options |= {"method": "blockwise", "block_size": block_size}
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, sinks=np.array([0.5, -0.5]), **options)
    expected = numpy_sdpa.sdpa_backward(upstream, residuals, grad_lse=upstream_lse)

    row_term = (upstream * output).sum(axis=-1) - upstream_lse
    rows = blockwise.RowStatistics(residuals.row_shift, residuals.row_sum, row_term)
    of_parts = []
    for keys in (slice(0, 3), slice(3, 7)):
        given = options | ({"bias": options["bias"][:, keys]} if "bias" in options else {})
        arrays, of_part = resolve(query, key[:, keys], value[:, keys], None, {**given, "query_offset": -keys.start})
        of_parts.append(blockwise.backward_from_rows(arrays, of_part, upstream, rows))
    first, second = of_parts
    for name in ("query", "alibi_slopes", "scale", "softcap"):
        if getattr(expected, name) is not None:
            assert_close(getattr(first, name) + getattr(second, name), getattr(expected, name), name)
    for name, axis in (("key", 1), ("value", 1), ("bias", 1)):
        if getattr(expected, name) is not None:
            joined = np.concatenate([getattr(first, name), getattr(second, name)], axis=axis)
            assert_close(joined, getattr(expected, name), name)


# ---- what blockwise has not


def test_what_needs_the_weights_names_dense():
    inputs = cases.make(cases.ALONE[0])
    output, residuals = numpy_sdpa.sdpa_forward(*inputs[:3], method="blockwise")
    for call in (
        lambda: numpy_sdpa.sdpa_backward(output, residuals, grad_weights=inputs.upstream["grad_weights"]),
        lambda: numpy_sdpa.sdpa_jvp(residuals, query=inputs.query),
        lambda: numpy_sdpa.sdpa_double_backward(output, residuals, query=inputs.query),
    ):
        with pytest.raises(ValueError, match='method="dense"'):
            call()


# ---- CuPy


@pytest.mark.parametrize("array_module", [CUPY_STANDIN, CUPY], indirect=True, ids=repr)
@pytest.mark.parametrize("case", cases.ALONE + cases.SHAPES, ids=str)
def test_cupy(case, array_module):
    inputs = cases.make(case)

    def converted(named):
        return {n: array_module.to_module(a) if isinstance(a, np.ndarray) else a for n, a in named.items()}

    options = {"method": "blockwise", "block_size": (2, 3)}
    got = run(*map(array_module.to_module, inputs[:3]), converted(inputs.options) | options, converted(inputs.upstream))
    array_module.assert_same_module_and_device(tuple(got.values()), array_module.to_module(inputs.query))
    expected = of_case(inputs, **options)
    assert_all_close({name: array_module.to_numpy(array) for name, array in got.items()}, expected)


def test_on_a_gpu_a_tile_holds_all_heads_and_there_are_no_threads(monkeypatch):
    import cupy_standin

    with cupy_standin.installed():
        xp = cupy_standin.module
        query = xp.zeros((2, 3, 4, 5))
        _, options = resolve(query, query, query, None, {"method": "blockwise", "workers": 8})
        assert len(slabs.slabs_of(options)) == 1
        assert tiles.grid_of(options).row_blocks == [slice(0, 4)]
        assert parts.workers_of(options)._count == 1
