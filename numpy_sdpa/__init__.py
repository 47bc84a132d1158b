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
from numpy_sdpa.residuals import SDPADoubleGradients, SDPAGradients, SDPAResiduals, SDPATangents

# Imported at first use: what they need (SciPy, and more) is not needed to compute attention.
_LATER = {
    "GradientReport": "gradcheck",
    "check_adjoint": "gradcheck",
    "check_jvp": "gradcheck",
    "check_taylor": "gradcheck",
    "check_vjp": "gradcheck",
}

__all__ = [
    "GradientReport",
    "SDPADoubleGradients",
    "SDPAGradients",
    "SDPAResiduals",
    "SDPATangents",
    "__version__",
    "attention",
    "attention_jacobian",
    "check_adjoint",
    "check_jvp",
    "check_taylor",
    "check_vjp",
    "merge_heads",
    "scaled_dot_product_attention",
    "sdpa_backward",
    "sdpa_double_backward",
    "sdpa_forward",
    "sdpa_jvp",
    "softmax_jacobian",
    "split_heads",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"numpy_sdpa.{_LATER[name]}"), name)
    raise AttributeError(f"module 'numpy_sdpa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
