"""How far from exact a result may be: a bound on the rounding errors of attention in a given precision, derived.

First-order error analysis (N. J. Higham, "Accuracy and stability of numerical algorithms", 2002, chapter 3): a sum of n
products is wrong by at most n · eps · Σ|products|, whatever its order. So every bound below is the formula of the
result with each term replaced by its absolute value, times a relative error that counts the roundings on the way. eps
is that of the compute dtype. A result that is then rounded to a narrower dtype is wrong by half a unit more.
"""

import loops
import numpy as np

# The terms of second order that are left out are smaller than the bound by the bound itself: 1e-3 at most here.
FIRST_ORDER = 1.001


class Bounds:
    """`forward` and `gradients`: the largest error of each result by name, in its shape."""

    def __init__(self, case, inputs, eps):
        self.case, self.inputs, self.eps = case, inputs, eps
        self.query, self.key, self.value = (np.abs(np.asarray(array, dtype=float)) for array in inputs[:3])
        if case.has_gqa:
            self.group = case.query[-3] // case.key[-3]
            self.key, self.value = (np.repeat(array, self.group, axis=-3) for array in (self.key, self.value))
        self.L, self.S = case.weights_shape[-2:]
        self.E, self.Ev = case.query[-1], case.value[-1]
        self.terms = int(np.prod(case.weights_shape))  # of a sum over the whole plane
        self.softcap = inputs.options.get("softcap")
        self.scale = abs(inputs.options.get("scale", loops.default_scale(self.E)))
        self.exact = loops.forward(*inputs[:3], **inputs.options)
        self.visible = self.exact.logits != -np.inf
        self.lse = np.where(np.isinf(self.exact.lse), 0, self.exact.lse)[..., None]
        self.kept = self._dropout_factor()
        self.distance = self._distance() if "alibi_slopes" in inputs.options else None
        self._logits()
        self.forward = {name: FIRST_ORDER * bound for name, bound in self._forward().items()}
        self.gradients = {name: FIRST_ORDER * self._summed(name, b) for name, b in self._gradients().items()}

    def _option(self, name):
        """An array option as magnitudes, −∞ as 0; None where it is off."""
        array = self.inputs.options.get(name)
        if array is None:
            return None
        array = np.asarray(array, dtype=float)
        return np.abs(np.where(np.isneginf(array), 0, array))

    def _upstream(self, name, shape):
        return np.abs(np.asarray(self.inputs.upstream.get(name, np.zeros(shape)), dtype=float))

    def _dropout_factor(self):
        p, mask = (self.inputs.options.get(name) for name in ("dropout_p", "dropout_mask"))
        return 1.0 if p is None else np.where(mask, 1 / (1 - p) if p < 1 else 0.0, 0)

    def _distance(self):
        distance = np.zeros((*self.case.batch, *(1 for _ in self.case.heads), self.L, self.S))
        attention = loops.Attention(*self.inputs[:3], **self.inputs.options)
        for (*lead, i, j), _ in np.ndenumerate(distance):
            distance[(*lead, i, j)] = attention.distance(tuple(lead), i, j)
        return distance

    def _logits(self):
        """E + 1 roundings of the products, three for scale and softcap, a few ulp of tanh; two additions."""
        self.products = np.broadcast_to(self.scale * self.query @ self.key.mT, self.case.weights_shape)
        added = np.zeros(self.case.weights_shape)
        if self.distance is not None:
            added = added + self._option("alibi_slopes")[..., None, None] * self.distance
        if "bias" in self.inputs.options:
            added = added + self._option("bias")
        error = self.eps * ((self.E + 12) * self.products + 3 * added)
        self.logits_error = self._row_max(error)
        magnitude = self._row_max(self.products + added)
        if "sinks" in self.inputs.options:
            magnitude = magnitude + self._option("sinks")[..., None, None]
        # of the weights: numerator and divisor each take the logits' error; S additions; z − shift, exp, division
        self.relative = 2 * self.logits_error + self.eps * (self.S + 8 + 2 * magnitude)

    def _row_max(self, plane):
        return np.max(plane, axis=-1, keepdims=True, where=self.visible, initial=0)

    def _forward(self):
        weights = self.exact.weights
        return {
            "output": (weights * self.kept * (self.relative + (self.S + 3) * self.eps)) @ self.value,
            "lse": (self.relative + self.eps * np.abs(self.lse))[..., 0],
            "weights": weights * self.relative,
        }

    def _gradients(self):
        eps, weights, shape = self.eps, self.exact.weights, self.case.weights_shape
        grad_output = self._upstream("grad_output", self.case.output_shape) * self.visible.any(axis=-1, keepdims=True)
        grad_lse = np.where(np.isneginf(self.exact.lse), 0, self._upstream("grad_lse", self.case.lse_shape))[..., None]
        grad_weights = self.kept * (grad_output @ self.value.mT) + self._upstream("grad_weights", shape)
        row_dot = np.sum(weights * grad_weights, axis=-1, keepdims=True)
        grad_logits = weights * (grad_weights + row_dot + grad_lse)
        relative = 2 * self.relative + eps * (self.S + self.Ev + 10)
        to_plane = relative + eps * self.terms
        bounds = {"value": (weights * self.kept * (self.relative + (self.L + 3) * eps)).mT @ grad_output}
        if "bias" in self.inputs.options:
            bounds["bias"] = grad_logits * to_plane
        if self.distance is not None:
            bounds["alibi_slopes"] = np.sum(grad_logits * self.distance * to_plane, axis=(-2, -1))
        if "sinks" in self.inputs.options:
            sink_weight = np.exp(self.inputs.options["sinks"].astype(float)[..., None, None] - self.lse)
            bounds["sinks"] = np.sum(sink_weight * (grad_lse + row_dot) * to_plane, axis=(-2, -1))
        if self.softcap is not None:  # d = 1 − t² is at most 1, and wrong by 2 t times the error of t
            relative = relative + 2 * self.logits_error / self.softcap + 8 * eps
            leverage = 1 + self.products / self.softcap
            bounds["softcap"] = np.sum(grad_logits * leverage * (relative + (self.terms + 8) * eps))
        per_query = (grad_logits * (relative + (self.S + 4) * eps)) @ self.key
        bounds["query"] = self.scale * per_query
        bounds["key"] = (grad_logits * (relative + (self.L + 4) * eps)).mT @ (self.scale * self.query)
        of_scale = per_query + self.terms * self.E * eps * (grad_logits @ self.key)
        bounds["scale"] = np.sum(self.query * of_scale)
        return bounds

    def _summed(self, name, bound):
        """To the gradient's shape: the adjoint of broadcasting and of grouped heads, which rounds once a term."""
        shape = np.shape(getattr(self.inputs, name, self.inputs.options.get(name, 0.0)))
        if self.case.has_gqa and name in ("key", "value"):
            *batch, heads, length, size = bound.shape
            bound = bound.reshape(*batch, heads // self.group, self.group, length, size).sum(axis=-3)
        added = bound.ndim - len(shape)
        repeated = tuple(axis for axis in range(added, bound.ndim) if shape[axis - added] == 1)
        bound = bound.sum(axis=(*range(added), *repeated), keepdims=True)
        return bound.reshape(shape)


def to_dtype(bound, expected, dtype):
    """The bound after one more rounding, to `dtype`: half a unit in the last place, or half the smallest subnormal."""
    return bound + 0.5 * np.maximum(unit(dtype) * (np.abs(expected) + bound), smallest(dtype))


def unit(dtype):
    """The distance from 1 to the next number."""
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]


def smallest(dtype):
    """The smallest number above 0."""
    return {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}[dtype]
