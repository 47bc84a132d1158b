"""Forms that mistakes take in kernels written otherwise: by autograd, with another fill, a softmax computed again."""

import numpy as np
import pytest
import wrong_kernels
from test_diagnosis import first_ties, normal, problem

from numpy_sdpa.kernelcheck import compare
from numpy_sdpa.kernelcheck.sample import strips_of


class Kernel:
    """Attention and its gradients in float32, in pieces: a mistake is a piece put in another's place."""

    def __init__(self, arrays, seen=True, sinks=None, bias=0.0):
        self.arrays, self.seen = arrays, seen
        self.q, self.k, self.v, self.grad_output = (arrays[n] for n in ("query", "key", "value", "grad_output"))
        self.scale = np.float32(self.q.shape[-1] ** -0.5)
        group = self.q.shape[1] // self.k.shape[1]
        self.k, self.v = np.repeat(self.k, group, axis=1), np.repeat(self.v, group, axis=1)
        self.logits = np.where(seen, self.scale * self.q @ self.k.mT + bias, -np.inf)
        self.sinks = None if sinks is None else sinks[:, None, None]

    def softmax(self, logits):
        """Weights and lse (…, L, 1); 0 and −∞ where a row sees nothing."""
        largest = np.max(logits, axis=-1, keepdims=True, initial=-np.inf if self.sinks is None else self.sinks.min())
        shift = np.where(np.isinf(largest), 0, largest)
        exponentials = np.exp(logits - shift)
        total = exponentials.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total = total + np.exp(self.sinks - shift)
        with np.errstate(divide="ignore"):
            return exponentials / np.where(total == 0, 1, total), shift + np.log(total)

    def results(self, weights, lse):
        return {"output": weights @ self.v, "lse": lse[..., 0]}

    def row_dot(self, output):
        return (self.grad_output * output).sum(axis=-1, keepdims=True)

    def gradients(self, weights, row_dot, of_lse=0.0):
        """By gS = P ∘ (gP − D) + what comes from lse."""
        grad_scores = weights * (self.grad_output @ self.v.mT - row_dot) + of_lse
        copies = {
            "grad_query": self.scale * grad_scores @ self.k,
            "grad_key": self.scale * grad_scores.mT @ self.q,
            "grad_value": weights.mT @ self.grad_output,
        }
        return copies | {name: self.summed(copies[name]) for name in ("grad_key", "grad_value")}

    def summed(self, copies):
        batch, heads, *rest = copies.shape
        key_heads = self.arrays["key"].shape[1]
        return copies.reshape(batch, key_heads, heads // key_heads, *rest).sum(axis=2)


def single(arrays):
    return {name: np.asarray(a, np.float32) if np.asarray(a).dtype.kind == "f" else a for name, a in arrays.items()}


def check_first(arrays, results, mistake, **options):
    report = compare({**arrays, **single(results)}, **options)
    assert mistake in first_ties(report), str(report)
    wrong = {name for name, array in report.arrays.items() if not array.passed}
    assert wrong == {name for diagnosis in report.diagnosis for name in diagnosis.explains}, str(report)
    return report


def with_an_empty_row(length=9, **extra):
    arrays, options = problem(L=length, S=length + 3, **extra)
    mask = np.random.default_rng(1).random((2, 4, length, length + 3)) < 0.7
    mask[..., 0] = True
    mask[0, 1, 2] = False
    return arrays | {"mask": mask}, options


# -- rows that see nothing -------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [-1e9, -1e4, -50.0])
def test_a_fill_in_lse_is_no_minus_infinity(fill):
    arrays, _ = with_an_empty_row()
    kernel = Kernel(arrays, arrays["mask"])
    results = kernel.results(*kernel.softmax(kernel.logits))
    assert compare({**arrays, **single(results)}).passed
    results["lse"] = np.where(np.isinf(results["lse"]), fill, results["lse"])
    assert not compare({**arrays, **single(results)}).arrays["lse"].passed


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "a bias with −∞"])
@pytest.mark.parametrize("fill", [-3e38, -1e9, -1e4, -50.0])
def test_any_fill_is_a_mean(fill, with_bias):
    """masked_fill(scores + bias, ~mask, fill): the fill is also where the bias is −∞."""
    arrays, _ = with_an_empty_row()
    bias = 0.0
    if with_bias:
        bias = np.random.default_rng(3).standard_normal((9, 12)).astype(np.float32)
        bias[2, 5] = bias[4, 7] = -np.inf
        arrays["bias"] = bias
    kernel = Kernel(arrays, bias=bias)
    weights, lse = kernel.softmax(np.where(arrays["mask"], kernel.logits, np.float32(fill)))
    report = check_first(arrays, kernel.results(weights, lse), "fully-masked-mean")
    assert report.diagnosis[0].explains == ("output", "lse")


@pytest.mark.parametrize("length", [9, 160])
def test_a_mask_that_is_filled_in_stops_the_nan(length):
    """By autograd: rows of NaN in the output, all of their heads in the gradient of value, and nowhere else."""
    arrays, _ = with_an_empty_row(length)
    kernel = Kernel(arrays, arrays["mask"])
    weights, lse = kernel.softmax(kernel.logits)
    results = kernel.results(weights, lse) | kernel.gradients(weights, kernel.row_dot(weights @ kernel.v))
    results["output"][0, 1, 2] = np.nan
    results["grad_value"][0, 1] = np.nan
    check_first(arrays, results, "fully-masked-nan")


def test_strips_have_the_worst_place_wherever_it_is():
    for worst in range(1000):
        badness = np.zeros(1000)
        badness[worst] = 5.0
        assert any(strip.start <= worst < strip.stop for strip in strips_of(badness, 64, ()))


# -- the upstream gradient of a wrong lse ----------------------------------------------------------


def with_lse_gradient(**extra):
    return problem(grad_lse=lambda rng: rng.standard_normal((2, 4, 9)), **extra)[0]


def test_lse_in_base_2_by_autograd():
    arrays = with_lse_gradient()
    kernel = Kernel(arrays)
    weights, lse = kernel.softmax(kernel.logits)
    of_lse = weights * arrays["grad_lse"][..., None] / np.log(2)
    gradients = kernel.gradients(weights, kernel.row_dot(weights @ kernel.v), of_lse)
    check_first(arrays, kernel.results(weights, lse / np.log(2)) | gradients, "lse-base-2")
    check_first(arrays, gradients, "lse-base-2")


def test_lse_without_its_sink_by_autograd():
    arrays = with_lse_gradient(sinks=lambda rng: rng.standard_normal(4))
    kernel = Kernel(arrays, sinks=arrays["sinks"])
    weights, lse = kernel.softmax(kernel.logits)
    without, lse_without = Kernel(arrays).softmax(kernel.logits)
    row_dot = kernel.row_dot(weights @ kernel.v)
    gradients = kernel.gradients(weights, row_dot, without * arrays["grad_lse"][..., None])
    gradients["grad_sinks"] = -(np.exp(kernel.sinks - lse) * row_dot).sum(axis=(0, 2, 3))
    check_first(arrays, kernel.results(weights, lse_without) | gradients, "sinks-ignored-in-lse")
    check_first(arrays, gradients, "sinks-ignored-in-lse")


def test_a_softmax_over_the_queries_with_the_gradient_of_the_right_lse():
    arrays = with_lse_gradient()
    kernel = Kernel(arrays)
    right, lse = kernel.softmax(kernel.logits)
    weights = np.exp(kernel.logits) / np.exp(kernel.logits).sum(axis=-2, keepdims=True)
    row_dot = (weights * (kernel.grad_output @ kernel.v.mT)).sum(axis=-2, keepdims=True)
    gradients = kernel.gradients(weights, row_dot, right * arrays["grad_lse"][..., None])
    check_first(arrays, kernel.results(weights, lse) | gradients, "softmax-wrong-axis")


def test_a_gradient_that_becomes_0_is_reproduced():
    """With one key lse alone depends on the scores: without its gradient there is only noise."""
    arrays, _ = problem(S=1, grad_lse=lambda rng: rng.standard_normal((2, 4, 9)))
    kernel = Kernel(arrays)
    weights, lse = kernel.softmax(kernel.logits)
    gradients = kernel.gradients(weights, kernel.row_dot(weights @ kernel.v))
    assert np.any(gradients["grad_query"])
    check_first(arrays, kernel.results(weights, lse) | gradients, "lse-gradient-ignored")


# -- the backward pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["kept", "skipped"])
def test_causal_ignored_in_backward_where_rows_see_nothing(rows):
    arrays, _ = problem(L=12, S=9)
    options = {"is_causal": True, "alignment": "lower_right"}
    seen = np.arange(9) <= np.arange(12)[:, None] - 3
    kernel, all_seen = Kernel(arrays, seen), Kernel(arrays)
    weights, lse = kernel.softmax(kernel.logits)
    again = np.exp(all_seen.logits - np.where(np.isinf(lse), 0, lse))
    if rows == "skipped":
        again = np.where(np.isinf(lse), 0, again)
    results = kernel.results(weights, lse)
    gradients = kernel.gradients(again, kernel.row_dot(results["output"]))
    check_first(arrays, results | gradients, "causal-ignored-in-backward", **options)


@pytest.mark.parametrize("row_dot", ["of the output", "of its own weights"])
@pytest.mark.parametrize("length", [9, 160])
def test_causal_ignored_in_a_softmax_computed_again(row_dot, length):
    arrays, _ = problem(L=length, S=length + 3)
    seen = np.arange(length + 3) <= np.arange(length)[:, None]
    kernel, all_seen = Kernel(arrays, seen), Kernel(arrays)
    weights, lse = kernel.softmax(kernel.logits)
    again, _ = all_seen.softmax(all_seen.logits)
    results = kernel.results(weights, lse)
    output = results["output"] if row_dot == "of the output" else again @ kernel.v
    gradients = kernel.gradients(again, kernel.row_dot(output))
    check_first(arrays, results | gradients, "causal-ignored-in-backward", is_causal=True)


@pytest.mark.parametrize("keys", [9, 12])
def test_query_and_key_exchanged_before_the_sum_over_the_group(keys):
    arrays, options = problem(S=keys, heads=(4, 2), enable_gqa=True)
    kernel = Kernel(arrays)
    weights, lse = kernel.softmax(kernel.logits)
    gradients = kernel.gradients(weights, kernel.row_dot(weights @ kernel.v))
    scores = weights * (kernel.grad_output @ kernel.v.mT - kernel.row_dot(weights @ kernel.v))
    gradients["grad_key"] = kernel.summed(gradients["grad_query"])
    gradients["grad_query"] = kernel.scale * scores.mT @ kernel.q
    report = compare({**arrays, **kernel.results(weights, lse), **gradients}, **options)
    assert "grad-query-key-swapped" in first_ties(report), str(report)
    assert set(report.diagnosis[0].explains) == {"grad_query", "grad_key"}


@pytest.mark.parametrize("name", ["bias", "alibi_slopes"])
def test_what_is_ignored_may_get_the_gradient_0(name):
    shape = (2, 4, 9, 12) if name == "bias" else (4,)
    arrays, _ = problem(**{name: lambda rng: rng.standard_normal(shape)})
    kernel = Kernel(arrays)
    weights, lse = kernel.softmax(kernel.logits)
    gradients = kernel.gradients(weights, kernel.row_dot(weights @ kernel.v))
    gradients[f"grad_{name}"] = np.zeros(shape, np.float32)
    check_first(arrays, kernel.results(weights, lse) | gradients, f"{name.removesuffix('_slopes')}-ignored")


# -- two at once -----------------------------------------------------------------------------------

GROUPED = {"heads": (4, 2), "enable_gqa": True}
DROPOUT = {"dropout_p": 0.3, "dropout_mask": lambda rng: rng.random((2, 4, 9, 12)) < 0.7}
LONG = {"L": 160, "S": 160, "batch": 1}


@pytest.mark.parametrize(
    ("planted", "extra"),
    [
        ({"causal-strict", "group-sum-missing:0"}, GROUPED | LONG | {"is_causal": True}),
        ({"causal-strict", "group-sum-missing:unreduced"}, GROUPED | LONG | {"is_causal": True}),
        ({"causal-strict", "grad-query-key-swapped"}, LONG | {"is_causal": True}),
        (
            {"scale-by-d", "broadcast-sum-missing:first"},
            LONG | {"bias": lambda rng: rng.standard_normal((1, 1, 160, 160))},
        ),
        ({"gqa-tiled", "group-sum-missing:0"}, GROUPED),
        ({"softmax-wrong-axis:heads", "grad-value-undropped"}, DROPOUT),
        ({"scale-from-value-size", "scale-missing-in-backward:key"}, {"scale": 0.3}),
        (
            {"softcap-ignored", "broadcast-sum-missing:first"},
            {"softcap": 1.5, "bias": lambda rng: rng.standard_normal(12)},
        ),
        ({"scale-by-d", "grad-bias-scaled"}, {"scale": 0.3, "bias": lambda rng: rng.standard_normal((2, 4, 9, 12))}),
    ],
    ids=lambda value: "+".join(sorted(value)),
)
def test_two_at_once(planted, extra):
    arrays, options = problem(**extra)
    report = compare({**arrays, **wrong_kernels.run(arrays, options, planted)}, **options)
    assert {entry.partition(":")[0] for entry in planted} <= {d.mistake for d in report.diagnosis}, str(report)
    wrong = {name for name, array in report.arrays.items() if not array.passed}
    assert wrong == {name for diagnosis in report.diagnosis for name in diagnosis.explains}, str(report)


# -- layout ----------------------------------------------------------------------------------------


def reread(array):
    """The memory of (B, H, L, X), read as (B, L, H, X)."""
    batch, heads, length, size = array.shape
    return array.reshape(batch, length, heads, size).swapaxes(1, 2)


def written(array):
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(array.shape)


@pytest.mark.parametrize("lse", ["its own strides", "written so"])
@pytest.mark.parametrize("names", ["inputs", "inputs and upstream gradients"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_a_kernel_that_takes_all_memory_for_the_other_layout(heads, names, lse):
    arrays, options = problem(heads=heads, L=12, enable_gqa=True, grad_lse=normal(2, 4, 12))
    read = {name: reread(arrays[name]) for name in ("query", "key", "value")}
    if names != "inputs":
        read["grad_output"] = reread(arrays["grad_output"])
        if lse == "written so":
            read["grad_lse"] = reread(arrays["grad_lse"][..., None])[..., 0]
    results = wrong_kernels.run(arrays | read, options)
    results = {name: array if name == "lse" else written(array) for name, array in results.items()}
    if lse == "written so":
        results["lse"] = written(results["lse"][..., None])[..., 0]
    check_first(arrays, results, "layout-swapped", **options)


@pytest.mark.parametrize("order", ["(B, H, L)", "(B, L, H)"])
def test_a_kernel_that_attends_over_heads(order):
    arrays, options = problem(heads=(6, 6), L=10, S=10)
    names = ("query", "key", "value", "grad_output")
    results = wrong_kernels.run(arrays | {name: arrays[name].swapaxes(1, 2) for name in names}, options)
    swaps = {name for name in results if name != "lse" or order == "(B, H, L)"}
    results = {name: array.swapaxes(1, 2) if name in swaps else array for name, array in results.items()}
    check_first(arrays, results, "layout-swapped", **options)


# -- past the lengths ------------------------------------------------------------------------------


def packed(run, query_lengths=(9, 14, 6), key_lengths=(12, 9, 7)):
    """Three packed sequences and what `run` gives of each alone: there is nothing past their lengths."""
    each = [
        problem(batch=1, L=length, S=keys, seed=i)[0]
        for i, (length, keys) in enumerate(zip(query_lengths, key_lengths, strict=True))
    ]
    results = [run(arrays) for arrays in each]
    lse = {"lse": np.concatenate([one.pop("lse")[0] for one in results], axis=-1)}
    both = [{**arrays, **one} for arrays, one in zip(each, results, strict=True)]
    joined = {name: np.concatenate([one[name][0].swapaxes(0, 1) for one in both]) for name in both[0]}
    ends = {
        name: np.cumsum([0, *lengths])
        for name, lengths in (("cu_seqlens_q", query_lengths), ("cu_seqlens_k", key_lengths))
    }
    return joined | ends, lse


@pytest.mark.parametrize(
    "planted", [{"softcap-after-mask"}, {"fully-masked-mean"}, {"fully-masked-nan"}], ids=lambda planted: min(planted)
)
def test_packed_sequences_have_nothing_past_their_lengths(planted):
    # of the second sequence some rows see nothing
    options = {"is_causal": True, "alignment": "lower_right"}
    if "softcap-after-mask" in planted:
        options = {"is_causal": True, "softcap": 1.5}
    arrays, results = packed(lambda arrays: wrong_kernels.run(arrays, options, planted))
    check_first(arrays, results, *planted, **options)


@pytest.mark.parametrize("mistake", ["softcap-after-mask", "fully-masked-mean"])
def test_a_kernel_that_runs_to_the_lengths_of_a_batch(mistake):
    options = {"is_causal": True, "softcap": 1.5}
    if mistake == "fully-masked-mean":
        options["query_offset"] = -2  # the first two rows see nothing
    arrays, _ = problem()
    parts = []
    for element, length in enumerate((7, 10)):
        one = {name: array[element : element + 1] for name, array in arrays.items()}
        one |= {name: one[name][..., :length, :] for name in ("key", "value")}
        results = wrong_kernels.run(one, options, {mistake})
        for name in ("grad_key", "grad_value"):
            results[name] = np.pad(results[name], ((0, 0), (0, 0), (0, 12 - length), (0, 0)))
        parts.append(results)
    results = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    check_first(arrays | {"key_lengths": np.array([7, 10])}, results, mistake, **options)
