"""How large the errors are where a kernel adds up in a half type: measured by adding up so, not guessed.

Such errors are as good as random, so no mutation reproduces them: they are told by their size, array by array.
"""

from collections.abc import Callable, Mapping

import numpy as np

from numpy_sdpa.kernelcheck.kernel import Kernel, Statistics
from numpy_sdpa.kernelcheck.problem import Array
from numpy_sdpa.kernelcheck.sample import Sample

# A kernel may add up some of its sums so and not others, or round only after every block of 16 or 32 terms: its error
# is between a sixteenth of that of rounding after each term in every sum, and (some order of the terms) four times
# it.
_LEAST, _MOST = 1 / 16, 4.0
# Rounding steps in one sum, at most: longer sums round after some terms together, so that 4096 terms take a second.
_ROUNDINGS = 512


def explained_by_half_sums(sample: Sample, names: set[str], dtype: str) -> dict[str, float] | None:
    """The relative error (Frobenius) of each named result, if all are as large as sums in a half type make them."""
    half_types = (dtype,) if dtype in _ROUND else tuple(_ROUND)
    names = names & set(sample.given)
    if any(sample.given[name].shape != sample.gold[name].shape for name in names):
        return None
    errors = {name: _distance(sample.given[name], sample.gold[name]) for name in names}
    for half_type in half_types:
        emulated = half_sum_results(sample, half_type)
        other_causes = (_is_where_nothing_is_summed, _is_proportional)
        if any(is_other(sample, name, emulated) for is_other in other_causes for name in names):
            continue
        sizes = {name: _distance(emulated[name], sample.gold[name]) for name in names if name in emulated}
        if names and sizes.keys() == names and all(_LEAST * sizes[n] <= errors[n] <= _MOST * sizes[n] for n in names):
            return {
                name: errors[name] / max(float(np.linalg.norm(_finite(sample.gold[name]))), 1e-300) for name in names
            }
    return None


def _is_where_nothing_is_summed(sample: Sample, name: str, emulated: Mapping[str, Array]) -> bool:
    """Whether a row that is 0 however it is summed, as that of a key that nobody sees, is another in the kernel's."""
    if name not in emulated or not emulated[name].ndim:
        return False
    empty = np.all((sample.gold[name] == 0) & (emulated[name] == 0), axis=-1)
    return bool(np.any(sample.given[name][empty]))


def _is_proportional(sample: Sample, name: str, emulated: Mapping[str, Array]) -> bool:
    """Whether the kernel's error is more nearly a multiple of the result than that of half sums, which is one in part.

    Long sums of like terms in bfloat16 stop growing, which is a factor to 0.9: the rest of the error tells.
    """
    gold = _finite(sample.gold[name])

    def proportional(results: Array) -> float:
        error = _finite(results) - gold
        return float(np.sum(error * gold)) ** 2 / max(float(np.sum(error**2) * np.sum(gold**2)), 1e-300)

    return name in emulated and 1 - proportional(sample.given[name]) < 0.1 * (1 - proportional(emulated[name]))


def half_sum_results(sample: Sample, half_type: str) -> Mapping[str, Array]:
    """The sample's results with every sum rounded to a half type as it goes."""
    results: dict[str, Array] = {}
    for kernel, statistics in sample.right_parts():
        emulated = _HalfSums(kernel, statistics, _ROUND[half_type]).results()
        results |= {name: array for name, array in sample.summed(kernel, emulated).items() if name not in results}
    return results


class _HalfSums:
    def __init__(self, kernel: Kernel, statistics: Statistics | None, rounded: Callable[[Array], Array]) -> None:
        self.kernel = kernel
        self.statistics = statistics
        self.rounded = rounded

    def results(self) -> dict[str, Array]:
        kernel, operands = self.kernel, self.kernel.operands
        # the scores' own errors travel on as a bias
        errors = self.product(operands.scale * operands.query, operands.key.mT) - kernel.forward().scores
        bias = errors if operands.bias is None else operands.bias + errors
        kernel.operands = operands._replace(bias=bias)
        logits = kernel.step("logits").logits
        shift = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
        shift = np.where(np.isfinite(shift), shift, 0)
        exponentials = np.exp(logits - shift)
        if self.statistics is None:
            row_sum = self.product(exponentials, np.ones((logits.shape[-1], 1)))
            if operands.sinks is not None:
                row_sum = row_sum + np.exp(operands.sinks[..., None, None] - shift)
            lse = np.where(row_sum > 0, shift + np.log(row_sum), -np.inf)
        else:
            lse = self.statistics.lse
        weights = np.where(np.isfinite(lse), exponentials * np.exp(shift - lse), 0)
        output = self.product(self.dropped(weights), operands.value)
        return {"output": output, "lse": lse[..., 0], "weights": weights, **self.gradients(weights, lse, output)}

    def gradients(self, weights: Array, lse: Array, output: Array) -> dict[str, Array]:
        kernel, operands = self.kernel, self.kernel.operands
        grad_output = kernel.grad_output()
        if grad_output is None:
            return {}
        grad_weights = self.dropped(self.product(grad_output, operands.value.mT))
        row_dot = np.sum(grad_output * output, axis=-1, keepdims=True)
        if self.statistics is not None:
            row_dot = self.statistics.row_dot
        grad_scores = kernel.step("softmax_backward", weights, grad_weights, row_dot, kernel.grad_lse(lse))
        return {
            "query": operands.scale * self.product(grad_scores, operands.key),
            "key": self.product(grad_scores.mT, operands.scale * operands.query),
            "value": self.product(self.dropped(weights).mT, grad_output),
        }

    def dropped(self, weights: Array) -> Array:
        view = self.kernel.view
        return weights if view.kept is None else np.where(view.kept, weights / max(1 - view.dropout_p, 1e-300), 0)

    def product(self, left: Array, right: Array) -> Array:
        """left @ right, rounded as the sum goes."""
        left, right = _finite(left), _finite(right)
        terms = left.shape[-1]
        step = max(1, -(-terms // _ROUNDINGS))
        total = np.zeros((*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]))
        for start in range(0, terms, step):
            total = self.rounded(total + left[..., start : start + step] @ right[..., start : start + step, :])
        return total


def _to_float16(array: Array) -> Array:
    return array.astype(np.float16).astype(np.float64)


def _to_bfloat16(array: Array) -> Array:
    """To nearest, ties to even, in the upper 16 bits of a float32."""
    bits = array.astype(np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


_ROUND = {"float16": _to_float16, "bfloat16": _to_bfloat16}


def _finite(array: Array) -> Array:
    return np.where(np.isfinite(array), array, 0.0)


def _distance(array: Array, other: Array) -> float:
    """Frobenius; inf where one side alone is not finite."""
    same = (array == other) | (np.isnan(array) & np.isnan(other))
    difference = np.where(same, 0.0, array - other)
    return float(np.linalg.norm(difference)) if np.all(np.isfinite(difference)) else np.inf
