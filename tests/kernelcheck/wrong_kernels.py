"""Kernels as people write them, right and wrong, in plain NumPy: they share no code with the package.

`run` is one textbook kernel in float32 (float16 and bfloat16 inputs are widened, weights and their gradient rounded
before the products, results rounded at the end, as half-precision kernels do). `wrong` is a set of mistakes by id,
some with a form after a colon; each is an `if` beside the right line. Mistakes of the forward pass go into the
backward pass as well, which follows the forward's own weights, unless "forward-only" is in the set: then the backward
is the right one, rebuilt from the forward's lse and output as flash kernels do.
"""

import math

import numpy as np

FORWARD_ONLY = "forward-only"


def run(arrays, options, wrong=()):
    """output, lse and the gradients of a problem in the contract's names, layout (B, H, L, E)."""
    return Kernel(arrays, options, frozenset(wrong)).results()


class Kernel:
    def __init__(self, arrays, options, wrong):
        self.arrays, self.options, self.wrong = arrays, options, wrong
        self.dtype = arrays["query"].dtype
        self.compute = np.float64 if self.dtype == np.float64 else np.float32
        self.forms = {entry.partition(":")[0]: entry.partition(":")[2] for entry in wrong}
        self.q, self.k, self.v = (arrays[name].astype(self.compute) for name in ("query", "key", "value"))
        if self.has("layout-swapped") == "heads":  # (B, L, H, E) is what this kernel expects
            self.q, self.k, self.v = (x.swapaxes(1, 2) for x in (self.q, self.k, self.v))
            self.arrays = {**arrays, "grad_output": arrays["grad_output"].swapaxes(1, 2)}
        if self.has("layout-swapped") == "inputs":
            self.q, self.k, self.v = (
                x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(0, 2, 1, 3)
                for x in (self.q, self.k, self.v)
            )
        self.query_heads, self.key_heads = self.q.shape[1], self.k.shape[1]
        self.L, self.S = self.q.shape[2], self.k.shape[2]

    def has(self, mistake):
        """The form of a mistake ("" without one), or None."""
        return self.forms.get(mistake)

    def round(self, array):
        """To the storage type and back."""
        return array.astype(self.dtype).astype(self.compute)

    # -- who reads whom ----------------------------------------------------------------------------

    def spread(self, x):
        """Key heads repeated for each query head."""
        group = self.query_heads // self.key_heads
        if self.has("gqa-tiled") is not None:
            return np.tile(x, (1, group, 1, 1))
        return np.repeat(x, group, axis=1)

    def gathered(self, g):
        """The adjoint."""
        group = self.query_heads // self.key_heads
        if group == 1 or not self.options.get("enable_gqa"):
            return g
        batch, _, length, size = g.shape
        if self.has("gqa-tiled") is not None:
            g = g.reshape(batch, group, self.key_heads, length, size).transpose(0, 2, 1, 3, 4)
        else:
            g = g.reshape(batch, self.key_heads, group, length, size)
        form = self.has("group-sum-missing")
        if form is None:
            return g.sum(axis=2)
        if form == "unreduced":
            return g.reshape(batch, self.query_heads, length, size)
        return g.mean(axis=2) if form == "mean" else g[:, :, int(form)]

    def offsets(self):
        """p(i) − i for each batch element, (B, 1, 1, 1)."""
        batch = self.q.shape[0]
        keys = np.asarray(self.arrays.get("key_lengths", [self.S] * batch))
        queries = np.asarray(self.arrays.get("query_lengths", [self.L] * batch))
        offset = np.zeros(batch, int)
        if self.options.get("alignment") == "lower_right":
            offset = keys - queries
        offset = offset + self.options.get("query_offset", 0) + self.arrays.get("query_offset", 0)
        form = self.has("causal-alignment")
        if form == "upper-left":
            offset = np.zeros(batch, int)
        if form == "lower-right":
            offset = np.full(batch, self.S - self.L)
        return offset[:, None, None, None]

    def visible(self, in_backward=False):
        i = np.arange(self.L)[:, None] + self.offsets()
        j = np.arange(self.S)
        seen = np.ones((self.q.shape[0], self.query_heads, self.L, self.S), bool)
        if "mask" in self.arrays:
            mask = self.arrays["mask"] != 0
            if self.has("mask-inverted") is not None:
                mask = ~mask
            if self.has("mask-ignored") is None and self.has("mask-as-bias") is None:
                seen = seen & mask
        if "bias" in self.arrays and self.has("bias-ignored") is None:
            seen = seen & ~np.isneginf(self.arrays["bias"].astype(np.float32))
        causal = self.options.get("is_causal", False) and self.has("causal-ignored") is None
        if in_backward and self.has("causal-ignored-in-backward") is not None:
            causal = False
        if causal:
            seen = seen & (j < i if self.has("causal-strict") is not None else j <= i)
        left, right = self.options.get("window", (None, None))
        if self.has("window-off-by-one"):
            side, step = self.has("window-off-by-one").split(",")
            left = left + int(step) if side in ("left", "both") else left
            right = right + int(step) if side in ("right", "both") else right
        if self.has("window-ignored") is not None:
            left, right = {"": (None, None), "left": (None, right), "right": (left, None)}[self.has("window-ignored")]
        if left is not None:
            seen = seen & (j >= i - left)
        if right is not None:
            seen = seen & (j <= i + right)
        if "key_lengths" in self.arrays and self.has("mask-ignored") != "key_lengths":
            seen = seen & (j < self.arrays["key_lengths"][:, None, None, None])
        if "query_lengths" in self.arrays:
            rows = np.arange(self.L)[:, None]
            seen = seen & (rows < self.arrays["query_lengths"][:, None, None, None])
        if "query_segments" in self.arrays and self.has("mask-ignored") != "segments":
            seen = seen & (
                self.arrays["query_segments"][:, None, :, None] == self.arrays["key_segments"][:, None, None, :]
            )
        return seen

    # -- forward -----------------------------------------------------------------------------------

    def scale(self):
        scale = self.options.get("scale", 1 / math.sqrt(self.q.shape[-1]))
        if self.has("scale-missing") is not None:
            scale = 1.0
        if self.has("scale-by-d") is not None:
            scale = 1 / self.q.shape[-1]
        if self.has("scale-from-value-size") is not None:
            scale = 1 / math.sqrt(self.v.shape[-1])
        return self.compute(scale)

    def added(self):
        """What is added to the scores: bias and ALiBi."""
        total = np.zeros((1, 1, 1, 1), self.compute)
        if "bias" in self.arrays and self.has("bias-ignored") is None:
            bias = self.arrays["bias"].astype(self.compute)
            total = total + np.where(np.isneginf(bias), 0, bias)
        if "alibi_slopes" in self.arrays and self.has("alibi-ignored") is None:
            total = total + self.slopes() * self.distance()
        if "mask" in self.arrays and self.has("mask-as-bias") is not None:
            total = total + self.arrays["mask"].astype(self.compute)
        return total

    def slopes(self):
        return self.arrays["alibi_slopes"].astype(self.compute).reshape(-1, self.query_heads)[:, :, None, None]

    def distance(self):
        i = np.arange(self.L)[:, None] + self.offsets()
        distance = i - np.arange(self.S)
        form = self.has("alibi-sign")
        if form == "signed":
            return -distance.astype(self.compute)
        return np.abs(distance).astype(self.compute) * (-1 if form is None else 1)

    def logits(self, seen):
        cap = self.options.get("softcap")
        scores = (self.scale() * self.q) @ self.spread(self.k).swapaxes(-1, -2)
        scores = np.where(np.isfinite(scores), scores, 0)
        added = self.added()
        if cap is None or self.has("softcap-ignored") is not None:
            return scores, np.where(seen, scores + added, -np.inf)
        if self.has("softcap-after-mask") is not None:
            return scores, self.compute(cap) * np.tanh(np.where(seen, scores + added, -np.inf) / self.compute(cap))
        if self.has("bias-before-softcap") is not None:
            return scores, np.where(seen, cap * np.tanh((scores + added) / self.compute(cap)), -np.inf)
        return scores, np.where(seen, self.compute(cap) * np.tanh(scores / self.compute(cap)) + added, -np.inf)

    def softmax(self, logits, seen, unmasked):
        """Weights, and lse as the kernel gives it."""
        if self.has("softmax-wrong-axis") is not None:
            axis = {"queries": -2, "heads": 1, "batch": 0}[self.has("softmax-wrong-axis")]
            top = logits.max(axis=axis, keepdims=True)
            exponentials = np.exp(logits - np.where(np.isinf(top), 0, top))
            total = exponentials.sum(axis=axis, keepdims=True)
            return exponentials / np.where(total == 0, 1, total), self.right_lse(logits)
        if self.has("fully-masked-mean") is not None:
            kind, _, fill = self.has("fully-masked-mean").rpartition(",")
            fill = self.compute(fill or -1e9)
            logits = np.where(seen, logits, unmasked + fill if kind == "added" else fill)
        sinks = self.sinks()
        top = logits.max(axis=-1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks)
        if self.has("fully-masked-nan") is None:
            top = np.where(np.isneginf(top), 0, top)
        exponentials = np.exp(logits - top)
        total = exponentials.sum(axis=-1, keepdims=True)
        without_sink = total
        if sinks is not None:
            total = total + np.exp(sinks - top)
        if self.has("fully-masked-nan") is None:
            weights = exponentials / np.where(total == 0, 1, total)
        else:
            weights = exponentials / total
        lse = top + np.log(without_sink if self.has("sinks-ignored-in-lse") is not None else total)
        return weights, lse

    def right_lse(self, logits):
        top = logits.max(axis=-1, keepdims=True)
        top = np.where(np.isneginf(top), 0, top)
        return top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))

    def sinks(self):
        if "sinks" not in self.arrays or self.has("sinks-ignored") is not None:
            return None
        return self.arrays["sinks"].astype(self.compute).reshape(-1, self.query_heads)[:, :, None, None]

    def dropped(self, weights):
        p = self.options.get("dropout_p")
        if p is None:
            return weights
        factor = 1.0 if self.has("dropout-not-rescaled") is not None else 1 / (1 - p)
        return np.where(self.arrays["dropout_mask"], weights * self.compute(factor), 0)

    # -- results -----------------------------------------------------------------------------------

    def results(self):
        with np.errstate(all="ignore"):
            return self._results()

    def _results(self):
        seen = self.visible()
        scores, logits = self.logits(seen)
        weights, lse = self.softmax(logits, seen, scores + self.added())
        output = self.round(self.dropped(weights)) @ self.spread(np.where(np.isfinite(self.v), self.v, 0))
        results = {"output": output.astype(self.dtype), "lse": lse[..., 0]}
        if "grad_output" in self.arrays:
            results |= self.backward(scores, logits, weights, lse, output)
        if self.has("lse-base-2") is not None:
            results["lse"] = results["lse"] / self.compute(math.log(2))
        return self.in_layout(results)

    def in_layout(self, results):
        form = self.has("layout-swapped")
        if form == "output":
            results["output"] = np.ascontiguousarray(results["output"].swapaxes(1, 2))
        if form == "heads":
            results["lse"] = results["lse"][..., None]
            results = {name: np.ascontiguousarray(array.swapaxes(1, 2)) for name, array in results.items()}
            results["lse"] = results["lse"][..., 0]
        if form == "memory":
            for name in ("output", "grad_query", "grad_key", "grad_value"):
                results[name] = np.ascontiguousarray(results[name].swapaxes(1, 2)).reshape(results[name].shape)
        return results

    def backward(self, scores, logits, weights, lse, output):
        if FORWARD_ONLY in self.wrong:
            right = Kernel(self.arrays, self.options, frozenset())
            seen = right.visible()
            scores, logits = right.logits(seen)
            weights = np.where(seen, np.exp(logits - lse), 0)
            return right.gradients(scores, logits, weights, lse, output, seen)
        seen = self.visible(in_backward=True)
        if self.has("causal-ignored-in-backward") is not None:
            scores, logits = self.logits(seen)
            weights = np.exp(logits - lse)
        return self.gradients(scores, logits, weights, lse, output, seen)

    def gradients(self, scores, logits, weights, lse, output, seen):
        cap = self.options.get("softcap")
        k, v = (
            self.spread(np.where(np.isfinite(self.k), self.k, 0)),
            self.spread(np.where(np.isfinite(self.v), self.v, 0)),
        )
        q = np.where(np.isfinite(self.q), self.q, 0)
        grad_output = self.arrays["grad_output"].astype(self.compute)
        empty = ~self.visible().any(axis=-1, keepdims=True)
        if self.has("fully-masked-mean") is None and self.has("fully-masked-nan") is None:
            grad_output = np.where(empty, 0, grad_output)
        for_value = weights if self.has("grad-value-undropped") is not None else self.dropped(weights)
        grad_value = self.round(for_value).swapaxes(-1, -2) @ grad_output
        grad_weights = self.dropped(grad_output @ v.swapaxes(-1, -2))
        row_dot = (grad_output * output).sum(axis=-1, keepdims=True)
        if self.has("row-dot-missing") is not None:
            row_dot = np.zeros_like(row_dot)
        if self.has("softmax-wrong-axis") is not None:
            axis = {"queries": -2, "heads": 1, "batch": 0}[self.has("softmax-wrong-axis")]
            row_dot = (weights * grad_weights).sum(axis=axis, keepdims=True)
        grad_lse = self.arrays.get("grad_lse")
        if grad_lse is None or self.has("lse-gradient-ignored") is not None:
            grad_lse = np.zeros(row_dot.shape[:-1])
        grad_lse = np.where(np.isneginf(lse), 0, grad_lse[..., None]).astype(self.compute)
        grad_logits = weights * (grad_weights - row_dot + grad_lse)
        if self.has("fully-masked-mean") is not None and "added" not in self.has("fully-masked-mean"):
            grad_logits = np.where(seen, grad_logits, 0)
        grad_scores = grad_logits
        grad_bias = grad_inside = grad_logits
        if cap is not None and self.has("softcap-ignored") is None:
            if self.has("softcap-after-mask") is not None or self.has("bias-before-softcap") is not None:
                inside = np.where(seen, scores + self.added(), -np.inf)
                grad_scores = grad_bias = grad_inside = np.where(
                    seen, grad_logits * (1 - np.tanh(inside / cap) ** 2), 0
                )
            elif self.has("softcap-derivative-missing") is None:
                grad_scores = grad_logits * (1 - np.tanh(scores / cap) ** 2)
            if self.has("grad-bias-scaled") == "softcap":
                grad_bias = grad_scores
        grad_scores = grad_scores.astype(self.compute)
        scale = self.scale()
        grad_query = scale * (self.round(grad_scores) @ k)
        grad_key = scale * (self.round(grad_scores).swapaxes(-1, -2) @ q)
        if self.has("grad-query-key-swapped") == "operands":
            grad_query = scale * (self.round(grad_scores) @ q)
            grad_key = scale * (self.round(grad_scores).swapaxes(-1, -2) @ k)
        which = self.has("scale-missing-in-backward")
        if which is not None:
            grad_query = grad_query if which == "key" else grad_query / scale
            grad_key = grad_key if which == "query" else grad_key / scale
        which = self.has("scale-twice-in-backward")
        if which is not None:
            grad_query = grad_query if which == "key" else grad_query * scale
            grad_key = grad_key if which == "query" else grad_key * scale
        results = {
            "grad_query": grad_query,
            "grad_key": self.gathered(grad_key),
            "grad_value": self.gathered(grad_value),
        }
        if self.has("grad-query-key-swapped") == "":
            results["grad_query"], results["grad_key"] = results["grad_key"], results["grad_query"]
        results |= self.option_gradients(grad_inside, grad_bias, row_dot, grad_lse, lse, scale)
        return {
            name: self.summed(name.removeprefix("grad_"), array).astype(self.dtype) for name, array in results.items()
        }

    def option_gradients(self, grad_inside, grad_bias, row_dot, grad_lse, lse, scale):
        results = {}
        if "bias" in self.arrays:
            results["grad_bias"] = scale * grad_bias if self.has("grad-bias-scaled") == "" else grad_bias
        if "alibi_slopes" in self.arrays:
            results["grad_alibi_slopes"] = (grad_inside * self.distance()).sum(axis=(-2, -1))
        if "sinks" in self.arrays:
            sinks = self.arrays["sinks"].astype(self.compute).reshape(-1, self.query_heads)[:, :, None, None]
            share = np.exp(sinks - lse) if self.has("sinks-ignored") is None else 0 * lse
            grad = share * (grad_lse - row_dot)
            results["grad_sinks"] = grad.sum(axis=(-2, -1)) * (-1 if self.has("grad-sinks-sign") is not None else 1)
        return results

    def summed(self, name, gradient):
        """Over what was broadcast."""
        if self.has("grad-query-key-swapped") is not None or self.has("layout-swapped") == "heads":
            return gradient
        shape = self.arrays[name].shape
        if (
            gradient.ndim == len(shape)
            and self.has("group-sum-missing") == "unreduced"
            and gradient.shape[1] != shape[1]
        ):
            return gradient  # not summed over the group
        axes = [
            a
            for a in range(gradient.ndim)
            if ((1,) * (gradient.ndim - len(shape)) + shape)[a] == 1 != gradient.shape[a]
        ]
        form = self.has("broadcast-sum-missing")
        if form is not None and axes:
            kind, _, which = form.partition(",")
            wrong = [axis for axis in axes if not which or str(axis) in which.split("/")]
            right = [axis for axis in axes if axis not in wrong]
            gradient = gradient.sum(axis=tuple(right), keepdims=True) if right else gradient
            if kind == "unreduced":
                return gradient
            for axis in wrong:
                if kind == "mean":
                    gradient = gradient.mean(axis=axis, keepdims=True)
                else:
                    gradient = np.take(gradient, [0 if kind == "first" else -1], axis=axis)
        elif axes:
            gradient = gradient.sum(axis=tuple(axes), keepdims=True)
        return gradient.reshape(shape)
