"""The mistakes that kernels make, each a small mutation of the reference. To add one, write one function in here.

A function under ``@forward`` or ``@backward`` yields a `Change` of the chain for each form that the mistake takes;
one under ``@rewritten`` yields what a single result becomes, from the results of a run without it. What does not
apply to a problem yields nothing, or changes nothing. The remedy is the sentence that the report prints.
"""

# Ties are in the order of these lines.
from numpy_sdpa.kernelcheck.mistakes.forward import right_change

# isort: split
from numpy_sdpa.kernelcheck.mistakes import softmax

# isort: split
from numpy_sdpa.kernelcheck.mistakes import backward

# isort: split
from numpy_sdpa.kernelcheck.registry import MISTAKES

__all__ = ["MISTAKES", "backward", "right_change", "softmax"]
