"""Dumps in all their forms, and what is wrong with them: one line, exit 2."""

import gc
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import wrong_kernels

from numpy_sdpa import attention
from numpy_sdpa.cli import main
from numpy_sdpa.cli.make_case import write
from numpy_sdpa.kernelcheck import DumpError, compare, make_case

ROOT = Path(__file__).parents[2]
INPUTS = ("query", "key", "value", "grad_output", "mask", "bias", "sinks", "key_lengths")


def dump(features=("causal", "gqa"), wrong=(), dtype="float32", **keywords):
    arrays, options = make_case(features, dtype=dtype, query_length=9, key_length=12, head_size=6, **keywords)
    inputs = {name: array for name, array in arrays.items() if name in INPUTS}
    return {**inputs, **wrong_kernels.run(inputs, options, wrong)}, options


def as_blhd(arrays):
    swapped = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")
    return {name: np.swapaxes(array, 1, 2) if name in swapped else array for name, array in arrays.items()}


# -- the three sources, the two layouts ------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_files_say_the_same_as_a_mapping(tmp_path, ending, dtype):
    if ending == "safetensors":
        pytest.importorskip("safetensors")
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    arrays, options = dump(wrong={"causal-strict"}, dtype=dtype)
    path = tmp_path / f"dump.{ending}"
    write(path, arrays, options)
    expected = compare(arrays, **options).to_dict()
    assert compare(path).to_dict() == expected
    assert compare(str(path)).to_dict() == expected
    assert expected["diagnosis"][0]["mistake"] == "causal-strict"


def test_a_number_of_two_bytes_in_a_file(tmp_path):
    """Without a head axis a sink is 0-d: its bfloat16 is two bytes without a shape."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((5, 4)).astype(np.float16) for name in ("query", "key", "value")}
    two_bytes = {name: (a.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for name, a in arrays.items()}
    one = np.array(0x3F80, np.uint16)  # 1.0
    inputs = {name: (a.astype(np.uint32) << 16).view(np.float32) for name, a in two_bytes.items()}
    output = attention(**inputs, sinks=np.float32(1.0)[()])
    raw = {name: a.view("V2") for name, a in {**two_bytes, "sinks": one}.items()}
    np.savez(tmp_path / "dump.npz", output=output, **raw)
    assert compare(tmp_path / "dump.npz").passed


@pytest.mark.parametrize("plane", [(3, 0), (1, 0)])
def test_without_keys(tmp_path, plane):
    pytest.importorskip("matplotlib")
    length, keys = plane
    query, key, grad_output = (np.ones((1, 2, size, 4), np.float32) for size in (length, keys, length))
    sinks = np.zeros(2, np.float32)
    inputs = {"query": query, "key": key, "value": key, "sinks": sinks, "grad_output": grad_output}
    right = {"output": np.zeros_like(query), "lse": np.zeros((1, 2, length), np.float32), "grad_key": key}
    report = compare({**inputs, **right})
    assert json.loads(report.to_json())["passed"]
    wrong = {**right, "output": query, "lse": np.ones((1, 2, length), np.float32)}
    report = compare({**inputs, **wrong})
    assert not json.loads(report.to_json())["passed"]
    report.plot(tmp_path / "report.png")


def test_both_layouts_say_the_same_but_for_the_index():
    arrays, options = dump(wrong={"causal-strict"})
    expected = compare(arrays, **options).to_dict()
    got = compare(as_blhd(arrays), layout="blhd", **options).to_dict()
    for name, array in got["arrays"].items():
        index = expected["arrays"][name]["worst_index"]
        if name != "lse":
            index[1], index[2] = index[2], index[1]
        assert array == expected["arrays"][name]
    assert got == expected


@pytest.mark.parametrize("drop", ["(H, L, E)", "(L, E)"])
def test_fewer_axes(drop):
    arrays, options = dump(features=["causal"], wrong={"causal-strict"})
    place = 0 if drop == "(H, L, E)" else (0, 0)
    arrays = {name: array[place] for name, array in arrays.items()}
    report = compare(arrays, **options)
    assert report.diagnosis[0].mistake == "causal-strict"
    assert len(report.arrays["output"].worst_index) == arrays["output"].ndim
    worst = report.arrays["grad_key"]
    assert worst.got == arrays["grad_key"][worst.worst_index]


def test_the_worst_index_is_where_the_kernel_gave_what_the_report_says():
    arrays, options = dump(wrong={"row-dot-missing"})
    for layout, given in (("bhld", arrays), ("blhd", as_blhd(arrays))):
        for name, array in compare(given, layout=layout, **options).arrays.items():
            assert given[name][array.worst_index] == np.float32(array.got)


def test_other_array_modules():
    jnp = pytest.importorskip("jax.numpy")
    arrays, options = dump()
    assert compare({name: jnp.asarray(array) for name, array in arrays.items()}, **options).passed


def test_options_in_the_dump_and_over_it(tmp_path):
    arrays, options = dump(wrong={"causal-strict"})
    path = tmp_path / "dump.npz"
    np.savez(path, options=np.array([json.dumps({**options, "window": [3, None], "softcap": 1.5})]), **arrays)
    report = compare(path, window=None, softcap=None)
    assert report.diagnosis[0].mistake == "causal-strict"
    # an option may also be an array of its own
    scalars = {name: np.asarray(option) for name, option in options.items()}
    assert compare({**arrays, **scalars}).to_dict() == report.to_dict()


def test_a_dropout_seed_is_ours():
    import numpy_sdpa

    arrays, _ = dump(features=[])
    inputs = [arrays[name] for name in ("query", "key", "value")]
    output, residuals = numpy_sdpa.sdpa_forward(*inputs, dropout_p=0.5, dropout_seed=7)
    gradient = numpy_sdpa.sdpa_backward(arrays["grad_output"], residuals).value
    given = {name: arrays[name] for name in ("query", "key", "value", "grad_output")}
    given |= {"output": output, "grad_value": gradient}
    assert compare(given, dropout_p=0.5, dropout_seed=7).passed
    assert not compare(given, dropout_p=0.5, dropout_seed=8).passed


# -- packed sequences ------------------------------------------------------------------------------


def packed_dump(wrong=(), outside=2, **options):
    """Three sequences one after the other, with rows outside of them; each run by itself."""
    rng = np.random.default_rng(5)
    cu_q, cu_k = np.array([1, 5, 5, 12]), np.array([0, 6, 9, 18])
    total_q, total_k = 12 + outside, 18 + outside

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    arrays = {
        "query": normal(total_q, 4, 6),
        "key": normal(total_k, 2, 6),
        "value": normal(total_k, 2, 6),
        "grad_output": normal(total_q, 4, 6),
        "sinks": normal(4),
    }
    results = {
        "output": np.zeros_like(arrays["query"]),
        "lse": np.full((4, total_q), -np.inf, np.float32),
        "grad_query": np.zeros_like(arrays["query"]),
        "grad_key": np.zeros_like(arrays["key"]),
        "grad_value": np.zeros_like(arrays["value"]),
        "grad_sinks": np.zeros(4, np.float32),
    }
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        if q0 == q1:
            continue
        queries, keys = slice(q0, q1), slice(k0, k1)
        rows = {"query": queries, "grad_output": queries, "key": keys, "value": keys}
        one = {name: arrays[name][part].swapaxes(0, 1)[None] for name, part in rows.items()}
        got = wrong_kernels.run({**one, "sinks": arrays["sinks"]}, {**options, "enable_gqa": True}, wrong)
        results["lse"][:, queries] = got["lse"][0]
        results["grad_sinks"] += got["grad_sinks"]
        for name, part in (("output", queries), ("grad_query", queries), ("grad_key", keys), ("grad_value", keys)):
            results[name][part] = got[name][0].swapaxes(0, 1)
    return {**arrays, **results, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, {**options, "enable_gqa": True}


def test_packed_sequences():
    arrays, options = packed_dump(is_causal=True, alignment="lower_right")
    report = compare(arrays, **options)
    assert report.passed, str(report)


def test_a_mistake_in_packed_sequences():
    arrays, options = packed_dump({"causal-strict"}, is_causal=True, alignment="lower_right")
    report = compare(arrays, **options)
    assert report.diagnosis[0].mistake == "causal-strict", str(report)
    for name, array in report.arrays.items():
        assert arrays[name][array.worst_index] == np.float32(array.got), name


def test_rows_outside_every_sequence_must_be_zero():
    arrays, options = packed_dump()
    arrays["output"][0, 2, 3] = 1.0
    report = compare(arrays, **options)
    assert not report.arrays["output"].passed
    assert report.arrays["output"].worst_index == (0, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_k": None}, "without cu_seqlens_k"),
        ({"cu_seqlens_q": np.array([1, 9, 5, 12])}, "must rise"),
        ({"cu_seqlens_q": np.array([1, 5, 5, 99])}, "must lie in 0 … 14"),
        ({"cu_seqlens_q": np.array([1, 5, 12])}, "same length"),
        ({"mask": np.ones((14, 20), bool)}, "does not go with packed sequences"),
        ({"lse": np.zeros((14, 4), np.float32)}, r"form \(Hq, T\)"),
    ],
)
def test_what_is_wrong_with_packed_sequences(change, message):
    arrays, options = packed_dump()
    with pytest.raises(DumpError, match=message):
        compare({**arrays, **change}, **options)


# -- what cannot be used ---------------------------------------------------------------------------

UNUSABLE = [
    ({"query": None}, "query is missing"),
    (dict.fromkeys(("output", "lse", "grad_query", "grad_key", "grad_value")), "nothing to compare"),
    ({"grad_output": None}, "without grad_output"),
    ({"dq": np.zeros(3)}, "call it grad_query"),
    ({"nonsense": np.zeros(3)}, "unknown name 'nonsense'"),
    ({"method": "dense"}, "a kernel has no such option"),
    ({"query": np.zeros((2, 4, 9, 6), np.int32)}, "query must be one of float16"),
    ({"output": np.zeros((2, 4, 9, 6), np.int32)}, "output must be floating"),
    ({"output": np.zeros((2, 4, 9, 7), np.float32)}, r"output must have shape \(2, 4, 9, 6\), got \(2, 4, 9, 7\)"),
    ({"key": np.zeros((2, 2, 12, 5), np.float32)}, "same last dimension"),
    ({"grad_output": np.zeros((2, 4, 9, 5), np.float32)}, "grad_output must have shape"),
    ({"grad_bias": np.zeros((9, 12), np.float32)}, "grad_bias was given without bias"),
    ({"softcap": 0.0}, "softcap must be greater than 0"),
    ({"window": (3, -1)}, "window"),
    ({"options": np.array("{not json")}, "options is no JSON"),
    ({"options": np.array("[1]")}, "options must be a JSON object"),
    ({"options": np.array("[" * 100_000)}, "options is no JSON"),
    ({"options": np.array('{"window": ["a", 1]}')}, "window must be"),
    ({"options": np.array('{"window": [[1], [2]]}')}, "window must be"),
    ({"options": np.array('{"window": [1.5, 2]}')}, "window must be"),
    ({"options": np.array('{"window": [1e999, 2]}')}, "window must be"),
    ({"options": np.array('{"key_lengths": [[1], [2, 3]]}')}, "key_lengths must be one array"),
]


@pytest.mark.parametrize(("change", "message"), UNUSABLE, ids=[message for _, message in UNUSABLE])
def test_what_is_unusable_gets_one_line(change, message):
    arrays, options = dump()
    with pytest.raises(DumpError, match=message) as caught:
        compare({**arrays, **options, **change})
    assert "\n" not in str(caught.value)


def test_torch_tensors_are_shown_how_to_convert():
    class Tensor:
        __module__ = "torch"

    arrays, options = dump()
    with pytest.raises(DumpError, match=r"detach\(\)"):
        compare({**arrays, "query": Tensor()}, **options)


def test_layout_and_semantics_are_checked():
    arrays, options = dump()
    with pytest.raises(DumpError, match="layout must be"):
        compare(arrays, layout="lbhd", **options)
    with pytest.raises(DumpError, match="semantics must be one of"):
        compare(arrays, semantics="tensorflow", **options)


def npy(header, data=b""):
    """A file of one array, with whatever header."""
    header = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


FLOATS = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }"


@pytest.mark.parametrize(
    "content",
    [npy(FLOATS % "(5,)", b"123"), npy(FLOATS % "(1000000000000, 1000)"), npy("hello"), npy(FLOATS % "(-5,)")],
    ids=["cut off", "larger than any memory", "no header", "a negative size"],
)
def test_a_damaged_array_gets_one_line(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "dump.npz", "w") as file:
        file.writestr("query.npy", content)
    with pytest.raises(DumpError, match="query is no readable array") as caught:
        compare(tmp_path / "dump.npz")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("place", "value"), [(10, 99), (8, 1)], ids=["an unknown compression", "encrypted"])
def test_an_archive_that_cannot_be_unpacked_gets_one_line(tmp_path, place, value):
    with zipfile.ZipFile(tmp_path / "dump.npz", "w") as file:
        file.writestr("query.npy", npy(FLOATS % "(5,)", bytes(20)))
    content = bytearray((tmp_path / "dump.npz").read_bytes())
    content[content.find(b"PK\x01\x02") + place] = value
    (tmp_path / "dump.npz").write_bytes(content)
    with pytest.raises(DumpError, match=r"dump\.npz"):
        compare(tmp_path / "dump.npz")


@pytest.mark.filterwarnings("error")
def test_a_file_that_is_no_archive_is_closed(tmp_path):
    (tmp_path / "dump.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DumpError, match=r"is no \.npz file"):
        compare(tmp_path / "dump.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    with pytest.raises(DumpError, match="but a single array"):
        compare(tmp_path / "array.npz")
    gc.collect()  # a file left open warns here


def test_objects_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    arrays, _ = dump()
    arrays["output"] = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "dump.npz", **arrays)
    with pytest.raises(DumpError, match="output cannot be read without pickle"):
        compare(tmp_path / "dump.npz")
    assert not (tmp_path / "exploded").exists()


# -- the command line ------------------------------------------------------------------------------

ARRAY_KEYS = {
    "passed", "max_abs_error", "max_rel_error", "worst_index", "expected", "got", "tolerance", "sensitivity",
    "non_finite",
}  # fmt: skip


def command(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_right_is_0_wrong_is_1_unusable_is_2(tmp_path, capsys):
    right, options = dump()
    wrong, _ = dump(wrong={"causal-strict"})
    write(tmp_path / "right.npz", right, options)
    write(tmp_path / "wrong.npz", wrong, options)
    (tmp_path / "broken.npz").write_text("not a zip file")
    code, out, err = command(capsys, "compare", tmp_path / "right.npz")
    assert (code, err) == (0, "")
    assert "Right" in out
    code, out, err = command(capsys, "compare", tmp_path / "wrong.npz")
    assert (code, err) == (1, "")
    assert "causal-strict" in out
    assert "j ≤ p(i)" in out
    for name in ("broken.npz", "missing.npz", "dump.txt"):
        code, out, err = command(capsys, "compare", tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("numpy-sdpa: ")


def test_flags_override_the_dump(tmp_path, capsys):
    arrays, options = dump(features=["causal"])
    write(tmp_path / "dump.npz", arrays, {**options, "softcap": 2.0, "alignment": "lower_right"})
    path = tmp_path / "dump.npz"
    assert command(capsys, "compare", path)[0] == 1
    write(path, arrays, {**options, "alignment": "lower_right", "scale": 0.3, "window": [2, 2]})
    flags = ["--alignment", "upper_left", "--scale", str(6**-0.5), "--window", "none", "none"]
    assert command(capsys, "compare", path, *flags)[0] == 0
    code, out, _ = command(capsys, "compare", path, *flags, "--no-is-causal")
    assert code == 1
    assert "Wrong" in out


def test_json_has_exactly_the_promised_form(tmp_path, capsys):
    arrays, options = dump(wrong={"row-dot-missing"})
    arrays["lse"][0, 0, 0] = np.nan
    arrays["grad_value"][0, 0, 0, 0] = np.inf
    write(tmp_path / "dump.npz", arrays, options)
    code, out, _ = command(capsys, "compare", tmp_path / "dump.npz", "--json")
    assert code == 1

    def no_constants(text):
        raise AssertionError(f"{text} is no JSON")

    report = json.loads(out, parse_constant=no_constants)
    assert set(report) == {"passed", "arrays", "diagnosis"}
    assert report["passed"] is False
    for array in report["arrays"].values():
        assert set(array) == ARRAY_KEYS
    for diagnosis in report["diagnosis"]:
        assert set(diagnosis) == {"mistake", "explains", "residual_error"}
    assert report["diagnosis"][0]["mistake"] == "row-dot-missing"
    assert report["diagnosis"][0]["explains"] == ["grad_query", "grad_key"]
    lse, value = report["arrays"]["lse"], report["arrays"]["grad_value"]
    assert lse["got"] == "nan"
    assert lse["non_finite"] == 1
    assert lse["worst_index"] == [0, 0, 0]
    assert value["got"] == "inf"
    assert value["max_abs_error"] == "inf"


def test_a_wrong_shape_that_is_explained_is_1(tmp_path, capsys):
    arrays, options = dump(wrong={"group-sum-missing:unreduced"})
    write(tmp_path / "dump.npz", arrays, options)
    code, out, _ = command(capsys, "compare", tmp_path / "dump.npz", "--json")
    report = json.loads(out)
    assert code == 1
    assert report["diagnosis"][0]["mistake"] == "group-sum-missing"
    assert report["arrays"]["grad_key"] == {
        "passed": False, "max_abs_error": None, "max_rel_error": None, "worst_index": None, "expected": [2, 2, 12, 6],
        "got": [2, 4, 12, 6], "tolerance": None, "sensitivity": None, "non_finite": 0,
    }  # fmt: skip
    assert "shape (2, 4, 12, 6), expected (2, 2, 12, 6)" in command(capsys, "compare", tmp_path / "dump.npz")[1]


def test_a_tolerance_of_ones_own(tmp_path, capsys):
    arrays, options = dump(features=[])
    arrays["output"] = arrays["output"] + np.float32(1e-4)
    assert not compare(arrays, **options).passed
    assert compare(arrays, tolerance=2e-4, **options).passed
    assert not compare(arrays, tolerance=5e-5, **options).passed
    assert compare(arrays, tolerance={"output": 2e-4}, **options).passed
    assert compare(arrays, tolerance={"output": 2e-4}, **options).arrays["lse"].tolerance < 1e-4
    write(tmp_path / "dump.npz", arrays, options)
    assert command(capsys, "compare", tmp_path / "dump.npz", "--tolerance", "2e-4")[0] == 0
    for unusable in ("-1", "nan", "inf"):
        code, out, err = command(capsys, "compare", tmp_path / "dump.npz", "--tolerance", unusable)
        assert (code, out, err.count("\n")) == (2, "", 1)
    with pytest.raises(DumpError, match="unknown name 'outputs'"):
        compare(arrays, tolerance={"outputs": 2e-4}, **options)


def test_the_other_layout_is_named_where_its_shapes_agree():
    arrays, options = make_case("gqa", layout="blhd")
    with pytest.raises(DumpError, match=r"; in layout blhd all shapes agree$"):
        compare(arrays, **options)
    assert compare(arrays, layout="blhd", **options).passed
    with pytest.raises(DumpError) as caught:
        compare({**arrays, "value": arrays["value"][:, 1:]}, layout="blhd", **options)
    assert "layout" not in str(caught.value)


def test_a_golden_array_that_was_left_in_is_named(tmp_path):
    arrays, options = make_case("causal", query_length=5, key_length=6)
    kernels = {**arrays, "output": arrays["output"].astype(np.float32)}
    report = compare(kernels, **options)
    assert report.passed
    assert report.golden == ("lse", "grad_query", "grad_key", "grad_value")
    assert "lse, grad_query, grad_key, grad_value: the golden result itself" in str(report)
    zeros = {**kernels, "lse": arrays["lse"].astype(np.float32), "grad_output": 0 * arrays["grad_output"]}
    zeros |= {name: 0 * arrays[name] for name in ("grad_query", "grad_key", "grad_value")}
    assert compare(zeros, **options).golden == ()  # 0 is any kernel's


def test_a_window_that_is_none_is_told_in_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command(capsys, "compare", "dump.npz", "--window", "3", "much")
    assert capsys.readouterr().err.endswith("argument --window: each side is an int or none, got 'much'\n")


def test_a_case_from_the_command_line_is_right(tmp_path, capsys):
    path = tmp_path / "case.npz"
    sizes = ["--batch", 1, "--query-heads", 2, "--query-length", 5, "--key-length", 7, "--head-size", 4]
    code, out, _ = command(capsys, "make-case", path, "--features", "causal", "bias", "--dtype", "float16", *sizes)
    assert code == 0
    own = "output, lse, grad_query, grad_key, grad_value, grad_bias"
    assert out.endswith(f"Next: put your kernel's own {own} in place of these, and: numpy-sdpa compare DUMP\n")
    code, out, _ = command(capsys, "compare", path)
    assert code == 0
    assert "golden result itself" in out
    assert "--layout blhd" in command(capsys, "make-case", path, "--layout", "blhd")[1]
    code, _, err = command(capsys, "make-case", path, "--features", "nonsense")
    assert (code, err.count("\n")) == (2, 1)
    assert command(capsys, "make-case", tmp_path / "case.txt")[0] == 2
    assert command(capsys, "make-case", tmp_path / "no" / "folder.npz")[0] == 2


def test_the_module_runs_as_a_command(tmp_path):
    arrays, options = dump(wrong={"scale-missing"})
    write(tmp_path / "dump.npz", arrays, options)
    ran = subprocess.run(
        [sys.executable, "-m", "numpy_sdpa", "compare", str(tmp_path / "dump.npz")],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    assert "scale-missing" in ran.stdout
