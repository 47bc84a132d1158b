"""Every array that the public functions return for one set of inputs, by name; and equality to the last bit."""

import numpy as np

import numpy_sdpa

FORWARD = ("lse", "weights", "logits", "row_shift", "row_sum")


def everything(query, key, value, options, upstream, directions=None):
    """output, FORWARD; grad_query …; with directions also tangent_output … and second_query …; None is left out."""
    output, residuals = numpy_sdpa.sdpa_forward(query, key, value, **options)
    results = {"output": output}
    results |= {name: array for name in FORWARD if (array := getattr(residuals, name)) is not None}
    upstream = {"grad_output": None, **upstream}
    grad_output = upstream.pop("grad_output")
    gradients = numpy_sdpa.sdpa_backward(grad_output, residuals, **upstream)
    results |= _named("grad_", gradients)
    if directions is not None:
        results |= _named("tangent_", numpy_sdpa.sdpa_jvp(residuals, **directions))
        second = numpy_sdpa.sdpa_double_backward(grad_output, residuals, **upstream, **directions)
        results |= _named("second_", second)
    return results


def _named(prefix, arrays):
    return {prefix + name: array for name, array in arrays._asdict().items() if array is not None}


def same_bits(first, second):
    """Where two arrays of one dtype and shape hold the same bits: tells 0 from −0, and knows NaN again."""
    first, second = np.asarray(first), np.asarray(second)
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    if first.dtype == bool:
        return first == second
    if first.dtype.kind == "c":
        return same_bits(first.real, second.real) & same_bits(first.imag, second.imag)
    words = np.dtype(f"u{first.dtype.itemsize}")
    return first.view(words) == second.view(words)


def assert_same_bits(got, expected, where=None):
    """Two mappings of the same named arrays are equal bit for bit (where the mapping `where` says, if given)."""
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        same = same_bits(got[name], array)
        if where is not None:
            same = same | ~np.broadcast_to(where[name], same.shape)
        assert same.all(), f"{name} differs at {np.argwhere(~same)[:5].tolist()}:\n{got[name]}\n{array}"
