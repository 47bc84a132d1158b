"""A bar for long runs, drawn by tqdm or rich where one of them is installed."""

import sys
import threading
from types import TracebackType
from typing import Any


class Progress:
    """Counts finished tasks; draws nothing unless asked to."""

    def __init__(self, wanted: bool, title: str, total: int) -> None:
        self._lock = threading.Lock()
        self._bar: Any = _bar(title, total) if wanted else None

    def advance(self) -> None:
        if self._bar is not None:
            with self._lock:
                self._bar.update(1)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(title: str, total: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        try:
            return _Rich(title, total)
        except ImportError:
            return _Plain(title, total)
    return tqdm(total=total, desc=title, unit="block", file=sys.stderr)


class _Rich:
    def __init__(self, title: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(stderr=True))
        self._task = self._bar.add_task(title, total=total)
        self._bar.start()

    def update(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def close(self) -> None:
        self._bar.stop()


class _Plain:
    """One line that is written over, at every whole percent."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0

    def update(self, count: int) -> None:
        before, self._done = 100 * self._done // self._total, self._done + count
        if (percent := 100 * self._done // self._total) > before:
            print(f"\r{self._title} {percent} %", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr)
