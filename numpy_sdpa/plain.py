"""Scaled dot-product attention and its gradients without options: read this first."""

import math

import numpy as np


def attention_forward(query, key, value):
    """query (…, L, E), key (…, S, E), value (…, S, Ev) → output (…, L, Ev), weights (…, L, S)."""
    scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * query @ key.mT  # 1  (…, L, S)
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))  # 2
    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)  # 3  softmax over the keys
    output = weights @ value  # 4  (…, L, Ev)
    return output, weights


def attention_backward(grad_output, query, key, value, weights):
    """grad_output (…, L, Ev) → gradients of query, key and value: the forward's lines undone in reverse order."""
    scale = 1 / math.sqrt(query.shape[-1])
    grad_value = weights.mT @ grad_output  # of 4
    grad_weights = grad_output @ value.mT  # of 4
    row_dot = (weights * grad_weights).sum(axis=-1, keepdims=True)
    grad_scores = weights * (grad_weights - row_dot)  # of 2 and 3: the softmax's Jacobian is diag(p) − p pᵀ
    grad_query = scale * grad_scores @ key  # of 1
    grad_key = scale * grad_scores.mT @ query  # of 1
    return grad_query, grad_key, grad_value
