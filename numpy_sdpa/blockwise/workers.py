"""Threads that work through a list of tasks, with BLAS held to one thread: NumPy lets go of the GIL inside its loops.

The tasks say what is computed, never the number of workers: results are the same bit for bit whatever that number is.
"""

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

import numpy as np

from numpy_sdpa._internal.namespace import DType
from numpy_sdpa.blockwise.progress import Progress

Task = TypeVar("Task")
Result = TypeVar("Result")


class Stopped(Exception):
    """Another worker failed or the user interrupted: give up the task at hand."""


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Buffers:
    """One worker's scratch arrays, by name, so that no tile allocates."""

    def __init__(self) -> None:
        self._flat: dict[str, np.ndarray] = {}
        self._last: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        """An array with anything in it. The next `take` of the same name may hand out the same memory."""
        array = self._last.get(name)
        if array is None or array.shape != shape or array.dtype != dtype:
            array = self._last[name] = self._memory(name, math.prod(shape), dtype).reshape(shape)
        return array

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def _memory(self, name: str, size: int, dtype: DType) -> np.ndarray:
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            flat = self._flat[name] = np.empty(size, dtype)
        return flat[:size]


# Kept from call to call: fresh memory costs a page fault for every 4 KiB, which is much beside a short call.
_spare: list[Buffers] = []
_MOST_KEPT = 8 * 2**20  # bytes for each worker; buffers of default tiles need 2 to 5 MiB


@contextmanager
def _scratch() -> Iterator[Buffers]:
    try:
        buffers = _spare.pop()
    except IndexError:
        buffers = Buffers()
    yield buffers
    if buffers.nbytes <= _MOST_KEPT:
        _spare.append(buffers)


class OnceEach(Generic[Result]):
    """`make(number)` for numbers below `count`, each made when it is first asked for and once."""

    def __init__(self, count: int, make: Callable[[int], Result]) -> None:
        self._make = make
        self._locks = [threading.Lock() for _ in range(count)]
        self._made: dict[int, Result] = {}

    def __getitem__(self, number: int) -> Result:
        with self._locks[number]:
            if number not in self._made:
                self._made[number] = self._make(number)
            return self._made[number]


class InOrder:
    """Contributions to a shared place take turns 0, 1, 2 …, whoever computes them: sums then round the same every time.

    A task may wait only for tasks that stand before it in the list. The first unfinished one never waits, so none
    waits for ever.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._condition = threading.Condition()
        self._turn: dict[Any, int] = {}
        self._early: dict[Any, set[int]] = {}

    def wait(self, place: Any, turn: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._stop.is_set() or self._turn.get(place, 0) == turn)
        if self._stop.is_set():
            raise Stopped

    def finish(self, place: Any, turn: int) -> None:
        """Also of a turn that was not waited for, since there was nothing to contribute."""
        with self._condition:
            early = self._early.setdefault(place, set())
            early.add(turn)
            following = self._turn.get(place, 0)
            while following in early:
                early.remove(following)
                following += 1
            self._turn[place] = following
            self._condition.notify_all()

    def wake(self) -> None:
        with self._condition:
            self._condition.notify_all()


class Workers:
    """`count` threads, the caller's own among them; the others live while a list is worked through."""

    def __init__(self, count: int, computing: Callable[[], AbstractContextManager]) -> None:
        self._count = count
        self._computing = computing
        self._stop = threading.Event()
        self.in_order = InOrder(self._stop)

    def check(self) -> None:
        """To be called now and then within a long task."""
        if self._stop.is_set():
            raise Stopped

    def run(
        self, work: Callable[[Task, Buffers], Result], tasks: Sequence[Task], progress: Progress | None = None
    ) -> list[Result]:
        """`work(task, buffers)` for every task, begun in the order of the list; the results in that order."""
        results: list[Any] = [None] * len(tasks)
        errors: list[BaseException] = []
        numbers = itertools.count()  # its next() is one step under the GIL

        def loop() -> None:
            with blas.single_threaded(), self._computing(), _scratch() as buffers:
                while not self._stop.is_set() and (number := next(numbers)) < len(tasks):
                    results[number] = work(tasks[number], buffers)
                    if progress is not None:
                        progress.advance()

        def helper() -> None:
            try:
                loop()
            except BaseException as error:  # handed on to the caller below
                errors.append(error)
                self._halt()

        helpers = [
            threading.Thread(target=helper, name=f"numpy_sdpa-{number}", daemon=True)
            for number in range(1, min(self._count, len(tasks)))
        ]
        try:
            for thread in helpers:
                thread.start()
            loop()
            for thread in helpers:
                thread.join()
        except BaseException:  # also KeyboardInterrupt: nobody goes on in the background
            self._halt()
            raise
        finally:
            for thread in helpers:
                if thread.is_alive():  # not every start need have come to its end
                    thread.join()
            if first := next((error for error in errors if not isinstance(error, Stopped)), None):
                raise first
        return results

    def _halt(self) -> None:
        self._stop.set()
        self.in_order.wake()


class _BLAS:
    """BLAS on one thread while any worker computes, and as it was when the last one has left.

    The number of threads belongs to the process, or, where BLAS runs on OpenMP, to the thread that sets it: so every
    worker sets it, helpers too, and each sets its own back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[int] = []  # of the process, when the first one came
        self._found: list[Any] | None = None

    @contextmanager
    def single_threaded(self) -> Iterator[None]:
        with self._lock:
            libraries = self._libraries()
            own = [library.num_threads for library in libraries]
            if self._inside == 0:
                self._before = own
            self._inside += 1
            for library in libraries:
                _set_threads(library, 1)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                for library, mine, first in zip(libraries, own, self._before, strict=True):
                    if getattr(library, "threading_layer", None) == "openmp":
                        _set_threads(library, mine)
                    elif self._inside == 0:
                        _set_threads(library, first)

    def _libraries(self) -> list[Any]:
        if self._found is None:  # it looks through every loaded library, which takes some ms: once
            from threadpoolctl import ThreadpoolController

            self._found = ThreadpoolController().select(user_api="blas").lib_controllers
        return self._found


def _set_threads(library: Any, count: int) -> None:
    """From whichever thread: threadpoolctl ≥ 3.8 leaves a process's OpenBLAS to the thread that was first to set it."""
    release = getattr(library, "clear_controlling_thread", lambda force: None)
    release(force=True)
    library.set_num_threads(count)
    release(force=True)


blas = _BLAS()
