"""The stand-in does what the table of CuPy's behaviour says, and CuPy itself where there is a GPU."""

import cupy_standin
import numpy as np
import pytest
from arrays import CUPY
from cupy_behaviours import BEHAVIOURS, GIVEN, outcome


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_the_stand_in_behaves_so(name):
    with cupy_standin.installed() as xp:
        outcome(BEHAVIOURS[name], xp)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_cupy_behaves_as_the_stand_in(name):
    with CUPY.installed():
        import cupy

        theirs = outcome(BEHAVIOURS[name], cupy)
    with cupy_standin.installed() as xp:
        ours = outcome(BEHAVIOURS[name], xp)
    if isinstance(ours, tuple) and isinstance(ours[-1], list):
        # 1e-6: float32 rounds at 6e-8, and CUDA's exp, log and tanh are good to a few units in the last place
        assert ours[:2] == theirs[:2]
        np.testing.assert_allclose(theirs[2], ours[2], rtol=1e-6)
    else:
        assert theirs == ours


# Where NumPy differs: it gives Python's or its own scalars, or has no such thing.
NOT_NUMPYS = frozenset(
    {
        "count_nonzero",
        "array_equal",
        "allclose",
        "where of bfloat16 is float32",
        "comparison with None",
        "concatenate(tup=)",
        "the type's module",
        "views share memory",
    }
)


@pytest.mark.parametrize("name", sorted(GIVEN.keys() - NOT_NUMPYS))
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:overflow")
def test_the_values_are_numpys(name):
    theirs = GIVEN[name].run(np)
    with cupy_standin.installed() as xp:
        ours = GIVEN[name].run(xp)
    ours, theirs = (pair if isinstance(pair, tuple) else (pair,) for pair in (ours, theirs))
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(our, xp.ndarray):
            assert our.dtype == np.asarray(their).dtype
            np.testing.assert_array_equal(our.get(), their)
        else:
            assert type(our) is type(their)
            assert our == their


EXPECTED = {  # dtype, shape: decided by CuPy's loops and NEP 50
    "sum of all is an array": ("float32", ()),
    "one element is an array": ("float32", ()),
    "count_nonzero": ("int64", ()),
    "array_equal": ("bool", ()),
    "allclose": ("bool", ()),
    "exp of a number": ("float64", ()),
    "float32 * float": ("float32", (2, 3)),
    "float32 * numpy.float64": ("float64", (2, 3)),
    "numpy.float64 * float32": ("float64", (2, 3)),
    "numpy.float32 * float32": ("float32", (2, 3)),
    "float32 * 0-d float64": ("float64", (2, 3)),
    "float32 * complex": ("complex64", (2, 3)),
    "float16 * float": ("float16", (2, 3)),
    "bfloat16 * bfloat16": ("bfloat16", (2, 3)),
    "bool * int": ("int64", (2, 3)),
    "bool + float": ("float64", (2, 3)),
    "int / int": ("float64", (2, 3)),
    "int32 sums to int64": ("int64", (3,)),
    "uint32 wraps around": ("uint32", (1,)),
    "uint32 shift": ("uint32", (2, 3)),
    "where with numbers": ("float32", (2, 3)),
    "where of two numbers": ("float64", (2, 3)),
    "where of a float64 scalar": ("float64", (2, 3)),
    "where of bfloat16 is float32": ("float32", (2, 3)),
    "the float16 product": ("float16", (2, 2)),
    "the complex product": ("complex128", (2, 2)),
    "the integer product": ("int32", (2, 2)),
    "a product over an empty axis": ("float64", (2, 3)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_dtype_and_shape(name):
    with cupy_standin.installed() as xp:
        assert outcome(GIVEN[name], xp)[:2] == EXPECTED[name]
