"""The picture is written, shows what is wrong, and loses no lone error."""

import numpy as np
import pytest
import wrong_kernels

from numpy_sdpa.cli import main
from numpy_sdpa.cli.make_case import write
from numpy_sdpa.kernelcheck import compare, make_case
from numpy_sdpa.kernelcheck.pictures import _pooled

pytest.importorskip("matplotlib")
SMALL = {"query_length": 9, "key_length": 12, "head_size": 6}
INPUTS = ("query", "key", "value", "grad_output", "bias", "sinks", "alibi_slopes")


def dump(features, wrong):
    arrays, options = make_case(features, **SMALL)
    inputs = {name: array for name, array in arrays.items() if name in INPUTS}
    return {**inputs, **wrong_kernels.run(inputs, options, wrong)}, options


@pytest.mark.parametrize(
    ("features", "wrong"),
    [
        (["causal", "bias", "sinks", "alibi"], {"causal-strict"}),
        (["gqa"], {"group-sum-missing:unreduced"}),
        (["causal"], ()),
    ],
    ids=["wrong", "a wrong shape", "right"],
)
def test_a_picture_of_every_array(tmp_path, features, wrong):
    arrays, options = dump(features, wrong)
    compare(arrays, **options).plot(tmp_path / "report.png")
    image = pytest.importorskip("matplotlib.image").imread(tmp_path / "report.png")
    assert image.shape[0] > 300
    assert image.std() > 0.01


def test_nan_and_infinity_are_drawn(tmp_path):
    arrays, options = dump([], ())
    arrays["output"][0, 0, 0, 0] = np.nan
    arrays["lse"][0, 0, 0] = np.inf
    compare(arrays, **options).plot(tmp_path / "report.svg")
    assert (tmp_path / "report.svg").stat().st_size > 1000


def test_the_flag(tmp_path, capsys):
    arrays, options = dump(["causal"], {"causal-strict"})
    write(tmp_path / "dump.npz", arrays, options)
    assert main(["compare", str(tmp_path / "dump.npz"), "--plot", str(tmp_path / "report.png")]) == 1
    assert (tmp_path / "report.png").exists()
    assert main(["compare", str(tmp_path / "dump.npz"), "--plot", str(tmp_path / "no" / "report.png")]) == 2
    assert main(["compare", str(tmp_path / "dump.npz"), "--plot", str(tmp_path / "report.nonsense")]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 2
    assert printed.out.count("verdict") == 1, "refused before the work, not after"


@pytest.mark.parametrize("name", ["", "report.xyz", "missing/report.png"], ids=["a folder", "an ending", "no folder"])
def test_where_no_picture_can_go_is_told_first(tmp_path, capsys, name):
    arrays, options = make_case("causal")
    write(tmp_path / "dump.npz", arrays, options)
    code = main(["compare", str(tmp_path / "dump.npz"), "--plot", str(tmp_path / name)])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)


def test_a_lone_error_survives_the_shrinking():
    badness = np.zeros((2, 5000))
    badness[1, 4321] = 7.0
    shrunk = _pooled(badness)
    assert shrunk.shape[1] <= 512
    assert shrunk.max() == 7.0
    assert shrunk[1].argmax() == 4321 // 10
