"""Mistakes in the forward pass, which the backward pass may share."""

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
_UNMASKED: dict[str, Any] = dict.fromkeys(("mask", *_LENGTHS, "query_segments", "key_segments"))
_UNBANDED: dict[str, Any] = {"is_causal": False, "window": (None, None)}


def _has_lengths(problem: Problem) -> bool:
    return any(getattr(problem.resolved[1], name) is not None for name in _LENGTHS)


def _but_lengths(options: dict[str, Any]) -> dict[str, Any]:
    """For a kernel that runs to the lengths: the positions past them, as those of packed sequences, are not there."""
    return {name: option for name, option in options.items() if name not in _LENGTHS}


def _visible_under(kernel: Kernel, options: dict[str, Any]) -> Array | None:
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
            unmasked = _visible_under(kernel, options)
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
        visible = _visible_under(kernel, {})
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
    over_keys = {"all keys": _UNMASKED | _UNBANDED, "band": _UNMASKED}
    if _has_lengths(problem):
        over_keys |= {f"{keys} within the lengths": _but_lengths(options) for keys, options in over_keys.items()}
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
            rows = _visible_under(kernel, _UNMASKED | _UNBANDED | only("query_lengths")) if is_within else None
            return _empty(kernel) & (True if rows is None else np.any(rows, axis=-1, keepdims=True))

        def only(name: str) -> dict[str, Any]:
            return {name: getattr(problem.resolved[1], name)}

        def nan_rows(kernel: Kernel, array: Array) -> Array:
            return np.where(empty(kernel), np.nan, array)

        def nan_heads(kernel: Kernel, array: Array) -> Array:
            return np.where(np.any(empty(kernel), axis=-2, keepdims=True), np.nan, array)

        def nan_keys(kernel: Kernel, array: Array) -> Array:
            keys = _visible_under(kernel, _UNMASKED | _UNBANDED | only("key_lengths")) if is_within else None
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
    if _has_lengths(problem):
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
        if _has_lengths(problem):
            within = _but_lengths(_UNMASKED) | _UNBANDED
            unhidden[" within the lengths"] = lambda kernel, view: view._replace(visible=_visible_under(kernel, within))
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
