"""``numpy-sdpa verify``: every rule's gradient on this machine, and a real model's tensors."""

import argparse
import json

HELP = "Check every gradient rule by several independent oracles, and a real model's tensors against torch's results."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from numpy_sdpa.verify import ORACLES, Finding, load_rules, model_findings

    def say(line: str) -> None:
        if not arguments.json:
            print(line, flush=True)  # each rule as soon as it is checked: all of them take seconds

    def cell(finding: Finding) -> str:
        return f"{finding.error:.1e}" + ("" if finding.passed else " WRONG")

    rules = list(load_rules())
    width = max(len(rule.name) for rule in rules)
    say("Each gradient rule against each oracle: largest error, relative to the array's largest entry")
    say("(Taylor rate: how far the order of convergence is from 2, which is to be small, not 0)\n")
    say(f"{'rule':<{width}}" + "".join(f"{oracle:>15}" for oracle in ORACLES) + "   worst at")
    by_rule: dict[str, dict[str, Finding]] = {}
    for rule in rules:
        row = by_rule[rule.name] = {oracle: check(rule) for oracle, check in ORACLES.items()}
        # a rate is on another scale than an error: where it is furthest off says something only if it is wrong
        shown = [finding for oracle, finding in row.items() if oracle != "Taylor rate" or not finding.passed]
        furthest = max(shown, key=lambda finding: (not finding.passed, finding.error))
        say(
            f"{rule.name:<{width}}"
            + "".join(f"{cell(finding):>15}" for finding in row.values())
            + f"   {furthest.where}"
        )
    say("\nA real transformer's tensors, (3, 12, 32, 32) float32, against what torch's autograd computed there\n")
    model = model_findings()
    for name, finding in model.items():
        say(f"{name:<{width}}{cell(finding):>15}   {finding.where}")
    findings = [*model.values(), *(finding for row in by_rule.values() for finding in row.values())]
    wrong = sum(not finding.passed for finding in findings)
    say(f"\n{len(findings)} checks, " + (f"{wrong} WRONG" if wrong else "all right"))
    if arguments.json:
        as_dicts = {
            name: {oracle: finding._asdict() for oracle, finding in row.items()} for name, row in by_rule.items()
        }
        by_array = {name: finding._asdict() for name, finding in model.items()}
        print(json.dumps({"passed": not wrong, "rules": as_dicts, "model": by_array}))
    return 1 if wrong else 0
