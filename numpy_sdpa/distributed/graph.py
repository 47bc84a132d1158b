"""The task graphs: which task takes the results of which. Here are names and shapes only, no numbers.

Dask is imported inside functions: whoever imports the package need not have it.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa._internal.namespace import DType
from numpy_sdpa.distributed import tasks
from numpy_sdpa.distributed.plan import Chunks, Index, Plan

Key = tuple[Any, ...]
DaskArray = Any
Axes = tuple[int | None, ...]


class Cut(NamedTuple):
    """An array, cut as the plane is. `axes`: which axis of the plane each of its own follows; None: it is whole."""

    array: DaskArray
    axes: Axes

    def key(self, index: Index) -> Key:
        """The chunk at a place of the plane's grid."""
        return (self.array.name, *_block(self.axes, index))


def _block(axes: Axes, index: Index) -> Index:
    return tuple(0 if axis is None else index[axis] for axis in axes)


class Pass:
    """The tasks of a forward or a backward pass: strips begin, meet in tiles, and end.

    An index is a place in the grid of the plane's chunks; for a strip of queries its column is 0, for a strip of keys
    its row.
    """

    stem: str

    def __init__(self, plan: Plan, inputs: Mapping[str, Cut], token: str, known: Mapping[str, Cut]) -> None:
        """`known`: what the backward knows of rows, besides the inputs."""
        from dask.highlevelgraph import HighLevelGraph

        self.plan = plan
        self.inputs = inputs
        self.known = known
        self.token = token
        self.name = f"{self.stem}-{token}"
        carried = {name: cut for name, cut in inputs.items() if name != "sinks"}
        self.of_rows = [name for name, cut in carried.items() if plan.columns not in cut.axes]
        self.of_tiles = [name for name, cut in carried.items() if {plan.rows, plan.columns} <= set(cut.axes)]
        self.of_columns = [name for name in carried if name not in (*self.of_rows, *self.of_tiles)]
        self.row_ends: dict[Index, Key] = {}
        self.column_ends: dict[Index, Key] = {}
        self.bias_ends: dict[Index, Key] = {}  # by chunk of the bias
        self._tasks: dict[Any, Any] = {}
        self._build()
        arrays = [cut.array for cut in (*inputs.values(), *known.values())]
        self._graph = HighLevelGraph.from_collections(self.name, self._tasks, dependencies=arrays)

    def _build(self) -> None:
        """What a tile makes of two strips, the next tiles take: each state of a strip has one reader, and then goes."""
        plan = self.plan
        for lead in plan.leads():
            rows = {
                (row, number): self.begin_rows((*lead, row, 0), number)
                for row in range(plan.row_count)
                for number in range(plan.row_strips)
            }
            columns = {
                (column, number): self.begin_columns((*lead, 0, column), number)
                for column in range(plan.column_count)
                for number in range(plan.column_strips)
            }
            for row, column in plan.tiles(lead):
                index = (*lead, row, column)
                of_queries, of_keys = (row, plan.row_strip(column)), (column, plan.column_strip(row))
                tile = self.tile(index, rows[of_queries], columns[of_keys])
                rows[of_queries] = self.add("rows", index, itemgetter(0), tile)
                columns[of_keys] = self.add("columns", index, itemgetter(1), tile)
            for row in range(plan.row_count):
                self.end_rows((*lead, row, 0), [rows[row, number] for number in range(plan.row_strips)])
            for column in range(plan.column_count):
                self.end_columns((*lead, 0, column), [columns[column, number] for number in range(plan.column_strips)])

    def begin_rows(self, index: Index, number: int) -> Key:
        raise NotImplementedError

    def begin_columns(self, index: Index, number: int) -> Key:
        return self.add("begin-columns", (*index[:-2], index[-1], number), *self.begin(self.of_columns, index))

    def tile(self, index: Index, rows: Key, columns: Key) -> Key:
        raise NotImplementedError

    def end_rows(self, index: Index, strips: list[Key]) -> None:
        raise NotImplementedError

    def end_columns(self, index: Index, strips: list[Key]) -> None:
        raise NotImplementedError

    def add(self, what: str, index: Index, function: Callable[..., Any], *arguments: Any) -> Key:
        key = (f"{self.stem}-{what}-{self.token}", *index)
        self._tasks[key] = (function, *arguments)
        return key

    def begin(self, names: list[str], index: Index) -> tuple[Callable[..., Any], list[Key]]:
        return partial(tasks.begin, names), self.chunks(names, index)

    def chunks(self, names: Iterable[str], index: Index) -> list[Key]:
        return [self.inputs[name].key(index) for name in names]

    def sinks(self, index: Index) -> Key | None:
        return self.inputs["sinks"].key(index) if "sinks" in self.inputs else None

    def place(self, index: Index) -> tasks.Place:
        return self.plan.place(index[:-2], *index[-2:])

    def collected(
        self, name: str, ends: dict[Index, Key], across: int, axes: Axes, chunks: tuple[Chunks, ...], dtype: DType
    ) -> DaskArray:
        """What strips call `name` at their end, as an array with these axes of the plane and these chunks.

        `across` is the axis of the plane that numbers the strips. Strips that the array does not tell apart are summed.
        """
        grid = self.plan.chunks
        summed = [axis for axis in (*range(len(grid) - 2), across) if axis not in axes and len(grid[axis]) > 1]
        get = partial(tasks.part_of, name=name, summed_axes=len(summed))
        blocks = {_block((*summed, *axes), index): (get, end) for index, end in ends.items()}
        array = self.array(name, blocks, (*((1,) * len(grid[axis]) for axis in summed), *chunks), dtype)
        return array.sum(axis=tuple(range(len(summed)))) if summed else array

    def array(self, name: str, blocks: dict[Index, Any], chunks: tuple[Chunks, ...], dtype: DType) -> DaskArray:
        """Of blocks that this pass's tasks make."""
        import dask.array as da
        from dask.array.utils import meta_from_array
        from dask.highlevelgraph import HighLevelGraph

        layer = f"{self.stem}-{name.replace('_', '-')}-{self.token}"
        tasks_of_blocks: Any = {(layer, *block): task for block, task in blocks.items()}
        layers = {**self._graph.layers, layer: tasks_of_blocks}
        graph = HighLevelGraph(layers, {**self._graph.dependencies, layer: {self.name}})
        meta = meta_from_array(self.inputs["query"].array._meta.real, ndim=len(chunks), dtype=dtype)
        return da.Array(graph, layer, chunks, meta=meta)


class Forward(Pass):
    stem = "sdpa-forward"

    def begin_rows(self, index: Index, number: int) -> Key:
        return self.add("begin-rows", (*index[:-1], number), *self.begin(self.of_rows, index))

    def tile(self, index: Index, rows: Key, columns: Key) -> Key:
        tile = partial(tasks.forward_tile, self.plan.call, self.place(index), self.of_tiles)
        return self.add("tile", index, tile, rows, columns, self.chunks(self.of_tiles, index))

    def end_rows(self, index: Index, strips: list[Key]) -> None:
        shape = (*self.plan.lead_shape(index[:-2]), self.plan.chunks[self.plan.rows][index[-2]])
        end = partial(tasks.end_rows, self.plan.call, shape)
        self.row_ends[index] = self.add("end-rows", index[:-1], end, strips, self.sinks(index))

    def end_columns(self, index: Index, strips: list[Key]) -> None:
        """Keys were read; nothing has become of them."""

    def results(self) -> dict[str, DaskArray]:
        """Of whole rows, in the compute dtype."""
        plan, dtype = self.plan, self.plan.call.compute_dtype
        real = np.zeros((), dtype).real.dtype
        chunks = (*plan.chunks[: plan.columns], (plan.call.value_size,))

        def of_rows(name: str, dtype: DType, ndim: int = plan.columns) -> DaskArray:
            return self.collected(name, self.row_ends, plan.rows, plan.axes_of_rows[:ndim], chunks[:ndim], dtype)

        return {
            "output": of_rows("output", dtype, plan.columns + 1),
            "row_shift": of_rows("row_shift", real),
            "row_sum": of_rows("row_sum", dtype),
            "lse": of_rows("lse", dtype),
            "sees": of_rows("sees", bool),
        }


class Backward(Pass):
    stem = "sdpa-gradients"

    def begin_rows(self, index: Index, number: int) -> Key:
        begin = partial(tasks.begin_rows_backward, self.plan.call, self.of_rows, list(self.known))
        known = [cut.key(index) for cut in self.known.values()]
        return self.add("begin-rows", (*index[:-1], number), begin, self.chunks(self.of_rows, index), known)

    def tile(self, index: Index, rows: Key, columns: Key) -> Key:
        tile = partial(tasks.backward_tile, self.plan.call, self.place(index), self.of_tiles)
        chunks = self.chunks(self.of_tiles, index)
        if "bias" not in self.of_tiles:
            return self.add("tile", index, tile, rows, columns, chunks, None)
        _, *block = self.inputs["bias"].key(index)  # which tiles of several heads may share: one after the other
        before = self.bias_ends.get(tuple(block))
        key = self.add("tile", index, tile, rows, columns, chunks, before)
        self.bias_ends[tuple(block)] = self.add("bias-of-tile", index, itemgetter(2), key)
        return key

    def end_rows(self, index: Index, strips: list[Key]) -> None:
        end = partial(tasks.end_backward, self.plan.call)
        self.row_ends[index] = self.add("end-rows", index[:-1], end, strips, self.sinks(index))

    def end_columns(self, index: Index, strips: list[Key]) -> None:
        end = partial(tasks.end_backward, self.plan.call)
        self.column_ends[index] = self.add("end-columns", (*index[:-2], index[-1]), end, strips, None)

    def gradient(self, name: str) -> DaskArray | None:
        """In the shape and dtype of the input; None where it was not given."""
        plan, dtype = self.plan, self.plan.call.compute_dtype
        if name == "scale" or (name == "softcap" and (name in self.inputs or name in plan.call.options)):
            return self.collected(name, self.row_ends, plan.rows, (), (), dtype)
        if name not in self.inputs:
            return None
        array, axes = self.inputs[name]
        if name in self.of_tiles:
            gradient = self._bias_gradient(array)
        elif name in self.of_columns:
            gradient = self.collected(name, self.column_ends, plan.columns, axes, array.chunks, dtype)
        else:
            gradient = self.collected(name, self.row_ends, plan.rows, axes, array.chunks, dtype)
        return gradient.astype(array.dtype)

    def _bias_gradient(self, bias: DaskArray) -> DaskArray:
        """That of a bias with rows and columns: a chunk for each tile, 0 where nobody sees anything."""
        zeros = partial(tasks.zeros, self.plan.call)
        blocks = {
            block: self.bias_ends.get(block) or (zeros, (bias.name, *block)) for block in np.ndindex(*bias.numblocks)
        }
        return self.array("bias", blocks, bias.chunks, self.plan.call.compute_dtype)
