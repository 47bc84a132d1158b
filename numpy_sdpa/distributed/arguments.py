"""A call's arguments on their way in: checked when the graph is built, and cut as the plane is.

The checks and their texts are those of every other way to call attention: they see stand-ins for Dask arrays, which
have a shape and a dtype and take no memory. What only the numbers can tell, workers check.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from numpy_sdpa._internal.namespace import Namespace, array_namespace, dtype_kind, from_list, is_cupy
from numpy_sdpa._internal.options import Inputs, Options
from numpy_sdpa._internal.validation import resolve
from numpy_sdpa.attention import checked_upstream
from numpy_sdpa.distributed import tasks
from numpy_sdpa.distributed.graph import Axes, Cut, DaskArray
from numpy_sdpa.distributed.plan import Chunks, Plan

# Arrays of the chunks' module; lengths and the like, and single numbers, may come from anywhere.
_OF_CHUNKS = ("query", "key", "value", "mask", "bias", "sinks", "alibi_slopes", "dropout_mask")
_NUMBERS = ("scale", "softcap")
_ARRAYS = (*_OF_CHUNKS, *_NUMBERS, "query_offset", "query_lengths", "key_lengths", "query_segments", "key_segments")
# What goes with every task as it is.
_PLAIN = (
    "is_causal",
    "window",
    "enable_gqa",
    "dropout_p",
    "dropout_seed",
    "block_size",
    "method",
    "workers",
    *_NUMBERS,
)


def cut_arguments(
    query: Any, key: Any, value: Any, mask: Any, options: Mapping[str, Any]
) -> tuple[Plan, dict[str, Cut]]:
    """How the plane is cut, and every array, cut so."""
    given = {"query": query, "key": key, "value": value, "mask": mask, **options}
    given = {name: argument for name, argument in given.items() if argument is not None}
    _refuse_what_dask_does(given)
    # Dask runs as many tasks at a time as it has threads: one thread a task, then, unless the caller knows better.
    given = {"method": "blockwise", "workers": 1, **given}
    xp = _module_of_chunks(given)
    given |= {name: _as_array(name, given[name], xp, given) for name in _ARRAYS if name in given}
    stand_ins = {name: stand_in(name, argument) for name, argument in given.items()}
    query, key, value, mask = (stand_ins.pop(name, None) for name in ("query", "key", "value", "mask"))
    return _Cutter(given, *resolve(query, key, value, mask, stand_ins)).cut()


def is_dask(array: Any) -> bool:
    import dask.array as da

    return isinstance(array, da.Array)


def stand_in(name: str, argument: Any) -> Any:
    """For a Dask array one of its shape and dtype, in the memory of one number; everything else as it is."""
    if not is_dask(argument):
        return argument
    dtype = argument.dtype
    if name == "mask" and dtype_kind(np, dtype) in "if":  # nobody need compare numbers that are not there
        dtype = np.dtype(bool)
    return tasks.stand_in(argument.shape, dtype, fill=1 if name in _NUMBERS else 0)  # softcap may not be 0


def _refuse_what_dask_does(given: Mapping[str, Any]) -> None:
    if given.get("method") == "dense":
        raise ValueError('method must be "blockwise", which is how workers compute a tile; got "dense"')
    if given.get("progress"):
        raise ValueError("progress shows that of one process; Dask shows its own: dask.diagnostics.ProgressBar")


def _module_of_chunks(given: Mapping[str, Any]) -> Namespace:
    arrays = {name: given[name] for name in _OF_CHUNKS if name in given and not isinstance(given[name], float)}
    xp = array_namespace({name: meta_of(name, array) for name, array in arrays.items()})
    if xp is not np and not is_cupy(xp):
        raise TypeError(f"numpy_sdpa.distributed takes chunks of NumPy and CuPy, got {xp.__name__}")
    return xp


def meta_of(name: str, array: Any) -> Any:
    """An array of the module that the chunks belong to."""
    return array._meta if is_dask(array) else from_list(name, array)


def _as_array(name: str, argument: Any, xp: Namespace, given: Mapping[str, Any]) -> Any:
    """A Dask array, or an array or number that is here, on the host."""
    if is_dask(argument):
        if np.isnan(argument.shape).any():
            raise ValueError(f"{name} has chunks of unknown size: call {name}.compute_chunk_sizes() first")
        return argument
    if name in _NUMBERS or isinstance(argument, int | np.integer):
        return argument
    if isinstance(argument, float) and "query" in given:  # a Python number takes the dtype of the arrays
        argument = xp.asarray(argument, dtype=given["query"].dtype)
    argument = from_list(name, argument)
    if isinstance(argument, np.ndarray | np.generic):
        return argument
    import dask.array as da

    return da.from_array(argument, asarray=False)


class _Cutter:
    """One call's arrays on their way to being cut. Axes are those of the plane, numbered from 0."""

    def __init__(self, given: dict[str, Any], inputs: Inputs, resolved: Options) -> None:
        self._given = given
        self._inputs = inputs
        self._resolved = resolved
        rank = len(resolved.plane)
        self._lead, self._rows, self._columns = tuple(range(rank - 2)), rank - 2, rank - 1
        self._batch, self._is_grouped = self._lead[:-1], resolved.group > 1
        self._chunks = tuple(self._chunks_of(axis) for axis in range(rank))

    def cut(self) -> tuple[Plan, dict[str, Cut]]:
        from dask.base import tokenize

        cuts = {name: self._cut(name, array) for name, array in self._arrays().items()}
        call = self._call(cuts)
        token = tokenize(call, self._chunks, {name: cut.array.name for name, cut in cuts.items()})
        return Plan(call, self._known(), self._chunks, token), cuts

    def _chunks_of(self, axis: int) -> Chunks:
        """As query is cut; as key or value where the axis is theirs, or query is broadcast along it."""
        plane, group = self._resolved.plane, self._resolved.group
        names = ("key", "value") if axis == self._columns else ("query", "key", "value")
        axis_of_array = min(axis, self._rows)
        for name in names:
            array = self._given[name]
            if is_dask(array) and array.shape[axis_of_array] == plane[axis]:
                chunks = array.chunks[axis_of_array]
                return _whole_groups(chunks, group) if self._is_grouped and axis == self._rows - 1 else chunks
        return (plane[axis],)

    # Arrays

    def _arrays(self) -> dict[str, Any]:
        """Every array by name, on the host or of Dask, in the form in which it is cut."""
        given, resolved = self._given, self._resolved
        arrays: dict[str, Any] = {
            name: given[name] if is_dask(given[name]) else getattr(self._inputs, name)
            for name in ("query", "key", "value", "bias", "sinks", "alibi_slopes")
            if name in given
        }
        if "mask" in given:
            arrays["mask"] = _lazy_mask(given["mask"]) if is_dask(given["mask"]) else resolved.mask
        if "dropout_mask" in given and resolved.dropout is not None:
            arrays["dropout_mask"] = given["dropout_mask"] if is_dask(given["dropout_mask"]) else resolved.dropout.mask
        for name in ("query_segments", "key_segments", "query_lengths", "key_lengths", *_NUMBERS):
            if is_dask(given.get(name)):
                arrays[name] = given[name] if name.endswith("segments") else self._checked_by_workers(name)
            elif name in given and name not in _NUMBERS:
                arrays[name] = np.asarray(given[name])
        offset = self._offset(arrays)
        return arrays if isinstance(offset, int) else arrays | {"query_offset": offset}

    def _offset(self, arrays: Mapping[str, Any]) -> Any:
        """An int, or integers (B…), of Dask where they, or the lengths that they come from, are."""
        if is_dask(self._given.get("query_offset")):
            return self._given["query_offset"]
        lengths = {name: arrays[name] for name in ("query_lengths", "key_lengths") if name in arrays}
        if self._given.get("alignment") == "lower_right" and any(map(is_dask, lengths.values())):
            queries, keys = self._resolved.plane[-2:]
            return lengths.get("key_lengths", keys) - lengths.get("query_lengths", queries)
        offset = self._resolved.offset
        return offset if isinstance(offset, int) else offset.reshape(self._resolved.plane[: len(self._batch)])

    def _checked_by_workers(self, name: str) -> DaskArray:
        """An array that is small, whole, and checked with the others' shapes before any tile sees it."""
        array = self._given[name]
        operands = {name: (self._given[name].shape, self._given[name].dtype) for name in ("query", "key", "value")}
        options: dict[str, Any] = {
            name: self._given[name] for name in ("enable_gqa", "compute_dtype") if name in self._given
        }
        check = partial(tasks.checked, name, operands, options)
        return array.rechunk(-1).map_blocks(check, dtype=array.dtype, meta=array._meta)

    def _cut(self, name: str, array: Any) -> Cut:
        axes = self._axes_followed(name, array)
        chunks = tuple(
            (size,) if axis is None else self._chunks_along(name, axis)
            for axis, size in zip(axes, array.shape, strict=True)
        )
        return Cut(_rechunked(array, chunks), axes)

    def _axes_followed(self, name: str, array: Any) -> Axes:
        axes: Axes
        if name in ("query", "key", "value"):
            axes = (*self._lead, self._rows if name == "query" else self._columns, None)
        elif name in ("mask", "bias", "dropout_mask"):
            axes = (*self._lead, self._rows, self._columns)[len(self._chunks) - array.ndim :]
        elif name in ("sinks", "alibi_slopes"):
            axes = self._lead[len(self._lead) - array.ndim :]
        elif name.endswith("segments"):
            axes = (*self._batch, self._rows if name == "query_segments" else self._columns)
        else:
            axes = self._batch[: array.ndim]
        return tuple(
            axis if axis is not None and sum(self._chunks_along(name, axis)) == size else None
            for axis, size in zip(axes, array.shape, strict=True)
        )

    def _chunks_along(self, name: str, axis: int) -> Chunks:
        chunks = self._chunks[axis]
        if name in ("key", "value") and self._is_grouped and axis == self._rows - 1:
            return tuple(size // self._resolved.group for size in chunks)
        return chunks

    # What is no array

    def _call(self, cuts: Mapping[str, Cut]) -> tasks.Call:
        resolved, given = self._resolved, self._given
        plain = {name: given[name] for name in _PLAIN if name in given and name not in cuts}
        return tasks.Call(
            batch=resolved.plane[: len(self._batch)],
            value_size=given["value"].shape[-1],
            compute_dtype=resolved.compute_dtype,
            offset=None if "query_offset" in cuts else resolved.offset,
            options={**plain, "compute_dtype": resolved.compute_dtype},
        )

    def _known(self) -> Options:
        """What is known while the graph is built: the rest is for the workers to see."""

        def if_here(value: Any, *names: str) -> Any:
            return None if any(is_dask(self._given.get(name)) for name in names) else value

        resolved = self._resolved
        of_offset = ["query_offset"]
        if self._given.get("alignment") == "lower_right":
            of_offset += ["query_lengths", "key_lengths"]
        segments = ("query_segments", "key_segments")
        return dataclasses.replace(
            resolved,
            mask=if_here(resolved.mask, "mask"),
            offset=if_here(resolved.offset, *of_offset),
            query_lengths=if_here(resolved.query_lengths, "query_lengths"),
            key_lengths=if_here(resolved.key_lengths, "key_lengths"),
            query_segments=if_here(resolved.query_segments, *segments),
            key_segments=if_here(resolved.key_segments, *segments),
        )


def _whole_groups(chunks: Chunks, group: int) -> Chunks:
    """Cuts moved up to where a group of query heads ends: a chunk of them meets all of its key heads."""
    ends = {-(-end // group) * group for end in itertools.accumulate(chunks)}
    return tuple(np.diff(sorted({0, *ends})).tolist())


def _lazy_mask(mask: DaskArray) -> DaskArray:
    """As bool. Floating numbers must be 0 and 1 with a 1 among them, which is asked of the whole mask."""
    import dask.array as da

    kind = dtype_kind(np, mask.dtype)
    if kind == "b":
        return mask
    # comparisons and reductions of Dask trip over empty chunks
    mask = mask.rechunk(tuple(tuple(size for size in sizes if size) or (0,) for sizes in mask.chunks))
    if kind == "i" or mask.size == 0:
        return mask != 0
    is_one = mask == 1
    is_mask = (is_one | (mask == 0)).all() & is_one.any()
    return da.map_blocks(tasks.checked_mask, is_one, is_mask, mask.min(), mask.max(), dtype=bool, meta=is_one._meta)


def cut_upstream(plan: Plan, query: Cut, results: Mapping[str, Cut], upstream: Mapping[str, Any]) -> dict[str, Cut]:
    """grad_output and grad_lse, those that are given: checked, and cut as the forward's `results` are."""
    given = {name: array if is_dask(array) else from_list(name, array) for name, array in upstream.items()}
    given = {name: array for name, array in given.items() if array is not None}
    array_namespace({name: meta_of(name, array) for name, array in {"query": query.array, **given}.items()})
    dtype = plan.call.compute_dtype

    def stand_in_to_cast(array: Any) -> np.ndarray:
        """In the compute dtype already, if it may be cast: a cast makes a copy, of full size."""
        return tasks.stand_in(array.shape, dtype if dtype_kind(np, array.dtype) == "f" else array.dtype)

    stand_ins = {name: stand_in_to_cast(array) for name, array in given.items()}
    shapes = {name: SimpleNamespace(shape=cut.array.shape) for name, cut in results.items()}
    residuals = SimpleNamespace(query=stand_in_to_cast(query.array), options=plan.options, **shapes)
    checked_upstream(residuals, stand_ins.get("grad_output"), stand_ins.get("grad_lse"), None)
    like = {name: results[name.removeprefix("grad_")] for name in given}
    return {name: Cut(_rechunked(array, like[name].array.chunks), like[name].axes) for name, array in given.items()}


def _rechunked(array: Any, chunks: tuple[Chunks, ...]) -> DaskArray:
    import dask.array as da

    return array.rechunk(chunks) if is_dask(array) else da.from_array(array, chunks=chunks)
