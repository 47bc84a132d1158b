"""``numpy-sdpa verify``: every rule's gradient on this machine, and a real model's tensors."""

import argparse
import json

HELP = "Check every gradient rule against every oracle, and a real model's tensors against torch's results."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from numpy_sdpa.verify import ORACLES, Finding, load_rules, model_findings

    rules = {rule.name: {oracle: check(rule) for oracle, check in ORACLES.items()} for rule in load_rules()}
    model = model_findings()
    findings = [*model.values(), *(finding for row in rules.values() for finding in row.values())]
    passed = all(finding.passed for finding in findings)
    if arguments.json:
        by_rule = {name: {oracle: finding._asdict() for oracle, finding in row.items()} for name, row in rules.items()}
        by_array = {name: finding._asdict() for name, finding in model.items()}
        print(json.dumps({"passed": passed, "rules": by_rule, "model": by_array}))
        return 0 if passed else 1

    def cell(finding: Finding) -> str:
        return f"{finding.error:.1e}" + ("" if finding.passed else " WRONG")

    print("Each gradient rule against each oracle: largest error, relative to the array's largest entry")
    print("(Taylor rate: how far the order of convergence is from 2, which is to be small, not 0)\n")
    width = max(map(len, rules))
    print(f"{'rule':<{width}}" + "".join(f"{oracle:>15}" for oracle in ORACLES) + "   worst at")
    for name, row in rules.items():
        # a rate is on another scale than an error: where it is furthest off says something only if it is wrong
        shown = [finding for oracle, finding in row.items() if oracle != "Taylor rate" or not finding.passed]
        furthest = max(shown, key=lambda finding: (not finding.passed, finding.error))
        print(f"{name:<{width}}" + "".join(f"{cell(row[oracle]):>15}" for oracle in ORACLES) + f"   {furthest.where}")
    print("\nA real transformer's tensors, (3, 12, 32, 32) float32, against what torch's autograd computed there\n")
    for name, finding in model.items():
        print(f"{name:<{width}}{cell(finding):>15}   {finding.where}")
    wrong = sum(not finding.passed for finding in findings)
    print(f"\n{len(findings)} checks, " + ("all right" if passed else f"{wrong} WRONG"))
    return 0 if passed else 1
