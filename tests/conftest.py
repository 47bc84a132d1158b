import pytest
from arrays import array_module

__all__ = ["array_module"]


@pytest.fixture
def one_thread():
    """Dask computes one task after the other."""
    import dask

    with dask.config.set(scheduler="synchronous"):
        yield
