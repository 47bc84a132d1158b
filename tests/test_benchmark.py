"""The benchmark measures what it says, in turns, and prints it."""

import json
import sys

import numpy as np
import pytest

from numpy_sdpa import attention, benchmark
from numpy_sdpa.cli import main


@pytest.fixture
def quick(monkeypatch):
    """No rest and one call a block, and no torch: tests import it never."""
    monkeypatch.setattr(benchmark, "REST", 0)
    monkeypatch.setattr(benchmark, "BLOCK", 0)
    monkeypatch.setitem(sys.modules, "torch", None)


def test_a_ratio_is_the_median_of_pairs_in_turns(quick, monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    durations = {"ours": [9, 2, 9, 3, 9, 8], "other": [9, 4, 9, 4, 9, 2]}  # every first call warms up

    def call(name):
        def run():
            order.append(name)
            now[0] += durations[name].pop(0)

        return run

    row = benchmark.measure(benchmark.Comparison("group", "name", call("ours"), call("other"), 1.0), pairs=3)
    assert (row.ratio, row.ours, row.other) == (0.75, 3, 4)
    assert order == ["ours"] * 2 + ["other"] * 2 + ["ours"] * 2 + ["other"] * 2 + ["ours"] * 2 + ["other"] * 2


@pytest.mark.parametrize("inputs", [benchmark.random_inputs(200), benchmark.model_inputs(200)], ids=["random", "model"])
def test_everybody_computes_the_same(inputs):
    expected = attention(*inputs[:3])
    assert expected.shape == (1, 8, 200, 64)
    np.testing.assert_allclose(benchmark.plain_numpy(inputs)(), expected, atol=1e-5)
    np.testing.assert_allclose(benchmark.blockwise(inputs, 2, backward=False)(), expected, atol=1e-5)
    assert benchmark.blockwise(inputs, 2, backward=True)().query.shape == (1, 8, 200, 64)
    benchmark.products_alone(inputs, 2)()


def test_the_table(quick, capsys):
    assert main(["bench", "--lengths", "64", "--pairs", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ours / other") == 1
    for words in ("causal / full, L = 128", "window of 256", "float64", "dense / plain NumPy", "no torch"):
        assert words in printed


def test_json(quick, capsys):
    assert main(["bench", "--lengths", "64", "--pairs", "1", "--json", "--only", "causal"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["torch"] is None
    (row,) = result["rows"]
    assert row["name"] == "causal / full, L = 128"
    assert row["ratio"] == pytest.approx(row["ours"] / row["other"])


def test_plot(quick, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "ratios.png"
    assert main(["bench", "--lengths", "64", "--pairs", "1", "--only", "itself", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [["--lengths", "0"], ["--pairs", "0"], ["--threads", "0"], ["--plot", "/nowhere/a.png"], ["--only", "no such row"]],
)
def test_bad_usage(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
