"""What other systems mean where they disagree, as data: one row a system, each with its source and how it was checked.

``scripts/check_semantics.py`` runs every row against the system itself where that is installed;
``python scripts/print_semantics.py`` prints docs/semantics.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class System:
    """One system's attention. The first fields decide what `compare` takes for right, the others are for the reader."""

    name: str
    version: str  # that was checked or read
    function: str
    layout: str  # of query, key, value and output: "bhld" or "blhd"
    lse_layout: str  # "bhl" or "blh"
    alignment: str  # of the causal rule, the window and ALiBi, where the caller says nothing
    alignment_with_key_lengths: str  # the same, where key lengths are given
    empty_rows: str  # output of a query that sees no key: "zero", or "mean" of all values
    lse_of_empty_rows: float | None  # None: something finite, or there is no lse to look at
    mask: str
    window: str
    softcap: str
    grouped_heads: str
    alibi: str
    checked: str
    source: str

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options that the system adds to those given."""
        if "alignment" in given or "query_offset" in given:
            return {}
        alignment = self.alignment if given.get("key_lengths") is None else self.alignment_with_key_lengths
        return {"alignment": alignment} if alignment != "upper_left" else {}


SYSTEMS = {
    system.name: system
    for system in (
        System(
            name="numpy-sdpa",
            version="this one",
            function="sdpa_forward",
            layout="bhld",
            lse_layout="bhl",
            alignment="upper_left",
            alignment_with_key_lengths="upper_left",
            empty_rows="zero",
            lse_of_empty_rows=-math.inf,
            mask="True attends; numbers go in bias=",
            window="(left, right), both ends inside",
            softcap="before ALiBi and bias",
            grouped_heads="h reads h // group, with enable_gqa",
            alibi="−slope · abs(p(i) − j)",
            checked="tests",
            source="README.md, its table of options",
        ),
        System(
            name="torch",
            version="2.13.0, CPU",
            function="torch.nn.functional.scaled_dot_product_attention",
            layout="bhld",
            lse_layout="bhl",
            alignment="upper_left",
            alignment_with_key_lengths="upper_left",
            empty_rows="zero",
            lse_of_empty_rows=None,
            mask="True attends; numbers are a bias; not together with is_causal",
            window="none",
            softcap="none",
            grouped_heads="h reads h // group, with enable_gqa",
            alibi="none",
            checked="run",
            source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        ),
        System(
            name="flash-attention",
            version="2.1 and later",
            function="flash_attn.flash_attn_func",
            layout="blhd",
            lse_layout="bhl",
            alignment="lower_right",
            alignment_with_key_lengths="lower_right",
            empty_rows="zero",
            lse_of_empty_rows=math.inf,
            mask="none",
            window="(left, right) around i + S − L, both ends inside; −1 is unbounded",
            softcap="over the scaled scores; 0 is off",
            grouped_heads="h reads h // group",
            alibi="−slope · abs(i + S − L − j)",
            checked="read: needs a CUDA GPU",
            source="https://github.com/Dao-AILab/flash-attention: flash_attn_interface.py, softmax.h",
        ),
        System(
            name="jax",
            version="0.10.2, xla on CPU",
            function="jax.nn.dot_product_attention",
            layout="blhd",
            lse_layout="blh",
            alignment="upper_left",
            alignment_with_key_lengths="upper_left",
            empty_rows="mean",
            lse_of_empty_rows=None,
            mask="True attends",
            window="local_window_size (left, right), both ends inside; one int is both sides",
            softcap="none",
            grouped_heads="h reads h // group",
            alibi="none",
            checked="run",
            source="https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html",
        ),
        System(
            name="onnx",
            version="1.23.2, reference evaluator",
            function="Attention",
            layout="bhld",
            lse_layout="bhl",
            alignment="upper_left",
            alignment_with_key_lengths="lower_right",
            empty_rows="zero",
            lse_of_empty_rows=None,
            mask="True attends; numbers are a bias",
            window="left_window_size, right_window_size, both ends inside; −1 is unbounded",
            softcap="before the bias; 0 is off",
            grouped_heads="h reads h // group",
            alibi="none",
            checked="run",
            source="https://onnx.ai/onnx/operators/onnx__Attention.html",
        ),
    )
}


def system(name: str | None) -> System:
    """A system's row; this package's own for None."""
    if name is None:
        return SYSTEMS["numpy-sdpa"]
    if name not in SYSTEMS:
        raise ValueError(f"semantics must be one of {', '.join(SYSTEMS)}, got {name!r}")
    return SYSTEMS[name]


_HEAD = """# What systems mean where they disagree

Printed by `python scripts/print_semantics.py` from the data in `numpy_sdpa/kernelcheck/semantics.py`: change it there.
`compare(…, semantics="jax")` and `check_kernel(…, semantics="jax")` take a system's meaning for right: its layout,
where its diagonal lies, what it gives to a query that sees no key. lse is a natural logarithm everywhere. “run”:
`scripts/check_semantics.py` confirmed the row on the system itself.
"""
_DIAGONALS = {"upper_left": "upper left: j ≤ i", "lower_right": "lower right: j ≤ i + S − L"}
_EMPTY = {"zero": "0", "mean": "the mean of all values (its fill is finite)"}
_LSE = {-math.inf: "−∞", math.inf: "+∞", None: "finite or not given"}
_COLUMNS: dict[str, Callable[[System], str]] = {
    "system": lambda s: f"**{s.name}**: `{s.function}`, {s.version}",
    "layout": lambda s: f"`{s.layout}`, lse `{s.lse_layout}`",
    "causal diagonal": lambda s: _alignment(s),
    "a query that sees no key": lambda s: f"output {_EMPTY[s.empty_rows]}, lse {_LSE[s.lse_of_empty_rows]}",
    "mask": lambda s: s.mask,
    "window": lambda s: s.window,
    "softcap": lambda s: s.softcap,
    "grouped heads": lambda s: s.grouped_heads,
    "ALiBi": lambda s: s.alibi,
    "checked": lambda s: s.checked,
}


def _alignment(s: System) -> str:
    also = "; with key lengths lower right of these" if s.alignment_with_key_lengths != s.alignment else ""
    return _DIAGONALS[s.alignment] + also


def as_markdown() -> str:
    """docs/semantics.md."""
    lines = [_HEAD, f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(column(s) for column in _COLUMNS.values())} |" for s in SYSTEMS.values()]
    lines += ["", "Sources:", "", *(f"- {s.name}: {s.source}" for s in SYSTEMS.values())]
    return "\n".join(lines) + "\n"
