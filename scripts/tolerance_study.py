"""Is a right kernel ever called wrong? Random problems, right kernels in several orders of rounding, and torch's own.

    python scripts/tolerance_study.py --problems 500 --dtypes float32 bfloat16 float16

Prints, for each dtype and array, how many arrays were judged and how many called wrong, the largest |error| / σ, the
largest ‖error‖ / bound, and how sensitive the verdict was. docs/tolerance.md has a run's result.

torch's flash kernel on the CPU adds the gradients of its blocks in the half type, which is no right sum: in half types
its gradients have rows of their own, and are not counted among the right ones.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from right_kernels import KERNELS, Plane

from numpy_sdpa import sdpa_backward, sdpa_forward
from numpy_sdpa._internal.shapes import repeat_heads
from numpy_sdpa.chain import tile_of_bias, view_of
from numpy_sdpa.kernelcheck import tolerance
from numpy_sdpa.residuals import SDPAResiduals, Upstream
from numpy_sdpa.visibility import whole_plane

Array = np.ndarray
GRADIENTS = ("query", "key", "value", "bias", "sinks", "alibi_slopes")
SUMS_IN_HALF = "torch flash"


@dataclass(frozen=True)
class Problem:
    query: Array
    key: Array
    value: Array
    options: dict[str, Any]
    grad_output: Array
    grad_lse: Array | None
    dtype: str
    kind: str  # how the keys were drawn

    def __str__(self) -> str:
        shapes = f"query {self.query.shape}, key {self.key.shape}, value {self.value.shape}"
        return f"{self.kind} keys, {shapes}, {sorted(self.options)}"


def storage_type(dtype: str) -> np.dtype:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


# Problems

# Independent keys; nearly equal ones (gradients cancel); equal ones; one key that takes nearly everything; smooth ones
KEYS = ("independent", "independent", "independent", "near-equal", "equal", "dominant", "smooth")
VALUES = ("independent", "independent", "shifted", "ones", "smooth")
LOGITS = (0.1, 1.0, 5.0, 50.0, 300.0, 1000.0)
LONG = 25  # one problem in this many has rows of 4096


def draw_problem(seed: int, dtype: str) -> Problem:
    rng = np.random.default_rng(seed)
    storage = storage_type(dtype)

    def chance(one_in: int) -> bool:
        return int(rng.integers(one_in)) == 0

    def cast(array: Array) -> Array:
        return np.asarray(array).astype(storage)

    batch, key_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.choice([1, 1, 1, 2, 4]))
    queries, keys = (int(np.exp(rng.uniform(0, math.log(300)))) for _ in range(2))
    if seed % LONG == 0:
        batch, key_heads, group, queries, keys = 1, 1, 1, int(rng.integers(1, 65)), 4096
    elif seed % LONG == 1:
        batch, key_heads, group, queries, keys = 1, 1, 1, 4096, int(rng.integers(1, 65))
    size, value_size = (int(rng.choice([1, 3, 16, 64, 64, 128])) for _ in range(2))
    heads = key_heads * group
    kind = str(rng.choice(KEYS))
    query = rng.standard_normal((batch, heads, queries, size))
    key = _keys(rng, kind, (batch, key_heads, keys, size))
    value = _values(rng, (batch, key_heads, keys, value_size))
    options: dict[str, Any] = {}
    if group > 1:
        options["enable_gqa"] = True
    elif chance(6):  # one key head for all, one batch element for all
        query, key = rng.standard_normal((batch, 3, queries, size)), key[:, :1]
        value = value[:1, :1]
        heads = 3
    scale = 1 / math.sqrt(size)
    largest = np.max(np.abs(scale * query @ repeat_heads(np, key, group).mT), initial=1e-9)
    query = query * (float(rng.choice(LOGITS)) / largest)
    if not chance(3):
        options |= _options(rng, (batch, heads, queries, keys), cast)
    grad_output = rng.standard_normal((batch, heads, queries, value_size))
    if chance(5):  # of the sum of the outputs
        grad_output = np.ones_like(grad_output)
    # larger ones overflow float16 on the way, where the copies of a shared key's gradient are stored
    grad_output = grad_output * float(rng.choice([1, 1, 1, 1e-3, 1.0 if dtype == "float16" else 30.0]))
    return Problem(
        query=cast(query),
        key=cast(key),
        value=cast(value),
        options=options,
        grad_output=cast(grad_output),
        grad_lse=rng.standard_normal((batch, heads, queries)).astype(np.float32) if chance(3) else None,
        dtype=dtype,
        kind=kind,
    )


def _keys(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    key = rng.standard_normal(shape)
    if kind == "near-equal":
        return key[..., :1, :] + key * float(rng.choice([1e-1, 1e-3]))
    if kind == "equal":
        return np.repeat(key[..., :1, :], shape[-2], axis=-2)
    if kind == "dominant":
        key[..., 0, :] *= 4
    if kind == "smooth":
        return np.cumsum(key, axis=-2) / math.sqrt(shape[-2])
    return key


def _values(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    value, kind = rng.standard_normal(shape), rng.choice(VALUES)
    if kind == "ones":
        return np.ones(shape)
    if kind == "smooth":
        return np.cumsum(value, axis=-2) / math.sqrt(shape[-2])
    return value + 3 if kind == "shifted" else value


def _options(rng: np.random.Generator, plane: tuple[int, ...], cast: Any) -> dict[str, Any]:
    """Each option one time in four."""
    batch, heads, queries, keys = plane
    options: dict[str, Any] = {}

    def on() -> bool:
        return int(rng.integers(4)) == 0

    if on():
        options["is_causal"] = True
    if on():
        options["alignment"] = "lower_right"
    if on():
        options["window"] = (int(rng.integers(0, keys)), None if on() else int(rng.integers(0, keys)))
    if on():
        options["mask"] = rng.random((1 if on() else batch, 1 if on() else heads, queries, keys)) < 0.7
    if on():
        options["key_lengths"] = rng.integers(0, keys + 1, batch)
    if on():
        shape = tuple(1 if on() else size for size in plane)
        bias = rng.standard_normal(shape) * float(rng.choice([1, 10]))
        options["bias"] = cast(np.where(rng.random(shape) < 0.1, -np.inf, bias))
    if on():
        options["sinks"] = cast(rng.standard_normal(heads) * 3)
    if on():
        options["alibi_slopes"] = cast(2.0 ** -rng.uniform(0, 8, heads))
    if on():
        options["scale"] = float(rng.uniform(0.05, 1))
    if on():
        options["softcap"] = float(rng.choice([1.5, 20.0, 50.0]))
    if on():
        options |= {"dropout_p": float(rng.choice([0.1, 0.5])), "dropout_seed": int(rng.integers(1000))}
    return options


# Golden results


@dataclass(frozen=True)
class Golden:
    residuals: SDPAResiduals
    upstream: Upstream
    arrays: dict[str, Array]


def golden(problem: Problem) -> Golden:
    """Float64 results of the problem's inputs as they are."""

    def exactly(array: Any) -> Any:
        return array.astype(np.float64) if isinstance(array, np.ndarray) and array.dtype.kind in "fV" else array

    options = {name: exactly(option) for name, option in problem.options.items()}
    inputs = (exactly(array) for array in (problem.query, problem.key, problem.value))
    output, residuals = sdpa_forward(*inputs, **options)
    grad_output, grad_lse = exactly(problem.grad_output), exactly(problem.grad_lse)
    gradients = sdpa_backward(grad_output, residuals, grad_lse=grad_lse)
    arrays = {"output": output, "lse": residuals.lse, "weights": residuals.weights}
    for name in GRADIENTS:
        if getattr(gradients, name) is not None:
            arrays[f"grad_{name}"] = getattr(gradients, name)
    return Golden(residuals, Upstream(grad_output, grad_lse, None), arrays)


def plane_of(problem: Problem, gold: Golden) -> Plane:
    """What the emulated kernels get."""
    residuals, options = gold.residuals, gold.residuals.options
    arithmetic = np.float64 if problem.dtype == "float64" else np.float32
    bias = tile_of_bias(residuals.bias, whole_plane(options))
    view = view_of(options, whole_plane(options), bias, residuals.alibi_slopes is not None)
    lead, plane = options.plane[:-2], options.plane

    def over_heads(array: Array) -> Array:
        array = repeat_heads(np, array, options.group).astype(arithmetic)
        return np.broadcast_to(array, (*lead, *array.shape[-2:]))

    def over_plane(array: Array | None) -> Array | None:
        return None if array is None else np.broadcast_to(array.astype(arithmetic), plane)

    keep = 1.0 if view.kept is None else view.kept / (1 - view.dropout_p)
    slopes = residuals.alibi_slopes
    inputs = {name: getattr(residuals, name) for name in GRADIENTS}
    return Plane(
        query=np.broadcast_to(problem.query.astype(arithmetic), (*lead, *problem.query.shape[-2:])),
        key=over_heads(problem.key),
        value=over_heads(problem.value),
        visible=np.broadcast_to(True if view.visible is None else view.visible, plane),
        keep=np.broadcast_to(np.asarray(keep, arithmetic), plane),
        scale=float(residuals.scale),
        softcap=None if residuals.softcap is None else float(residuals.softcap),
        alibi=None if slopes is None else over_plane(slopes[..., None, None].astype(arithmetic) * view.distance),
        distance=None if slopes is None else over_plane(view.distance),
        bias=over_plane(bias),
        sinks=None if residuals.sinks is None else residuals.sinks[..., None, None].astype(arithmetic),
        grad_output=problem.grad_output.astype(arithmetic),
        grad_lse=(np.zeros(plane[:-1]) if problem.grad_lse is None else problem.grad_lse)[..., None].astype(arithmetic),
        storage=storage_type(problem.dtype),
        shapes={name: array.shape for name, array in inputs.items() if array is not None},
        group=options.group,
    )


def torch_kernels(problem: Problem, gold: Golden) -> Iterator[tuple[str, dict[str, Array]]]:
    """torch's math and flash kernels on the CPU, where it is installed and knows the problem's options."""
    try:
        import torch
    except ImportError:
        return
    unknown = {"sinks", "softcap", "dropout_p", "alibi_slopes", "bias"}
    if unknown & set(problem.options) or problem.grad_lse is not None:
        return
    residuals = gold.residuals
    plane = plane_of(problem, gold)
    if not plane.visible.any(axis=-1).all():  # torch gives NaN, or a mean, for a row that sees nothing
        return
    dtype = getattr(torch, problem.dtype)

    def tensor(array: Array) -> Any:
        return torch.tensor(array.astype(np.float64)).to(dtype)

    leaves = [tensor(array).requires_grad_() for array in (problem.query, problem.key, problem.value)]
    lead = plane.visible.shape[:-2]
    inputs = [
        leaf.repeat_interleave(plane.group, 1).expand(*lead, -1, -1) if number else leaf.expand(*lead, -1, -1)
        for number, leaf in enumerate(leaves)
    ]
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = None if plane.visible.all() else torch.tensor(plane.visible.copy())
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        if backend is SDPBackend.FLASH_ATTENTION and problem.query.shape[-1] != problem.value.shape[-1]:
            continue
        with sdpa_kernel(backend):
            scale = float(residuals.scale)
            output = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scale)
        gradients = torch.autograd.grad(output, leaves, tensor(problem.grad_output))
        named = zip(("output", "grad_query", "grad_key", "grad_value"), (output, *gradients), strict=True)
        yield (
            f"torch {backend.name.lower().removesuffix('_attention')}",
            {name: array.detach().double().numpy() for name, array in named},
        )


# The judgement


@dataclass(frozen=True)
class Verdict:
    error: float  # largest |error| / σ, without the array's own rounding
    frobenius: float  # ‖error‖ / ‖σ with the array's own rounding‖
    share: float  # ‖error‖ / its bound
    is_wrong: bool


@dataclass
class Tally:
    """The largest of each number over all verdicts."""

    arrays: int = 0
    wrong: int = 0
    error: float = 0.0
    frobenius: float = 0.0
    share: float = 0.0
    sensitivities: list[float] = field(default_factory=list)

    def add(self, verdicts: dict[str, Verdict], sensitivity: float) -> None:
        self.sensitivities.append(sensitivity)
        for verdict in verdicts.values():
            self.arrays += 1
            self.wrong += verdict.is_wrong
            self.error = max(self.error, verdict.error)
            self.frobenius = max(self.frobenius, verdict.frobenius)
            self.share = max(self.share, verdict.share)


def judge(got: Array, gold: Array, sigma: Array, dtype: str, array_dtype: str) -> Verdict:
    got = got.astype(np.float64)
    bound = tolerance.tolerance(sigma, dtype, array_dtype, gold)
    # what the array's type cannot hold
    overflown = np.isinf(got) & (np.sign(got) == np.sign(gold)) & tolerance.may_overflow(gold, bound, array_dtype)
    got = np.where(overflown, gold, got)
    if not np.array_equal(np.isfinite(got), np.isfinite(gold)):
        return Verdict(np.inf, np.inf, np.inf, True)
    is_finite = np.isfinite(gold)
    error = np.abs(np.where(is_finite, got, 0) - np.where(is_finite, gold, 0))
    own = tolerance.tolerance(np.zeros_like(sigma), dtype, array_dtype, gold)
    frobenius = tolerance.frobenius_bound(sigma, dtype, array_dtype, gold)
    excess = np.maximum(error - own, 0)
    size = float(np.linalg.norm(error))
    share = size / frobenius if size else 0.0
    return Verdict(
        error=float(np.max(np.divide(excess, sigma, out=np.zeros_like(sigma), where=excess > 0), initial=0)),
        frobenius=size / float(np.sqrt(np.sum(sigma**2 + own**2 / 3))) if size else 0.0,
        share=share,
        is_wrong=bool(np.any(error > bound)) or share > 1,
    )


def study(problems: Iterator[Problem], with_torch: bool, log: Any) -> dict[str, Tally]:
    """By array; `log` gets a line for each right array that is called wrong."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for number, problem in enumerate(problems):
        gold = golden(problem)
        sigma = tolerance.rounding_sigma(gold.residuals, gold.upstream, gold.arrays, problem.dtype)
        plane = plane_of(problem, gold)
        with np.errstate(all="ignore"):
            results = [(name, kernel(plane)) for name, kernel in KERNELS.items()]
        if with_torch:
            results += list(torch_kernels(problem, gold))
        for name, array in gold.arrays.items():
            dtype = "float32" if name == "lse" and problem.dtype != "float64" else problem.dtype
            verdicts = {
                kernel: judge(arrays[name], array, sigma[name], problem.dtype, dtype)
                for kernel, arrays in results
                if name in arrays
            }
            sensitivity = tolerance.sensitivity(sigma[name], problem.dtype, dtype, array)
            if problem.dtype != "float32" and name.startswith("grad_") and SUMS_IN_HALF in verdicts:
                tallies[f"{name} of {SUMS_IN_HALF}"].add({SUMS_IN_HALF: verdicts.pop(SUMS_IN_HALF)}, sensitivity)
            tallies[name].add(verdicts, sensitivity)
            for kernel, verdict in verdicts.items():
                if verdict.is_wrong:
                    what = f"{problem.dtype} problem {number}, {problem}: {name} of {kernel}: {verdict}"
                    print(what, file=log, flush=True)
                    break
    return tallies


def table(dtype: str, tallies: dict[str, Tally]) -> str:
    head = (dtype, "array", "arrays", "wrong", "|error|/σ", "‖error‖/‖σ‖", "‖error‖/bound")
    rows = [(*head, "sensitivity: 10 %", "50 %", "90 %")]
    for name, tally in tallies.items():
        sensitivities = np.quantile(tally.sensitivities, (0.1, 0.5, 0.9), method="nearest")
        largest = (f"{number:.2f}" for number in (tally.error, tally.frobenius, tally.share))
        told = (f"{number:.1e}" for number in sensitivities)
        rows.append(("", name, str(tally.arrays), str(tally.wrong), *largest, *told))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=500, help="how many of each dtype (default 500)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--no-torch", action="store_true", help="leave torch's own kernels out")
    arguments = parser.parse_args()
    wrong = 0
    for dtype in arguments.dtypes:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.problems)
        tallies = study((draw_problem(seed, dtype) for seed in seeds), not arguments.no_torch, sys.stderr)
        print(table(dtype, tallies), flush=True)
        wrong += sum(tally.wrong for name, tally in tallies.items() if SUMS_IN_HALF not in name)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
