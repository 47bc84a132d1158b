"""Threads that end when they must, tell of errors, and leave BLAS as it was."""

import itertools
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import threadpoolctl

import numpy_sdpa
from numpy_sdpa.blockwise import folded
from numpy_sdpa.blockwise.workers import Buffers, InOrder, OnceEach, Stopped, Workers, blas


def workers(count):
    return Workers(count, lambda: np.errstate(all="ignore"))


def blas_threads():
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


@pytest.fixture
def two_blas_threads(monkeypatch):
    monkeypatch.setattr(blas, "_found", None)  # a test before may have loaded one more BLAS, SciPy's
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        if set(blas_threads()) != {2}:
            pytest.skip("this BLAS cannot be told its number of threads")
        yield


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_task_once_and_results_in_order(count):
    seen = []
    results = workers(count).run(lambda task, buffers: seen.append(task) or task * task, range(20))
    assert results == [task * task for task in range(20)]
    assert sorted(seen) == list(range(20))


def test_as_many_threads_as_asked_at_the_same_time():
    meet = threading.Barrier(3, timeout=30)
    workers(3).run(lambda task, buffers: meet.wait(), range(3))  # fewer would wait until the time is out


def test_a_buffer_has_the_shape_and_dtype_that_are_asked_for():
    """Also where the last one of that name had another of either, and its memory is long enough."""
    buffers = Buffers()
    for shape, dtype in itertools.product([(3, 4), (4, 3), (2, 2), (5, 6), (3, 4)], ["float32", "float64", "int32"]):
        for _ in range(2):
            array = buffers.take("scratch", shape, np.dtype(dtype))
            assert (array.shape, array.dtype) == (shape, dtype)
    assert buffers.take("scratch", (2, 6), np.dtype("int32")).base is array.base
    assert not np.shares_memory(buffers.take("another", (3, 4), np.dtype("int32")), array)


def test_each_worker_has_its_own_buffers():
    meet = threading.Barrier(2, timeout=30)

    def work(task, buffers):
        scratch = buffers.take("scratch", (3, 4), np.dtype(np.float32))
        scratch[:] = task
        meet.wait()
        assert (scratch == task).all()
        return scratch

    first, second = workers(2).run(work, range(2))
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_stops_the_others_and_is_raised(count):
    team, begun = workers(count), []

    def work(task, buffers):
        begun.append(task)
        if task == 1:
            raise ZeroDivisionError("of task 1")
        if task > 1:
            while True:
                team.check()
                time.sleep(0.001)

    with pytest.raises(ZeroDivisionError, match="of task 1"):
        team.run(work, range(100))
    assert len(begun) < 100


@pytest.mark.parametrize("callers", [True, False], ids=["the caller's thread", "a helper"])
def test_the_error_is_raised_not_that_the_others_stopped(callers):
    team, both = workers(2), threading.Barrier(2, timeout=30)

    def work(task, buffers):
        both.wait()
        if (threading.current_thread() is threading.main_thread()) == callers:
            raise ZeroDivisionError
        while True:
            team.check()
            time.sleep(0.001)

    with pytest.raises(ZeroDivisionError):
        team.run(work, range(2))


def test_an_error_wakes_those_who_wait_for_their_turn():
    team = workers(2)

    def work(task, buffers):
        if task == 0:
            time.sleep(0.05)
            raise ZeroDivisionError
        team.in_order.wait("place", 1)

    with pytest.raises(ZeroDivisionError):
        team.run(work, range(2))


def test_an_interrupt_while_a_helper_starts_leaves_nobody_behind(monkeypatch):
    start, begun, ended = threading.Thread.start, threading.Event(), threading.Event()

    def interrupted(thread):
        start(thread)
        begun.wait(30)
        raise KeyboardInterrupt

    def work(task, buffers):
        begun.set()
        time.sleep(0.1)
        ended.set()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers(2).run(work, range(9))
    assert ended.is_set()


def test_turns_are_taken_in_order():
    order, in_order = [], InOrder(threading.Event())

    def contribute(turn):
        in_order.wait("place", turn)
        order.append(turn)
        in_order.finish("place", turn)

    threads = [threading.Thread(target=contribute, args=(turn,)) for turn in (4, 1, 0, 3)]
    in_order.finish("place", 2)  # has nothing to contribute
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 3, 4]


def test_nobody_waits_when_all_is_stopped():
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        InOrder(stop).wait("place", 5)


def test_what_is_made_once_is_made_once():
    made = []
    things = OnceEach(3, lambda number: made.append(number) or object())
    threads = [threading.Thread(target=lambda: things[1]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert things[1] is things[1]


def test_blas_is_on_one_thread_inside_and_as_it_was_outside(two_blas_threads):
    with blas.single_threaded():
        assert set(blas_threads()) == {1}
        with blas.single_threaded():
            pass
        assert set(blas_threads()) == {1}  # the inner one has left, the outer one has not
    assert set(blas_threads()) == {2}
    with pytest.raises(ZeroDivisionError), blas.single_threaded():
        raise ZeroDivisionError
    assert set(blas_threads()) == {2}


def test_overlapping_calls_leave_blas_as_it_was(two_blas_threads):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with blas.single_threaded():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with blas.single_threaded():
        thread.start()
        assert inside.wait(30)
    assert set(blas_threads()) == {1}  # the other one has not left
    leave.set()
    thread.join()
    assert set(blas_threads()) == {2}
    with blas.single_threaded():
        assert set(blas_threads()) == {1}


class OfEachThread:
    """A BLAS on OpenMP: its number of threads belongs to the thread that sets it."""

    threading_layer = "openmp"

    def __init__(self):
        self._own = threading.local()

    @property
    def num_threads(self):
        return getattr(self._own, "count", 2)

    def set_num_threads(self, count):
        self._own.count = count


def test_each_worker_holds_a_blas_on_openmp_to_one_thread(monkeypatch):
    library, meet = OfEachThread(), threading.Barrier(3, timeout=30)
    monkeypatch.setattr(blas, "_found", [library])
    inside = workers(3).run(lambda task, buffers: meet.wait() >= 0 and library.num_threads, range(3))
    assert inside == [1, 1, 1]
    assert library.num_threads == 2


def test_calls_that_begin_at_the_same_time_find_the_same_libraries(monkeypatch):
    """A library that is loaded meanwhile would be one more for the second of them only."""
    found = []

    class Controller:
        def select(self, user_api):
            time.sleep(0.05)
            found.append(OfEachThread())
            return self

        @property
        def lib_controllers(self):
            return list(found)

    monkeypatch.setattr(blas, "_found", None)
    monkeypatch.setattr(threadpoolctl, "ThreadpoolController", Controller)
    workers(3).run(lambda task, buffers: time.sleep(0.2), range(3))
    assert len(found) == 1


def test_calls_at_the_same_time_are_equal_bit_for_bit(two_blas_threads):
    """Products by two threads of BLAS would be cut, and so rounded, elsewhere."""
    arrays = np.random.default_rng(0).standard_normal((4, 2, 700, 64), np.float32)

    def call(length):
        query, key, value, upstream = arrays[:, :, :length]
        output, residuals = numpy_sdpa.sdpa_forward(query, key, value, method="blockwise", workers=1)
        return [output, *numpy_sdpa.sdpa_backward(upstream, residuals)[:3]]

    lengths = [700, 150, 700, 300] * 3  # the short ones leave while the long ones are at it
    expected = {length: call(length) for length in lengths}
    with ThreadPoolExecutor(4) as pool:
        for length, got in zip(lengths, pool.map(call, lengths), strict=True):
            for one, other in zip(got, expected[length], strict=True):
                np.testing.assert_array_equal(one, other)
    assert set(blas_threads()) == {2}


def test_an_error_in_the_engine_leaves_blas_as_it_was(two_blas_threads, monkeypatch):
    def broken(*args):
        assert set(blas_threads()) == {1}
        raise ZeroDivisionError

    monkeypatch.setattr(folded, "_exponentials", broken)
    with pytest.raises(ZeroDivisionError):
        numpy_sdpa.attention(*np.ones((3, 4, 600, 8)), method="blockwise", workers=2)
    assert set(blas_threads()) == {2}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("numpy_sdpa")]


INTERRUPTED = """
import signal, threading, time, numpy as np, numpy_sdpa, threadpoolctl
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start what runs in the background without it
rng = np.random.default_rng(0)
query = rng.standard_normal((2, 40000, 64), np.float32)
numpy_sdpa.attention(*query[None, :, :600].repeat(3, axis=0), method="blockwise")
threads = lambda: [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
before = threads()
output, residuals = numpy_sdpa.sdpa_forward(query, query, query, window=(10, 10), method="blockwise")
residuals = __import__("dataclasses").replace(
    residuals, options=__import__("dataclasses").replace(residuals.options, window=(None, None))
)
call = {"forward": lambda: numpy_sdpa.attention(query, query, query, method="blockwise", workers=2),
        "backward": lambda: numpy_sdpa.sdpa_backward(output, residuals)}["%s"]
print("ready", flush=True)
try:
    call()
except KeyboardInterrupt:
    alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("numpy_sdpa")]
    print("stopped", before == threads(), alive, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_ctrl_c_ends_promptly(which):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED % which], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        time.sleep(0.5)
        assert process.poll() is None  # still at it
        sent = time.perf_counter()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopped True []\n", process.stderr.read()
        assert time.perf_counter() - sent < 5  # a run to the end would take a minute


@pytest.mark.parametrize("library", ["tqdm", "rich", None])
def test_progress(library, capsys, monkeypatch):
    for name in ("tqdm", "rich"):
        if name != library:
            for module in (name, f"{name}.auto", f"{name}.console", f"{name}.progress"):
                monkeypatch.setitem(sys.modules, module, None)
    if library is not None:
        pytest.importorskip(library)
    arrays = np.ones((3, 2, 300, 8))
    output, residuals = numpy_sdpa.sdpa_forward(*arrays, method="blockwise", block_size=64, progress=True)
    numpy_sdpa.sdpa_backward(output, residuals)
    captured = capsys.readouterr()
    assert "forward" in captured.err
    assert "backward" in captured.err
    assert "100" in captured.err
    assert not captured.out
    numpy_sdpa.attention(*arrays, method="blockwise")
    assert not capsys.readouterr().err
