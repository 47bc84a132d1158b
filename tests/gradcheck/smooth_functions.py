"""Smooth functions with hand-written derivatives, in any floating dtype: what a checker must call right."""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """A function, its two derivatives, and arguments drawn for them."""

    name: str
    function: object
    vjp: object
    jvp: object
    args: tuple


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_backward(grad, p):
    return p * (grad - (grad * p).sum(-1, keepdims=True))


# --- dense layer
# -----------------------------------------------------------------------------------------------


def dense(x, w, b):
    return np.tanh(x @ w + b)


def dense_vjp(grad, x, w, b):
    y = dense(x, w, b)
    d = grad * (1 - y * y)
    return d @ w.T, x.T @ d, d.sum(0)


def dense_jvp(tangents, x, w, b):
    dx, dw, db = tangents
    y = dense(x, w, b)
    return (1 - y * y) * (dx @ w + x @ dw + db)


# --- attention, with its log-sum-exp as a second output
# ----------------------------------------------------------


def attention(q, k, v):
    s = q @ k.T / np.asarray(np.sqrt(q.shape[-1]), q.dtype)
    m = s.max(-1, keepdims=True)
    lse = m[:, 0] + np.log(np.exp(s - m).sum(-1))
    return softmax(s) @ v, lse


def attention_vjp(grads, q, k, v):
    c = np.asarray(1 / np.sqrt(q.shape[-1]), q.dtype)
    p = softmax(q @ k.T * c)
    ds = (softmax_backward(grads[0] @ v.T, p) + grads[1][:, None] * p) * c
    return ds @ k, ds.T @ q, p.T @ grads[0]


def attention_jvp(tangents, q, k, v):
    dq, dk, dv = tangents
    c = np.asarray(1 / np.sqrt(q.shape[-1]), q.dtype)
    p = softmax(q @ k.T * c)
    ds = (dq @ k.T + q @ dk.T) * c
    return softmax_backward(ds, p) @ v + p @ dv, (p * ds).sum(-1)


# --- layer normalisation
# -----------------------------------------------------------------------------------------


def _normal(x):
    centred = x - x.mean(-1, keepdims=True)
    s = np.sqrt((centred * centred).mean(-1, keepdims=True) + np.asarray(1e-5, x.dtype))
    return centred / s, s


def layernorm(x, g):
    return _normal(x)[0] * g


def _normal_derivative(d, n, s):  # symmetric: its own adjoint
    return (d - d.mean(-1, keepdims=True) - n * (d * n).mean(-1, keepdims=True)) / s


def layernorm_vjp(grad, x, g):
    n, s = _normal(x)
    return _normal_derivative(grad * g, n, s), (grad * n).sum(0)


def layernorm_jvp(tangents, x, g):
    n, s = _normal(x)
    return _normal_derivative(tangents[0], n, s) * g + n * tangents[1]


# --- entry by entry
# ----------------------------------------------------------------------------------------------

ENTRYWISE = [
    (np.sin, np.cos),
    (np.exp, np.exp),
    (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    (lambda x: np.log1p(x * x), lambda x: 2 * x / (1 + x * x)),
    (lambda x: 1 / (1 + x * x), lambda x: -2 * x / (1 + x * x) ** 2),
    (lambda x: x * x * x - 2 * x, lambda x: 3 * x * x - 2),
    (lambda x: np.sqrt(1 + x * x), lambda x: x / np.sqrt(1 + x * x)),
    (lambda x: np.exp(-x * x / 2), lambda x: -x * np.exp(-x * x / 2)),
]


def entrywise(which):
    f, slope = ENTRYWISE[which]

    def function(x, y):
        return f(x) * y

    def vjp(grad, x, y):
        return grad * y * slope(x), grad * f(x)

    def jvp(tangents, x, y):
        return slope(x) * y * tangents[0] + f(x) * tangents[1]

    return function, vjp, jvp


# --- a scalar that cancels: distances
# ----------------------------------------------------------------------------


def energy(x, c):
    d = x[:, None] - x[None, :]
    return (c * np.log1p((d * d).sum(-1))).sum()


def energy_vjp(grad, x, c):
    d = x[:, None] - x[None, :]
    r = (d * d).sum(-1)
    g = 2 * (c + c.T) / (1 + r)
    return grad * (g[:, :, None] * d).sum(1), grad * np.log1p(r)


def energy_jvp(tangents, x, c):
    d = x[:, None] - x[None, :]
    dd = tangents[0][:, None] - tangents[0][None, :]
    r = (d * d).sum(-1)
    return (c * 2 * (d * dd).sum(-1) / (1 + r) + tangents[1] * np.log1p(r)).sum()


def draw(rng, dtype="float64"):
    """A random case: the function, the shapes and the scales are drawn."""
    kind = rng.integers(5)
    rows, inner, columns = (int(n) for n in rng.integers(1, 5, 3))
    scale = float(rng.choice([0.3, 1.0, 3.0]))

    def array(*shape, scale=scale):
        return np.asarray(scale * rng.normal(size=shape), dtype)

    if kind == 0:
        args = (array(rows, inner), array(inner, columns), array(columns))
        return Case("dense", dense, dense_vjp, dense_jvp, args)
    if kind == 1:
        args = (array(rows, inner), array(columns, inner), array(columns, 3))
        return Case("attention", attention, attention_vjp, attention_jvp, args)
    if kind == 2:
        return Case("layernorm", layernorm, layernorm_vjp, layernorm_jvp, (array(rows, inner + 2), array(inner + 2)))
    if kind == 3:
        which = int(rng.integers(len(ENTRYWISE)))
        return Case(f"entrywise {which}", *entrywise(which), (array(rows, inner), array(rows, inner)))
    return Case("energy", energy, energy_vjp, energy_jvp, (array(rows, inner), array(rows, rows)))
