"""``numpy-sdpa demo``: the quick test."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from numpy_sdpa import cli, scaled_dot_product_attention
from numpy_sdpa.cli import demo


def test_prints_shape_sum_pictures_and_legend(capsys):
    assert cli.main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Output shape: [1, 1, 5, 64]", "Weights sum check: 1.0000"]
    pictures = [line for line in lines if line.startswith("q")]
    assert len(pictures) == 10
    assert all(line.endswith(" 1.0000") for line in pictures)
    assert lines[-1] == "A weight ░ up to 0.25, ▒ up to 0.5, ▓ up to 0.75, █ up to 1; nothing: masked"


def test_json_is_attention_of_the_seeds_arrays(capsys):
    assert cli.main(["demo", "--json", "--seed", "3"]) == 0
    facts = json.loads(capsys.readouterr().out)
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((1, 1, 5, 64), dtype=np.float32) for _ in range(3))
    output, weights = scaled_dot_product_attention(query, key, value)
    _, causal = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert facts["output_shape"] == list(output.shape) == [1, 1, 5, 64]
    np.testing.assert_array_equal(facts["weights"], weights[0, 0])
    np.testing.assert_array_equal(facts["causal_weights"], causal[0, 0])
    np.testing.assert_allclose(facts["row_sums"] + facts["causal_row_sums"], np.ones(10), rtol=1e-6)
    assert np.array_equal(np.triu(facts["causal_weights"], 1), np.zeros((5, 5)))
    assert facts != demo.quick_test(0)


def test_shades_grow_with_the_weight_and_only_a_masked_key_is_blank():
    header, first, second = demo.draw([[1.0, 0.0, 0.0], [0.001, 0.3, 0.699]])
    assert header.split() == ["k0", "k1", "k2", "k0", "k1", "k2", "sum"]
    assert first == "q0  |████        |   1.00              1.0000"
    assert second == "q1  |░░░░▒▒▒▒▓▓▓▓|   0.00  0.30  0.70  1.0000"


@pytest.mark.parametrize(("encoding", "full"), [("utf-8", "█"), ("ascii", "@")])
def test_terminal_without_blocks(encoding, full):
    command = [sys.executable, "-m", "numpy_sdpa", "demo"]
    printed = subprocess.run(
        command, check=True, capture_output=True, env=_environment(PYTHONIOENCODING=encoding)
    ).stdout
    text = printed.decode(encoding)
    assert f"q0  |{full * 4}{' ' * 16}|   1.00" in text  # the first causal row


def test_needs_numpy_only():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('scipy', 'matplotlib', 'threadpoolctl')));"
        "from numpy_sdpa.cli import main; sys.exit(main(['demo']))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=_environment())


def _environment(**more):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


@pytest.mark.parametrize(
    "fault", [lambda output, weights: (output, 0.999 * weights), lambda output, w: (output[..., :5], w)]
)
def test_a_wrong_result_exits_1(fault, monkeypatch, capsys):
    monkeypatch.setattr(
        demo, "scaled_dot_product_attention", lambda *a, **k: fault(*scaled_dot_product_attention(*a, **k))
    )
    assert cli.main(["demo"]) == 1


def test_wrong_causal_weights_exit_1(monkeypatch, capsys):
    def faulty(*arrays, is_causal=False):
        output, weights = scaled_dot_product_attention(*arrays, is_causal=is_causal)
        return output, 0.999 * weights if is_causal else weights

    monkeypatch.setattr(demo, "scaled_dot_product_attention", faulty)
    assert cli.main(["demo"]) == 1


def test_plot_shows_both_pictures(capsys, tmp_path):
    path = tmp_path / "weights.png"
    assert cli.main(["demo", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    facts = demo.quick_test(0)
    full, causal, colorbar = demo.plot(facts).axes
    assert [axes.get_title() for axes in (full, causal)] == ["Full attention", "Causal attention"]
    for axes, name in ((full, "weights"), (causal, "causal_weights")):
        np.testing.assert_array_equal(axes.images[0].get_array(), facts[name])
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("key position", "query position")
    assert sum(text.get_text() == "masked" for text in causal.texts) == 10
    assert colorbar.get_ylabel() == "weight (share of 1)"


def test_negative_seed_is_bad_usage(capsys):
    assert cli.main(["demo", "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "numpy-sdpa: --seed must be at least 0, got -1\n"
