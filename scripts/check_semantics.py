"""Check the rows of `numpy_sdpa.kernelcheck.semantics` against the systems themselves: ``python
scripts/check_semantics.py``.

Each system is run as a kernel on the problems that it knows, and must be right by its own row and wrong by another
row where the two disagree. What is not installed is skipped. (flash-attention needs a CUDA GPU: its row is read, not
run.)
"""

import importlib.util
import sys

import numpy as np

from numpy_sdpa.kernelcheck import check_kernel

# Where this package's meaning and the system's are not the same: these features tell them apart.
DIFFERENCES = {"torch": (), "jax": ("empty_rows",), "onnx": ("causal", "key_lengths")}

FEATURES = {
    "torch": [
        "mask",
        "head_mask",
        "bias",
        "broadcast_bias",
        "causal",
        "scale",
        "gqa",
        "empty_rows",
        "value_size",
        "odd_sizes",
        "one_query",
    ],
    "jax": [
        "mask",
        "head_mask",
        "bias",
        "broadcast_bias",
        "causal",
        "window",
        "query_lengths",
        "key_lengths",
        "scale",
        "gqa",
        "empty_rows",
        "odd_sizes",
        "one_query",
    ],
    "onnx": [
        "mask",
        "head_mask",
        "bias",
        "broadcast_bias",
        "causal",
        "window",
        "key_lengths",
        "scale",
        "softcap",
        "gqa",
        "empty_rows",
        "value_size",
        "odd_sizes",
    ],
}


def torch_kernel(arrays, options):
    import torch

    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    inputs = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    mask, bias = tensors.get("mask"), tensors.get("bias")
    if mask is not None and bias is not None:
        bias = torch.where(mask, bias, -torch.inf)
    attn_mask = mask if bias is None else bias.requires_grad_()
    is_causal = options.get("is_causal", False)
    if (is_causal and attn_mask is not None) or not options.keys() <= {"is_causal", "scale", "enable_gqa"}:
        raise NotImplementedError("not an option of torch's")
    output = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=attn_mask, **options)
    output.backward(tensors["grad_output"])
    results = {"output": output.detach()}
    results |= {f"grad_{name}": tensors[name].grad for name in ("query", "key", "value")}
    if bias is not None and mask is None:
        results["grad_bias"] = bias.grad
    return {name: tensor.numpy() for name, tensor in results.items()}


def jax_kernel(arrays, options):
    import jax
    import jax.numpy as jnp

    names = {
        "mask": "mask",
        "bias": "bias",
        "query_lengths": "query_seq_lengths",
        "key_lengths": "key_value_seq_lengths",
        "scale": "scale",
        "is_causal": "is_causal",
        "window": "local_window_size",
    }
    options = {name: option for name, option in options.items() if name != "enable_gqa"}
    given = {**arrays, **options}
    query, key, value, grad_output = (jnp.asarray(given.pop(name)) for name in ("query", "key", "value", "grad_output"))
    if not given.keys() <= names.keys():
        raise NotImplementedError("not an option of jax's")
    keywords = {names[name]: value for name, value in given.items()}
    bias = keywords.pop("bias", None)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in keywords:
            keywords[name] = jnp.asarray(keywords[name], jnp.int32)
    if "mask" in keywords:
        keywords["mask"] = jnp.asarray(keywords["mask"])

    def attention(query, key, value, bias):
        return jax.nn.dot_product_attention(query, key, value, bias, return_residual=True, **keywords)

    bias = None if bias is None else jnp.asarray(bias)
    (output, lse), vjp = jax.vjp(attention, query, key, value, bias)
    gradients = vjp((grad_output, jnp.zeros_like(lse)))
    results = {"output": output, "lse": lse, "grad_query": gradients[0], "grad_key": gradients[1]}
    results["grad_value"] = gradients[2]
    if bias is not None:
        results["grad_bias"] = gradients[3]
    return results


def onnx_kernel(arrays, options):
    from onnx import TensorProto, defs, helper
    from onnx.reference import ReferenceEvaluator

    mask, bias = arrays.get("mask"), arrays.get("bias")
    if mask is not None and bias is not None:
        bias = np.where(mask, bias, -np.inf)
    inputs = {"Q": arrays["query"], "K": arrays["key"], "V": arrays["value"]}
    inputs["attn_mask"] = mask if bias is None else bias
    inputs["nonpad_kv_seqlen"] = arrays.get("key_lengths")
    inputs = {name: array for name, array in inputs.items() if array is not None}
    left, right = options.get("window", (-1, -1))
    attributes = {
        "is_causal": int(options.get("is_causal", False)),
        "softcap": options.get("softcap", 0.0),
        "left_window_size": left,
        "right_window_size": right,
    }
    if "scale" in options:
        attributes["scale"] = options["scale"]
    slots = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    node = helper.make_node("Attention", [name if name in inputs else "" for name in slots], ["Y"], **attributes)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", defs.onnx_opset_version())])
    return {"output": ReferenceEvaluator(model).run(None, inputs)[0]}


KERNELS = {"torch": torch_kernel, "jax": jax_kernel, "onnx": onnx_kernel}


def check(name, features=None):
    """Reports by the system's own row, one a feature; and by this package's row on what the two disagree about."""
    kernel, backward = KERNELS[name], name != "onnx"
    own = [check_kernel(kernel, semantics=name, features=[f], backward=backward) for f in features or FEATURES[name]]

    def in_our_layout(arrays, options):
        swapped = {n: np.swapaxes(a, 1, 2) if a.ndim == 4 and n in HEADED else a for n, a in arrays.items()}
        results = kernel(swapped, options)
        return {n: np.swapaxes(a, 1, 2) if n in HEADED else np.asarray(a) for n, a in results.items() if n != "lse"}

    ours = in_our_layout if name == "jax" else kernel
    differences = DIFFERENCES[name]
    return own, [
        check_kernel(ours, semantics="numpy-sdpa", features=differences, backward=backward)
    ] if differences else []


HEADED = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")


def main():
    code = 0
    for name in KERNELS:
        if importlib.util.find_spec(name) is None:
            print(f"{name}: not installed, not checked")
            continue
        own, ours = check(name)
        wrong = [report for report in own if not report.passed]
        right = [report for report in ours if report.passed]
        print(f"{name}: {'NOT as its row says' if wrong or right else 'as its row says'}, {len(own)} features")
        for report in wrong:
            print(f"  {report}")
        if right:
            print("  right by this package's row too, which says otherwise")
        code |= bool(wrong or right)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
