"""What was asked: the records that a call's arguments become, once `_internal.validation` has checked them."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from numpy_sdpa._internal.namespace import Array, DType, Namespace


class AttentionOptions(TypedDict, total=False):
    """The keyword options that every way to call attention takes: see `scaled_dot_product_attention`."""

    bias: Array | None
    is_causal: bool
    alignment: str
    query_offset: Any
    window: tuple[int | None, int | None] | None
    query_lengths: Any
    key_lengths: Any
    query_segments: Any
    key_segments: Any
    sinks: Array | None
    alibi_slopes: Array | None
    scale: Any
    softcap: Any
    dropout_p: float | None
    dropout_mask: Array | None
    dropout_seed: int | None
    enable_gqa: bool
    compute_dtype: DType | None
    method: str
    block_size: int | tuple[int, int] | None
    workers: int | None
    progress: bool | None


class Inputs(NamedTuple):
    """The arrays of a call, as they were given (lists converted)."""

    query: Array
    key: Array
    value: Array
    mask: Array | None
    bias: Array | None
    sinks: Array | None
    alibi_slopes: Array | None
    scale: Array  # 0-d, in the compute dtype
    softcap: Array | None  # 0-d, in the compute dtype
    dropout_mask: Array | None


class Dropout(NamedTuple):
    """Which weights are kept: by a mask, or by the generator at global coordinates."""

    p: float
    mask: Array | None  # bool, at least 2-D
    seed: int
    batches: Array  # flat batch index, (B…, 1, 1, 1)
    heads: Array  # query head index, (Hq, 1, 1)
    first_row: int = 0  # of the plane within the whole, where it is a part
    first_column: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """Everything about a call but its differentiable inputs. Arrays broadcast to the plane (B…, Hq, L, S)."""

    xp: Namespace
    like: Array  # an array on the device where new ones are made
    compute_dtype: DType
    output_dtype: DType
    plane: tuple[int, ...]  # (B…, Hq, L, S); (L, S) at rank 2
    group: int  # query heads per key head
    mask: Array | None = None  # bool, at least 2-D
    is_causal: bool = False
    offset: Any = 0  # int, or ints (B…, 1, 1, 1)
    window: tuple[int | None, int | None] = (None, None)
    query_lengths: Array | None = None  # ints (B…, 1, 1, 1)
    key_lengths: Array | None = None  # ints (B…, 1, 1, 1)
    query_segments: Array | None = None  # ints (B…, 1, L, 1)
    key_segments: Array = None  # ints (B…, 1, 1, S), where query_segments are given
    dropout: Dropout | None = None
    method: str = "dense"
    block_size: tuple[int, int] | None = None
    workers: int | None = None
    progress: bool = False
    given: Mapping[str, Any]  # the options as the caller wrote them, those that are on

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy.deepcopy, which take no module: its name."""
        return self.__dict__ | {"xp": self.xp.__name__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"xp": importlib.import_module(state["xp"])})

    @property
    def query_length(self) -> int:
        return self.plane[-2]

    @property
    def key_length(self) -> int:
        return self.plane[-1]
