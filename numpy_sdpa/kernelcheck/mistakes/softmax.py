"""Mistakes between the scores and the weights: softcap, ALiBi, bias, sinks, softmax, dropout."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from numpy_sdpa import chain, steps
from numpy_sdpa.chain import Differentiable, View
from numpy_sdpa.kernelcheck import kernel as right
from numpy_sdpa.kernelcheck.kernel import Change, Forward, Kernel
from numpy_sdpa.kernelcheck.mistakes.forward import UNBANDED, UNMASKED, but_lengths, has_lengths, visible_under
from numpy_sdpa.kernelcheck.problem import Array, Problem
from numpy_sdpa.kernelcheck.registry import forward

# ------------------------------------------------------------------------------------------------------------------
# Softcap, bias, ALiBi, sinks, dropout
# ------------------------------------------------------------------------------------------------------------------


@forward("softcap-ignored", "cap the scores: softcap · tanh(scores / softcap)")
def _(problem: Problem) -> Iterator[Change]:
    if problem.resolved[0].softcap is not None:
        yield Change(inputs={"softcap": None})


def _capped_late(after: tuple[str, ...], masked: bool) -> dict[str, Callable[..., Any]]:
    """The cap over scores + `after` instead of over the scores alone; over the mask's −∞ as well where `masked`."""

    def inside(kernel: Kernel) -> chain.Logits:
        kept = {name: getattr(kernel.operands, name) if name in after else None for name in ("bias", "alibi_slopes")}
        view = Kernel(kernel.problem, replace(kernel.change, view=None), kernel.part).view
        return chain.logits_forward(
            kernel.operands._replace(softcap=None, **kept), view if masked else view._replace(visible=None)
        )

    def logits(kernel: Kernel) -> chain.Logits:
        stages = inside(kernel)
        capped = steps.softcap_forward(np, stages.logits, kernel.operands.softcap)
        outside = capped
        if kernel.operands.alibi_slopes is not None and "alibi_slopes" not in after:
            outside = steps.alibi_forward(outside, kernel.operands.alibi_slopes, kernel.view.distance)
        if kernel.operands.bias is not None and "bias" not in after:
            outside = outside + kernel.operands.bias
        return chain.Logits(stages.scores, capped, steps.mask_forward(np, outside, kernel.view.visible))

    def logits_backward(kernel: Kernel, grad_logits: Array, run: Forward) -> Differentiable:
        capped = inside(kernel).logits
        grad_capped, _ = steps.softcap_backward(np, grad_logits, capped, kernel.operands.softcap)
        grad_inside = np.where(np.isfinite(capped), grad_capped, 0)
        without_cap = replace_operands(kernel, softcap=None)
        grads = chain.logits_backward(grad_inside, run.scores, without_cap, kernel.view)
        outer = chain.logits_backward(grad_logits, run.scores, without_cap, kernel.view)
        return grads._replace(**{name: getattr(outer, name) for name in ("bias", "alibi_slopes") if name not in after})

    return {"logits": logits, "logits_backward": logits_backward}


def replace_operands(kernel: Kernel, **operands: Any) -> Differentiable:
    return kernel.operands._replace(**operands)


@forward("softcap-after-mask", "cap before the mask: a capped −∞ is −softcap, and hidden keys get weight")
def _(problem: Problem) -> Iterator[Change]:
    if problem.resolved[0].softcap is not None:
        added = tuple(name for name in ("bias", "alibi_slopes") if problem.inputs.get(name) is not None)
        unhidden: dict[str, Callable[[Kernel, View], View]] = {"": lambda kernel, view: view._replace(visible=None)}
        if has_lengths(problem):
            within = but_lengths(UNMASKED) | UNBANDED
            unhidden[" within the lengths"] = lambda kernel, view: view._replace(visible=visible_under(kernel, within))
        for after, where in itertools.product(dict.fromkeys([added, ()]), unhidden):
            variant = f"scores + {' + '.join((*after, 'mask'))}{where}"
            yield Change(variant, steps=_capped_late(after, masked=True), view=unhidden[where])


@forward("bias-before-softcap", "cap the scores first, then add ALiBi and bias")
def _(problem: Problem) -> Iterator[Change]:
    if problem.resolved[0].softcap is not None:
        added = tuple(name for name in ("bias", "alibi_slopes") if problem.inputs.get(name) is not None)
        for after in dict.fromkeys([added, *((name,) for name in added)]):
            if after:
                yield Change(" and ".join(after), steps=_capped_late(after, masked=False))


def _without_gradient(name: str) -> dict[str, Callable[..., Any]]:
    """What is not used has the gradient 0."""

    def logits_backward(kernel: Kernel, grad_logits: Array, run: Forward) -> Differentiable:
        grads = right.logits_backward(kernel, grad_logits, run)
        return grads._replace(**{name: np.zeros_like(getattr(grads, name))})

    return {"logits_backward": logits_backward}


@forward("bias-ignored", "add the bias to the scores")
def _(problem: Problem) -> Iterator[Change]:
    bias = problem.inputs.get("bias")
    if bias is not None:
        yield Change(inputs={"bias": np.zeros_like(bias)})
        yield Change("its gradient 0", inputs={"bias": np.zeros_like(bias)}, steps=_without_gradient("bias"))
        if np.any(np.isneginf(bias)):
            yield Change("its −∞ kept", inputs={"bias": np.where(np.isneginf(bias), bias, 0)})


@forward("alibi-ignored", "add −slope · |p(i) − j| to the scores")
def _(problem: Problem) -> Iterator[Change]:
    slopes = problem.inputs.get("alibi_slopes")
    if slopes is not None:
        yield Change(inputs={"alibi_slopes": np.zeros_like(slopes)})
        zeros = np.zeros_like(slopes)
        yield Change("its gradient 0", inputs={"alibi_slopes": zeros}, steps=_without_gradient("alibi_slopes"))


@forward("alibi-sign", "ALiBi lowers the scores with the distance: −slope · |p(i) − j|")
def _(problem: Problem) -> Iterator[Change]:
    def signed(sign: int) -> Callable[[Kernel, View], View]:
        def view_of(kernel: Kernel, view: View) -> View:
            rows, columns = kernel.part.row_indices(), kernel.part.column_indices()
            return view._replace(distance=sign * (rows[:, None] + kernel.options.offset - columns).astype(np.float64))

        return view_of

    def negated(kernel: Kernel, view: View) -> View:
        return view._replace(distance=-np.asarray(view.distance))

    if problem.inputs.get("alibi_slopes") is not None:
        yield Change("+ slope · |p(i) − j|", view=negated)
        yield Change("− slope · (p(i) − j)", view=signed(1))
        yield Change("+ slope · (p(i) − j)", view=signed(-1))


@forward("sinks-ignored", "the sink joins the softmax's sum: row_sum = Σ exp(logits) + exp(sink)")
def _(problem: Problem) -> Iterator[Change]:
    sinks = problem.inputs.get("sinks")
    if sinks is not None:
        yield Change(inputs={"sinks": np.full_like(sinks, -np.inf)})


@forward("sinks-ignored-in-lse", "lse includes the sink: log(Σ exp(logits) + exp(sink))")
def _(problem: Problem) -> Iterator[Change]:
    def softmax(kernel: Kernel, logits: Array) -> steps.Softmax:
        without = steps.softmax_forward(np, logits, None, kernel.view.visible)
        return right.softmax(kernel, logits)._replace(lse=without.lse)

    def with_sink(kernel: Kernel, lse: Array) -> Array:
        return np.logaddexp(lse, kernel.operands.sinks[..., None, None])

    # the upstream gradient of such an lse goes to its keys alone: P_without · g_lse, P_without = P exp(lse_with − lse)
    def grad_lse(kernel: Kernel, lse: Array) -> Array:
        return right.grad_lse(kernel, lse) * np.exp(np.where(lse == -np.inf, 0, with_sink(kernel, lse) - lse))

    def rebuilt_weights(kernel: Kernel, logits: Array, lse: Array) -> Array:
        return right.rebuilt_weights(kernel, logits, with_sink(kernel, lse))

    def sinks_backward(kernel: Kernel, row_dot: Array, grad_lse: Array, lse: Array) -> Array | None:
        return right.sinks_backward(kernel, row_dot, np.zeros((1, 1)), with_sink(kernel, lse))

    if problem.inputs.get("sinks") is not None:
        yield Change(steps={"softmax": softmax})
        if "grad_lse" in problem.upstream:
            own: dict[str, Callable[..., Any]] = {
                "grad_lse": grad_lse,
                "rebuilt_weights": rebuilt_weights,
                "sinks_backward": sinks_backward,
            }
            yield Change("its gradient too", steps={"softmax": softmax, **own})


@forward("dropout-not-rescaled", "divide the kept weights by 1 − p")
def _(problem: Problem) -> Iterator[Change]:
    if problem.resolved[1].dropout is not None:
        yield Change(view=lambda kernel, view: view._replace(dropout_p=0.0))


# ------------------------------------------------------------------------------------------------------------------
# Softmax
# ------------------------------------------------------------------------------------------------------------------


@forward("lse-base-2", "give lse as a natural logarithm: multiply by ln 2")
def _(problem: Problem) -> Iterator[Change]:
    ln_2 = math.log(2)

    def softmax(kernel: Kernel, logits: Array) -> steps.Softmax:
        result = right.softmax(kernel, logits)
        return result._replace(lse=result.lse / ln_2)

    def grad_lse(kernel: Kernel, lse: Array) -> Array:
        return right.grad_lse(kernel, lse) / ln_2

    def rebuilt_weights(kernel: Kernel, logits: Array, lse: Array) -> Array:
        return right.rebuilt_weights(kernel, logits, lse * ln_2)

    def sinks_backward(kernel: Kernel, row_dot: Array, grad_lse: Array, lse: Array) -> Array | None:
        return right.sinks_backward(kernel, row_dot, grad_lse, lse * ln_2)

    own: dict[str, Callable[..., Any]] = {
        "grad_lse": grad_lse,
        "rebuilt_weights": rebuilt_weights,
        "sinks_backward": sinks_backward,
    }
    yield Change(steps={"softmax": softmax, **own})


@forward("softmax-wrong-axis", "normalise over the keys, the last axis of the scores")
def _(problem: Problem) -> Iterator[Change]:
    def over(axis: int) -> dict[str, Callable[..., Any]]:
        def softmax(kernel: Kernel, logits: Array) -> steps.Softmax:
            visible = kernel.view.visible
            if visible is not None:
                visible = np.moveaxis(np.broadcast_to(visible, logits.shape), axis, -1)
            weights = steps.softmax_forward(np, np.moveaxis(logits, axis, -1), None, visible).weights
            return right.softmax(kernel, logits)._replace(weights=np.moveaxis(weights, -1, axis))

        def softmax_backward(
            kernel: Kernel, weights: Array, grad_weights: Array, row_dot: Array, grad_lse: Array
        ) -> Array:
            of_output = weights * (grad_weights - np.sum(weights * grad_weights, axis=axis, keepdims=True))
            if "grad_lse" not in problem.upstream:
                return of_output
            return of_output + grad_lse * right.softmax(kernel, right.logits(kernel).logits).weights

        return {"softmax": softmax, "softmax_backward": softmax_backward}

    names = {-2: "queries", -3: "heads"}
    for axis in range(-2, -len(problem.plane) - 1, -1):
        yield Change(f"over {names.get(axis, 'the batch')}", steps=over(axis), whole=True)
