from arrays import array_module

__all__ = ["array_module"]
