"""Do the tests notice? Change the mathematics in one place at a time, and see whether a test fails.

    python scripts/mutation.py                      every mutant, two workers; some minutes
    python scripts/mutation.py --list               what would be changed
    python scripts/mutation.py --only steps:17      one mutant by its number, as --list shows it

Each operator, constant, comparison and sign of MODULES is changed by itself. The tests are collected once; then every
mutant has a forked process, in which the functions of its module get the changed code, and the tests run in order until
one fails. A mutant that no test kills is a survivor. `mutation_survivors.toml` says of each known one why it changes
nothing that can be seen; a survivor that is not there, or one there that is killed or gone, makes the exit code 1.
docs/testing.md has the figures.
"""

import argparse
import ast
import copy
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import tomllib
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when NumPy is imported: every process has one core

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent
EXPLANATIONS = Path(__file__).with_name("mutation_survivors.toml")

# Each module with the tests of that room alone, which come first.
MODULES = {
    "steps": (),
    "visibility": ("test_visibility.py",),
    "chain": ("test_visibility.py",),
    "dense": (),
    "dropout": ("test_dropout.py",),
    "_internal.shapes": ("test_shapes.py",),
}

# Then one test of each kind, which kill nine mutants in ten within a second; then all of these.
ONE_OF_EACH_KIND = (
    "test_against_loops.py::test_first_order[GQA 6/2, most options]",
    "test_against_loops.py::test_second_order[GQA 6/2, most options]",
    "test_against_loops.py::test_first_order[bare]",
    "test_poison.py::test_what_is_hidden_is_never_read[all + with all, L = 6, S = 3]",
    "test_poison.py::test_what_is_seen_shows_and_goes_no_further[mask + with gqa, L = 3, S = 6]",
)
TESTS = (
    "test_against_loops.py",
    "test_numbers.py",
    "test_poison.py",
    "test_steps.py",
)
# JAX compiles for seconds, on the same lines; hypothesis would shrink what it finds for minutes.
NOT_THESE = "not jax and not random"

# Of the processor, three times what all tests take: a mutant that runs for ever is noticed, and so killed.
TIME_LIMIT = 200


class Mutant(NamedTuple):
    module: str
    number: int
    where: str  # function or class
    line: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.module}:{self.number}"

    def __str__(self) -> str:
        return f"{self.module}.{self.where}: {self.before}  →  {self.after}"


class Outcome(NamedTuple):
    mutant: Mutant
    killed_by: str | None
    seconds: float  # of the processor


# -- what is changed ---------------------------------------------------------------------------------------------------

OPERATORS = {
    ast.Add: [ast.Sub],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.Div],
    ast.Div: [ast.Mult],
    ast.FloorDiv: [ast.Mult],
    ast.Mod: [ast.Mult],
    ast.Pow: [ast.Mult],
    ast.LShift: [ast.RShift],
    ast.RShift: [ast.LShift],
    ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd],
    ast.BitXor: [ast.BitOr],
    ast.And: [ast.Or],
    ast.Or: [ast.And],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
}
NAMES = {
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "all": "any",
    "any": "all",
    "zeros_like": "ones_like",
    "start": "stop",
    "stop": "start",
}


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Every change of this one node, its parts left as they are."""

    def changed(**fields) -> ast.AST:
        new = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            for other in OPERATORS.get(type(op), []):
                yield changed(op=other())
            if isinstance(op, ast.Mult | ast.Div | ast.MatMult):
                yield ast.UnaryOp(ast.USub(), copy.deepcopy(node))
        case ast.Compare(ops=[op]):
            for other in OPERATORS.get(type(op), []):
                yield changed(ops=[other()])
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for other in OPERATORS.get(type(op), []):
                    yield changed(ops=[*ops[:place], other(), *ops[place + 1 :]])
        case ast.UnaryOp(operand=operand):
            yield copy.deepcopy(operand)
        case ast.Constant(value=bool(value)):
            yield changed(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield changed(value=value + 1)
            yield changed(value=value - 1)
        case ast.IfExp(test=ast.Name() | ast.Attribute() | ast.Call() as test):  # a comparison changes by itself
            yield changed(test=ast.UnaryOp(ast.Not(), test))
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call() as test):
            yield changed(test=ast.UnaryOp(ast.Not(), test))
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, first, second]):
            yield changed(args=[condition, second, first])
        case ast.Attribute(attr=name) if name in NAMES:
            yield changed(attr=NAMES[name])
        case ast.Name(id=name) if name in NAMES:
            yield changed(id=NAMES[name])


class Mutator(ast.NodeTransformer):
    """Visits a module; lists its mutants, and makes the one with the wanted number."""

    def __init__(self, module: str, wanted: int | None = None) -> None:
        self.module, self.wanted = module, wanted
        self.mutants: list[Mutant] = []
        self.scope: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        made = None
        for new in replacements(node):
            if len(self.mutants) == self.wanted:
                made = new
            before, after = ast.unparse(node), ast.unparse(new)
            if isinstance(node, ast.If):
                before, after = (text.partition("\n")[0] for text in (before, after))
            where = ".".join(self.scope) or "<module>"
            self.mutants.append(Mutant(self.module, len(self.mutants), where, node.lineno, before, after))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.scope.append(node.name)
            node = self.generic_visit(node)
            self.scope.pop()
        else:
            node = super().visit(node)
        return node if made is None else made

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return node  # an annotation is no mathematics

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef):
            returns, node.returns = node.returns, None
            super().generic_visit(node)
            node.returns = returns
            return node
        return super().generic_visit(node)


def path_of(module: str) -> Path:
    return ROOT / "numpy_sdpa" / (module.replace(".", "/") + ".py")


def mutants_of(module: str) -> list[Mutant]:
    mutator = Mutator(module)
    mutator.visit(ast.parse(path_of(module).read_text(encoding="utf-8")))
    return mutator.mutants


# -- one mutant --------------------------------------------------------------------------------------------------------


def put_in_place(mutant: Mutant) -> None:
    """Give the functions of the imported module the code of the changed one, and the module its constants."""
    path = path_of(mutant.module)
    tree = Mutator(mutant.module, mutant.number).visit(ast.parse(path.read_text(encoding="utf-8")))
    true = importlib.import_module(f"numpy_sdpa.{mutant.module}")
    changed = types.ModuleType(true.__name__)
    changed.__file__ = str(path)
    sys.modules[true.__name__] = changed  # classes look their module up there
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), changed.__dict__)
    sys.modules[true.__name__] = true
    _replace_code(vars(true), vars(changed), true.__name__)
    for name, value in vars(changed).items():
        if isinstance(value, int | float | tuple):
            setattr(true, name, value)


def _replace_code(true: Mapping[str, Any], changed: Mapping[str, Any], module: str) -> None:
    for name, new in changed.items():
        old = true.get(name)
        if isinstance(new, property):
            old, new = old.fget, new.fget
        if getattr(new, "__module__", None) != module:
            continue
        if isinstance(new, types.FunctionType):
            old.__code__, old.__defaults__ = new.__code__, new.__defaults__
        elif isinstance(new, type):
            _replace_code(vars(old), vars(new), module)


def first_failure(items: list[pytest.Item]) -> str | None:
    """The first test that fails, or None."""
    for item in items:
        if any(report.failed for report in runtestprotocol(item, log=False)):
            return item.nodeid
    return None


class Session:
    """A pytest plugin: in place of running the collected tests once, run them on every mutant."""

    def __init__(self, mutants: list[Mutant], workers: int) -> None:
        self.mutants, self.workers = mutants, workers
        self.items: list[pytest.Item] = []
        self.outcomes: list[Outcome] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        global THE_SESSION
        THE_SESSION = self
        self.items = session.items
        with multiprocessing.get_context("fork").Pool(self.workers, maxtasksperchild=1) as pool:
            self.outcomes += pool.map(judge, [None])
            if self.outcomes[0].killed_by is None:
                for outcome in pool.imap_unordered(judge, self.mutants, chunksize=1):
                    self.outcomes.append(outcome)
                    print(f"\r{len(self.outcomes) - 1} of {len(self.mutants)}", end="", file=sys.stderr, flush=True)
        return True

    def items_for(self, mutant: Mutant | None) -> list[pytest.Item]:
        """One of each kind, then the tests of the mutant's own room, then the rest; all of them without a mutant."""
        others = {test for tests in MODULES.values() for test in tests}
        if mutant is not None:
            others -= set(MODULES[mutant.module])

        def order(item: pytest.Item) -> tuple[int, int]:
            file, _, test = item.nodeid.removeprefix("tests/").partition("::")
            if f"{file}::{test}" in ONE_OF_EACH_KIND:
                return 0, 0
            return (1, TESTS.index(file)) if file in TESTS else (0, 1)

        chosen = [item for item in self.items if mutant is None or item.path.name not in others]
        return sorted(chosen, key=order)


THE_SESSION: Session  # what a forked process finds


def judge(mutant: Mutant | None) -> Outcome:
    """In a forked process: change the package, and run the tests."""
    start = time.process_time()

    def out_of_time(*_):
        raise TimeoutError(f"{TIME_LIMIT} s of the processor")

    signal.signal(signal.SIGPROF, out_of_time)
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
    killed_by = None
    if mutant is not None:
        try:
            put_in_place(mutant)
        except Exception as error:
            killed_by = f"{mutant.module} cannot be imported: {error!r}"
    killed_by = killed_by or first_failure(THE_SESSION.items_for(mutant))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return Outcome(mutant, killed_by, time.process_time() - start)


# -- all of them -------------------------------------------------------------------------------------------------------


def explanations() -> dict[str, str]:
    """By the text of the mutant: why it changes nothing that can be seen."""
    if not EXPLANATIONS.exists():
        return {}
    listed = tomllib.loads(EXPLANATIONS.read_text(encoding="utf-8"))["survivor"]
    return {mutant: entry["why"] for entry in listed for mutant in entry["mutants"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", nargs="*", metavar="MODULE[:NUMBER]", help="these mutants alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    arguments = parser.parse_args()

    mutants = [mutant for module in MODULES for mutant in mutants_of(module)]
    if arguments.only:
        mutants = [m for m in mutants if {m.module, m.name} & set(arguments.only)]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name:>20}  line {mutant.line:>3}  {mutant}")
        return 0

    start = time.perf_counter()
    session = Session(mutants, arguments.workers)
    files = sorted({test for tests in MODULES.values() for test in tests} | set(TESTS))
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    code = pytest.main(
        [*(f"tests/{file}" for file in files), "-q", "-k", NOT_THESE, "-p", "no:cacheprovider"], [session]
    )
    if not session.outcomes:
        print(f"the tests cannot be collected: {code!r}")
        return 2
    unchanged, *outcomes = session.outcomes
    if unchanged.killed_by is not None:
        print(f"a test fails without any change: {unchanged.killed_by}")
        return 2
    print(f"\nall tests take {unchanged.seconds:.0f} s of a processor")
    return report(outcomes, time.perf_counter() - start, arguments.json)


def report(outcomes: list[Outcome], seconds: float, file: Path | None) -> int:
    known = explanations()
    survivors = sorted(outcome.mutant for outcome in outcomes if outcome.killed_by is None)
    unexplained = [mutant for mutant in survivors if str(mutant) not in known]
    print("\n")
    for module in MODULES:
        of_module = [outcome for outcome in outcomes if outcome.mutant.module == module]
        killed = sum(outcome.killed_by is not None for outcome in of_module)
        print(f"{module:>18}: {killed} of {len(of_module)} killed")
    tried = Counter(outcome.mutant.module for outcome in outcomes)
    whole = tuple(f"{module}." for module in MODULES if tried[module] == len(mutants_of(module)))
    stale = [text for text in known if text.startswith(whole) and text not in set(map(str, survivors))]
    killed = len(outcomes) - len(survivors)
    print(f"{killed} of {len(outcomes)} killed, {killed / len(outcomes):.1%}, in {seconds / 60:.1f} minutes")
    print(f"{len(survivors)} survivors, of which {len(unexplained)} without an explanation")
    for mutant in unexplained:
        print(f"  {mutant.name} line {mutant.line}  {mutant}")
    for text in stale:
        print(f"  explained, but no survivor: {text}")
    for test, count in Counter((outcome.killed_by or "none").partition("::")[0] for outcome in outcomes).most_common():
        print(f"{count:>6}  {test}")
    if file is not None:
        rows = [{**o.mutant._asdict(), "killed_by": o.killed_by, "seconds": o.seconds} for o in sorted(outcomes)]
        file.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
