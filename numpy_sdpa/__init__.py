"""Scaled dot-product attention and all its derivatives, by hand, in NumPy: the reference to check kernels against.

Start with `numpy_sdpa.plain`, two dozen lines without options; `numpy_sdpa.steps` holds the mathematics of them all.
"""

import importlib
from typing import Any

from numpy_sdpa._version import __version__
from numpy_sdpa.attention import (
    attention,
    scaled_dot_product_attention,
    sdpa_backward,
    sdpa_double_backward,
    sdpa_forward,
    sdpa_jvp,
)
from numpy_sdpa.heads import merge_heads, split_heads
from numpy_sdpa.jacobians import attention_jacobian, softmax_jacobian
from numpy_sdpa.merge import merge_attention, merge_attention_backward
from numpy_sdpa.residuals import SDPADoubleGradients, SDPAGradients, SDPAResiduals, SDPATangents
from numpy_sdpa.varlen import SDPAVarlenResiduals, sdpa_varlen_backward, sdpa_varlen_forward

# Imported at first use: what they need (SciPy, and more) is not needed to compute attention.
_LATER = {
    "GradientReport": "gradcheck",
    "KernelReport": "kernelcheck",
    "check_adjoint": "gradcheck",
    "check_jvp": "gradcheck",
    "check_kernel": "kernelcheck",
    "check_taylor": "gradcheck",
    "check_vjp": "gradcheck",
    "compare": "kernelcheck",
    "make_case": "kernelcheck",
}

__all__ = [
    "GradientReport",
    "KernelReport",
    "SDPADoubleGradients",
    "SDPAGradients",
    "SDPAResiduals",
    "SDPATangents",
    "SDPAVarlenResiduals",
    "__version__",
    "attention",
    "attention_jacobian",
    "check_adjoint",
    "check_jvp",
    "check_kernel",
    "check_taylor",
    "check_vjp",
    "compare",
    "make_case",
    "merge_attention",
    "merge_attention_backward",
    "merge_heads",
    "scaled_dot_product_attention",
    "sdpa_backward",
    "sdpa_double_backward",
    "sdpa_forward",
    "sdpa_jvp",
    "sdpa_varlen_backward",
    "sdpa_varlen_forward",
    "softmax_jacobian",
    "split_heads",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"numpy_sdpa.{_LATER[name]}"), name)
    raise AttributeError(f"module 'numpy_sdpa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
