"""docs/derivation.md: every formula names a function that computes it and a test that checks it, and both exist."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "derivation.md").read_text(encoding="utf-8")

BLOCK = re.compile(r"^```math\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
FUNCTION = re.compile(r"`(numpy_sdpa(?:\.\w+)+)`")
TEST = re.compile(r"`tests/(test_\w+\.py)::(\w+)`")
# "The following macros are not allowed" says GitHub of these, or drops them.
REFUSED = re.compile(r"\\(operatorname|mbox|phantom|newcommand|renewcommand|def|require|href|class|style)\b")


def blocks():
    """Each math block, and the paragraph that follows it."""
    for match in BLOCK.finditer(PAGE):
        yield match.group(1), PAGE[match.end() :].lstrip("\n").partition("\n\n")[0]


def resolve(name):
    """The object of a dotted name, which may lie within a module or be one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[cut:], found)
    raise ModuleNotFoundError(name)


def names_of_tests(file):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", sorted(set(FUNCTION.findall(PAGE))))
def test_functions_exist(name):
    assert callable(resolve(name))


@pytest.mark.parametrize(("file", "test"), sorted(set(TEST.findall(PAGE))))
def test_tests_exist(file, test):
    assert test.startswith("test_")
    assert test in names_of_tests(file)


def test_every_formula_has_a_function_and_a_test():
    found = list(blocks())
    assert len(found) == PAGE.count("```math") > 20
    for formula, beside in found:
        assert beside.startswith("Code: "), formula
        code, separator, tests = beside.partition("Test: ")
        assert separator, formula
        assert FUNCTION.search(code), formula
        assert TEST.search(tests), formula


def test_every_rule_of_the_steps_has_its_formula():
    tree = ast.parse((ROOT / "numpy_sdpa" / "steps.py").read_text(encoding="utf-8"))
    rules = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    rules = {name for name in rules if re.search(r"_(forward|backward|tangent)$", name)} | {"dropout"}
    named = {name for _, beside in blocks() for name in FUNCTION.findall(beside)}
    assert {f"numpy_sdpa.steps.{name}" for name in rules} <= named


def test_github_renders_it():
    """Inline formulas only as $`…`$, where Markdown leaves \\, _ and * alone; no macro that GitHub refuses."""
    prose = BLOCK.sub("", PAGE)
    inline = re.compile(r"\$`[^`]+`\$")
    assert "$" not in inline.sub("", prose)
    assert not re.search(r"\w\$`|`\$\w", prose), "a formula that touches a letter is not recognised"
    for formula in (*BLOCK.findall(PAGE), *inline.findall(prose)):
        assert not REFUSED.search(formula), formula
        assert "<" not in formula, "HTML to GitHub"
        assert formula.count("{") == formula.count("}")
    for row in re.findall(r"^\|.*\|$", prose, re.MULTILINE):
        assert row.count("|") == 4, "a bar inside a formula ends the cell"
