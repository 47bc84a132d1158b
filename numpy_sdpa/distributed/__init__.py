"""Attention past one machine: the same call on Dask arrays, lazily, on any Dask cluster.

    from numpy_sdpa import distributed

The plane (B…, Hq, L, S) is cut along every axis but the head size (`plan`), workers compute its tiles by the blockwise
engine (`tasks`), and a graph says which task takes whose results (`graph`). Scheduling, memory limits and recovery from
lost workers are Dask's. Needs the extra ``numpy_sdpa[dask]``, when a function is called. docs/distributed.md tells what
a call costs.
"""

from dataclasses import dataclass
from typing import Any, Unpack

from numpy_sdpa._internal.options import AttentionOptions
from numpy_sdpa.distributed.graph import Backward, Cut, DaskArray, Forward
from numpy_sdpa.distributed.plan import Plan
from numpy_sdpa.residuals import SDPAGradients

__all__ = ["SDPADistributedResiduals", "sdpa_backward", "sdpa_forward"]


@dataclass(frozen=True, eq=False)
class SDPADistributedResiduals:
    """What a forward pass hands to its backward pass; ``dask.persist(output, residuals)`` computes it and keeps it.

    Attributes
    ----------
    output : dask array (B…, Hq, L, Ev)
        In the compute dtype.
    row_shift, row_sum, lse : dask array (B…, Hq, L)
        Of whole rows: ``lse = row_shift + log(row_sum)``, sink included; −inf where nothing is visible.
    sees : dask array of bool (B…, Hq, L)
        True where a query sees a key.
    inputs : dict
        The inputs by name, cut as the plane is.
    plan : Plan
        How that is.
    """

    output: DaskArray
    row_shift: DaskArray
    row_sum: DaskArray
    lse: DaskArray
    sees: DaskArray
    inputs: dict[str, Cut]
    plan: Plan


def sdpa_forward(
    query: DaskArray, key: DaskArray, value: DaskArray, mask: Any = None, **options: Unpack[AttentionOptions]
) -> tuple[DaskArray, SDPADistributedResiduals]:
    """The output and what a backward needs: `numpy_sdpa.sdpa_forward` on dask arrays. Nothing is computed yet.

    Parameters
    ----------
    query : dask array (B…, Hq, L, E), floating
        Its chunks say how batch, heads and L are cut. Chunks are of NumPy or CuPy. The head size is not cut: it is
        made whole. With ``enable_gqa=True`` cuts of the heads move up to where a group ends.
    key : dask array (B…, Hkv, S, E), floating
        Its chunks say how S is cut.
    value : dask array (B…, Hkv, S, Ev), floating
    mask, **options
        As for `numpy_sdpa.scaled_dot_product_attention`; arrays may be of Dask or NumPy. What is not of Dask is looked
        at now: tiles in which nobody sees anything, by a causal rule, a window, lengths, segments or a mask, make no
        task. ``method`` is "blockwise"; ``workers``, threads within a tile, is 1, since Dask runs a task per thread.

    Returns
    -------
    output : dask array (B…, Hq, L, Ev), in ``result_type(query, key, value)``
    residuals : SDPADistributedResiduals
        With ``output`` and ``lse``.

    Raises
    ------
    ImportError
        Without Dask.
    TypeError, ValueError
        As `numpy_sdpa.scaled_dot_product_attention`, when called; for numbers within dask arrays (lengths, scale,
        softcap, a floating mask), when computed. ValueError for chunks of unknown size, ``method="dense"`` and
        ``progress=True``.

    Notes
    -----
    A row's softmax runs over its tiles: a strip of queries takes (sums, row_sum, row_shift) from tile to tile. H. Liu,
    M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023,
    arXiv:2310.01889, without the ring's fixed places: Dask decides which worker computes which tile.
    """
    _require_dask()
    from numpy_sdpa.distributed.arguments import cut_arguments

    plan, inputs = cut_arguments(query, key, value, mask, options)
    results = Forward(plan, inputs, plan.token, {}).results()
    output = results["output"].astype(plan.options.output_dtype)
    return output, SDPADistributedResiduals(**results, inputs=inputs, plan=plan)


def sdpa_backward(
    grad_output: DaskArray | None, residuals: SDPADistributedResiduals, *, grad_lse: DaskArray | None = None
) -> SDPAGradients:
    """The gradient of every input, as `numpy_sdpa.sdpa_backward`, of dask arrays. Nothing is computed yet.

    Parameters
    ----------
    grad_output : dask or NumPy array (B…, Hq, L, Ev), floating, or None
    residuals : SDPADistributedResiduals
        From `sdpa_forward`.
    grad_lse : dask or NumPy array (B…, Hq, L), floating, optional
        Ignored where lse is −inf.

    Returns
    -------
    SDPAGradients
        Of dask arrays, each in the shape and dtype of its input; `scale` and `softcap` 0-d, in the compute dtype.

    Raises
    ------
    ImportError, TypeError, ValueError
        As `sdpa_forward`; ValueError where neither upstream gradient is given, and for residuals of complex numbers.

    Notes
    -----
    Every tile's weights and D = Σ gO ∘ O are those of the whole row, whose numbers the forward kept; with those of the
    tile's own keys, gradients would be of another function. The sums of gQ, gK and gV run from tile to tile.
    """
    _require_dask()
    from dask.base import tokenize

    from numpy_sdpa.distributed.arguments import cut_upstream

    plan, inputs = residuals.plan, residuals.inputs
    arrays = {name: getattr(residuals, name) for name in ("output", "row_shift", "row_sum", "lse", "sees")}
    known = {name: Cut(array, plan.axes_of_rows[: array.ndim]) for name, array in arrays.items()}
    known |= cut_upstream(plan, inputs["query"], known, {"grad_output": grad_output, "grad_lse": grad_lse})
    token = tokenize(plan.token, {name: cut.array.name for name, cut in known.items()})
    run = Backward(plan, inputs, token, known)
    return SDPAGradients(**{name: run.gradient(name) for name in SDPAGradients._fields})


def _require_dask() -> None:
    try:
        import dask.array  # noqa: F401
    except ImportError as error:
        raise ImportError("numpy_sdpa.distributed needs Dask: pip install 'numpy_sdpa[dask]'") from error
