"""The stand-in offers what CuPy's list has, refuses the rest, and counts what makes the host wait."""

import json
import sys
import threading
from pathlib import Path

import cupy_standin
import numpy as np
import pytest
from cupy_standin import NOT_OFFERED, synchronisations
from cupy_standin.calls import RENAMED
from cupy_standin.ndarray import NOT_OFFERED_ATTRIBUTES

LISTED = json.loads((Path(__file__).parent / "data" / "cupy-14.2-api.json").read_text())
FUNCTIONS = LISTED["functions"]
OFFERED = sorted(FUNCTIONS.keys() - NOT_OFFERED)
UFUNCS = [name for name in OFFERED if FUNCTIONS[name].get("ufunc")]

xp = cupy_standin.module


@pytest.fixture(autouse=True)
def _no_count_is_left():
    synchronisations.reset()


# ---- the list


def test_every_function_and_constant_is_offered_or_set_aside():
    listed = FUNCTIONS.keys() | set(LISTED["constants"])
    assert listed >= NOT_OFFERED
    for name in listed:
        assert hasattr(xp, name) == (name not in NOT_OFFERED), name


def test_nothing_else_is_offered():
    functions = {name for name, value in vars(xp).items() if callable(value) and not isinstance(value, type)}
    assert functions == set(OFFERED)


def test_every_attribute_of_an_array_is_offered_or_set_aside():
    array = xp.zeros((1, 1))
    assert set(LISTED["ndarray"]) >= NOT_OFFERED_ATTRIBUTES
    for name in LISTED["ndarray"]:
        assert hasattr(array, name) == (name not in NOT_OFFERED_ATTRIBUTES), name


def test_an_array_has_no_other_attribute():
    public = {name for name in dir(xp.ndarray) if not name.startswith("_")}
    assert public <= set(LISTED["ndarray"])

    class Empty: ...  # has what every class has, which from Python 3.13 on is more

    operators = {name for name in vars(xp.ndarray) if name.startswith("__") and name not in vars(Empty)}
    assert operators <= set(LISTED["dunder"])
    with pytest.raises(AttributeError):
        xp.zeros(3).anything_else = 1


@pytest.mark.parametrize("name", [n for n in OFFERED if not FUNCTIONS[n].get("var_keyword")])
def test_no_other_parameter_is_taken(name):
    for keyword in {"where", "initial", "device", "like"} - set(FUNCTIONS[name]["keywords"]):
        with pytest.raises(TypeError, match="unexpected keyword"):
            getattr(xp, name)(xp.zeros(3), **{keyword: None})


@pytest.mark.parametrize("name", [n for n in OFFERED if FUNCTIONS[n].get("positional")])
def test_no_more_arguments_are_taken_by_position(name):
    too_many = len(FUNCTIONS[name]["positional"]) + 1
    with pytest.raises(TypeError, match="positional argument"):
        getattr(xp, name)(*[xp.zeros(3)] * too_many)


@pytest.mark.parametrize("name", UFUNCS)
def test_a_ufunc_gives_numpys_values(name):
    theirs = getattr(np, RENAMED.get(name, name))
    positive = np.arange(1, 7).reshape(2, 3)
    inputs = [positive / 8, positive.T[::-1].copy().reshape(2, 3) / 8]
    if name in INTEGER_UFUNCS:
        inputs = [positive, positive[::-1]]
    if name == "ldexp":
        inputs = [positive / 8, positive]
    inputs = inputs[: getattr(theirs, "nin", 1)]
    ours = getattr(xp, name)(*map(xp.asarray, inputs))
    with np.errstate(all="ignore"):
        expected = theirs(*inputs)
    for our, their in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, expected)), strict=True):
        assert type(our) is xp.ndarray
        assert our.dtype == their.dtype
        np.testing.assert_array_equal(our.get(), their)


INTEGER_UFUNCS = frozenset(
    name
    for name in UFUNCS
    if name.startswith("bitwise") or name in ("gcd", "lcm", "invert", "left_shift", "right_shift")
)


def test_a_keyword_given_twice_is_refused():
    with pytest.raises(TypeError, match="multiple values"):
        xp.sum(xp.zeros(3), a=xp.zeros(3))


# ---- views


def test_views_share_memory_and_copies_do_not():
    array = xp.asarray(np.arange(6.0).reshape(2, 3))
    array[0, 1][...] = 10
    array.mT[2, 0] = 20
    array.reshape(-1)[5] = 30
    xp.permute_dims(array, (1, 0))[0, 1] = 40
    np.testing.assert_array_equal(array.get(), [[0, 10, 20], [40, 4, 30]])
    assert array[0].base is array
    assert array[0].T.base is array
    for copy in (array.copy(), array + 0, array[[0, 1]], array[array >= 0], array.T.reshape(-1)):
        copy[...] = -1
        assert copy.base is None
        assert copy.flags.owndata
    assert array.get().min() == 0


def test_a_copy_of_a_host_array_does_not_alias_it():
    host = np.zeros(3)
    array = xp.asarray(host)
    host[0] = 1
    assert array.get()[0] == 0
    array[1] = 1
    assert host[1] == 0
    back = array.get()
    back[2] = 1
    assert array.get()[2] == 0


# ---- synchronisations


@pytest.mark.parametrize(
    "wait",
    [
        float,
        int,
        bool,
        complex,
        str,
        repr,
        lambda x: f"{x}",
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.get(),
        lambda x: xp.asnumpy(x),
        lambda x: x and None,
        lambda x: x.reshape(1)[x.reshape(1) > 0],
        lambda x: x.reshape(1).__setitem__(x.reshape(1) > 0, 2),
        lambda x: xp.zeros(3)[: x.astype(int)],
        lambda x: xp.nonzero(x.reshape(1)),
        lambda x: xp.where(x.reshape(1)),
        lambda x: xp.unique(x),
        lambda x: x.device.synchronize(),
        lambda x: xp.cuda.get_current_stream().synchronize(),
    ],
)
def test_what_makes_the_host_wait_is_counted(wait):
    wait(xp.asarray(1.0))
    assert synchronisations.count == 1, synchronisations.reasons


def test_membership_waits_for_every_element():
    assert 2.0 in xp.asarray([0.0, 1.0, 2.0])
    assert synchronisations.count == 3


def test_arithmetic_is_not_counted():
    x = xp.asarray(np.ones((4, 4), "f4"))
    y = xp.where(xp.any(x > 2, axis=-1, keepdims=True), xp.exp(x - xp.max(x, axis=-1, keepdims=True)), 0) @ x.mT
    y[:, 1] += 1
    assert y.shape == (4, 4)
    assert y.dtype == "float32"
    assert y[:, [0, 2]].sum().ndim == 0
    assert synchronisations.count == 0


# ---- devices


def test_arrays_are_made_on_the_current_device():
    with xp.cuda.Device(1):
        assert xp.zeros(3).device.id == 1
        assert (xp.zeros(3) + 1).device == xp.cuda.Device(1)
        with xp.cuda.Device(0):
            assert xp.arange(3).device.id == 0
        assert xp.asarray([1]).device.id == 1
    assert xp.zeros(3).device.id == 0


@pytest.mark.parametrize(
    "operation",
    [
        lambda here, there: here + there,
        lambda here, there: there + 1,
        lambda here, there: there @ there,
        lambda here, there: xp.sum(there),
        lambda here, there: xp.where(here > 0, here, there),
        lambda here, there: xp.where(there, here, here),
        lambda here, there: xp.exp(here, out=there),
        lambda here, there: xp.stack([here, there]),
        lambda here, there: here[there > 0],
        lambda here, there: there.astype("f4"),
        lambda here, there: there.T.reshape(-1),
        lambda here, there: there.__setitem__(0, 1),
        lambda here, there: here.__setitem__(0, there[0]),
    ],
)
def test_an_array_of_another_device_is_refused(operation):
    with xp.cuda.Device(1):
        there = xp.ones((2, 2))
    with pytest.raises(ValueError, match="different from the current device"):
        operation(xp.ones((2, 2)), there)


def test_views_and_transfers_work_from_any_device():
    with xp.cuda.Device(1):
        there = xp.ones((2, 3))
        empty = xp.ones((0, 3))
    for view in (
        there.T,
        there[0],
        there.reshape(-1),
        xp.broadcast_to(there, (2, 2, 3)),
        there[0, 0],
        empty.reshape(3, 0),
    ):
        assert view.device.id == 1
    assert there.get().shape == (2, 3)
    assert xp.asarray(there).device.id == 0
    assert there.copy().device.id == 0
    assert there.device.id == 1


def test_the_current_device_belongs_to_the_thread():
    seen = []
    with xp.cuda.Device(1):
        thread = threading.Thread(target=lambda: seen.append(xp.zeros(1).device.id))
        thread.start()
        thread.join()
    assert seen == [0]


def test_there_is_no_third_device():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        xp.cuda.Device(2).use()


def test_a_stream_is_current_inside_its_context():
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        assert xp.cuda.get_current_stream() is stream
    assert xp.cuda.get_current_stream() is xp.cuda.Stream.null


# ---- installation


def test_it_is_installed_as_cupy_and_removed(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with cupy_standin.installed():
        import cupy
        from cupy.cuda import Device

        assert cupy is xp
        assert Device is xp.cuda.Device
        assert cupy.get_array_module(cupy.zeros(1), np.zeros(1)) is cupy
    assert "cupy" not in sys.modules
    monkeypatch.setitem(sys.modules, "cupy", np)
    with cupy_standin.installed():
        pass
    assert sys.modules["cupy"] is np


def test_the_packages_namespace_finder_knows_it():
    from numpy_sdpa._internal.namespace import array_namespace

    with cupy_standin.installed():
        assert array_namespace({"query": xp.zeros(3)}) is xp
        with pytest.raises(TypeError, match="cupy"):
            array_namespace({"query": xp.zeros(3), "key": np.zeros(3)})
