"""The command line as a whole: what happens where its output cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from numpy_sdpa.cli import COMMANDS, main

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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: numpy-sdpa {command}" in capsys.readouterr().out
