"""The experiment on √d_k: its statistics, its attention, its sentences, its picture, its command."""

import json
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from scipy import stats

from numpy_sdpa import cli, plain, softmax_jacobian, why_scale
from numpy_sdpa.data import load_model_tensors
from numpy_sdpa.why_scale_figure import plot

DOCS = Path(__file__).parents[1] / "docs"
DISTRIBUTIONS = ("normal", "uniform", "rademacher")
ROW_KEYS = {
    "d_k",
    "scale",
    "score_mean",
    "score_variance",
    "score_variance_ci",
    "entropy",
    "max_weight",
    "jacobian_norm",
    "grad_query_norm",
    "grad_key_norm",
    "grad_value_norm",
    "saturated",
}
SMALL = ["--d-k", "4", "64", "--samples", "500"]


@cache
def default_result(distribution="normal"):
    return why_scale.measure(distribution=distribution)


@cache
def small_result(length=16, d_k=(4, 64)):
    return why_scale.measure(d_k, length=length, samples=500)


def at_scale(result, scale):
    return [row for row in result["rows"] if row["scale"] == scale]


def claim(result, words):
    (found,) = [entry for entry in result["claims"] if words in entry["claim"]]
    return found


# --- the scores ---


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_default_intervals_hold_what_was_derived(distribution):
    seen = why_scale.score_statistics(why_scale.D_K, samples=why_scale.SAMPLES, distribution=distribution, seed=0)
    for d_k, (low, high) in zip(why_scale.D_K, seen.variance_intervals, strict=True):
        assert low <= d_k <= high
        assert high / low < 1.2  # or they would hold anything
    assert all(low <= 0 <= high for low, high in seen.mean_intervals)
    assert seen.exponent_interval[0] <= 1 <= seen.exponent_interval[1]
    assert seen.exponent_interval[1] - seen.exponent_interval[0] < 0.03


def test_measure_reports_these_intervals_and_agrees():
    result = default_result()
    seen = why_scale.score_statistics(why_scale.D_K, samples=why_scale.SAMPLES, distribution="normal", seed=0)
    assert [row["score_variance_ci"] for row in at_scale(result, "1/d_k")] == seen.variance_intervals
    assert [row["score_mean_ci"] for row in at_scale(result, "1")] == seen.mean_intervals
    assert result["variance_exponent_ci"] == seen.exponent_interval
    assert why_scale.agrees_with_derivation(result)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_entries_are_as_they_are_called(distribution):
    entries = why_scale.DISTRIBUTIONS[distribution](np.random.default_rng(5), (200_000,))
    fourth_moment = {"normal": 3, "uniform": 9 / 5, "rademacher": 1}[distribution]
    # standard errors: of the mean 0.0022, of the variance at most 0.0032, of the fourth moment at most 0.022
    assert entries.mean() == pytest.approx(0, abs=0.01)
    assert entries.var() == pytest.approx(1, abs=0.015)
    assert (entries**4).mean() == pytest.approx(fourth_moment, abs=0.1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_standard_errors_are_the_spread_over_repetitions(distribution):
    """A formula for normal samples (κ = 3) would be off by 32 % for normal entries and by 15 % for ±1."""
    d_k, repetitions, samples = 4, 2000, 1000
    rng, draw = np.random.default_rng(7), why_scale.DISTRIBUTIONS[distribution]
    shape = (repetitions, samples, d_k)
    moments = why_scale.sample_moments((draw(rng, shape) * draw(rng, shape)).sum(axis=-1))
    # the spread over 2000 repetitions is known to 1.6 %
    assert moments.mean_error.mean() == pytest.approx(moments.mean.std(), rel=0.05)
    assert moments.log_variance_error.mean() == pytest.approx(np.log(moments.variance).std(), rel=0.05)


def test_moments_are_numpys():
    sample = np.random.default_rng(3).gamma(2.0, size=(3, 50))
    moments = why_scale.sample_moments(sample)
    np.testing.assert_allclose(moments.mean, sample.mean(axis=-1))
    np.testing.assert_allclose(moments.variance, sample.var(axis=-1, ddof=1))
    expected = np.sqrt((stats.kurtosis(sample, axis=-1, fisher=False) - 47 / 49) / 50)
    np.testing.assert_allclose(moments.log_variance_error, expected)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_joint_coverage(distribution):
    """99 % are promised; 300 runs of that fall below 95.7 % once in 100 000."""
    shares = why_scale.joint_coverage((4, 16), samples=2000, distribution=distribution, runs=300, seed=1000)
    assert shares["joint"] >= stats.binom.ppf(1e-5, 300, why_scale.JOINT_LEVEL) / 300
    assert shares["joint"] <= min(shares["means"], shares["variances"], shares["exponent"])


def test_intervals_are_bonferroni_over_all():
    """Of two sizes five intervals: the half width of the mean's in standard errors is t at 1 − 0.01 / 5 / 2."""
    (row, *_) = small_result()["rows"]
    low, high = row["score_mean_ci"]
    half_width = (high - low) / 2 / np.sqrt(row["score_variance"] / 500)
    assert half_width == pytest.approx(stats.t.ppf(1 - 0.001, 499))


def test_no_two_pairs_share_a_vector(monkeypatch):
    drawn = []

    def counting(rng, shape):
        drawn.append(shape)
        return rng.standard_normal(shape)

    monkeypatch.setitem(why_scale.DISTRIBUTIONS, "normal", counting)
    monkeypatch.setattr(why_scale, "_ENTRIES_AT_ONCE", 1000)
    why_scale.score_statistics((3, 64), samples=777, distribution="normal", seed=0)
    assert sum(np.prod(shape) for shape in drawn) == 2 * 777 * (3 + 64)


def test_a_size_does_not_depend_on_the_others():
    alone, together = small_result(), small_result(d_k=(4, 16, 64))
    for scale in why_scale.SCALES:
        for one, other in zip(at_scale(alone, scale), at_scale(together, scale)[::2], strict=True):
            assert {k: v for k, v in one.items() if "ci" not in k} == {k: v for k, v in other.items() if "ci" not in k}
    assert why_scale.measure((4, 64), samples=500, seed=1)["rows"] != alone["rows"]


def test_streams_are_separate():
    """The exponent's standard error takes the sizes' variances for independent."""
    firsts = [rng.random() for d_k in (4, 16) for rng in why_scale._generators(0, d_k)]
    assert len(set(firsts)) == 4


# --- the softmax and the gradients ---


def test_jacobian_norm_is_that_of_the_matrix():
    weights = np.random.default_rng(0).dirichlet(np.full(6, 0.3), size=(2, 5))
    expected = np.linalg.norm(softmax_jacobian(weights), axis=(-2, -1))
    np.testing.assert_allclose(why_scale.jacobian_norm(weights), expected, rtol=1e-12)


def test_jacobian_norm_does_not_cancel():
    rest = 1e-13  # diag(p) − p pᵀ of (1 − x, x) is x (1 − x) [[1, −1], [−1, 1]]
    np.testing.assert_allclose(why_scale.jacobian_norm(np.array([1 - rest, rest])), 2 * rest, rtol=1e-10)
    np.testing.assert_allclose(why_scale.jacobian_norm(np.array([0.5, 0.5])), 0.5)


def test_measures_are_those_of_the_plain_functions():
    rng = np.random.default_rng(2)
    query, key = rng.standard_normal((2, 3, 5, 16))
    value, grad_output = rng.standard_normal((2, 3, 5, 7))
    weights, per_row = why_scale._attention_rows(query, key, value, grad_output, 1 / 4)
    _, expected = plain.attention_forward(query, key, value)
    gradients = plain.attention_backward(grad_output, query, key, value, expected)
    np.testing.assert_allclose(weights, expected)
    np.testing.assert_allclose(per_row[0], stats.entropy(expected, axis=-1))
    np.testing.assert_allclose(per_row[1], expected.max(axis=-1))
    for norms, gradient in zip(per_row[3:], gradients, strict=True):
        np.testing.assert_allclose(norms, np.sqrt((gradient**2).sum(axis=-1)))


def test_summary_names_each_measure():
    per_row = np.arange(30.0).reshape(6, 5)
    per_row[1] = [0.1, 0.2, 0.995, 0.999, 0.99]
    summary = why_scale._summary(per_row)
    means = dict(zip(("entropy", "max_weight", "jacobian_norm"), per_row.mean(axis=-1)[:3], strict=True))
    assert {name: summary[name] for name in means} == pytest.approx(means)
    assert [summary[f"grad_{name}_norm"] for name in ("query", "key", "value")] == [17, 22, 27]
    assert (summary["jacobian_norm_median"], summary["grad_query_norm_median"]) == (12, 17)
    assert summary["saturated"] == 0.4


def test_without_the_scale_it_saturates_and_with_it_nothing_changes():
    result = default_result()
    unscaled, scaled, overscaled = (at_scale(result, name) for name in ("1", "1/sqrt(d_k)", "1/d_k"))
    assert [row["saturated"] for row in unscaled] == sorted(row["saturated"] for row in unscaled)
    assert unscaled[-1]["saturated"] > 0.8
    assert max(row["saturated"] for row in scaled) == 0
    for name in ("entropy", "jacobian_norm", "grad_query_norm", "grad_key_norm", "grad_value_norm"):
        assert scaled[-1][name] == pytest.approx(scaled[0][name], rel=0.1)
    assert overscaled[-1]["entropy"] == pytest.approx(np.log(16), abs=0.01)
    # the keys are √d_k long, the scale is 1/d_k
    assert overscaled[-1]["grad_query_norm"] / overscaled[0]["grad_query_norm"] == pytest.approx(1 / 32, rel=0.1)


def test_the_jacobian_falls_below_in_short_rows_only():
    sizes = (4, 16, 64)
    assert why_scale.jacobian_below_since(small_result(length=4, d_k=sizes)) == 4
    assert why_scale.jacobian_below_since(small_result(length=16, d_k=sizes)) == 16
    long_rows = small_result(length=256, d_k=sizes)
    assert why_scale.jacobian_below_since(long_rows) is None
    assert not claim(long_rows, "softmax Jacobian is smaller")["holds"]
    assert "not below the scaled one at d_k 64" in claim(long_rows, "softmax Jacobian is smaller")["evidence"]


def test_predicted_crossing_lies_between_the_measured_sizes():
    assert why_scale.predicted_crossing(2) == pytest.approx(2 / np.pi / np.e)  # c(2) = 2 ∫ φ² = 1/√π
    for length, below in ((64, 256), (16, 64)):
        assert below / 4 < why_scale.predicted_crossing(length) < below


# --- the real model ---


def test_model_measures_are_those_of_the_shipped_tensors():
    tensors, model = load_model_tensors(), why_scale.measure_model()
    real = np.broadcast_to(tensors.mask[:, :, 0, :], (3, 12, 32))
    (scaled,) = [row for row in model["rows"] if row["scale"] == "1/sqrt(d_k)"]
    assert scaled["max_weight"] == pytest.approx(tensors.weights[real].max(axis=-1).mean(), rel=1e-5)
    for name in ("query", "key", "value"):
        expected = np.linalg.norm(getattr(tensors, f"grad_{name}")[real], axis=-1).mean()
        assert scaled[f"grad_{name}_norm"] == pytest.approx(expected, rel=1e-4)


def test_model_scores_are_over_real_tokens_only():
    tensors, model = load_model_tensors(), why_scale.measure_model()
    scores, within_rows = [], []
    for sentence, count in enumerate(tensors.mask.sum(axis=-1).ravel()):
        for head in range(12):
            query, key = (array[sentence, head, :count].astype(float) for array in (tensors.query, tensors.key))
            plane = query @ key.T
            scores += plane.ravel().tolist()
            within_rows += plane.var(axis=-1, ddof=1).tolist()
    assert model["pairs"] == len(scores) == 12 * (15**2 + 32**2 + 9**2)
    assert model["score_mean"] == pytest.approx(np.mean(scores))
    assert model["score_variance"] == pytest.approx(np.var(scores, ddof=1))
    assert model["score_variance_scaled"] == pytest.approx(np.var(scores, ddof=1) / 32)
    assert model["score_variance_within_rows"] == pytest.approx(np.mean(within_rows))
    assert len(model["score_variance_per_head"]) == 12


def test_model_claim_follows_the_tensors(monkeypatch):
    assert not claim(small_result(), "trained model's q.k has variance d_k")["holds"]
    rng, tensors = np.random.default_rng(0), load_model_tensors()
    random = {name: rng.standard_normal((3, 12, 32, 32), dtype=np.float32) for name in ("query", "key")}
    monkeypatch.setattr(why_scale, "load_model_tensors", lambda: tensors._replace(**random))
    result = why_scale.measure((4, 64), samples=100)
    assert claim(result, "trained model's q.k has variance d_k")["holds"]


# --- what is said ---


def test_the_notes_claims_by_default():
    result = default_result()
    verdicts = [entry["holds"] for entry in result["claims"]]
    assert [entry["claim"] for entry, holds in zip(result["claims"], verdicts, strict=True) if not holds] == [
        "without the scale the mean over queries vanishes too",
        "a trained model's q.k has variance d_k too",
    ]
    for entry in result["claims"]:
        assert set(entry) == {"claim", "holds", "evidence"}
        assert isinstance(entry["holds"], bool)
        assert re.search(r"\d", entry["evidence"])
    assert "rows of 16 keys" in claim(result, "softmax Jacobian")["claim"]
    assert "from d_k 16 on" in claim(result, "softmax Jacobian")["evidence"]


@pytest.mark.parametrize(
    ("entries", "missed"),
    [
        (lambda rng, shape: 1.1 * rng.standard_normal(shape), "q.k has variance d_k, and"),
        (lambda rng, shape: 1.0 + rng.standard_normal(shape), "q.k has mean 0"),
        (lambda rng, shape: shape[-1] ** 0.05 * rng.standard_normal(shape), "in proportion to d_k"),
    ],
)
def test_wrong_entries_are_seen(entries, missed, monkeypatch, capsys):
    monkeypatch.setitem(why_scale.DISTRIBUTIONS, "normal", entries)
    assert cli.main(["why-scale", "--json", "--d-k", "4", "256", "--samples", "2000"]) == 1
    assert not claim(json.loads(capsys.readouterr().out), missed)["holds"]


def test_a_wrong_scale_is_seen(monkeypatch):
    monkeypatch.setitem(why_scale.SCALES, "1/sqrt(d_k)", lambda d_k: d_k**-0.75)
    result = why_scale.measure((4, 64), samples=100)
    assert not claim(result, "keeps the gradients' size")["holds"]


# --- the command ---


def test_json_has_the_issues_form(capsys):
    assert (
        cli.main(["why-scale", "--json", *SMALL, "--distribution", "rademacher", "--length", "8", "--seed", "3"]) == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result == why_scale.measure((4, 64), samples=500, distribution="rademacher", length=8, seed=3)
    assert [(row["d_k"], row["scale"]) for row in result["rows"]] == [
        (d_k, scale) for d_k in (4, 64) for scale in ("1/sqrt(d_k)", "1", "1/d_k")
    ]
    assert all(set(row) >= ROW_KEYS for row in result["rows"])
    assert len(result["variance_exponent_ci"]) == 2
    assert [row["scale"] for row in result["model"]["rows"]] == ["1/sqrt(d_k)", "1", "1/d_k"]


def test_text_shows_every_row_and_claim_in_ascii(capsys):
    assert cli.main(["why-scale", *SMALL]) == 0
    text = capsys.readouterr().out
    assert text.isascii()
    result = small_result()
    for row in result["rows"]:
        assert re.search(rf"^ *{row['d_k']}  {re.escape(row['scale'])} +{row['entropy']:.3g} ", text, re.MULTILINE)
        assert f"{row['score_variance']:.5g}" in text
    for entry in result["claims"]:
        assert f"{'yes' if entry['holds'] else 'NO '}  {entry['claim']}: {entry['evidence']}." in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--d-k", "64"], "at least two different sizes"),
        (["--d-k", "64", "64"], "at least two different sizes"),
        (["--d-k", "0", "4"], "d_k must be at least 1, got 0"),
        (["--length", "1"], "length must be in 2 to 4096, got 1"),
        (["--length", "5000"], "length must be in 2 to 4096, got 5000"),
        (["--samples", "99"], "samples must be at least 100"),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--plot", "no-such-folder/figure.png"], "no folder no-such-folder"),
        (["--plot", "figure.txt"], "figure.txt: the name must end with"),
    ],
)
def test_bad_usage_is_one_line(arguments, named, capsys):
    assert cli.main(["why-scale", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert named in error
    assert error.count("\n") == 1


def test_unknown_distribution():
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["why-scale", "--distribution", "cauchy"])
    assert exit_info.value.code == 2
    with pytest.raises(ValueError, match="distribution must be one of normal, uniform, rademacher, got 'cauchy'"):
        why_scale.measure(distribution="cauchy")


@pytest.mark.parametrize("command", ["why-scale", "demo"])
def test_missing_matplotlib_names_the_extra(command, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert cli.main([command, "--plot", str(tmp_path / "figure.png")]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == ("", "numpy-sdpa: --plot needs matplotlib: pip install 'numpy-sdpa[plot]'\n")


def test_plot_is_saved(capsys, tmp_path):
    path = tmp_path / "figure.png"
    assert cli.main(["why-scale", *SMALL, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_unwritable_plot_is_one_line(capsys, tmp_path):
    (tmp_path / "figure.png").mkdir()
    assert cli.main(["why-scale", *SMALL, "--plot", str(tmp_path / "figure.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- the picture ---


def test_figure_has_four_labelled_panels():
    figure = plot(default_result())
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "Variance of the logits",
        "Weights of one row, $d_k$ = 4096",
        "Softmax Jacobian, mean over rows of 16 keys",
        "Gradient of a query, mean over rows of 16 keys",
    ]
    units = ["(nat²)", "(share of 1)", "(weight per nat of logit)", "(per unit of upstream gradient)"]
    for axes, unit in zip(figure.axes, units, strict=True):
        assert axes.get_ylabel().endswith(unit)
        assert axes.get_xlabel()
    for axes in np.delete(np.array(figure.axes), 1):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 5


def test_figure_shows_the_numbers():
    result = default_result()
    variance, weights, jacobian, gradient = plot(result).axes
    for position, (name, scale) in enumerate(why_scale.SCALES.items()):
        rows = at_scale(result, name)
        d_k = np.array([row["d_k"] for row in rows])
        squared = np.array([scale(size) ** 2 for size in d_k])
        line, _, (bars,) = variance.containers[position].lines
        np.testing.assert_allclose(line.get_data(), [d_k, squared * [row["score_variance"] for row in rows]])
        ends = np.array([segment[:, 1] for segment in bars.get_segments()])
        np.testing.assert_allclose(ends, squared[:, None] * [row["score_variance_ci"] for row in rows])
        heights = [bar.get_height() for bar in weights.containers[position]]
        order = np.argsort(result["example_weights"]["1/sqrt(d_k)"])[::-1]
        np.testing.assert_allclose(heights, np.array(result["example_weights"][name])[order])
    star = variance.get_lines()[-1]
    assert list(star.get_xdata()) == [32, 32]
    assert list(star.get_ydata()) == [result["model"]["score_variance"], result["model"]["score_variance_scaled"]]
    for axes, measure in ((jacobian, "jacobian_norm"), (gradient, "grad_query_norm")):
        scaled, unscaled, median, overscaled = axes.get_lines()
        for line, name, key in (
            (scaled, "1/sqrt(d_k)", measure),
            (unscaled, "1", measure),
            (median, "1", f"{measure}_median"),
            (overscaled, "1/d_k", measure),
        ):
            rows = at_scale(result, name)
            np.testing.assert_array_equal(line.get_xdata(), [row["d_k"] for row in rows])
            np.testing.assert_array_equal(line.get_ydata(), [row[key] for row in rows])


def test_figure_is_legible_in_grey():
    """Marker, line style and grey value each tell the series apart; the bars have hatches."""
    _, weights, jacobian, _ = plot(default_result()).axes
    lines = jacobian.get_lines()
    assert len({line.get_marker() for line in lines}) == len(lines) == 4
    assert len({line.get_linestyle() for line in lines}) == 4
    luminances = sorted(np.dot(to_rgb(line.get_color()), (0.299, 0.587, 0.114)) for line in lines[:2] + lines[3:])
    assert min(np.diff(luminances)) > 0.15
    assert len({container[0].get_hatch() for container in weights.containers}) == 3


def test_long_rows_show_their_largest_weights():
    _, weights, *_ = plot(small_result(length=256, d_k=(4, 16, 64))).axes
    assert len(weights.containers[0]) == 16
    assert weights.get_xlabel() == "key, by falling weight (first 16 of 256)"
    example = small_result(length=256, d_k=(4, 16, 64))["example_weights"]["1/sqrt(d_k)"]
    assert weights.containers[0][0].get_height() == max(example)


# --- the document ---


def test_document_tells_the_default_run():
    """Its first table, variance and exponent; to within the intervals, since another NumPy may draw other numbers."""
    text = (DOCS / "why_scale.md").read_text(encoding="utf-8")
    assert "(why_scale.png)" in text
    picture = (DOCS / "why_scale.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 100_000
    for d_k in why_scale.D_K:
        (line,) = re.findall(rf"^\| {d_k} \| (\d.*\[.*)\|$", text, re.MULTILINE)
        cells = [[float(number) for number in re.findall(r"[\d.]+", cell)] for cell in line.split("|")[:3]]
        for value, low, high in cells:
            assert low < d_k < high
            assert value == pytest.approx(d_k, rel=0.07)
    (line,) = re.findall(r"^\| exponent \| (.*)\|$", text, re.MULTILINE)
    assert all(0.98 < float(number) < 1.02 for number in re.findall(r"[\d.]+", line))
