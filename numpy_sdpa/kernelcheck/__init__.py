"""Is a kernel right, and if not, which mistake is it?

`compare` judges what a kernel gave for one problem, `make_case` makes problems, `check_kernel` does both for all the
problems that catch people. To read on: `kernel` is the reference with replaceable steps, `mistakes` the table of what
goes wrong.
"""

from numpy_sdpa.kernelcheck.cases import make_case
from numpy_sdpa.kernelcheck.check import CaseReport, CheckReport, check_kernel
from numpy_sdpa.kernelcheck.comparison import compare
from numpy_sdpa.kernelcheck.dump import DumpError
from numpy_sdpa.kernelcheck.report import ArrayReport, Diagnosis, KernelReport

__all__ = [
    "ArrayReport",
    "CaseReport",
    "CheckReport",
    "Diagnosis",
    "DumpError",
    "KernelReport",
    "check_kernel",
    "compare",
    "make_case",
]
