"""Check a jax.custom_vjp: attention with a hand-written backward pass."""

import sys

import jax
import jax.numpy as jnp

from numpy_sdpa.kernelcheck import check_kernel


@jax.custom_vjp
def attention(query, key, value):
    return attention_forward(query, key, value)[0]


def attention_forward(query, key, value):
    scores = query @ key.mT / jnp.sqrt(query.shape[-1])
    weights = jax.nn.softmax(scores, axis=-1)
    return weights @ value, (query, key, value, weights)


def attention_backward(saved, grad_output):
    query, key, value, weights = saved
    grad_value = weights.mT @ grad_output
    grad_weights = grad_output @ value.mT
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(axis=-1, keepdims=True))
    grad_scores = grad_scores / jnp.sqrt(query.shape[-1])
    return grad_scores @ key, grad_scores.mT @ query, grad_value


attention.defvjp(attention_forward, attention_backward)


def kernel(arrays, options):
    query, key, value, grad_output = (
        jnp.asarray(arrays.pop(name)) for name in ("query", "key", "value", "grad_output")
    )
    if arrays or options or query.shape[1] != key.shape[1]:
        raise NotImplementedError("options, and heads that are shared")
    output, vjp = jax.vjp(attention, query, key, value)
    grad_query, grad_key, grad_value = vjp(grad_output)
    return {"output": output, "grad_query": grad_query, "grad_key": grad_key, "grad_value": grad_value}


if __name__ == "__main__":
    with jax.default_matmul_precision("float32"):
        report = check_kernel(kernel)
    print(report)
    sys.exit(0 if report.passed else 1)
