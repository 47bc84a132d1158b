"""What is right: results in float64, and the error that the kernel's precision must cost."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from numpy_sdpa.attention import sdpa_backward, sdpa_forward
from numpy_sdpa.kernelcheck.problem import Array, Problem
from numpy_sdpa.kernelcheck.registry import Results
from numpy_sdpa.kernelcheck.semantics import SYSTEMS
from numpy_sdpa.kernelcheck.tolerance import rounding_sigma
from numpy_sdpa.residuals import SDPAGradients, SDPAResiduals, Upstream

# Elements of the plane from which on the blockwise method serves: the dense one would keep several such arrays.
_DENSE = 2**24


class Gold:
    """The reference's results for a problem.

    Attributes
    ----------
    results : dict
        Every result that the problem has, by name, float64, in this package's shapes.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.residuals = _forward(problem)
        self.results = self._results()
        means = _problem_of_means(problem)
        self._means = None if means is None else Gold(means)
        if self._means is not None:
            for name in {"output", "grad_value"} & set(self.results):
                self.results[name] = self.results[name] + self._means.results[name]
        self.results["lse"] = problem.lse_of_system(self.results["lse"], problem.given.get("lse"))

    def _results(self) -> dict[str, Array]:
        residuals, problem = self.residuals, self.problem
        results = {"output": residuals.output, "lse": residuals.lse}
        if residuals.weights is not None:
            results["weights"] = residuals.weights
        if problem.has_gradients():
            gradients = _backward(problem, residuals)
            for name in ("query", "key", "value", "bias", "sinks", "alibi_slopes"):
                if getattr(gradients, name) is not None:
                    results[f"grad_{name}"] = getattr(gradients, name)
        return results

    @cached_property
    def sigma(self) -> dict[str, Array]:
        """The standard deviation of each given result of a right kernel, before its rounding to its own dtype."""
        upstream = None
        if self.problem.has_gradients():
            zeros = np.zeros_like(self.residuals.output)
            upstream = Upstream(
                self.problem.upstream.get("grad_output", zeros), self.problem.upstream.get("grad_lse"), None
            )
        given = {name: self.results[name] for name in self.problem.given}
        sigma = rounding_sigma(self.residuals, upstream, given, self.problem.dtype)
        if self._means is not None:
            for name, of_means in self._means.sigma.items():
                sigma[name] = np.hypot(sigma[name], of_means)
        return sigma

    def as_results(self) -> Results:
        return Results(self.problem, self.results, self._unsummed)

    def _unsummed(self, name: str) -> Array:
        return self._gradients_of_copies[name]

    @cached_property
    def _gradients_of_copies(self) -> Mapping[str, Array]:
        """Each input's gradient before any sum: that of an input which is written out wherever it is read."""
        problem = self.problem
        inputs = dict(problem.inputs)
        for name in ("query", "key", "value", "bias", "sinks", "alibi_slopes"):
            if name in inputs:
                array = inputs[name]
                if name in ("key", "value") and problem.resolved[1].group > 1:
                    array = array[..., problem.key_heads, :, :]
                inputs[name] = np.broadcast_to(array, problem.full_shape(name))
        options = {name: option for name, option in problem.options.items() if name != "enable_gqa"}
        copies = replace(problem, inputs=inputs, options=options)
        gradients = _backward(copies, _forward(copies))
        return {name: getattr(gradients, name) for name in gradients._fields}


def _problem_of_means(problem: Problem) -> Problem | None:
    """Where the system averages all values in rows that see nothing: these rows alone, with equal logits for all keys.

    Rows past their query length are not among them: their output is 0 everywhere.
    """
    empty = ~problem.sees
    if problem.system.empty_rows != "mean" or not np.any(empty):
        return None
    lengths = problem.resolved[1].query_lengths
    if lengths is not None:
        empty = empty & (np.arange(problem.plane[-2])[:, None] < lengths)
    inputs = {name: array for name, array in problem.inputs.items() if name in ("value", "dropout_mask")}
    inputs |= {name: np.zeros_like(problem.inputs[name]) for name in ("query", "key")}
    inputs["mask"] = np.broadcast_to(empty, problem.plane)
    options = {name: option for name, option in problem.options.items() if name in ("enable_gqa", "dropout_p")}
    given = {name: array for name, array in problem.given.items() if name in ("output", "grad_value")}
    return replace(problem, inputs=inputs, options=options, given=given, system=SYSTEMS["numpy-sdpa"])


def _forward(problem: Problem) -> SDPAResiduals:
    arguments = {**problem.inputs, **problem.options}
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    method = "blockwise" if math.prod(problem.plane) > _DENSE and "weights" not in problem.given else "dense"
    return sdpa_forward(query, key, value, **arguments, compute_dtype=np.float64, method=method)[1]


def _backward(problem: Problem, residuals: SDPAResiduals) -> SDPAGradients:
    return sdpa_backward(problem.upstream.get("grad_output"), residuals, grad_lse=problem.upstream.get("grad_lse"))
