"""What may be passed to the checks, what is done with it, and what is refused."""

import sys
import types

import numpy as np
import pytest

from numpy_sdpa.gradcheck import check_adjoint, check_jvp, check_taylor, check_vjp

X = np.random.default_rng(3).normal(size=(2, 3))


def square(x):
    return x * x


def square_vjp(grad, x):
    return 2 * x * grad


def square_jvp(tangents, x):
    return 2 * x * tangents[0]


# --- shapes and kinds of arguments -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (1, 1, 2)])
@pytest.mark.parametrize("direction", ["all", "random"])
@pytest.mark.parametrize("method", ["central", "complex"])
def test_any_shape(shape, direction, method):
    x = np.random.default_rng(0).normal(size=shape)
    options = {"direction": direction, "method": method}
    assert check_vjp(square, square_vjp, (x,), **options).passed
    assert check_jvp(square, square_jvp, (x,), **options).passed
    assert check_adjoint(square_jvp, square_vjp, (x,), direction=direction).passed
    assert check_taylor(square, square_jvp, (x,), direction=direction).passed
    wrong = check_vjp(square, lambda g, x: np.ones((7, *shape)), (x,), raise_exception=False, **options)
    assert wrong.rows[0].verdict == "wrong"


def test_results_without_entries():
    def empty(x):
        return x[:0], x

    def empty_vjp(grads, x):
        return grads[1]

    assert check_vjp(empty, empty_vjp, (X,)).passed
    assert check_jvp(empty, lambda t, x: (t[0][:0], t[0]), (X,)).passed
    assert check_taylor(empty, lambda t, x: (t[0][:0], t[0]), (X,)).passed
    assert check_adjoint(lambda t, x: (t[0][:0], t[0]), empty_vjp, (X,)).passed


def test_arguments_without_slopes_are_passed_on():
    def function(x, n, mask, name, scale, nothing):
        assert (n, name, nothing) == (3, "a", None)
        assert mask.dtype == bool
        assert isinstance(scale, float)
        return np.where(mask, x**n * scale, 0)

    def vjp(grad, x, n, mask, name, scale, nothing):
        return np.where(mask, n * x ** (n - 1) * scale * grad, 0)

    report = check_vjp(function, vjp, [X, 3, X > 0, "a", 0.5, None])
    assert [row.argument for row in report.rows] == [0]


def test_a_python_float_is_differentiated_when_named():
    def function(x, scale):
        assert isinstance(scale, float)
        return np.sin(scale * x)

    def vjp(grad, x, scale):
        inner = grad * np.cos(scale * x)
        return np.sum(inner * x), inner * scale

    report = check_vjp(function, vjp, (X, 0.7), wrt=(1, 0))
    assert [row.argument for row in report.rows] == [1, 0]
    assert check_vjp(function, lambda *a: vjp(*a)[1], (X, 0.7)).rows[0].argument == 0
    assert check_vjp(function, lambda *a: vjp(*a)[0], (X, 0.7), wrt=1).rows[0].argument == 1


def test_numpy_scalars_stay_scalars():
    def function(x):
        assert isinstance(x, np.float64)
        return np.sin(x)

    assert check_vjp(function, lambda grad, x: grad * np.cos(x), (np.float64(0.3),)).passed


def test_a_callee_may_write_into_what_it_gets():
    def function(x):
        x *= x
        return x

    def vjp(grad, x):
        grad *= 2 * x
        x[...] = 0
        return grad

    x = X.copy()
    assert check_vjp(function, vjp, (x,)).passed
    assert check_adjoint(square_jvp, vjp, (x,)).passed
    np.testing.assert_array_equal(x, X)


def test_strides_do_not_matter():
    wide = np.random.default_rng(0).normal(size=(6, 4))
    assert check_vjp(lambda x: x @ x.T, lambda g, x: (g + g.T) @ x, (wide[::2, ::-1].T,)).passed


def test_entries_of_the_result_that_are_not_finite_are_left_out():
    """As the log-sum-exp of an empty row."""
    visible = np.array([True, False, True])

    def function(x):
        return np.where(visible, np.sin(x), -np.inf)

    def vjp(grad, x):
        assert grad[1] == 0
        return np.where(visible, grad * np.cos(x), 0)

    x = np.array([0.3, 0.5, 0.7])
    report = check_vjp(function, vjp, (x,))
    assert "1 entries of the result are not finite" in report.rows[0].note
    assert check_jvp(function, lambda t, x: np.where(visible, t[0] * np.cos(x), 0), (x,)).passed
    assert check_taylor(function, lambda t, x: np.where(visible, t[0] * np.cos(x), 0), (x,)).passed
    wrong = check_jvp(function, lambda t, x: t[0] * np.cos(x) * 1.1, (x,), raise_exception=False)
    assert not wrong.passed


def test_nan_in_an_argument_that_is_never_read():
    visible = np.array([True, False])
    x = np.array([0.5, np.nan])
    assert check_vjp(lambda x: np.where(visible, x * x, 0), lambda g, x: np.where(visible, 2 * x * g, 0), (x,)).passed


def test_a_function_may_raise_beyond_its_domain():
    def function(x):
        if np.any(x <= 0):
            raise ValueError("x must be positive")
        return np.log(x)

    x = np.array([1e-3, 0.5, 3.0])
    report = check_vjp(function, lambda grad, x: grad / x, (x,))
    assert "function raised ValueError at some of the points around args: x must be positive" in str(report)
    with pytest.raises(ValueError, match="x must be positive"):
        check_vjp(function, lambda grad, x: grad / x, (-x,))

    def broken(x):
        if np.any(x != X):
            raise RuntimeError("out of memory")
        return x

    with pytest.raises(RuntimeError, match="out of memory"):
        check_vjp(broken, lambda grad, x: grad, (X,))


# --- array modules ---------------------------------------------------------------------------------------


@pytest.fixture
def fake_cupy(monkeypatch):
    """A module whose arrays live elsewhere, as CuPy's do: no conversion but by `get`, no mixing."""
    module = types.ModuleType("cupy")

    class ndarray:
        def __init__(self, host):
            self._host = np.array(host)
            self.dtype, self.shape = self._host.dtype, self._host.shape

        def get(self):
            return self._host.copy()

        def __array__(self, *args, **kwargs):
            raise TypeError("Implicit conversion to a NumPy array is not allowed")

        def __mul__(self, other):
            if isinstance(other, np.ndarray):
                raise TypeError("Unsupported type numpy.ndarray")
            return ndarray(self._host * (other._host if isinstance(other, ndarray) else other))

        __rmul__ = __mul__
        __array_ufunc__ = None

    ndarray.__module__ = "cupy"
    module.ndarray = ndarray
    module.asarray = lambda host: ndarray(host)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cupy_arrays_stay_on_their_device(fake_cupy, dtype):
    x = fake_cupy.asarray(X.astype(dtype))
    seen = []

    def function(x, y):
        seen.append((type(x), x.dtype))
        return x * x * y, x * 2

    def vjp(grads, x, y):
        seen.extend((type(array), array.dtype) for array in (*grads, x))
        return fake_cupy.asarray((2 * x * y * grads[0]).get() + 2 * grads[1].get()), x * x * grads[0]

    def jvp(tangents, x, y):
        seen.extend((type(array), array.dtype) for array in tangents)
        first = 2 * x * y * tangents[0]
        return fake_cupy.asarray(first.get() + (x * x * tangents[1]).get()), tangents[0] * 2

    for check in (
        lambda: check_vjp(function, vjp, (x, x)),
        lambda: check_vjp(function, vjp, (x, x), method="complex"),
        lambda: check_jvp(function, jvp, (x, x)),
        lambda: check_adjoint(jvp, vjp, (x, x)),
        lambda: check_taylor(function, jvp, (x, x)),
    ):
        assert check().passed
    kinds = {dtype, "complex64" if dtype == "float32" else "complex128"}
    assert {(kind, str(name)) for kind, name in seen} == {(fake_cupy.ndarray, name) for name in kinds}
    wrong = check_vjp(function, lambda *a: [-1 * g for g in vjp(*a)], (x, x), raise_exception=False)
    assert [row.verdict for row in wrong.rows] == ["wrong", "wrong"]


@pytest.mark.parametrize("module", ["array_api_strict", "jax.numpy"])
def test_array_api_modules(module):
    xp = pytest.importorskip(module)
    x = xp.asarray(X.astype(np.float32))
    kind = type(x)

    def function(x):
        assert isinstance(x, kind)
        return xp.sin(x)

    def vjp(grad, x):
        assert isinstance(grad, kind)
        return grad * xp.cos(x)

    def jvp(tangents, x):
        return tangents[0] * xp.cos(x)

    assert check_vjp(function, vjp, (x,)).passed
    assert check_jvp(function, jvp, (x,), direction="random").passed
    assert check_adjoint(jvp, vjp, (x,)).passed
    assert check_taylor(function, jvp, (x,)).passed
    assert not check_vjp(function, lambda g, x: vjp(g, x) * 1.01, (x,), raise_exception=False).passed


def test_bfloat16_is_a_floating_dtype():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = X.astype(ml_dtypes.bfloat16)
    report = check_vjp(lambda x: (x * x).astype(x.dtype), lambda g, x: -(2 * x * g), (x,), raise_exception=False)
    assert report.rows[0].verdict == "wrong"


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"function": 3}, TypeError, "function must be callable, got builtins.int"),
        ({"vjp": None}, TypeError, "vjp must be callable"),
        (
            {"args": X},
            TypeError,
            r"args must be a tuple or list of the function's arguments, got float64 array \(2, 3\)",
        ),
        ({"args": (3, "a")}, TypeError, "argument 0 is builtins.int, argument 1 is builtins.str"),
        ({"args": ()}, TypeError, "args is empty"),
        ({"args": (X + 0j,)}, TypeError, "argument 0 is complex128 array"),
        ({"wrt": (1,)}, ValueError, "wrt must hold positions from 0 to 0, got 1"),
        ({"wrt": (-1,)}, ValueError, "positions from 0 to 0, got -1"),
        ({"wrt": (0, 0)}, ValueError, "each once"),
        ({"wrt": ()}, ValueError, "at least one position"),
        ({"wrt": (True,)}, TypeError, "wrt must hold positions in args"),
        ({"wrt": "x"}, TypeError, "wrt must hold positions in args"),
        (
            {"args": (X, 3), "wrt": (1,)},
            TypeError,
            "wrt names argument 1, which must be a real floating array, got b",
        ),
        ({"method": "forward"}, ValueError, "method must be one of 'central', 'complex', got 'forward'"),
        ({"direction": "some"}, ValueError, "direction must be one of 'all', 'random', got 'some'"),
        ({"eps": 0}, ValueError, "eps must be a finite number above 0"),
        ({"eps": np.nan}, ValueError, "eps must be a finite number above 0"),
        ({"eps": "1"}, TypeError, "eps must be a number above 0"),
        ({"atol": -1}, ValueError, "atol must be a finite number at least 0"),
        ({"rtol": np.inf}, ValueError, "rtol must be a finite number at least 0"),
        ({"rtol": X}, TypeError, "rtol must be a number at least 0"),
        ({"rng": "seed"}, TypeError, "rng must be a numpy.random.Generator, a seed or None, got 'seed'"),
        ({"rng": -1}, ValueError, "rng must be a numpy.random.Generator, a seed or None, got -1"),
        ({"function": lambda x: x > 0}, TypeError, "function must return a real floating array.*bool array"),
        ({"function": lambda x: x + 0j}, TypeError, "real and imaginary parts as two outputs"),
        ({"function": lambda x: (x, "a")}, TypeError, "output 1 is builtins.str"),
        ({"function": lambda x: None}, TypeError, "its result is builtins.NoneType"),
        ({"function": lambda x: x * np.inf}, ValueError, "function must return a finite value somewhere"),
    ],
)
def test_bad_input_is_named(changed, error, message):
    given = {"function": square, "vjp": square_vjp, "args": (X,)} | changed
    with pytest.raises(error, match=message):
        check_vjp(given.pop("function"), given.pop("vjp"), given.pop("args"), **given)


def test_the_other_checks_refuse_the_same():
    with pytest.raises(TypeError, match="jvp must be callable"):
        check_jvp(square, 3, (X,))
    with pytest.raises(TypeError, match="jvp must be callable"):
        check_taylor(square, 3, (X,))
    with pytest.raises(TypeError, match="vjp must be callable"):
        check_adjoint(square_jvp, 3, (X,))
    with pytest.raises(TypeError, match="jvp must return a real floating array"):
        check_adjoint(lambda t, x: None, square_vjp, (X,))
    for check, first in ((check_jvp, square), (check_taylor, square), (check_adjoint, square_jvp)):
        second = square_vjp if check is check_adjoint else square_jvp
        with pytest.raises(ValueError, match="direction must be one of"):
            check(first, second, (X,), direction="up")
        with pytest.raises(TypeError, match="args must be a tuple or list"):
            check(first, second, X)
        with pytest.raises(ValueError, match="rtol must be a finite number"):
            check(first, second, (X,), rtol=-1)


def test_a_result_that_changes_its_shape_is_refused():
    with pytest.raises(ValueError, match="function must return the same shapes at every call"):
        check_vjp(lambda x: x[: 1 + int(np.any(x != X))], square_vjp, (X,))


# --- complex steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param(np.abs, "needs an analytic function; in argument 0 the entry", id="absolute value"),
        pytest.param(lambda x: x * np.abs(x), "needs an analytic function", id="half absolute value"),
        pytest.param(lambda x: x * np.conj(x), "needs an analytic function", id="conjugate"),
        pytest.param(np.real, "needs an analytic function", id="real part"),
        pytest.param(lambda x: x + np.maximum(x.real, 0), "needs an analytic function", id="real maximum"),
        pytest.param(lambda x: x.astype(float), "ComplexWarning", id="cast"),
        pytest.param(lambda x: [float(v) for v in x.flat] and x, "accepts complex input", id="float()"),
        pytest.param(np.cbrt, "accepts complex input.*cbrt", id="ufunc"),
    ],
)
def test_complex_steps_say_what_is_not_analytic(function, message):
    with pytest.raises(ValueError, match=message) as failure:
        check_vjp(function, square_vjp, (X,), method="complex")
    assert 'method="central"' in str(failure.value)


def test_complex_steps_do_not_hide_a_kink():
    """|x| at 0 is real, and its complex step 0 for any claim."""
    with pytest.raises(ValueError, match="needs an analytic function"):
        check_vjp(np.abs, lambda g, x: g * np.sign(x), (np.zeros(2),), method="complex")


def test_complex_steps_need_a_complex_dtype():
    with pytest.raises(ValueError, match="argument 0 is float16, which has no complex dtype"):
        check_vjp(square, square_vjp, (X.astype(np.float16),), method="complex")


def test_complex_steps_are_exact_to_rounding():
    x = np.array([0.5, 1.0, 2.0])
    report = check_vjp(lambda x: np.exp(x) / x, lambda g, x: g * np.exp(x) * (x - 1) / x**2, (x,), method="complex")
    assert report.rows[0].uncertainty < 1e-13
    report = check_vjp(
        lambda x: np.exp(x) / x,
        lambda g, x: g * np.exp(x) * (x - 1) / x**2 * (1 + 1e-11),
        (x,),
        method="complex",
        rtol=1e-12,
        raise_exception=False,
    )
    assert report.rows[0].verdict == "wrong"


def test_a_maximum_of_complex_numbers_compares_real_parts_and_is_analytic():
    x = np.array([0.5, -1.0, 2.0])
    assert check_vjp(lambda x: np.maximum(x, 0), lambda g, x: g * (x > 0), (x,), method="complex").passed
