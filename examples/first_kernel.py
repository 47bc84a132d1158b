"""A first flash kernel, in NumPy: it reads case.npz and writes dump.npz. One of its lines is wrong.

numpy-sdpa make-case case.npz --features causal gqa
python examples/first_kernel.py
numpy-sdpa compare dump.npz --plot report.png
"""

import numpy as np

BLOCK = 16

case = dict(np.load("case.npz"))
query, key, value, grad_output = (case[name] for name in ("query", "key", "value", "grad_output"))
group = query.shape[1] // key.shape[1]
scale = np.float32(query.shape[-1] ** -0.5)
rows, keys = np.arange(query.shape[2]), np.arange(key.shape[2])
full_key, full_value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)


def scores_of(block):
    scores = scale * query @ full_key[:, :, block].swapaxes(-1, -2)
    return np.where(keys[block] < rows[:, None], scores, -np.inf)


# forward: a running maximum and sum over blocks of keys
largest = np.full((*query.shape[:-1], 1), -np.inf, np.float32)
total, output = np.zeros_like(largest), np.zeros_like(query)
for start in range(0, len(keys), BLOCK):
    block = slice(start, start + BLOCK)
    scores = scores_of(block)
    new = np.maximum(largest, scores.max(axis=-1, keepdims=True))
    shift = np.where(np.isinf(new), 0, new)
    shrink, exponentials = np.exp(largest - shift), np.exp(scores - shift)
    output = output * shrink + exponentials @ full_value[:, :, block]
    total = total * shrink + exponentials.sum(axis=-1, keepdims=True)
    largest = new
output = output / np.where(total == 0, 1, total)
with np.errstate(divide="ignore"):
    lse = np.where(np.isinf(largest), 0, largest) + np.log(total)

# backward: the weights of each block are rebuilt from lse
row_dot = (grad_output * output).sum(axis=-1, keepdims=True)
grad_query, grad_key, grad_value = np.zeros_like(query), np.zeros_like(full_key), np.zeros_like(full_value)
for start in range(0, len(keys), BLOCK):
    block = slice(start, start + BLOCK)
    weights = np.exp(scores_of(block) - np.where(np.isinf(lse), 0, lse))
    grad_value[:, :, block] = weights.swapaxes(-1, -2) @ grad_output
    grad_scores = weights * (grad_output @ full_value[:, :, block].swapaxes(-1, -2) - row_dot)
    grad_query += scale * grad_scores @ full_key[:, :, block]
    grad_key[:, :, block] = scale * grad_scores.swapaxes(-1, -2) @ query
grad_key, grad_value = (g.reshape(*key.shape[:2], group, *g.shape[2:]).sum(axis=2) for g in (grad_key, grad_value))

results = {"output": output, "lse": lse[..., 0], "grad_query": grad_query, "grad_key": grad_key}
np.savez("dump.npz", **{**case, **results, "grad_value": grad_value})
