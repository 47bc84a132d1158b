"""Attention in memory that grows with L · E, not with L · S: the chain on many tiles, joined by a running softmax.

`forward` and `backward` have the form of `dense`'s. Where they cut is in `slabs` (by head) and `tiles` (along queries
and keys); a tile runs the steps of the chain (`running`), a plain one their folded form (`folded`); `workers` has the
threads.
"""

from typing import Any

from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Inputs, Options
from numpy_sdpa.blockwise.backward_pass import Backward, backward_slabs
from numpy_sdpa.blockwise.forward_pass import forward_slabs
from numpy_sdpa.blockwise.parts import Results, RowStatistics, empty_results, with_leading_axes
from numpy_sdpa.blockwise.slabs import Slab, slabs_of
from numpy_sdpa.chain import Differentiable
from numpy_sdpa.residuals import SDPAResiduals, Upstream


def forward(inputs: Inputs, options: Options) -> SDPAResiduals:
    arrays = with_leading_axes(inputs, options)
    results = empty_results(options, options.plane[:-1], arrays.value.shape[-1])
    forward_slabs(slabs_of(options), arrays, results, options)
    return SDPAResiduals(**inputs._asdict(), **results._asdict(), options=options)


def backward(residuals: SDPAResiduals, upstream: Upstream) -> Differentiable:
    """Gradients in the compute dtype, summed over what was broadcast within the plane."""
    options = residuals.options
    arrays = with_leading_axes(residuals, options)
    return backward_slabs(slabs_of(options), arrays, _results_of(residuals), upstream, options)


def _results_of(residuals: Any) -> Results:
    return Results(*(getattr(residuals, name) for name in Results._fields))


def backward_from_rows(arrays: Any, options: Options, grad_output: Array, statistics: RowStatistics) -> Differentiable:
    """The gradients that the keys at hand give, from what is known of the rows over all keys, wherever those are.

    Parameters
    ----------
    arrays : Inputs, SDPAResiduals or the like
        The part's query, key, value, bias, alibi_slopes, scale and softcap.
    options : Options
        Of the part: offset, lengths, mask and dropout as they are there.
    grad_output : array (B…, Hq, L, Ev), in the compute dtype
        0 in rows that see nothing at all.
    statistics : RowStatistics

    Returns
    -------
    Differentiable
        Without `sinks`, whose gradient belongs to whole rows.
    """
    run = Backward(slabs_of(options), with_leading_axes(arrays, options), options)
    return run.from_rows(grad_output, statistics)


__all__ = [
    "Results",
    "RowStatistics",
    "Slab",
    "backward",
    "backward_from_rows",
    "backward_slabs",
    "forward",
    "forward_slabs",
]
