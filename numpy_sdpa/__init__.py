"""Scaled dot-product attention and all its derivatives, by hand, in NumPy."""

from numpy_sdpa._version import __version__

__all__ = ["__version__"]
