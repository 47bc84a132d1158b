"""Every gradient rule on this machine against every oracle, and the real model's tensors against torch's autograd.

Each rule is one option of attention on small float64 arrays that were stored with what torch computed from them
(`data/torch_rules.npz`, written by scripts/make_torch_fixtures.py). An oracle returns the largest error that it sees,
relative to the largest entry of the array in question, and where.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import as_file, files
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa import dense
from numpy_sdpa._internal.namespace import computing
from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.attention import sdpa_backward, sdpa_double_backward, sdpa_forward, sdpa_jvp
from numpy_sdpa.chain import Differentiable, like_inputs
from numpy_sdpa.data import load_model_tensors
from numpy_sdpa.residuals import SDPAResiduals, Upstream

# A complex step has no cancellation: it may be so small that its square vanishes beside any first-order term.
STEP = 1e-100
# Of a real model's float32 arrays: torch and we both round each of some thousand operations to 6e-8.
MODEL_TOLERANCE = 2e-6


class Finding(NamedTuple):
    """The worst entry that an oracle saw. `error` is relative to its array's largest entry; for a rate, |2 − rate|."""

    error: float
    where: str
    passed: bool


class Rule(NamedTuple):
    name: str
    arrays: dict[str, np.ndarray]  # the differentiable inputs, scale among them
    options: dict[str, Any]  # everything else
    upstream: dict[str, np.ndarray]
    directions: dict[str, np.ndarray]
    torch: dict[str, np.ndarray]  # output, lse, weights, gradients.…, tangents.…, second.…

    def forward(self, moved: dict[str, Any] | None = None, **options: Any) -> SDPAResiduals:
        arrays = self.arrays | (moved or {})
        query, key, value = (arrays.pop(name) for name in ("query", "key", "value"))
        return sdpa_forward(query, key, value, **self.options, **arrays, **options)[1]

    def backward(self, residuals: SDPAResiduals) -> dict[str, np.ndarray]:
        gradients = sdpa_backward(self.upstream.get("grad_output"), residuals, **self.other_upstream())
        return {name: getattr(gradients, name) for name in self.arrays}

    def other_upstream(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self.upstream.items() if name != "grad_output"}

    def weighted(self, residuals: SDPAResiduals) -> Any:
        """Σ⟨upstream, result⟩: the number whose gradients `backward` returns."""
        total: Any = 0.0
        for name, gradient in self.upstream.items():
            result = getattr(residuals, name.removeprefix("grad_"))
            total = total + np.sum(np.where(np.isneginf(result.real), 0, result) * gradient)
        return total


def load_rules() -> Iterator[Rule]:
    for name, record in _stored().items():
        fields = {field: record[field] for field in record.dtype.names or ()}
        options = json.loads(str(fields.pop("options")))

        def group(prefix: str, fields: dict[str, np.ndarray] = fields) -> dict[str, np.ndarray]:
            return {field.partition(".")[2]: array for field, array in fields.items() if field.startswith(prefix)}

        given = group("options.") | options
        arrays = {field: fields[field] for field in ("query", "key", "value")}
        arrays["scale"] = np.asarray(given.pop("scale", fields["query"].shape[-1] ** -0.5))
        arrays |= {field: np.asarray(given.pop(field)) for field in Differentiable._fields if field in given}
        results = {f: a for f, a in fields.items() if f in ("output", "lse", "weights") or f.startswith(_RESULTS)}
        yield Rule(name, arrays, given, group("upstream."), group("directions."), results)


_RESULTS = ("gradients.", "tangents.", "second.")


@cache
def _stored() -> dict[str, np.ndarray]:
    with as_file(files("numpy_sdpa.data") / "torch_rules.npz") as path, np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def worst(pairs: Iterator[tuple[str, Any, Any]], tolerance: float) -> Finding:
    """The largest error among (name, got, expected)."""
    finding = Finding(0.0, "", True)
    for name, got, expected in pairs:
        got, expected = np.asarray(got), np.asarray(expected)
        if got.shape != expected.shape:
            return Finding(np.inf, f"{name}: shape {got.shape}, expected {expected.shape}", False)
        if got.size == 0:
            continue
        with np.errstate(invalid="ignore"):
            error = np.where(got == expected, 0, np.abs(got - expected))
        error = np.where(np.isnan(error), np.inf, error)
        finite = np.abs(expected[np.isfinite(expected)])
        relative = error / max(np.max(finite, initial=0), np.finfo(float).tiny)
        index = np.unravel_index(np.argmax(relative), relative.shape)
        if relative[index] > finding.error:
            where = f"{name}[{', '.join(map(str, index))}]" if index else name
            finding = Finding(float(relative[index]), where, True)
    return finding._replace(passed=finding.error <= tolerance)


# The oracles: each is given a rule, and returns a Finding.


def differences(rule: Rule) -> Finding:
    """Central differences of the forward, along random directions."""
    from numpy_sdpa.gradcheck import check_vjp

    function, vjp, names = _as_function(rule)
    report = check_vjp(
        function, vjp, tuple(rule.arrays[name] for name in names), direction="random", rng=0, raise_exception=False
    )
    return _of_report(report, rule, "grad_{argument} from {result}")


def complex_step(rule: Rule) -> Finding:
    """Im f(x + ih) / h of the forward, entry by entry: no cancellation, so exact to rounding."""
    gradients = rule.backward(rule.forward())

    def pairs() -> Iterator[tuple[str, Any, Any]]:
        for name, array in rule.arrays.items():
            expected = np.zeros(array.shape)
            for index in np.ndindex(array.shape):
                stepped = array.astype(complex)
                stepped[index] += 1j * STEP
                residuals = rule.forward({name: stepped}, compute_dtype=np.complex128)
                expected[index] = rule.weighted(residuals).imag / STEP
            yield f"grad_{name}", gradients[name], expected

    return worst(pairs(), 1e-12)


def adjoint(rule: Rule) -> Finding:
    """⟨v, J u⟩ = ⟨Jᵀ v, u⟩ of sdpa_jvp and sdpa_backward."""
    residuals = rule.forward()
    tangents = sdpa_jvp(residuals, **rule.directions)
    gradients = rule.backward(residuals)
    forwards = sum(np.sum(v * getattr(tangents, name.removeprefix("grad_"))) for name, v in rule.upstream.items())
    backwards = sum(np.sum(gradients[name] * u) for name, u in rule.directions.items())
    return worst(iter([("inner product", forwards, backwards)]), 1e-11)


def taylor(rule: Rule) -> Finding:
    """f(x + h u) − f(x) − h J u shrinks as h²."""
    from numpy_sdpa.gradcheck import check_taylor

    function, _, names = _as_function(rule)

    def jvp(tangents: tuple[np.ndarray, ...], *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        residuals = rule.forward(dict(zip(names, arrays, strict=True)))
        tangent = sdpa_jvp(residuals, **dict(zip(names, tangents, strict=True)))
        return tuple(getattr(tangent, name.removeprefix("grad_")) for name in rule.upstream)

    report = check_taylor(function, jvp, tuple(rule.arrays[name] for name in names), rng=0, raise_exception=False)
    return _of_report(report, rule, "{result} along {argument}")


def torch(rule: Rule) -> Finding:
    """Output, lse, weights and gradients that torch's autograd computed, as stored."""
    residuals = rule.forward()
    gradients = rule.backward(residuals)

    def pairs() -> Iterator[tuple[str, Any, Any]]:
        for name in ("output", "lse", "weights"):
            yield name, getattr(residuals, name), rule.torch[name]
        for name, gradient in gradients.items():
            yield f"grad_{name}", gradient, rule.torch[f"gradients.{name}"]

    return worst(pairs(), 1e-12)


def second_order(rule: Rule) -> Finding:
    """sdpa_double_backward against the complex step of the backward, and against torch's double backward."""
    second = sdpa_double_backward(
        rule.upstream.get("grad_output"), rule.forward(), **rule.other_upstream(), **rule.directions
    )
    stepped = _complex_backward(rule)

    def pairs() -> Iterator[tuple[str, Any, Any]]:
        for name in rule.arrays:
            yield f"second {name}", getattr(second, name), getattr(stepped, name).imag / STEP
            yield f"second {name}", getattr(second, name), rule.torch[f"second.{name}"]
        for name in rule.upstream:
            yield f"second {name}", getattr(second, name), rule.torch[f"second.{name}"]

    return worst(pairs(), 1e-11)


ORACLES: dict[str, Callable[[Rule], Finding]] = {
    "differences": differences,
    "complex step": complex_step,
    "adjoint": adjoint,
    "Taylor rate": taylor,
    "torch": torch,
    "second order": second_order,
}


def _as_function(rule: Rule) -> tuple[Callable[..., Any], Callable[..., Any], list[str]]:
    """The forward as a function of its differentiable arrays, its vjp, and their names."""
    names = list(rule.arrays)

    def function(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        residuals = rule.forward(dict(zip(names, arrays, strict=True)))
        results = (getattr(residuals, name.removeprefix("grad_")) for name in rule.upstream)
        return tuple(np.where(np.isneginf(result), 0, result) for result in results)

    def vjp(upstream: tuple[np.ndarray, ...], *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        flowing = dict(zip(rule.upstream, upstream, strict=True))
        residuals = rule.forward(dict(zip(names, arrays, strict=True)))
        gradients = sdpa_backward(flowing.pop("grad_output", None), residuals, **flowing)
        return tuple(getattr(gradients, name) for name in names)

    return function, vjp, names


def _of_report(report: Any, rule: Rule, where: str) -> Finding:
    """The row of a gradient report that is furthest off: along one direction for each input, so without an index."""
    rows = list(report.rows)
    row = max(rows, key=lambda row: (row.verdict != "right", row.max_rel_error))
    result = list(rule.upstream)[row.worst_index[0] if row.worst_index else 0]  # the number of one of several
    where = where.format(argument=list(rule.arrays)[row.argument], result=result.removeprefix("grad_"))
    return Finding(float(row.max_rel_error), where, report.passed)


def _complex_backward(rule: Rule) -> Differentiable:
    """The backward at inputs + i·STEP·directions: its imaginary part is the derivative along the directions."""
    moved = {name: array + 1j * STEP * rule.directions.get(name, 0) for name, array in rule.arrays.items()}
    options = rule.options | moved | {"compute_dtype": np.complex128}
    query, key, value = (options.pop(name) for name in ("query", "key", "value"))
    inputs, resolved = resolve(query, key, value, options.pop("mask", None), options)
    with computing(np, query):
        residuals = dense.forward(inputs, resolved)
        flowing = (rule.upstream.get(f"grad_{name}") for name in Upstream._fields)
        upstream = Upstream(*(None if array is None else array.astype(complex) for array in flowing))
        return like_inputs(dense.backward(residuals, upstream), residuals, resolved)


def model_findings() -> dict[str, Finding]:
    """The real model's output, weights and gradients against torch's, each relative to its largest entry."""
    tensors = load_model_tensors()
    output, residuals = sdpa_forward(tensors.query, tensors.key, tensors.value, tensors.mask)
    gradients = sdpa_backward(tensors.grad_output, residuals)
    got = {"output": output, "weights": residuals.weights}
    got |= {f"grad_{name}": getattr(gradients, name) for name in ("query", "key", "value")}
    return {name: worst(iter([(name, array, getattr(tensors, name))]), MODEL_TOLERANCE) for name, array in got.items()}
