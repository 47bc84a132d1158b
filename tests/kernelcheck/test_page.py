"""The page's trip, from a case to a named mistake, is run as it stands."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from numpy_sdpa.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernelcheck.md").read_text(encoding="utf-8")


def test_the_trip(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    commands, expected = re.search(r"```sh\n(.*?)```.*?```text\n(.*?)```", PAGE, re.DOTALL).groups()
    make_case, kernel, compare = (shlex.split(line, comments=True) for line in commands.splitlines())
    assert main(make_case[1:]) == 0
    runpy.run_path(str(ROOT / kernel[1]))
    capsys.readouterr()
    assert main(compare[1:]) == 1
    printed = capsys.readouterr().out
    # where an error is worst may hang on the last digit: the words do not
    assert [line.split()[:2] for line in printed.splitlines()] == [line.split()[:2] for line in expected.splitlines()]
    assert printed.splitlines()[-1].partition(" to ")[0] == expected.splitlines()[-1].partition(" to ")[0]
    assert (tmp_path / "report.png").exists()


def test_what_the_page_names_is_there():
    for name in re.findall(r"\]\(([\w.]+)\)", PAGE):
        if name != "tolerance.md":  # written beside the tolerances
            assert (ROOT / "docs" / name).exists(), name
    for name in re.findall(r"examples/\w+\.py|numpy_sdpa/[\w/]+\.py", PAGE):
        assert (ROOT / name).exists(), name
    assert len(PAGE.splitlines()) < 45
