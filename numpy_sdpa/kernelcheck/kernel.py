"""A kernel in float64 whose steps can be replaced: the reference's own chain, on the whole plane or on a part of it.

`mistakes` holds the replacements. A replaced step takes the kernel itself, for its operands and its view of the
plane, and then what the default step takes. Grouped keys and values are repeated here, one for each query head, so
that a mistake can change who reads what; the sum over the group is a step of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa import chain, steps
from numpy_sdpa.chain import Differentiable, View
from numpy_sdpa.kernelcheck.problem import Array, Problem
from numpy_sdpa.visibility import Tile


@dataclass(frozen=True, eq=False)
class Change:
    """How a wrong kernel differs from the right one: other inputs or options, or a step replaced."""

    variant: str = ""  # which form of the mistake, for the reader
    inputs: Mapping[str, Any] = field(default_factory=dict)  # fields of `Inputs`
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of `Options`, in their resolved form
    steps: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # names in `STEPS`
    view: Callable[["Kernel", View], View] | None = None
    key_heads: Array | None = None  # which key head each query head reads
    problem: Problem | None = None  # another problem altogether
    results: Callable[[str, Array], Array] | None = (
        None  # what becomes of each result (…, H, L, X), by name: output, lse and the gradients of Q, K and V
    )
    whole: bool = (
        False  # a part of the plane does not tell: a sum runs over more than a row, or arrays are read otherwise
    )

    def with_(self, other: "Change") -> "Change":
        """Both changes; where they touch the same thing, the other's."""
        return Change(
            variant=", ".join(filter(None, (self.variant, other.variant))),
            inputs={**self.inputs, **other.inputs},
            options={**self.options, **other.options},
            steps={**self.steps, **other.steps},
            view=_both(self.view, other.view),
            key_heads=self.key_heads if other.key_heads is None else other.key_heads,
            problem=self.problem or other.problem,
            results=self.results or other.results,
            whole=self.whole or other.whole,
        )


def _both(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return first or second
    return lambda kernel, view: second(kernel, first(kernel, view))


RIGHT = Change()


class Part(NamedTuple):
    """A part of the plane: some query heads, and strips of rows and of columns."""

    heads: Array  # indices of query heads
    rows: tuple[slice, ...]
    columns: tuple[slice, ...]

    def row_indices(self) -> Array:
        return np.concatenate([np.arange(rows.start, rows.stop) for rows in self.rows])

    def column_indices(self) -> Array:
        return np.concatenate([np.arange(columns.start, columns.stop) for columns in self.columns])


def whole_part(problem: Problem) -> Part:
    *_, heads, rows, columns = problem.plane
    return Part(np.arange(heads), (slice(0, rows),), (slice(0, columns),))


class Forward(NamedTuple):
    """One part's forward pass: arrays (B…, heads, rows, columns), and (B…, heads, rows, X)."""

    scores: Array
    logits: Array
    weights: Array
    lse: Array  # (B…, heads, rows, 1)
    output: Array


class Statistics(NamedTuple):
    """What a backward pass takes from a forward pass to rebuild its rows."""

    lse: Array  # (B…, Hq, L, 1)
    row_dot: Array | None  # D = Σ gO ∘ O, (B…, Hq, L, 1); None: from the rows' own weights, D = Σ P ∘ gP


class Kernel:
    """`Change` applied to a problem, on one part of its plane."""

    def __init__(self, problem: Problem, change: Change = RIGHT, part: Part | None = None) -> None:
        self.problem = problem = change.problem or problem
        self.change = change
        self.part = whole_part(problem) if part is None else part
        inputs, options = problem.resolved
        self.inputs = inputs._replace(**change.inputs)
        self.options = replace(options, **change.options)
        self.key_heads = problem.key_heads if change.key_heads is None else change.key_heads
        self.operands = self._operands()
        self.view = self._view()
        if change.view is not None:
            self.view = change.view(self, self.view)

    def _operands(self) -> Differentiable:
        operands = chain.operands_of(self.inputs, self.options)
        heads, rows, columns = self.part.heads, self.part.row_indices(), self.part.column_indices()
        key_heads = self.key_heads[heads]

        def of_keys(array: Array) -> Array:
            return array[..., key_heads if array.shape[-3] > 1 else [0], :, :][..., columns, :]

        bias = operands.bias
        if bias is not None:
            bias = strip(bias[(None,) * max(0, 2 - bias.ndim)], self.part)
        return operands._replace(
            query=operands.query[..., heads, :, :][..., rows, :],
            key=of_keys(operands.key),
            value=of_keys(operands.value),
            bias=bias,
            sinks=None if operands.sinks is None else operands.sinks[..., heads],
            alibi_slopes=None if operands.alibi_slopes is None else operands.alibi_slopes[..., heads],
        )

    def _view(self) -> View:
        bias = self.inputs.bias
        tiles = [[self._tile(Tile(rows, columns), bias) for columns in self.part.columns] for rows in self.part.rows]

        def joined(name: str) -> Array | None:
            arrays = [[getattr(view, name) for view in row] for row in tiles]
            if all(array is None for row in arrays for array in row):
                return None
            return np.concatenate(
                [np.concatenate(row, axis=-1) for row in _broadcast(arrays, tiles_shape(self.part))], axis=-2
            )

        whole = tiles[0][0]
        return whole._replace(visible=joined("visible"), distance=joined("distance"), kept=joined("kept"))

    def _tile(self, tile: Tile, bias: Array | None) -> View:
        view = chain.view_of(self.options, tile, chain.tile_of_bias(bias, tile), self.inputs.alibi_slopes is not None)
        names = ("visible", "distance", "kept")
        of_heads: dict[str, Any] = {name: take_heads(getattr(view, name), self.part.heads) for name in names}
        return view._replace(group=1, **of_heads)

    def step(self, name: str, *arguments: Any) -> Any:
        return self.change.steps.get(name, STEPS[name])(self, *arguments)

    @cached_property
    def sees(self) -> Array:
        """Whether a row sees any key at all, also outside the part's columns; broadcasts to (…, rows, 1)."""
        if not (self.change.options or self.change.inputs or self.change.view or self.change.problem):
            return self.problem.sees[..., self.part.heads, :, :][..., self.part.row_indices(), :]
        every_column = (slice(0, self.problem.plane[-1]),)
        if self.part.columns != every_column:
            return Kernel(self.problem, self.change, self.part._replace(columns=every_column)).sees
        if self.view.visible is None:
            return np.full((1, 1), self.problem.plane[-1] > 0)
        return np.any(self.view.visible, axis=-1, keepdims=True)

    def forward(self) -> Forward:
        stages = self.step("logits")
        softmax = self.step("softmax", stages.logits)
        output = self.step("output", softmax.weights)
        return Forward(stages.scores, stages.logits, softmax.weights, softmax.lse, output)

    def statistics(self, forward: Forward) -> Statistics:
        grad_output = self.grad_output()
        row_dot = 0.0 if grad_output is None else np.sum(grad_output * forward.output, axis=-1, keepdims=True)
        return Statistics(forward.lse, np.broadcast_to(row_dot, forward.lse.shape))

    def grad_output(self) -> Array | None:
        """The part's rows of it, 0 in rows that see nothing."""
        array = self.problem.upstream.get("grad_output")
        if array is None:
            return None
        array = array[..., self.part.heads, :, :][..., self.part.row_indices(), :]
        return np.where(self.sees, array, 0)

    def grad_lse(self, lse: Array) -> Array:
        array = self.problem.upstream.get("grad_lse")
        if array is None:
            return np.zeros((1, 1))
        array = array[..., self.part.heads, :][..., self.part.row_indices()][..., None]
        return np.where(lse == -np.inf, 0, array)

    def backward(self, forward: Forward, statistics: Statistics | None = None) -> dict[str, Array]:
        """Gradients by input, before any sum over what was repeated: (B…, heads, rows or columns, X).

        Without `statistics` from the outside, rows are whole and use their own weights and their own D.
        """
        weights = forward.weights
        if statistics is not None:
            weights = self.step("rebuilt_weights", forward.logits, statistics.lse)
        lse = forward.lse if statistics is None else statistics.lse
        grad_output = self.grad_output()
        if grad_output is None:
            grad_output = np.zeros_like(forward.output)
        grads = self.step("output_backward", grad_output, weights)
        row_dot = None if statistics is None else statistics.row_dot
        if row_dot is None:
            row_dot = np.sum(weights * grads.weights, axis=-1, keepdims=True)
        grad_lse = self.step("grad_lse", lse)
        grad_logits = self.step("softmax_backward", weights, grads.weights, row_dot, grad_lse)
        gradients = self.step("logits_backward", grad_logits, forward)
        return {
            "query": gradients.query,
            "key": gradients.key,
            "value": grads.value,
            "bias": gradients.bias,
            "sinks": self.step("sinks_backward", row_dot, grad_lse, lse),
            "alibi_slopes": gradients.alibi_slopes,
        }


def logits(kernel: Kernel) -> chain.Logits:
    return chain.logits_forward(kernel.operands, kernel.view)


def softmax(kernel: Kernel, logits: Array) -> steps.Softmax:
    return steps.softmax_forward(np, logits, kernel.operands.sinks, kernel.view.visible)


def rebuilt_weights(kernel: Kernel, logits: Array, lse: Array) -> Array:
    """exp(Z − lse); a row whose lse is −∞ is left out, whatever this kernel sees in it."""
    weights = np.where(lse == -np.inf, 0, np.exp(logits - lse))
    return weights if kernel.view.visible is None else np.where(kernel.view.visible, weights, 0)


def output(kernel: Kernel, weights: Array) -> Array:
    return chain.output_forward(weights, kernel.operands.value, kernel.view)


def output_backward(kernel: Kernel, grad_output: Array, weights: Array) -> steps.OutputGradients:
    return chain.output_backward(grad_output, weights, kernel.operands.value, kernel.view)


def grad_lse(kernel: Kernel, lse: Array) -> Array:
    return kernel.grad_lse(lse)


def softmax_backward(kernel: Kernel, weights: Array, grad_weights: Array, row_dot: Array, grad_lse: Array) -> Array:
    """gZ = P ∘ (gP − D + g_lse)."""
    return weights * (grad_weights - row_dot + grad_lse)


def sinks_backward(kernel: Kernel, row_dot: Array, grad_lse: Array, lse: Array) -> Array | None:
    """g_sink = p_sink (g_lse − D), for each row: (…, heads, rows)."""
    if kernel.operands.sinks is None:
        return None
    sinks = kernel.operands.sinks[..., None, None]
    sink_weight = np.where(sinks == -np.inf, 0, np.exp(np.where(sinks == lse, 0, sinks - lse)))
    return (sink_weight * (grad_lse - row_dot))[..., 0]


def logits_backward(kernel: Kernel, grad_logits: Array, forward: Forward) -> Differentiable:
    return chain.logits_backward(grad_logits, forward.scores, kernel.operands, kernel.view)


STEPS: dict[str, Callable[..., Any]] = {
    "logits": logits,
    "softmax": softmax,
    "output": output,
    "rebuilt_weights": rebuilt_weights,
    "output_backward": output_backward,
    "grad_lse": grad_lse,
    "softmax_backward": softmax_backward,
    "sinks_backward": sinks_backward,
    "logits_backward": logits_backward,
}


# Parts of arrays that broadcast to the plane


def take_heads(array: Array | None, heads: Array) -> Array | None:
    """Some heads of an array that broadcasts to the plane."""
    if array is None or array.ndim < 3 or array.shape[-3] == 1:
        return array
    return array[..., heads, :, :]


def strip(array: Array, part: Part) -> Array:
    """The part's heads, rows and columns of an array that broadcasts to the plane, at least 2-D."""
    if array.ndim > 2 and array.shape[-3] != 1:
        array = array[..., part.heads, :, :]
    if array.shape[-2] != 1:
        array = array[..., part.row_indices(), :]
    return array if array.shape[-1] == 1 else array[..., part.column_indices()]


def tiles_shape(part: Part) -> list[list[tuple[int, int]]]:
    return [[Tile(rows, columns).shape for columns in part.columns] for rows in part.rows]


def _broadcast(arrays: list[list[Array | None]], shapes: list[list[tuple[int, int]]]) -> list[list[Array]]:
    """Tiles of one array made whole and alike, so that they can be joined; None, which hides nothing, becomes True."""
    filled = [[np.True_ if array is None else array for array in row] for row in arrays]
    lead = np.broadcast_shapes(*(array.shape[:-2] for row in filled for array in row))
    return [
        [np.broadcast_to(array, (*lead, *shape)) for array, shape in zip(row, sizes, strict=True)]
        for row, sizes in zip(filled, shapes, strict=True)
    ]
