"""Is a gradient right? For any function of arrays, not only attention.

- `check_vjp`: a backward (reverse mode) against difference quotients or complex steps.
- `check_jvp`: a tangent (forward mode) against the same.
- `check_adjoint`: backward and tangent against each other, exact to rounding.
- `check_taylor`: the rate at which the Taylor remainder of a tangent falls.

Each returns a `GradientReport`, one `GradientRow` per argument, with one of three verdicts: "right", "wrong",
and "undecided", where the quotient itself is too uncertain to tell. Anything that can be called with NumPy
arrays can be checked; a torch kernel, for one::

    def function(*arrays):
        return kernel(*map(torch.from_numpy, arrays)).numpy()

    def vjp(grad_output, *arrays):
        grads = kernel_backward(torch.from_numpy(grad_output), *map(torch.from_numpy, arrays))
        return [grad.numpy() for grad in grads]

    check_vjp(function, vjp, (query, key, value))
"""

from numpy_sdpa.gradcheck.checks import check_adjoint, check_jvp, check_taylor, check_vjp
from numpy_sdpa.gradcheck.report import GradientReport, GradientRow

__all__ = ["GradientReport", "GradientRow", "check_adjoint", "check_jvp", "check_taylor", "check_vjp"]
