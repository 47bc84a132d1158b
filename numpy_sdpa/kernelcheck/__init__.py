"""Is a kernel right, and if not, which mistake is it?"""

from numpy_sdpa.kernelcheck.comparison import compare
from numpy_sdpa.kernelcheck.report import KernelReport

__all__ = ["KernelReport", "compare"]
