"""`numpy-sdpa verify` and `info`: what they print, and that they notice a wrong rule."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from numpy_sdpa import cli, steps, verify
from numpy_sdpa.verify import ORACLES, load_rules, model_findings

RULES = {rule.name: rule for rule in load_rules()}


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_passes_every_oracle(name, oracle):
    finding = ORACLES[oracle](RULES[name])
    assert finding.passed, finding


def test_no_rule_is_empty():
    """A rule under which nothing is seen would pass with any derivative."""
    for rule in RULES.values():
        weights = rule.forward().weights
        assert ((weights > 0).sum(axis=-1) > 1).any(), rule.name


def test_the_real_model_is_within_two_millionths():
    findings = model_findings()
    assert set(findings) == {"output", "weights", "grad_query", "grad_key", "grad_value"}
    for name, finding in findings.items():
        assert 0 < finding.error <= 2e-6, name


def wrong_softcap_backward(xp, grad_capped, scores, softcap):
    """The derivative forgotten: a frequent mistake."""
    return steps.SoftcapGradients(scores=grad_capped, softcap=xp.sum(grad_capped * 0))


def wrong_scores_backward(*arguments):
    gradients = right_scores_backward(*arguments)
    return gradients._replace(key=gradients.key * (1 + 1e-9))


right_scores_backward = steps.scores_backward


@pytest.mark.parametrize(
    ("function", "wrong", "rule", "oracles"),
    [
        ("softcap_backward", wrong_softcap_backward, "softcap", ("differences", "complex step", "adjoint", "torch")),
        ("scores_backward", wrong_scores_backward, "plain", ("complex step", "adjoint", "torch")),
    ],
)
def test_a_wrong_rule_is_noticed(monkeypatch, function, wrong, rule, oracles):
    monkeypatch.setattr(steps, function, wrong)
    for oracle in oracles:
        assert not ORACLES[oracle](RULES[rule]).passed, oracle


def test_the_worst_entry_is_found():
    expected = np.array([[1.0, -2.0], [4.0, 0.0]])
    got = expected + np.array([[0.0, 0.2], [0.0, 0.0]])
    finding = verify.worst(iter([("a", expected, expected), ("b", got, expected)]), tolerance=0.1)
    assert finding == (pytest.approx(0.05), "b[0, 1]", True)
    assert not verify.worst(iter([("b", got, expected)]), tolerance=0.01).passed
    assert not verify.worst(iter([("b", got * np.nan, expected)]), tolerance=0.01).passed
    assert not verify.worst(iter([("b", got[0], expected)]), tolerance=0.01).passed


def test_where_names_the_input_and_the_result():
    """A check along one direction has no index: the report's is the number of the result."""
    rule = RULES["plain"]
    for several in (True, False):
        upstream = rule.upstream if several else {"grad_output": rule.upstream["grad_output"]}
        for oracle, pattern in ((verify.differences, r"grad_(\w+) from (\w+)"), (verify.taylor, r"(\w+) along (\w+)")):
            names = set(re.fullmatch(pattern, oracle(rule._replace(upstream=upstream)).where).groups())
            assert len(names & set(rule.arrays)) == 1
            assert names - set(rule.arrays) <= {name.removeprefix("grad_") for name in upstream}


def test_each_rule_is_shown_as_soon_as_it_is_checked(monkeypatch, capsys):
    shown = []

    def rules():
        return iter([RULES["plain"], RULES["softcap"]])

    def check(rule):
        shown.append(capsys.readouterr().out)
        return verify.Finding(0.0, "", True)

    monkeypatch.setattr(verify, "load_rules", rules)
    monkeypatch.setattr(verify, "ORACLES", {"differences": check})
    assert cli.main(["verify"]) == 0
    assert "rule" in shown[0]
    assert shown[1].startswith("plain")


def test_exit_code_and_table_of_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(steps, "softcap_backward", wrong_softcap_backward)
    monkeypatch.setattr(verify, "load_rules", lambda: iter([RULES["softcap"]]))
    assert cli.main(["verify"]) == 1
    table = capsys.readouterr().out
    assert "WRONG" in table
    assert "complex step" in table
    assert cli.main(["verify", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert report["rules"]["softcap"]["complex step"]["passed"] is False
    assert report["model"]["output"]["passed"] is True


def test_info(capsys):
    assert cli.main(["info"]) == 0
    assert "numpy_sdpa" in capsys.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["numpy"] == np.__version__
    assert facts["cores"] >= 1


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["verify", "--no-such-flag"]])
def test_bad_usage_exits_with_2(arguments):
    run = subprocess.run([sys.executable, "-m", "numpy_sdpa", *arguments], capture_output=True, text=True)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
