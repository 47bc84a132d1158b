"""Docstrings: examples print what they say, and every public function says what it takes, returns and raises."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import numpy_sdpa

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(numpy_sdpa.__path__, "numpy_sdpa.")
    if not name.endswith("__main__") and ".cli" not in name
]
FUNCTIONS = [name for name in numpy_sdpa.__all__ if inspect.isfunction(getattr(numpy_sdpa, name))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, raise_on_error=False, report=True)
    assert failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections(name):
    text = inspect.getdoc(getattr(numpy_sdpa, name))
    sections = ("Parameters", "Returns", "Raises", "Examples")
    assert not [section for section in sections if f"{section}\n{'-' * len(section)}" not in text]
