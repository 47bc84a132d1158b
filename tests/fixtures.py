"""What torch computed for the grid of cases: loading, and the form in which it is kept.

`scripts/make_torch_fixtures.py` writes `fixtures/`: one compressed npz per family of cases, in which each
case is one record (a 0-d structured array whose fields are named arrays), and `manifest.json`, which says
what each record stands on: versions, options, the torch functions called, the SHA-256 of the inputs.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cases
import numpy
from cases import Array, Case, Inputs

FOLDER = Path(__file__).parent / "fixtures"

# The fixtures' random cases are fixed by this seed; 200 is what the second order is asked to agree on.
RANDOM_SEED, RANDOM_COUNT = 2024, 200

FAMILIES: dict[str, tuple[Case, ...]] = {
    "alone": cases.ALONE,
    "pairs": cases.PAIRS,
    "shapes": cases.SHAPES,
    "random": cases.random_cases(RANDOM_COUNT, RANDOM_SEED),
}


class Fixture(NamedTuple):
    """One case with its inputs and torch's results.

    `gradients` go by input name. `tangents` (of output, lse, weights; forward mode) are along `directions`.
    `second` is the gradient of Σ⟨direction, gradient⟩, by input name and by name of upstream gradient.
    `sdpa_gradients` are torch's own function's for `grad_output` alone; empty where it lacks the options.
    """

    case: Case
    inputs: Inputs
    directions: dict[str, numpy.ndarray]
    output: numpy.ndarray
    lse: numpy.ndarray
    weights: numpy.ndarray
    gradients: dict[str, numpy.ndarray]
    tangents: dict[str, numpy.ndarray]
    second: dict[str, numpy.ndarray]
    sdpa_gradients: dict[str, numpy.ndarray]

    def __str__(self) -> str:
        return self.case.name


# The parameters of a test over every fixture: `@pytest.mark.parametrize(("family", "case"), fixtures.EVERY)`.
EVERY = [(family, case) for family, members in FAMILIES.items() for case in members]


def get(family: str, case: Case) -> Fixture:
    return from_record(case, _records(family)[case.name])


@cache
def _records(family: str) -> dict[str, numpy.ndarray]:
    with numpy.load(FOLDER / f"{family}.npz", allow_pickle=False) as archive:
        return dict(archive)


@cache
def manifest() -> dict[str, Any]:
    return json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))


def to_record(fixture: Fixture) -> numpy.ndarray:
    arrays = input_arrays(fixture.inputs, fixture.directions)
    arrays |= {name: getattr(fixture, name) for name in ("output", "lse", "weights")}
    for group in ("gradients", "tangents", "second", "sdpa_gradients"):
        arrays |= {f"{group}.{name}": array for name, array in getattr(fixture, group).items()}
    record = numpy.zeros((), dtype=[(name, array.dtype, array.shape) for name, array in arrays.items()])
    for name, array in arrays.items():
        record[name] = array
    return record


def from_record(case: Case, record: numpy.ndarray) -> Fixture:
    def group(prefix: str) -> dict[str, numpy.ndarray]:
        names = [name for name in record.dtype.names or () if name.startswith(f"{prefix}.")]
        return {name.partition(".")[2]: record[name] for name in names}

    options = {
        name: record[f"options.{name}"] if isinstance(option, Array) else option for name, option in case.options
    }
    inputs = Inputs(record["query"], record["key"], record["value"], options, group("upstream"))
    return Fixture(
        case,
        inputs,
        group("directions"),
        record["output"],
        record["lse"],
        record["weights"],
        group("gradients"),
        group("tangents"),
        group("second"),
        group("sdpa_gradients"),
    )


def input_arrays(inputs: Inputs, directions: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    options = {name: option for name, option in inputs.options.items() if isinstance(option, numpy.ndarray)}
    for prefix, group in (("options", options), ("upstream", inputs.upstream), ("directions", directions)):
        arrays |= {f"{prefix}.{name}": array for name, array in group.items()}
    return arrays


def sha256(inputs: Inputs, directions: dict[str, numpy.ndarray]) -> str:
    """Of the names, dtypes, shapes and little-endian bytes of everything that goes into a case."""
    digest = hashlib.sha256()
    for name, array in sorted(input_arrays(inputs, directions).items()):
        dtype = array.dtype.newbyteorder("<")
        digest.update(f"{name} {dtype.str} {array.shape}\n".encode())
        digest.update(numpy.ascontiguousarray(array, dtype=dtype).tobytes())
    return digest.hexdigest()


def describe(case: Case) -> dict[str, Any]:
    """The case as JSON keeps it."""
    return json.loads(json.dumps(vars(case)))
