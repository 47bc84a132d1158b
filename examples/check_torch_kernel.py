"""Check a torch.autograd.Function: attention with a hand-written backward pass, in float32 and bfloat16."""

import sys

import numpy as np
import torch

from numpy_sdpa.kernelcheck import check_kernel


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, is_causal):
        scale = query.shape[-1] ** -0.5
        scores = (scale * query.float()) @ key.float().mT
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(dim=-1)
        output = weights @ value.float()
        ctx.save_for_backward(query, key, value, weights)
        return output.to(query.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        query, key, value, weights = ctx.saved_tensors
        grad_output, scale = grad_output.float(), query.shape[-1] ** -0.5
        grad_value = weights.mT @ grad_output
        grad_weights = grad_output @ value.float().mT
        grad_scores = weights * (grad_weights - (weights * grad_weights).sum(dim=-1, keepdim=True))
        grad_query = scale * grad_scores @ key.float()
        grad_key = scale * grad_scores.mT @ query.float()
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None


def to_torch(array):
    if array.dtype.name == "bfloat16":  # torch takes no bfloat16 from NumPy: its two bytes
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def to_numpy(tensor):
    tensor = tensor.detach()
    return tensor.view(torch.int16).numpy().view("V2") if tensor.dtype == torch.bfloat16 else tensor.numpy()


def kernel(arrays, options):
    tensors = [to_torch(arrays.pop(name)).requires_grad_() for name in ("query", "key", "value")]
    grad_output = to_torch(arrays.pop("grad_output"))
    if arrays or not options.keys() <= {"is_causal"}:
        raise NotImplementedError("options other than is_causal")
    output = Attention.apply(*tensors, options.get("is_causal", False))
    output.backward(grad_output)
    query, key, value = tensors
    results = {"output": output, "grad_query": query.grad, "grad_key": key.grad, "grad_value": value.grad}
    return {name: to_numpy(tensor) for name, tensor in results.items()}


if __name__ == "__main__":
    report = check_kernel(kernel, dtypes=["float32", "bfloat16"])
    print(report)
    sys.exit(0 if report.passed else 1)
