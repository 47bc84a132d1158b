"""Softmax over keys that come tile by tile: what is kept of the tiles seen so far, and how two parts are joined.

Every tile runs the steps of the chain. M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018,
arXiv:1805.02867; T. Dao et al., "FlashAttention", 2022, arXiv:2205.14135.
"""

from typing import NamedTuple

from numpy_sdpa import chain, steps
from numpy_sdpa._internal.namespace import Array, DType, Namespace
from numpy_sdpa._internal.options import Options
from numpy_sdpa.chain import Differentiable, View


class Partial(NamedTuple):
    """Attention over some of the keys, not yet divided by the row's sum.

    sums = Σ exp(Z − shift) V and row_sum = Σ exp(Z − shift) over those keys; the shift is −∞ where none was visible.
    """

    sums: Array  # (…, rows, Ev)
    row_sum: Array  # (…, rows, 1)
    row_shift: Array  # (…, rows, 1)


class Rows(NamedTuple):
    """What the backward must know of a block of query rows."""

    grad_output: Array  # (…, rows, Ev)
    row_shift: Array  # (…, rows, 1)
    row_sum: Array  # (…, rows, 1)
    row_term: Array  # (…, rows, 1): D − g_lse, D = Σ gO ∘ O

    def part(self, rows: slice) -> "Rows":
        return Rows(*(array[..., rows, :] for array in self))


class TileGradients(NamedTuple):
    inputs: Differentiable  # query, key, bias (the tile's), slopes, scale and softcap
    value: Array


def nothing(options: Options, rows: tuple[int, ...], value_size: int) -> Partial:
    """Attention over no keys."""
    xp, dtype = options.xp, options.compute_dtype
    return Partial(
        sums=xp.zeros((*rows, value_size), dtype=dtype),
        row_sum=xp.zeros((*rows, 1), dtype=dtype),
        row_shift=xp.full((*rows, 1), -xp.inf, dtype=shift_dtype(options)),
    )


def shift_dtype(options: Options) -> DType:
    """A shift is real, also of complex logits."""
    return options.xp.zeros((), dtype=options.compute_dtype).real.dtype


def of_tile(operands: Differentiable, view: View) -> Partial:
    xp = view.xp
    logits = chain.logits_forward(operands, view).logits
    row_shift = steps.row_maximum(xp, logits)
    exponentials = xp.exp(logits - steps.finite_shift(xp, row_shift))
    return Partial(
        sums=chain.output_forward(exponentials, operands.value, view),
        row_sum=xp.sum(exponentials, axis=-1, keepdims=True),
        row_shift=row_shift,
    )


def of_sinks(xp: Namespace, sinks: Array, like: Partial) -> Partial:
    """A sink is a key whose value is 0."""
    row_shift = xp.broadcast_to(steps.row_maximum(xp, sinks[..., None, None]), like.row_shift.shape)
    is_sink = row_shift != -xp.inf
    exponential = steps.sink_exponential(xp, sinks, row_shift)
    return Partial(xp.zeros_like(like.sums), steps.only_where(xp, is_sink, exponential), row_shift)


def join(xp: Namespace, a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both: each part brought to the larger of the two shifts."""
    row_shift = xp.maximum(a.row_shift, b.row_shift)
    factor_a, factor_b = (_factor(xp, part.row_shift, row_shift) for part in (a, b))
    return Partial(a.sums * factor_a + b.sums * factor_b, a.row_sum * factor_a + b.row_sum * factor_b, row_shift)


def _factor(xp: Namespace, part_shift: Array, row_shift: Array) -> Array:
    """exp(part's shift − shift); 1 where both are the same infinity."""
    return xp.exp(xp.where(part_shift == row_shift, 0, part_shift - row_shift))


def backward_of_tile(rows: Rows, operands: Differentiable, view: View) -> TileGradients:
    """The chain's backward for one tile, from what is known of the whole rows.

    The weights are rebuilt with the shift of the forward and divided by its sum: exp(Z − lse) would lose digits with
    the size of the logits.
    """
    xp = view.xp
    stages = chain.logits_forward(operands, view)  # 1
    weights = steps.softmax_weights(xp, xp.exp(stages.logits - rows.row_shift), rows.row_sum, view.visible)  # 2
    # 3
    grads = chain.output_backward(rows.grad_output, weights, operands.value, view)
    # 2
    grad_logits = steps.softmax_logits_backward(grads.weights, weights, rows.row_term)
    # 1
    return TileGradients(chain.logits_backward(grad_logits, stages.scores, operands, view), grads.value)
