"""Mistakes of scale, of who may attend to whom, of heads and of layout, which the backward pass may share."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from numpy_sdpa import chain, steps
from numpy_sdpa.chain import Differentiable, View
from numpy_sdpa.kernelcheck import kernel as right
from numpy_sdpa.kernelcheck.kernel import RIGHT, Change, Forward, Kernel
from numpy_sdpa.kernelcheck.problem import FILL, Array, Problem
from numpy_sdpa.kernelcheck.registry import MISTAKES, Results, forward, rewritten

# ------------------------------------------------------------------------------------------------------------------
# Scale
# ------------------------------------------------------------------------------------------------------------------


def _scaled(variant: str, scale: float) -> Change:
    return Change(variant, inputs={"scale": np.asarray(scale, np.float64)})


def _default_scale(size: int) -> float:
    return 1 / math.sqrt(size) if size else 1.0


@forward("scale-missing", "multiply Q Kᵀ by the scale that was asked for, 1/√E where none was")
def _(problem: Problem) -> Iterator[Change]:
    yield _scaled("scale 1", 1.0)
    yield _scaled("1/√E although another scale was given", _default_scale(problem.inputs["query"].shape[-1]))


@forward("scale-by-d", "divide the scores by the square root of the head size, not by the head size")
def _(problem: Problem) -> Iterator[Change]:
    yield _scaled("1/E", 1 / (problem.inputs["query"].shape[-1] or 1))
    yield _scaled("the scale squared", float(problem.resolved[0].scale) ** 2)


@forward("scale-from-value-size", "take the default scale from the head size of query and key, not of value")
def _(problem: Problem) -> Iterator[Change]:
    yield _scaled("1/√Ev", _default_scale(problem.inputs["value"].shape[-1]))


# ------------------------------------------------------------------------------------------------------------------
# Who may attend to whom
# ------------------------------------------------------------------------------------------------------------------


@forward("mask-inverted", "True in the mask means may attend: negate the mask")
def _(problem: Problem) -> Iterator[Change]:
    mask = problem.resolved[1].mask
    if mask is not None:
        yield Change(options={"mask": ~mask})


@forward("mask-ignored", "apply the mask, lengths and segments: hidden scores become −∞ before the softmax")
def _(problem: Problem) -> Iterator[Change]:
    options = problem.resolved[1]
    rules = [("mask",), ("key_lengths",), ("query_lengths",), ("query_lengths", "key_lengths")]
    rules.append(("query_segments", "key_segments"))
    rules.append(tuple(dict.fromkeys(itertools.chain(*rules))))
    for rule in rules:
        on = [name for name in rule if getattr(options, name) is not None]
        if on:
            yield Change(", ".join(on), options=dict.fromkeys(on))


@forward("mask-as-bias", "a boolean mask selects: do not add its 0 and 1 to the scores")
def _(problem: Problem) -> Iterator[Change]:
    mask, bias = problem.inputs.get("mask"), problem.inputs.get("bias", 0.0)
    if mask is not None:
        yield Change("scores + mask", inputs={"bias": bias + mask.astype(np.float64)}, options={"mask": None})
        yield Change("scores − (1 − mask)", inputs={"bias": bias - (mask == 0)}, options={"mask": None})


@forward("causal-ignored", "apply the causal rule: key j is visible to query i iff j ≤ p(i)")
def _(problem: Problem) -> Iterator[Change]:
    if problem.resolved[1].is_causal:
        yield Change(options={"is_causal": False})


@forward(
    "causal-alignment",
    "the diagonal is elsewhere: upper_left puts query i at i, lower_right at i + S − L (of the lengths)",
)
def _(problem: Problem) -> Iterator[Change]:
    options = problem.resolved[1]
    keys = options.key_length if options.key_lengths is None else options.key_lengths
    queries = options.query_length if options.query_lengths is None else options.query_lengths
    offsets = {
        "upper left": 0,
        "lower right": options.key_length - options.query_length,
        "lower right of the lengths": keys - queries,
    }
    for name, offset in offsets.items():
        if np.any(offset != options.offset):
            moved = Change(name, options={"offset": offset})
            yield moved
            if problem.inputs.get("alibi_slopes") is not None:
                yield replace(moved, variant=f"{name} but for ALiBi", view=_with_the_right("distance"))
                yield replace(moved, variant=f"{name} in ALiBi alone", view=_with_the_right("visible"))


def _with_the_right(name: str) -> Callable[[Kernel, View], View]:
    return lambda kernel, view: view._replace(**{name: getattr(Kernel(kernel.problem, part=kernel.part).view, name)})


@forward("causal-strict", "a query sees its own position too: j ≤ p(i), not j < p(i)")
def _(problem: Problem) -> Iterator[Change]:
    options = problem.resolved[1]
    if options.is_causal:
        yield Change(options={"is_causal": False, "window": (options.window[0], -1)})


@forward("window-off-by-one", "the window includes both ends: p(i) − left ≤ j ≤ p(i) + right")
def _(problem: Problem) -> Iterator[Change]:
    window = problem.resolved[1].window
    for step in itertools.product((0, -1, 1), repeat=2):
        sides = [None if side is None else side + more for side, more in zip(window, step, strict=True)]
        if tuple(sides) != window:
            yield Change(f"window ({sides[0]}, {sides[1]})", options={"window": tuple(sides)})


@forward("window-ignored", "apply the window: p(i) − left ≤ j ≤ p(i) + right")
def _(problem: Problem) -> Iterator[Change]:
    left, right_side = problem.resolved[1].window
    for window in dict.fromkeys([(None, None), (None, right_side), (left, None)]):
        if window != (left, right_side):
            yield Change(f"window {window}", options={"window": window})


# ------------------------------------------------------------------------------------------------------------------
# A row that sees nothing
# ------------------------------------------------------------------------------------------------------------------


def _empty(kernel: Kernel) -> Array:
    """The rows that see nothing, before the view is changed; broadcasts to (…, rows, 1)."""
    return ~Kernel(kernel.problem, replace(kernel.change, view=None), kernel.part).sees


_LENGTHS = ("query_lengths", "key_lengths")
UNMASKED: dict[str, Any] = dict.fromkeys(("mask", *_LENGTHS, "query_segments", "key_segments"))
UNBANDED: dict[str, Any] = {"is_causal": False, "window": (None, None)}


def has_lengths(problem: Problem) -> bool:
    return any(getattr(problem.resolved[1], name) is not None for name in _LENGTHS)


def but_lengths(options: dict[str, Any]) -> dict[str, Any]:
    """For a kernel that runs to the lengths: the positions past them, as those of packed sequences, are not there."""
    return {name: option for name, option in options.items() if name not in _LENGTHS}


def visible_under(kernel: Kernel, options: dict[str, Any]) -> Array | None:
    return Kernel(kernel.problem, Change(inputs={"bias": None}, options=options), kernel.part).view.visible


@forward(
    "fully-masked-mean", "a query that sees no key has output 0 and lse −∞; a finite fill makes it a mean of values"
)
def _(problem: Problem) -> Iterator[Change]:
    def seeing(options: dict[str, Any]) -> Callable[[Kernel, View], View]:
        """Rows that see nothing see all that `options` leave."""

        def view_of(kernel: Kernel, view: View) -> View:
            if view.visible is None:
                return view
            unmasked = visible_under(kernel, options)
            return view._replace(visible=view.visible | (_empty(kernel) & (True if unmasked is None else unmasked)))

        return view_of

    def filled(kernel: Kernel) -> chain.Logits:
        stages = right.logits(kernel)
        return stages._replace(logits=np.where(_empty(kernel) & np.isfinite(stages.logits), FILL, stages.logits))

    def filled_over_bias(hidden: Callable[[Kernel], Array]) -> Callable[[Kernel], chain.Logits]:
        """The fill also where the bias is −∞, if `hidden` there."""

        def logits(kernel: Kernel) -> chain.Logits:
            stages = right.logits(kernel)
            visible = True if kernel.view.visible is None else kernel.view.visible
            return stages._replace(logits=np.where(_empty(kernel) & visible & hidden(kernel), FILL, stages.logits))

        return logits

    def hidden_by_rules(kernel: Kernel) -> Array:
        visible = visible_under(kernel, {})
        return np.array(False) if visible is None else ~visible

    def hidden_by_any(kernel: Kernel) -> Array:
        return np.array(True)

    def adding(fill: float) -> Callable[[Kernel], chain.Logits]:
        """Logits as a kernel knows them beside a fill: in float32 −1e4 rounds them to 1e-3, −1e7 to whole numbers."""
        compute = np.float64 if problem.dtype == "float64" else np.float32

        def logits(kernel: Kernel) -> chain.Logits:
            stages = right.logits(kernel)
            rounded = (stages.logits.astype(compute) + compute(fill)).astype(np.float64) - fill + FILL
            return stages._replace(logits=np.where(_empty(kernel), rounded, stages.logits))

        return logits

    def stopped(kernel: Kernel, grad_logits: Array, run: Forward) -> Differentiable:
        return right.logits_backward(kernel, np.where(_empty(kernel), 0, grad_logits), run)

    if np.all(problem.sees) and problem.system.empty_rows == "zero":
        return
    over_keys = {"all keys": UNMASKED | UNBANDED, "band": UNMASKED}
    if has_lengths(problem):
        over_keys |= {f"{keys} within the lengths": but_lengths(options) for keys, options in over_keys.items()}
    for keys, options in over_keys.items():
        view = seeing(options)
        yield Change(f"{keys}, filled", view=view, steps={"logits": filled, "logits_backward": stopped})
        yield Change(f"{keys}, filled, gradient flowing", view=view, steps={"logits": filled})
        if np.any(np.isneginf(problem.inputs.get("bias", 0.0))):
            for where, hidden in (("masked", hidden_by_rules), ("−∞", hidden_by_any)):
                over: dict[str, Callable[..., Any]] = {"logits": filled_over_bias(hidden), "logits_backward": stopped}
                variant = f"{keys}, filled where the bias is {where} too"
                yield Change(variant, view=view, steps=over)
                yield Change(f"{variant}, gradient flowing", view=view, steps={"logits": over["logits"]})
        for fill in (-1e4, -1e5, -1e6, -1e7, -1e8):
            yield Change(f"{keys}, {fill:.0e} added", view=view, steps={"logits": adding(fill)})


@forward("fully-masked-nan", "a query that sees no key has output 0 and lse −∞: guard the division by its sum of 0")
def _(problem: Problem) -> Iterator[Change]:
    def changes(variant: str, is_within: bool) -> Iterator[Change]:
        """Where `is_within`, NaN only in rows and keys within the lengths."""

        def empty(kernel: Kernel) -> Array:
            rows = visible_under(kernel, UNMASKED | UNBANDED | only("query_lengths")) if is_within else None
            return _empty(kernel) & (True if rows is None else np.any(rows, axis=-1, keepdims=True))

        def only(name: str) -> dict[str, Any]:
            return {name: getattr(problem.resolved[1], name)}

        def nan_rows(kernel: Kernel, array: Array) -> Array:
            return np.where(empty(kernel), np.nan, array)

        def nan_heads(kernel: Kernel, array: Array) -> Array:
            return np.where(np.any(empty(kernel), axis=-2, keepdims=True), np.nan, array)

        def nan_keys(kernel: Kernel, array: Array) -> Array:
            keys = visible_under(kernel, UNMASKED | UNBANDED | only("key_lengths")) if is_within else None
            there = True if keys is None else np.any(keys, axis=-2)[..., None]
            return np.where(there, nan_heads(kernel, array), array)

        def output(kernel: Kernel, weights: Array) -> Array:
            return nan_rows(kernel, right.output(kernel, np.where(np.isnan(weights), 0, weights)))

        def softmax(kernel: Kernel, logits: Array) -> steps.Softmax:
            result = right.softmax(kernel, logits)
            return result._replace(weights=nan_rows(kernel, result.weights))

        def softmax_nan_lse(kernel: Kernel, logits: Array) -> steps.Softmax:
            result = softmax(kernel, logits)
            return result._replace(lse=nan_rows(kernel, result.lse))

        def output_backward(kernel: Kernel, grad_output: Array, weights: Array) -> steps.OutputGradients:
            grads = right.output_backward(kernel, grad_output, np.where(np.isnan(weights), 0, weights))
            return grads._replace(value=nan_keys(kernel, grads.value))

        def stopped(kernel: Kernel, grad_logits: Array, run: Forward) -> Differentiable:
            return right.logits_backward(kernel, np.where(_empty(kernel), 0, grad_logits), run)

        def logits_backward(kernel: Kernel, grad_logits: Array, run: Forward) -> Differentiable:
            grads = stopped(kernel, grad_logits, run)
            slopes = grads.alibi_slopes
            return grads._replace(
                query=nan_rows(kernel, grads.query),
                key=nan_keys(kernel, grads.key),
                bias=None if grads.bias is None else nan_rows(kernel, grads.bias),
                alibi_slopes=None if slopes is None else nan_heads(kernel, slopes[..., None, None])[..., 0, 0],
            )

        spread: dict[str, Callable[..., Any]] = {"output": output, "output_backward": output_backward}
        for of_lse, function in (("", softmax), ("lse too", softmax_nan_lse)):
            form = ", ".join(filter(None, (variant, of_lse)))
            yield Change(form, steps={"softmax": function, "logits_backward": logits_backward, **spread})
            # where the mask was filled in, its gradient stops the NaN
            of_values = ", ".join(filter(None, (form, "gradients of values alone")))
            yield Change(of_values, steps={"softmax": function, "logits_backward": stopped, **spread})

    if np.all(problem.sees):
        return
    yield from changes("", is_within=False)
    if has_lengths(problem):
        yield from changes("within the lengths", is_within=True)


def right_change(problem: Problem) -> Change:
    """None, unless the kernel's own system averages all values where a query sees no key: then that is right."""
    if problem.system.empty_rows == "mean":
        return next(MISTAKES["fully-masked-mean"].all_changes(problem), RIGHT)
    return RIGHT


# ------------------------------------------------------------------------------------------------------------------
# Heads and layout
# ------------------------------------------------------------------------------------------------------------------


@forward("gqa-tiled", "query head h reads key head h // (Hq / Hkv): repeat the key heads one by one, do not tile them")
def _(problem: Problem) -> Iterator[Change]:
    group = problem.resolved[1].group
    if group > 1:
        yield Change(key_heads=np.arange(problem.lead[-1]) % (problem.lead[-1] // group))


def _reread(array: Array) -> Array:
    """The memory of (…, H, L, E), read as (…, L, H, E)."""
    *batch, heads, length, size = array.shape
    return np.swapaxes(np.reshape(array, (*batch, length, heads, size)), -3, -2)


def _written(array: Array) -> Array:
    """(…, H, L, E), its memory written as (…, L, H, E)."""
    return np.reshape(np.swapaxes(array, -3, -2), array.shape)


def _all_but_lse(change: Callable[[Array], Array]) -> Callable[[str, Array], Array]:
    return lambda name, array: array if name == "lse" else change(array)


_LAYOUT = (
    "heads and positions are exchanged: pass and read (…, H, L, E) where that is the layout, (…, L, H, E) where that is"
)


@forward("layout-swapped", _LAYOUT)
def _(problem: Problem) -> Iterator[Change]:
    inputs = problem.inputs
    # lse has no head size, and a kernel its own strides for it
    but_lse = _all_but_lse(_written)
    for names in (("query", "key", "value"), ("query",), ("key", "value"), ("key",), ("value",)):
        changed = {name: _reread(inputs[name]) for name in names}
        variant = f"{', '.join(names)} read so"
        yield Change(variant, inputs=changed, whole=True)
        written = f"{variant}, results written so"
        yield Change(written, inputs=changed, whole=True, results=lambda name, array: _written(array))
        yield Change(f"{written} but for lse", inputs=changed, whole=True, results=but_lse)
    everything = {name: _reread(inputs[name]) for name in ("query", "key", "value")}
    if "grad_output" in problem.upstream:
        upstream = {**problem.upstream, "grad_output": _reread(problem.upstream["grad_output"])}
        other = replace(problem, inputs={**inputs, **everything}, upstream=upstream)
        yield Change("all read and written so but for lse", problem=other, whole=True, results=but_lse)
        if "grad_lse" in upstream:
            upstream = {**upstream, "grad_lse": _reread(upstream["grad_lse"][..., None])[..., 0]}
            other = replace(other, upstream=upstream)
        yield Change("all read and written so", problem=other, whole=True, results=lambda name, array: _written(array))
    swapped = {name: np.swapaxes(inputs[name], -3, -2) for name in ("query", "key", "value")}
    upstream = {
        name: np.swapaxes(array, -2, -3 if name == "grad_output" else -1) for name, array in problem.upstream.items()
    }
    other = replace(problem, inputs={**inputs, **swapped}, upstream=upstream)
    *batch, heads, length, _ = problem.shape_of("output")
    upstream_shape = (*batch, length, heads)
    with contextlib.suppress(
        TypeError, ValueError
    ):  # where lengths cannot be head counts no kernel takes them for that
        if other.shape_of("output")[:-1] != upstream_shape:
            return

        def exchanged(array: Array) -> Array:
            return np.swapaxes(array, -3, -2)

        over_heads = Change(
            "attending over heads", problem=other, whole=True, results=lambda name, array: exchanged(array)
        )
        yield over_heads
        yield replace(over_heads, variant="attending over heads, lse in its own order", results=_all_but_lse(exchanged))


@rewritten("layout-swapped", _LAYOUT, is_backward=False)
def _(results: Results, name: str) -> Iterator[tuple[str, Array]]:
    array = results.arrays[name]
    if name in ("output", "grad_query", "grad_key", "grad_value"):
        yield "axes exchanged", np.swapaxes(array, -3, -2)
        yield "written so", _written(array)
    if name == "lse":
        yield "axes exchanged", np.swapaxes(array, -2, -1)
        yield "written so", _written(array[..., None])[..., 0]
