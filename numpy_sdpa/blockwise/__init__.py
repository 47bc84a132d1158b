"""Attention in memory that grows with L · E, not with L · S: the chain on many tiles, joined by a running softmax.

`forward` and `backward` have the form of `dense`'s. What they cut and where is in `slabs` (by head) and `tiles` (along queries and
keys); a tile runs the steps of the chain (`running`), a plain one their folded form (`folded`); `workers` has the threads.
"""

from numpy_sdpa.blockwise.engine import RowStatistics, backward, backward_from_rows, forward

__all__ = ["RowStatistics", "backward", "backward_from_rows", "forward"]
