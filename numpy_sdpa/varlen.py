"""Attention over packed sequences: the tokens of all sequences behind each other, cut at cumulative lengths."""

import dataclasses
import itertools
from dataclasses import dataclass, fields
from typing import Any, Unpack

import numpy as np

from numpy_sdpa._internal.namespace import (
    Array,
    Namespace,
    array_namespace,
    astype,
    computing,
    is_cupy,
    required,
)
from numpy_sdpa._internal.options import AttentionOptions, Options
from numpy_sdpa._internal.validation import described, is_int, resolve
from numpy_sdpa.attention import checked_upstream, require_residuals
from numpy_sdpa.blockwise import Results, Slab, backward_slabs, forward_slabs
from numpy_sdpa.chain import Differentiable, like_inputs
from numpy_sdpa.residuals import SDPAGradients

# What is meant for rectangular batches: a packed one says the same by where its sequences end.
_REFUSED = ("bias", "dropout_mask", "query_lengths", "key_lengths", "query_segments", "key_segments")


@dataclass(frozen=True, eq=False, kw_only=True)
class SDPAVarlenResiduals:
    """What a packed forward pass hands to its backward pass. The inputs are references: do not modify them in between.

    Attributes
    ----------
    query, key, value, sinks, alibi_slopes, scale, softcap : array or None
        The inputs.
    cu_seqlens_q, cu_seqlens_k : tuple of ints
    row_shift, row_sum, lse : array (Hq, T)
        ``lse = row_shift + log(row_sum)``; −inf where nothing is visible, and outside every sequence.
    output : array (T, Hq, Ev)
        In the compute dtype.
    options : Options
        Everything else that was asked.
    """

    query: Array
    key: Array
    value: Array
    sinks: Array | None
    alibi_slopes: Array | None
    scale: Array
    softcap: Array | None
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    row_shift: Array
    row_sum: Array
    lse: Array
    output: Array
    options: Options

    def to_dict(self) -> dict[str, Any]:
        """Every array that there is by its name, the cumulative lengths, and the options that are on, as given."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "options"}
        named = {name: value for name, value in named.items() if value is not None}
        return named | {name: option for name, option in self.options.given.items() if name not in named}


def sdpa_varlen_forward(
    query: Array,
    key: Array,
    value: Array,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, SDPAVarlenResiduals]:
    """Attention within each of several sequences that are packed behind each other.

    Parameters
    ----------
    query : array (T, Hq, E), floating
        The tokens of all sequences.
    key : array (Ts, Hkv, E), floating
    value : array (Ts, Hkv, Ev), floating
    cu_seqlens_q, cu_seqlens_k : ints (sequences + 1,)
        Sequence n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1], less one, and so its keys. They rise, and may
        start above 0 and end before T and Ts.
    **options
        As for `scaled_dot_product_attention`, with the sequences as its batch: sinks and alibi_slopes (Hq,) or
        (sequences, Hq), query_offset an int or (sequences,), alignment within each sequence, the dropout seed's flat
        batch the number of the sequence. mask, bias, dropout_mask, lengths and segments raise. The method is
        "blockwise".

    Returns
    -------
    output : array (T, Hq, Ev), in ``result_type(query, key, value)``
        0 outside every sequence.
    residuals : SDPAVarlenResiduals

    Raises
    ------
    TypeError
        For a wrong array module or dtype, or an unknown option.
    ValueError
        For a wrong shape or value, or an option that does not go with packed sequences.

    Examples
    --------
    >>> import numpy as np
    >>> tokens = np.ones((5, 1, 4))
    >>> output, residuals = sdpa_varlen_forward(tokens, tokens, tokens, [0, 2, 5], [0, 2, 5], is_causal=True)
    >>> residuals.row_sum.shape
    (1, 5)
    """
    given: dict[str, Any] = {name: option for name, option in options.items() if option is not None}
    _refuse(given)
    query, key, value = (required(name, array) for name, array in (("query", query), ("key", key), ("value", value)))
    xp = array_namespace({"query": query, "key": key, "value": value})
    if xp is not np and not is_cupy(xp):
        raise TypeError(f"packed sequences take NumPy and CuPy arrays, got {xp.__name__}")
    shapes = described(query=query, key=key, value=value)
    if not query.ndim == key.ndim == value.ndim == 3:
        raise ValueError(f"packed query, key and value must have three axes, (tokens, heads, head size): {shapes}")
    cuts_q, cuts_k = (
        _cumulative(name, cuts, array)
        for name, cuts, array in (("cu_seqlens_q", cu_seqlens_q, query), ("cu_seqlens_k", cu_seqlens_k, key))
    )
    if len(cuts_q) != len(cuts_k):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have the same length, one more than there are sequences: "
            f"got {len(cuts_q)} and {len(cuts_k)}"
        )
    query_batch, key_batch, value_batch = (_as_batch(xp, array, len(cuts_q) - 1) for array in (query, key, value))
    inputs, resolved = resolve(query_batch, key_batch, value_batch, None, {**given, "method": "blockwise"})
    arrays = Differentiable(
        query=query,
        key=key,
        value=value,
        sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes,
        scale=inputs.scale,
        softcap=inputs.softcap,
    )
    with computing(xp, query):
        results = _results(resolved, query, value)
        slabs = _slabs(resolved, cuts_q, cuts_k)
        forward_slabs(slabs, _with_all_heads(arrays, resolved), results, resolved)
        named = {name: array for name, array in arrays._asdict().items() if name != "bias"}
        residuals = SDPAVarlenResiduals(
            **named, **results._asdict(), cu_seqlens_q=cuts_q, cu_seqlens_k=cuts_k, options=resolved
        )
        output = astype(results.output, resolved.output_dtype)
        return (output.copy() if output is results.output else output), residuals


def sdpa_varlen_backward(
    grad_output: Array | None, residuals: SDPAVarlenResiduals, *, grad_lse: Array | None = None
) -> SDPAGradients:
    """The gradient of every input of `sdpa_varlen_forward`.

    Parameters
    ----------
    grad_output : array (T, Hq, Ev), floating, or None
    residuals : SDPAVarlenResiduals
    grad_lse : array (Hq, T), floating, optional
        Ignored where lse is −inf.

    Returns
    -------
    SDPAGradients
        Each in the shape and dtype of its input; 0 for tokens outside every sequence. There is no bias.

    Raises
    ------
    TypeError, ValueError
        As `sdpa_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> tokens = np.ones((5, 1, 4))
    >>> output, residuals = sdpa_varlen_forward(tokens, tokens, tokens, [0, 2, 5], [0, 2, 5], is_causal=True)
    >>> sdpa_varlen_backward(np.ones((5, 1, 4)), residuals).value[:, 0, 0].round(2)  # of sequences of 2 and of 3
    array([1.5 , 0.5 , 1.83, 0.83, 0.33])
    """
    require_residuals(residuals, SDPAVarlenResiduals, "sdpa_varlen_forward")
    options = residuals.options
    with computing(options.xp, options.like):
        upstream = checked_upstream(residuals, grad_output, grad_lse, None)
        arrays = Differentiable(**{name: getattr(residuals, name) for name in Differentiable._fields if name != "bias"})
        results = Results(*(getattr(residuals, name) for name in Results._fields))
        slabs = _slabs(options, residuals.cu_seqlens_q, residuals.cu_seqlens_k)
        gradients = backward_slabs(slabs, _with_all_heads(arrays, options), results, upstream, options)
        return SDPAGradients(*like_inputs(gradients, arrays, options))


def _refuse(given: dict[str, Any]) -> None:
    for name in ("mask", *_REFUSED):
        if name in given:
            raise ValueError(f"{name} does not go with packed sequences: cu_seqlens_q and cu_seqlens_k cut them")
    if given.get("method", "blockwise") != "blockwise":
        raise ValueError(f'packed sequences are computed with method="blockwise", got {given["method"]!r}')


def _cumulative(name: str, cuts: Any, array: Array) -> tuple[int, ...]:
    """Checked, on the host."""
    if hasattr(cuts, "tolist"):
        cuts = cuts.tolist()
    if not isinstance(cuts, list | tuple) or not cuts or not all(map(is_int, cuts)):
        raise TypeError(f"{name} must be one axis of integers, one more than there are sequences; got {cuts!r}")
    cuts = tuple(int(cut) for cut in cuts)
    tokens = array.shape[0]
    if cuts[0] < 0 or cuts[-1] > tokens or any(after < before for before, after in itertools.pairwise(cuts)):
        raise ValueError(f"{name} must rise within 0 … {tokens}, the number of tokens; got {cuts!r}")
    return cuts


def _as_batch(xp: Namespace, array: Array, sequences: int) -> Array:
    """(tokens, heads, X) as (sequences, heads, tokens, X), a view: the options are those of a batch of sequences."""
    return xp.broadcast_to(array.swapaxes(0, 1), (sequences, array.shape[1], array.shape[0], array.shape[2]))


def _with_all_heads(arrays: Differentiable, options: Options) -> Differentiable:
    """Key and value with the key heads of the plane: a single head may stand for all."""
    heads = options.plane[-3] // options.group

    def broadcast(array: Array, heads: int) -> Array:
        shape = (array.shape[0], heads, array.shape[2])
        return array if array.shape == shape else options.xp.broadcast_to(array, shape)

    return arrays._replace(
        query=broadcast(arrays.query, options.plane[-3]),
        key=broadcast(arrays.key, heads),
        value=broadcast(arrays.value, heads),
    )


def _results(options: Options, query: Array, value: Array) -> Results:
    """Those of rows outside every sequence."""
    xp, dtype, heads = options.xp, options.compute_dtype, options.plane[-3]
    rows = xp.zeros((heads, query.shape[0]), dtype=dtype)
    return Results(
        output=xp.zeros((query.shape[0], heads, value.shape[-1]), dtype=dtype),
        row_shift=xp.zeros_like(rows.real),
        row_sum=rows,
        lse=xp.full_like(rows, -xp.inf),
    )


def _slabs(options: Options, cuts_q: tuple[int, ...], cuts_k: tuple[int, ...]) -> list[Slab]:
    """On the CPU one for every key head of every sequence, on a GPU one for every sequence."""
    group, heads = options.group, options.plane[-3]
    key_heads = [slice(0, heads // group)]
    if options.xp is np:
        key_heads = [slice(head, head + 1) for head in range(heads // group)]
    slabs = []
    for number in range(len(cuts_q) - 1):
        queries, keys = slice(*cuts_q[number : number + 2]), slice(*cuts_k[number : number + 2])
        for shared in key_heads:
            sharing = slice(shared.start * group, shared.stop * group)
            of_sequence = _options_of(options, number, sharing, queries.stop - queries.start, keys.stop - keys.start)
            slabs.append(Slab(of_sequence, (queries, sharing), (keys, shared), (number, sharing), packed=True))
    return slabs


def _options_of(options: Options, number: int, heads: slice, query_length: int, key_length: int) -> Options:
    offset = options.offset
    if options.given.get("alignment") == "lower_right":
        offset = key_length - query_length
    elif not isinstance(offset, int):
        offset = offset[number].item()
    dropout = options.dropout
    if dropout is not None:
        dropout = dropout._replace(batches=dropout.batches[number], heads=dropout.heads[heads])
    plane = (heads.stop - heads.start, query_length, key_length)
    return dataclasses.replace(options, plane=plane, offset=offset, dropout=dropout)
