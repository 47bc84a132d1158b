"""Between the layout of a dump and (B…, H, L, E), which everything else works in; and back, for an entry's index."""

import itertools
from typing import Any, NamedTuple, Protocol

import numpy as np

from numpy_sdpa.kernelcheck.problem import Array

# (…, H, L, X) in "bhld", (…, L, H, X) in "blhd"
_OF_QUERIES = ("query", "output", "grad_output", "grad_query")
_OF_KEYS = ("key", "value", "grad_key", "grad_value")
_HEADED = (*_OF_QUERIES, *_OF_KEYS)
_PER_ROW = ("lse", "grad_lse")
_PER_HEAD = ("sinks", "alibi_slopes", "grad_sinks", "grad_alibi_slopes")

Index = tuple[int, ...]


class Layout(Protocol):
    def to_bhld(self, name: str, value: Any) -> Any:
        """An array of the dump as (B…, H, L, E); other values as they are."""

    def place(self, name: str, index: Index) -> Index:
        """Where the dump has the entry that (B…, H, L, E) has at `index`."""


class Heads(NamedTuple):
    """One array axis a batch axis: "bhld" or "blhd". Arrays without a head axis get one here."""

    swaps: bool
    lse_swaps: bool
    headless: bool

    @classmethod
    def of(cls, values: dict[str, Any], name: str, lse_name: str) -> "Heads":
        if name not in ("bhld", "blhd"):
            raise ValueError(f'layout must be "bhld" or "blhd", got {name!r}')
        rank = values["query"].ndim
        if rank == 2 and name == "blhd":
            raise ValueError('layout "blhd" needs arrays with a head axis, got query of rank 2')
        return cls(name == "blhd", lse_name == "blh", rank == 2)

    def to_bhld(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if self.headless:
            has_head_axis = name in (*_HEADED, *_PER_ROW, *_PER_HEAD, "weights")
            return value[None] if has_head_axis else value
        if self.swaps and name in _HEADED and value.ndim >= 3:
            return np.swapaxes(value, -3, -2)
        if self.lse_swaps and name in _PER_ROW and value.ndim >= 2:
            return np.swapaxes(value, -2, -1)
        return value

    def place(self, name: str, index: Index) -> Index:
        if self.headless and name in (*_HEADED, *_PER_ROW, *_PER_HEAD, "weights"):
            return index[1:]
        if self.swaps and name in _HEADED:
            return (*index[:-3], index[-2], index[-3], index[-1])
        if self.lse_swaps and name in _PER_ROW:
            return (*index[:-2], index[-1], index[-2])
        return index


class Packed(NamedTuple):
    """Sequences one after the other, (T, H, E), between cu_seqlens: here each is an element of a batch, filled up
    with 0.

    Rows outside every sequence become one more element, of length 0: they too must be 0.
    """

    query_rows: Array  # (sequences, L): the packed row at each place, −1 where it is filled up
    key_rows: Array  # (sequences, S)
    query_lengths: Array  # (sequences,)
    key_lengths: Array
    query_total: int  # T of queries
    key_total: int  # T of keys
    extra: bool  # the last element holds the rows outside

    @classmethod
    def of(cls, values: dict[str, Any], cu_seqlens_q: Any, cu_seqlens_k: Any) -> "Packed":
        if cu_seqlens_q is None or cu_seqlens_k is None:
            missing, present = (
                ("cu_seqlens_q", "cu_seqlens_k") if cu_seqlens_q is None else ("cu_seqlens_k", "cu_seqlens_q")
            )
            raise ValueError(f"{present} was given without {missing}")
        refused = ("mask", "bias", "dropout_mask", "dropout_seed", "query_lengths", "key_lengths", "query_segments")
        for name in (*refused, "key_segments", "weights"):
            if name in values:
                raise ValueError(f"{name} does not go with packed sequences (cu_seqlens)")
        for name in ("query", "key", "value"):
            if values[name].ndim != 3:
                raise ValueError(f"with cu_seqlens {name} must have the form (T, H, E), got shape {values[name].shape}")
        _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, len(values["query"]))
        _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, len(values["key"]))
        if len(cu_seqlens_q) != len(cu_seqlens_k):
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_k must have the same length, "
                f"got {len(cu_seqlens_q)} and {len(cu_seqlens_k)}"
            )
        queries, query_extra = _rows(cu_seqlens_q, len(values["query"]))
        keys, key_extra = _rows(cu_seqlens_k, len(values["key"]))
        extra = bool(len(query_extra) or len(key_extra))
        query_lengths, key_lengths = np.diff(cu_seqlens_q), np.diff(cu_seqlens_k)
        if extra:
            queries.append(query_extra)
            keys.append(key_extra)
            query_lengths, key_lengths = np.append(query_lengths, 0), np.append(key_lengths, 0)
        totals = len(values["query"]), len(values["key"])
        return cls(_filled_up(queries), _filled_up(keys), query_lengths, key_lengths, *totals, extra)

    def lengths(self) -> dict[str, Array]:
        return {"query_lengths": self.query_lengths, "key_lengths": self.key_lengths}

    def outside(self) -> Array:
        """Rows that are in no sequence, (sequences, 1, L)."""
        length = self.query_rows.shape[1]
        return (np.arange(length) >= self.query_lengths[:, None])[:, None, :]

    def to_bhld(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if name in _HEADED:
            return self._unpacked(name, value)
        if name in _PER_ROW:
            if value.ndim != 2 or value.shape[1] != self.query_total:
                raise ValueError(f"{name} must have the form (Hq, T), got shape {value.shape}")
            # the upstream gradient of an lse of −inf reaches nothing; what the kernel gave there is looked at
            reached = self.query_rows >= 0 if name == "lse" else ~self.outside()[:, 0]
            rows = np.where(reached, value[:, self.query_rows], -np.inf if name == "lse" else 0.0)
            return np.swapaxes(rows, 0, 1)
        per_sequence = name == "query_offset" or (name in _PER_HEAD and value.ndim == 2)
        if per_sequence and self.extra:
            return np.concatenate([value, np.zeros_like(value[:1])])
        return value

    def _unpacked(self, name: str, value: Array) -> Array:
        rows, total = (self.query_rows, self.query_total) if name in _OF_QUERIES else (self.key_rows, self.key_total)
        if value.ndim == 3 and value.shape[0] == total:
            filled = np.where((rows >= 0)[..., None, None], value[rows], 0.0)
            return np.swapaxes(filled, -3, -2)
        if value.ndim == 3 and value.shape[1] == total:  # (H, T, E): heads and positions exchanged
            return np.moveaxis(np.where((rows >= 0)[..., None], value[:, rows], 0.0), 0, -2)
        raise ValueError(f"{name} must have the form (T, H, E), got shape {value.shape}")

    def place(self, name: str, index: Index) -> Index:
        if name in _HEADED:
            rows = self.query_rows if name in _OF_QUERIES else self.key_rows
            sequence, head, position, entry = index
            return (int(rows[sequence, position]), head, entry)
        if name in _PER_ROW:
            sequence, head, position = index
            return (head, int(self.query_rows[sequence, position]))
        return index


def _check_cu_seqlens(name: str, cu_seqlens: Any, total: int) -> None:
    if not isinstance(cu_seqlens, np.ndarray) or cu_seqlens.ndim != 1 or cu_seqlens.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers (sequences + 1,), got {getattr(cu_seqlens, 'shape', cu_seqlens)}")
    if len(cu_seqlens) < 2 or np.any(np.diff(cu_seqlens.astype(np.int64)) < 0):
        raise ValueError(f"{name} must rise and have at least two entries")
    if cu_seqlens[0] < 0 or cu_seqlens[-1] > total:
        raise ValueError(f"{name} must lie in 0 … {total}, got {cu_seqlens[0]} … {cu_seqlens[-1]}")


def _rows(cu_seqlens: Array, total: int) -> tuple[list[Array], Array]:
    """Each sequence's packed rows, and those outside every sequence."""
    inside = [np.arange(start, stop) for start, stop in itertools.pairwise(cu_seqlens)]
    outside = np.concatenate([np.arange(cu_seqlens[0]), np.arange(cu_seqlens[-1], total)])
    return inside, outside.astype(np.int64)


def _filled_up(rows: list[Array]) -> Array:
    length = max(len(sequence) for sequence in rows)
    return np.stack([np.pad(sequence, (0, length - len(sequence)), constant_values=-1) for sequence in rows])
