"""How CuPy behaves where NumPy does not, as a table: the stand-in has to do it, and so has CuPy itself.

Each entry takes the module and gives a result, or raises. ``outcome`` reduces either to something comparable.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Behaviour(NamedTuple):
    run: Callable[[Any], Any]
    raises: type[Exception] | None = None


def matrix(xp, dtype="float32"):
    return xp.asarray(np.arange(1.0, 7.0).reshape(2, 3).astype(dtype))


def _assigned(xp, index, value):
    array = matrix(xp)
    array[index] = value
    return array


def _through_view(xp):
    array = matrix(xp)
    element = array[0, 1]
    element[...] = 7
    array.mT[2, 0] = 8
    array.reshape(-1)[5] = 9
    return array


def _in_place(xp):
    array = matrix(xp)
    array += 1
    array *= array
    return array


def _out(xp):
    array = matrix(xp)
    out = xp.empty_like(array)
    result = xp.multiply(array, 2, out=out)
    return result is out, out


def _bfloat16(xp):
    import ml_dtypes

    return matrix(xp, ml_dtypes.bfloat16)


REFUSED = {
    "numpy.asarray": Behaviour(lambda xp: np.asarray(matrix(xp)), TypeError),
    "numpy.array": Behaviour(lambda xp: np.array(matrix(xp)), TypeError),
    "array + numpy array": Behaviour(lambda xp: matrix(xp) + np.ones(3, "f4"), TypeError),
    "numpy array + array": Behaviour(lambda xp: np.ones(3, "f4") + matrix(xp), TypeError),
    "array @ numpy array": Behaviour(lambda xp: matrix(xp) @ np.ones((3, 2), "f4"), TypeError),
    "numpy array @ array": Behaviour(lambda xp: np.ones((2, 2), "f4") @ matrix(xp), TypeError),
    "array += numpy array": Behaviour(lambda xp: matrix(xp).__iadd__(np.ones(3, "f4")), TypeError),
    "array > numpy array": Behaviour(lambda xp: matrix(xp) > np.ones(3, "f4"), TypeError),
    "numpy.add with a numpy array": Behaviour(lambda xp: np.add(matrix(xp), np.ones(3, "f4")), TypeError),
    "maximum of a numpy array": Behaviour(lambda xp: xp.maximum(matrix(xp), np.ones(3, "f4")), TypeError),
    "exp of a numpy array": Behaviour(lambda xp: xp.exp(np.ones(3)), TypeError),
    "exp of a list": Behaviour(lambda xp: xp.exp([1.0, 2.0]), TypeError),
    "where of a numpy array": Behaviour(lambda xp: xp.where(matrix(xp) > 2, matrix(xp), np.ones(3)), TypeError),
    "where of a bool": Behaviour(lambda xp: xp.where(True, matrix(xp), 0), AttributeError),
    "out of another module": Behaviour(lambda xp: xp.exp(matrix(xp), out=np.empty((2, 3), "f4")), TypeError),
    "concatenate with a number": Behaviour(lambda xp: xp.concatenate([matrix(xp), 1.0]), TypeError),
    "sum with where=": Behaviour(lambda xp: xp.sum(matrix(xp), where=matrix(xp) > 2), TypeError),
    "sum with initial=": Behaviour(lambda xp: xp.sum(matrix(xp), initial=0), TypeError),
    "max with initial=": Behaviour(lambda xp: xp.max(matrix(xp), initial=0), TypeError),
    "method with initial=": Behaviour(lambda xp: matrix(xp).max(initial=0), TypeError),
    "ufunc with where=": Behaviour(lambda xp: xp.exp(matrix(xp), where=matrix(xp) > 2), TypeError),
    "numpy's ufunc with where=": Behaviour(lambda xp: np.exp(matrix(xp), where=matrix(xp) > 2), TypeError),
    "zeros with device=": Behaviour(lambda xp: xp.zeros(3, device=None), TypeError),
    "asarray with device=": Behaviour(lambda xp: xp.asarray([1.0], device=None), TypeError),
    "max of an empty axis": Behaviour(lambda xp: xp.max(xp.zeros((2, 0)), axis=-1), ValueError),
    "asarray of strings": Behaviour(lambda xp: xp.asarray(["a"]), ValueError),
    "an array as a range": Behaviour(lambda xp: range(xp.asarray(3)), TypeError),
    "an array in a shape": Behaviour(lambda xp: xp.zeros((xp.asarray(2), 3)), TypeError),
    "hash of an array": Behaviour(lambda xp: hash(matrix(xp)), TypeError),
    "hash of a device": Behaviour(lambda xp: hash(matrix(xp).device), TypeError),
    "bool of many": Behaviour(lambda xp: bool(matrix(xp)), ValueError),
    "numpy array into a slice": Behaviour(lambda xp: _assigned(xp, slice(0, 1), np.ones(3)), ValueError),
    "0-d operand of @": Behaviour(lambda xp: matrix(xp) @ xp.asarray(1.0), ValueError),
    "the namespace": Behaviour(lambda xp: matrix(xp).__array_namespace__(), AttributeError),
    "flags.writeable": Behaviour(lambda xp: matrix(xp).flags.writeable, AttributeError),
    "errstate": Behaviour(lambda xp: xp.errstate(all="ignore"), AttributeError),
    "int too large for the dtype": Behaviour(lambda xp: xp.asarray([1], dtype="uint8") + 300, OverflowError),
}

GIVEN = {
    "sum of all is an array": Behaviour(lambda xp: xp.sum(matrix(xp))),
    "one element is an array": Behaviour(lambda xp: matrix(xp)[0, 1]),
    "max over an axis": Behaviour(lambda xp: xp.max(matrix(xp), axis=-1, keepdims=True)),
    "any over an axis": Behaviour(lambda xp: xp.any(matrix(xp) > 4, axis=-1)),
    "count_nonzero": Behaviour(lambda xp: xp.count_nonzero(matrix(xp) > 2)),
    "array_equal": Behaviour(lambda xp: xp.array_equal(matrix(xp), matrix(xp))),
    "allclose": Behaviour(lambda xp: xp.allclose(matrix(xp), matrix(xp))),
    "exp of a number": Behaviour(lambda xp: xp.exp(1.0)),
    "float32 * float": Behaviour(lambda xp: 2.0 * matrix(xp)),
    "float32 * numpy.float64": Behaviour(lambda xp: matrix(xp) * np.float64(2)),
    "numpy.float64 * float32": Behaviour(lambda xp: np.float64(2) * matrix(xp)),
    "numpy.float32 * float32": Behaviour(lambda xp: np.float32(2) * matrix(xp)),
    "float32 * 0-d float64": Behaviour(lambda xp: matrix(xp) * xp.asarray(2.0)),
    "float32 * complex": Behaviour(lambda xp: matrix(xp) * 2j),
    "float16 * float": Behaviour(lambda xp: matrix(xp, "f2") * 2.5),
    "bfloat16 * bfloat16": Behaviour(lambda xp: _bfloat16(xp) * _bfloat16(xp)),
    "bool * int": Behaviour(lambda xp: (matrix(xp) > 2) * 3),
    "bool + float": Behaviour(lambda xp: (matrix(xp) > 2) + 0.5),
    "int / int": Behaviour(lambda xp: matrix(xp, "i4") / 2),
    "int32 sums to int64": Behaviour(lambda xp: xp.sum(matrix(xp, "i4"), axis=0)),
    "uint32 wraps around": Behaviour(lambda xp: xp.asarray([2**32 - 1], dtype="uint32") * 0xCD9E8D57 + 7),
    "uint32 shift": Behaviour(lambda xp: matrix(xp, "u4") >> 1),
    "uint32 shift by uint32": Behaviour(lambda xp: matrix(xp, "u4") << xp.uint32(3)),
    "uint64 high word": Behaviour(lambda xp: (matrix(xp, "u8") * 0xD2511F53) >> 32),
    "where with numbers": Behaviour(lambda xp: xp.where(matrix(xp) > 2, matrix(xp), -np.inf)),
    "where of two numbers": Behaviour(lambda xp: xp.where(matrix(xp) > 2, 0.0, -xp.inf)),
    "where of a float64 scalar": Behaviour(lambda xp: xp.where(matrix(xp) > 2, matrix(xp), np.float64(0))),
    "where of bfloat16 is float32": Behaviour(lambda xp: xp.where(matrix(xp) > 2, _bfloat16(xp), 0)),
    "where of an integer condition": Behaviour(lambda xp: xp.where(matrix(xp, "i4") - 1, matrix(xp), 0)),
    "the float32 product": Behaviour(lambda xp: matrix(xp) @ matrix(xp).mT),
    "the float16 product": Behaviour(lambda xp: matrix(xp, "f2") @ matrix(xp, "f2").mT),
    "the complex product": Behaviour(lambda xp: matrix(xp, "c16") @ matrix(xp, "c16").mT),
    "the integer product": Behaviour(lambda xp: matrix(xp, "i4") @ matrix(xp, "i4").mT),
    "a broadcast product": Behaviour(lambda xp: matrix(xp)[None, None] @ xp.ones((2, 1, 3, 2), "f4")),
    "a product over an empty axis": Behaviour(lambda xp: xp.ones((2, 0)) @ xp.ones((0, 3))),
    "matmul with out=": Behaviour(lambda xp: xp.matmul(matrix(xp), matrix(xp).mT, out=xp.empty((2, 2), "f4"))),
    "complex tanh": Behaviour(lambda xp: xp.tanh(matrix(xp, "c16") / 8)),
    "0/0 and log 0 do not warn": Behaviour(lambda xp: xp.log(xp.zeros(2)) + xp.zeros(2) / xp.zeros(2)),
    "exp that overflows": Behaviour(lambda xp: xp.exp(matrix(xp) * 1000)),
    "sums of nothing": Behaviour(lambda xp: xp.sum(xp.zeros((2, 0)), axis=-1)),
    "mask selects": Behaviour(lambda xp: matrix(xp)[matrix(xp) > 2]),
    "mask assigns": Behaviour(lambda xp: _assigned(xp, matrix(xp) > 2, 0)),
    "slice assigns a number": Behaviour(lambda xp: _assigned(xp, (slice(None), 1), -np.inf)),
    "slice assigns an array": Behaviour(lambda xp: _assigned(xp, slice(0, 1), xp.ones(3))),
    "an array as a slice's end": Behaviour(lambda xp: matrix(xp)[: xp.asarray(1)]),
    "positions select": Behaviour(lambda xp: matrix(xp)[:, [2, 0]]),
    "take": Behaviour(lambda xp: xp.take(matrix(xp), xp.asarray([1, 1]), axis=1)),
    "newaxis": Behaviour(lambda xp: matrix(xp)[..., None, :].shape),
    "views share memory": Behaviour(_through_view),
    "in-place operators": Behaviour(_in_place),
    "out= is what comes back": Behaviour(_out),
    "numpy's ufunc goes to the module": Behaviour(lambda xp: np.exp(matrix(xp))),
    "numpy's function goes to the module": Behaviour(lambda xp: np.sum(matrix(xp), axis=0)),
    "comparison with a 0-d numpy array": Behaviour(lambda xp: matrix(xp) > np.asarray(2.0)),
    "comparison with None": Behaviour(lambda xp: matrix(xp) == None),  # noqa: E711
    "stack of 0-d": Behaviour(lambda xp: xp.stack([xp.any(matrix(xp) > 2), xp.all(matrix(xp) > 2)])),
    "concatenate(tup=)": Behaviour(lambda xp: xp.concatenate(tup=[matrix(xp), matrix(xp)], axis=1)),
    "result_type": Behaviour(lambda xp: xp.result_type(matrix(xp), np.float64)),
    "isdtype": Behaviour(lambda xp: xp.isdtype(matrix(xp).dtype, "real floating")),
    "astype to bool": Behaviour(lambda xp: (matrix(xp) - 1).astype(bool)),
    "broadcast_to": Behaviour(lambda xp: xp.broadcast_to(matrix(xp)[:, None], (2, 4, 3))),
    "permute_dims": Behaviour(lambda xp: xp.permute_dims(matrix(xp), (1, 0))),
    "arange": Behaviour(lambda xp: xp.arange(1, 4)),
    "full of -inf": Behaviour(lambda xp: xp.full((2,), -xp.inf, dtype=xp.float32)),
    "zeros_like": Behaviour(lambda xp: xp.zeros_like(matrix(xp), dtype=xp.float64)),
    "asarray of nested lists": Behaviour(lambda xp: xp.asarray([[1, 2], [3, 4]])),
    "the type's module": Behaviour(lambda xp: type(matrix(xp)).__module__),
    "item": Behaviour(lambda xp: xp.sum(matrix(xp)).item()),
    "float": Behaviour(lambda xp: float(xp.sum(matrix(xp)))),
}

BEHAVIOURS = REFUSED | GIVEN


def outcome(behaviour: Behaviour, xp) -> Any:
    """What came of it: the exception's type, or the result with arrays as (dtype, shape, values)."""
    if behaviour.raises is not None:
        try:
            result = behaviour.run(xp)
        except behaviour.raises:
            return behaviour.raises
        raise AssertionError(f"gave {result!r}, should have raised {behaviour.raises.__name__}")
    return _plain(behaviour.run(xp), xp)


def _plain(result, xp):
    if isinstance(result, tuple):
        return tuple(_plain(item, xp) for item in result)
    if isinstance(result, xp.ndarray):
        return str(result.dtype), result.shape, result.get().astype(complex).tolist()
    return type(result), result
