"""The command line as a whole: what happens where its output cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from numpy_sdpa import attention, make_case
from numpy_sdpa.cli import COMMANDS, main
from numpy_sdpa.cli.make_case import write

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this machine")
@pytest.mark.parametrize("command", [["demo"], ["info", "--json"]])
def test_a_full_disk_gets_one_line(command):
    with FULL.open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "numpy_sdpa", *command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ran.returncode == 2
    assert ran.stderr == "numpy-sdpa: [Errno 28] No space left on device\n"


def test_a_reader_who_has_seen_enough_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)
    ran = subprocess.run([sys.executable, "-m", "numpy_sdpa", "demo"], stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_terminal_without_the_signs_is_no_error(tmp_path):
    arrays, options = make_case("causal", query_length=6, key_length=7, backward=False)
    arrays["output"] = attention(arrays["query"], arrays["key"], arrays["value"], is_causal=True, query_offset=-1)
    write(tmp_path / "dump.npz", {name: arrays[name] for name in ("query", "key", "value", "output")}, options)
    ran = subprocess.run(
        [sys.executable, "-m", "numpy_sdpa", "compare", str(tmp_path / "dump.npz")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (ran.returncode, ran.stderr) == (1, "")
    assert r"j \u2264 p(i)" in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: numpy-sdpa {command}" in capsys.readouterr().out
