"""Large problems are diagnosed from strips of their plane, and in seconds."""

import numpy as np
import pytest
import wrong_kernels
from test_diagnosis import first_ties

from numpy_sdpa.kernelcheck import compare, make_case
from numpy_sdpa.kernelcheck.sample import strips_of

INPUTS = ("query", "key", "value", "grad_output", "bias", "sinks", "alibi_slopes", "mask")


def long_dump(features, wrong, length=768, dtype="float32", **sizes):
    sizes = {"batch": 1, "query_heads": 2, "head_size": 16, **sizes}
    arrays, options = make_case(features, dtype=dtype, query_length=length, key_length=length, **sizes)
    inputs = {name: array for name, array in arrays.items() if name in INPUTS}
    return {**inputs, **wrong_kernels.run(inputs, options, wrong)}, options


PLANTED = [
    (["causal"], {"causal-strict"}),
    (["window"], {"window-off-by-one:left,1"}),
    (["gqa"], {"gqa-tiled"}),
    (["softcap", "bias"], {"bias-before-softcap"}),
    (["causal"], {"row-dot-missing"}),
    (["softcap"], {"softcap-derivative-missing"}),
    (["gqa"], {"group-sum-missing:mean"}),
    ([], {"scale-missing-in-backward:key"}),
    (["causal"], {"causal-ignored-in-backward"}),
    (["broadcast_bias"], {"broadcast-sum-missing:mean"}),
    (["sinks"], {"grad-sinks-sign"}),
    ([], {"layout-swapped:memory"}),
]


@pytest.mark.parametrize(("features", "wrong"), PLANTED, ids=lambda value: "+".join(sorted(value)))
def test_a_long_dump_is_diagnosed_from_strips(features, wrong):
    sizes = {"batch": 2} if "broadcast_bias" in features else {}
    sizes |= {"query_heads": 4, "key_heads": 2} if "gqa" in features else {}
    arrays, options = long_dump(features, wrong, **sizes)
    report = compare(arrays, **options)
    assert next(iter(wrong)).partition(":")[0] in first_ties(report), str(report)


@pytest.mark.parametrize("features", [["causal"], ["window", "gqa"]], ids="+".join)
def test_a_long_right_dump_is_right(features):
    arrays, options = long_dump(features, ())
    assert compare(arrays, **options).passed


def test_two_mistakes_in_a_long_dump():
    arrays, options = long_dump(["causal"], {"causal-strict", "scale-twice-in-backward"})
    report = compare(arrays, **options)
    assert {"causal-strict", "scale-twice-in-backward"} <= {d.mistake for d in report.diagnosis}, str(report)


@pytest.mark.slow
def test_4096_tokens():
    arrays, options = long_dump(["causal"], {"causal-strict", "row-dot-missing"}, length=4096, query_heads=1)
    report = compare(arrays, **options)
    assert {"causal-strict", "row-dot-missing"} <= {d.mistake for d in report.diagnosis}, str(report)


def test_strips_have_the_worst_place_and_are_spread():
    badness = np.zeros(1000)
    badness[777] = 5.0
    strips = strips_of(badness, 64, ())
    positions = np.concatenate([np.arange(strip.start, strip.stop) for strip in strips])
    assert 777 in positions
    assert len(set(positions)) == len(positions) <= 64
    assert max(np.diff(positions)) > 100
    second = strips_of(badness, 64, strips)
    others = np.concatenate([np.arange(strip.start, strip.stop) for strip in second])
    assert 777 not in others
    assert strips_of(np.zeros(10), 64, ()) == (slice(0, 10),)


def test_what_strips_do_not_show_is_found_where_everything_is_small_enough():
    """Gradients of sinks are sums over all rows; a softmax over the queries is no matter of some rows."""
    arrays, options = long_dump(["sinks"], {"row-dot-missing"}, length=160)
    report = compare(arrays, **options)
    assert report.diagnosis[0].mistake == "row-dot-missing"
    assert "grad_sinks" in report.diagnosis[0].explains, str(report)
    arrays, options = long_dump([], {"softmax-wrong-axis:queries"}, length=160)
    report = compare(arrays, **options)
    assert report.diagnosis[0].mistake == "softmax-wrong-axis", str(report)
    assert set(report.diagnosis[0].explains) == {"output", "grad_query", "grad_key", "grad_value"}
