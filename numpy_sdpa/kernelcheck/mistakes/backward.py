"""Mistakes in the backward pass alone."""

import itertools
from collections.abc import Iterator

import numpy as np

from numpy_sdpa import chain, steps
from numpy_sdpa._internal.shapes import sum_to_shape
from numpy_sdpa.chain import Differentiable
from numpy_sdpa.kernelcheck import kernel as right
from numpy_sdpa.kernelcheck.kernel import Change, Forward, Kernel
from numpy_sdpa.kernelcheck.mistakes.softmax import replace_operands
from numpy_sdpa.kernelcheck.problem import INPUTS, Array, Problem
from numpy_sdpa.kernelcheck.registry import Results, backward, rewritten


@backward("row-dot-missing", "subtract D = Σ P ∘ gP of the row: gS = P ∘ (gP − D)")
def _(problem: Problem) -> Iterator[Change]:
    def softmax_backward(kernel: Kernel, weights: Array, grad_weights: Array, row_dot: Array, grad_lse: Array) -> Array:
        return right.softmax_backward(kernel, weights, grad_weights, np.zeros_like(row_dot), grad_lse)

    def sinks_backward(kernel: Kernel, row_dot: Array, grad_lse: Array, lse: Array) -> Array | None:
        return right.sinks_backward(kernel, np.zeros_like(row_dot), grad_lse, lse)

    yield Change(steps={"softmax_backward": softmax_backward})
    yield Change("for sinks too", steps={"softmax_backward": softmax_backward, "sinks_backward": sinks_backward})
    yield Change("for sinks alone", steps={"sinks_backward": sinks_backward})


_EXCHANGED = "gQ = scale · gS K and gK = scale · gSᵀ Q: query and key are exchanged"


@rewritten("grad-query-key-swapped", _EXCHANGED)
def _(results: Results, name: str) -> Iterator[tuple[str, Array]]:
    other = {"grad_query": "grad_key", "grad_key": "grad_query"}.get(name)
    if other is not None and other in results.arrays:
        yield f"{other} given", results.arrays[other]
    if other is not None and results.is_whole and results.unsummed and results.problem.resolved[1].group > 1:
        copies = results.unsummed(other.removeprefix("grad_"))
        if name == "grad_key":
            copies = results.problem.in_groups("key", copies, results.key_heads)
        yield f"{other} given, before the sum over the group", copies


@backward("grad-query-key-swapped", _EXCHANGED)
def _(problem: Problem) -> Iterator[Change]:
    def logits_backward(kernel: Kernel, grad_logits: Array, run: Forward) -> Differentiable:
        exchanged = replace_operands(kernel, query=kernel.operands.key, key=kernel.operands.query)
        return right.logits_backward(kernel, grad_logits, run)._replace(
            **{
                name: getattr(chain.logits_backward(grad_logits, run.scores, exchanged, kernel.view), name)
                for name in ("query", "key")
            }
        )

    if problem.plane[-1] == problem.plane[-2]:
        yield Change("gS Q and gSᵀ K", steps={"logits_backward": logits_backward}, whole=True)


def _scales(results: Results) -> set[float]:
    """The scale that was asked for, and the kernel's own."""
    asked = float(results.problem.resolved[0].scale)
    return {asked, asked if results.scale is None else results.scale}


@rewritten("scale-missing-in-backward", "scale the gradients of query and key: gQ = scale · gS K, gK = scale · gSᵀ Q")
def _(results: Results, name: str) -> Iterator[tuple[str, Array]]:
    if name in ("grad_query", "grad_key"):
        for scale in _scales(results):
            if scale != 0:
                yield "", results.arrays[name] / scale


@rewritten(
    "scale-twice-in-backward", "scale the gradients of query and key once: the scaled query already holds the scale"
)
def _(results: Results, name: str) -> Iterator[tuple[str, Array]]:
    if name in ("grad_query", "grad_key"):
        for scale in _scales(results):
            yield "", results.arrays[name] * scale


@backward("softcap-derivative-missing", "multiply the scores' gradient by 1 − tanh²(scores / softcap)")
def _(problem: Problem) -> Iterator[Change]:
    def logits_backward(kernel: Kernel, grad_logits: Array, run: Forward) -> Differentiable:
        return chain.logits_backward(grad_logits, run.scores, replace_operands(kernel, softcap=None), kernel.view)

    if problem.resolved[0].softcap is not None:
        yield Change(steps={"logits_backward": logits_backward})


@rewritten("group-sum-missing", "sum the gradients of key and value over the query heads of each group")
def _(results: Results, name: str) -> Iterator[tuple[str, Array]]:
    problem = results.problem
    group = problem.resolved[1].group
    if name not in ("grad_key", "grad_value") or group == 1 or results.unsummed is None:
        return
    of_heads = results.unsummed(name.removeprefix("grad_"))
    yield "not summed", of_heads
    key_heads = problem.key_heads if results.key_heads is None else results.key_heads
    of_groups = np.stack([of_heads[..., key_heads == head, :, :] for head in np.unique(key_heads)], axis=-4)
    shape = results.arrays[name].shape
    yield "mean of the group", sum_to_shape(np, np.mean(of_groups, axis=-3), shape)
    for head in range(group):
        yield f"head {head} of the group alone", sum_to_shape(np, of_groups[..., head, :, :], shape)


@rewritten("broadcast-sum-missing", "sum a gradient over every axis along which its input was broadcast")
def _(results: Results, name: str) -> Iterator[tuple[str, Array]]:
    problem = results.problem
    argument = name.removeprefix("grad_")
    axes = problem.repeated_axes(argument) if argument in INPUTS else ()
    if not axes or results.unsummed is None:
        return
    full = problem.in_groups(argument, results.unsummed(argument), results.key_heads)
    takes = {
        "not summed": lambda array, axes: array,
        "first": lambda array, axes: _taken(array, axes, 0),
        "last": lambda array, axes: _taken(array, axes, -1),
        "mean": lambda array, axes: np.mean(array, axis=axes, keepdims=True),
    }
    for count in range(1, len(axes) + 1):
        for wrong in itertools.combinations(axes, count):
            summed = tuple(axis for axis in axes if axis not in wrong)
            array = np.sum(full, axis=summed, keepdims=True) if summed else full
            for kind, take in takes.items():
                yield f"{kind} over axes {wrong}", take(array, wrong)


def _taken(array: Array, axes: tuple[int, ...], index: int) -> Array:
    for axis in axes:
        array = np.take(array, [index], axis=axis)
    return array


@backward("grad-value-undropped", "the gradient of value takes the weights after dropout: gV = Wᵀ gO")
def _(problem: Problem) -> Iterator[Change]:
    def output_backward(kernel: Kernel, grad_output: Array, weights: Array) -> steps.OutputGradients:
        value = steps.output_backward(np, grad_output, weights, kernel.operands.value, kernel.view.visible, 1).value
        return right.output_backward(kernel, grad_output, weights)._replace(value=value)

    if problem.resolved[1].dropout is not None:
        yield Change(steps={"output_backward": output_backward})


_BIAS = "the gradient of the bias is that of the logits: neither the scale nor the softcap reaches it"


@rewritten("grad-bias-scaled", _BIAS)
def _(results: Results, name: str) -> Iterator[tuple[str, Array]]:
    if name == "grad_bias":
        for scale in _scales(results):
            yield "times the scale", results.arrays[name] * scale
            if scale != 0:
                yield "divided by the scale", results.arrays[name] / scale


@backward("grad-bias-scaled", _BIAS)
def _(problem: Problem) -> Iterator[Change]:
    def logits_backward(kernel: Kernel, grad_logits: Array, run: Forward) -> Differentiable:
        grads = right.logits_backward(kernel, grad_logits, run)
        if kernel.operands.softcap is None:  # the forward pass has none
            return grads
        scores = steps.mask_backward(np, run.scores, kernel.view.visible)
        return grads._replace(bias=steps.softcap_backward(np, grads.bias, scores, kernel.operands.softcap).scores)

    if problem.resolved[0].softcap is not None and problem.inputs.get("bias") is not None:
        yield Change("through the softcap", steps={"logits_backward": logits_backward})


@rewritten("grad-sinks-sign", "the gradient of a sink is p_sink · (g_lse − D): a sink takes from its row")
def _(results: Results, name: str) -> Iterator[tuple[str, Array]]:
    if name == "grad_sinks":
        yield "", -results.arrays[name]


@backward("causal-ignored-in-backward", "apply the causal rule where the backward rebuilds the weights, too")
def _(problem: Problem) -> Iterator[Change]:
    def rows_kept(kernel: Kernel, logits: Array, lse: Array) -> Array:
        return right.rebuilt_weights(kernel, logits, np.where(lse == -np.inf, 0, lse))

    if problem.resolved[1].is_causal:
        yield Change(options={"is_causal": False})
        if not np.all(problem.sees):  # their lse is −∞
            yield Change(
                "rows that see nothing kept", options={"is_causal": False}, steps={"rebuilt_weights": rows_kept}
            )


@backward("lse-gradient-ignored", "add the upstream gradient of lse: gS = P ∘ (gP − D + g_lse)")
def _(problem: Problem) -> Iterator[Change]:
    if "grad_lse" in problem.upstream:
        yield Change(steps={"grad_lse": lambda kernel, lse: np.zeros((1, 1))})
