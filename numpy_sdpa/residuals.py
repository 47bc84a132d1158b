"""What the forward pass hands to the backward pass, and what the derivatives return."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from numpy_sdpa._internal.namespace import Array
from numpy_sdpa._internal.options import Options


@dataclass(frozen=True, eq=False, kw_only=True)
class SDPAResiduals:
    """Every array of a forward pass under its name: to be printed, saved, compared, and given to `sdpa_backward`.

    What was not made (as by ``method="blockwise"``, which keeps nothing of size L × S) is None. The inputs are
    references to the caller's arrays: do not modify them before the backward.

    Attributes
    ----------
    scores, capped_scores, logits, weights : array (B…, Hq, L, S) or None
        (scale · Q) Kᵀ; after the softcap; after ALiBi, bias and mask (−inf where masked); after the softmax, before
        dropout.
    dropout_mask : bool array or None
        True where a weight was kept.
    row_shift, row_sum, lse : array (B…, Hq, L)
        ``lse = row_shift + log(row_sum)``, natural logarithm, sink included; −inf where nothing is visible.
    output : array (B…, Hq, L, Ev)
        In the compute dtype.
    query, key, value, mask, bias, sinks, alibi_slopes, scale, softcap : array or None
        The inputs.
    options : Options
        Everything else that was asked.
    """

    query: Array
    key: Array
    value: Array
    mask: Array | None
    bias: Array | None
    sinks: Array | None
    alibi_slopes: Array | None
    scale: Array
    softcap: Array | None
    scores: Array | None = None
    capped_scores: Array | None = None
    logits: Array | None = None
    weights: Array | None = None
    dropout_mask: Array | None = None
    row_shift: Array
    row_sum: Array
    lse: Array
    output: Array
    options: Options

    def to_dict(self) -> dict[str, Any]:
        """Every array that there is by its name, then the options that are on, as they were given."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "options"}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        return arrays | {name: option for name, option in self.options.given.items() if name not in arrays}


class Upstream(NamedTuple):
    """The gradients that flow into a backward, in the compute dtype; None = nothing flows."""

    output: Array | None  # (B…, Hq, L, Ev)
    lse: Array | None  # (B…, Hq, L)
    weights: Array | None  # (B…, Hq, L, S), before dropout


class SDPAGradients(NamedTuple):
    """The gradient of every input, in the shape and dtype of that input; None where the input was not given.

    `scale` (always there) and `softcap` are 0-d arrays in the compute dtype.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None
    alibi_slopes: Array | None
    scale: Array
    softcap: Array | None


class SDPATangents(NamedTuple):
    """The derivative of a forward pass along a direction, in the compute dtype."""

    output: Array  # (B…, Hq, L, Ev)
    lse: Array  # (B…, Hq, L); 0 where lse is −inf
    weights: Array  # (B…, Hq, L, S), before dropout


class SDPADoubleGradients(NamedTuple):
    """The gradient of Σ⟨cotangent, sdpa_backward(…)⟩ for every input and every upstream gradient.

    None where the input or upstream gradient was not given.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None
    alibi_slopes: Array | None
    scale: Array
    softcap: Array | None
    grad_output: Array | None
    grad_lse: Array | None
    grad_weights: Array | None
