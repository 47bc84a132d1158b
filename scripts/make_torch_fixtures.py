"""Compute with torch, in float64 on the CPU, what the tests compare with; the only file that imports torch.

    python scripts/make_torch_fixtures.py            # writes tests/fixtures and numpy_sdpa/data/torch_rules.npz
    python scripts/make_torch_fixtures.py --check    # computes again, and compares with what is there

Every case of `tests/cases.py` (and 200 random ones) is composed of elementary torch operations, and
torch.autograd differentiates: reverse mode, forward mode, and reverse over reverse. Where torch has the
options of a case, its own `scaled_dot_product_attention` (output, and gradients of the output) or
`flex_attention` (output and lse; it has no backward on the CPU) is called too: what it returns is what
is stored, and the composition has to agree. The manifest says which function each result comes from.

A row with nothing to attend to is as this package has it: output 0, lse −inf, no gradient.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn.attention import bias as torch_bias
from torch.nn.attention import flex_attention as flex

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
RULES = ROOT / "numpy_sdpa" / "data" / "torch_rules.npz"
sys.path.insert(0, str(TESTS))

import cases  # noqa: E402
import fixtures  # noqa: E402
from cases import Case, Inputs  # noqa: E402
from fixtures import Fixture  # noqa: E402

# Two orders of summation of a few terms of order 1 differ by some 1e-15 in float64, second derivatives (with
# a softcap of 0.2 or a scale of 2.5) by up to a hundred times more.
AGREEMENT = 1e-12
# The same operations on the same machine give the same bits; other BLAS kernels sum in another order.
REPRODUCTION = 1e-13

# flex_attention would be traced and compiled on every call; this is torch's switch for running it eagerly.
flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True


# -- attention, composed of elementary operations ------------------------------------------------------


class Plane:
    """What is not differentiated: who sees whom, distances, what dropout keeps; all (B…, Hq, L, S)."""

    def __init__(self, case: Case, inputs: Inputs):
        self.shape = case.weights_shape
        self.options = {name: to_torch(option) for name, option in inputs.options.items()}
        self.rank = len(self.shape)
        self.i = torch.arange(self.shape[-2])[:, None]
        self.j = torch.arange(self.shape[-1])
        self.position = self.i + self.offset()
        self.distance = (self.position - self.j).abs()
        self.visible = torch.ones(self.shape, dtype=torch.bool)
        for condition in self.conditions():
            self.visible = self.visible & condition
        self.keep_factor = self.dropout()

    def per_batch(self, integers) -> torch.Tensor:
        """(B…) → (B…, 1, 1, 1)."""
        return torch.as_tensor(integers).reshape(*numpy.shape(integers), *(1,) * min(self.rank, 3))

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        query_length = self.options.get("query_lengths", self.shape[-2])
        key_length = self.options.get("key_lengths", self.shape[-1])
        return self.per_batch(query_length), self.per_batch(key_length)

    def offset(self) -> torch.Tensor:
        if self.options.get("alignment") == "lower_right":
            query_length, key_length = self.lengths()
            return key_length - query_length
        return self.per_batch(self.options.get("query_offset", 0))

    def conditions(self):
        query_length, key_length = self.lengths()
        yield (self.i < query_length) & (self.j < key_length)
        if self.options.get("is_causal"):
            yield self.j <= self.position
        left, right = self.options.get("window", (None, None))
        if left is not None:
            yield self.j >= self.position - left
        if right is not None:
            yield self.j <= self.position + right
        if "query_segments" in self.options:
            query_segments, key_segments = self.options["query_segments"], self.options["key_segments"]
            same = query_segments[..., :, None] == key_segments[..., None, :]
            yield same if self.rank == 2 else same.unsqueeze(-3)
        if "mask" in self.options:
            yield self.options["mask"] != 0
        if "bias" in self.options:
            yield self.options["bias"] != -math.inf

    def dropout(self) -> torch.Tensor:
        if "dropout_mask" not in self.options:
            return torch.ones(())
        p = self.options["dropout_p"]
        return self.options["dropout_mask"] * (0.0 if p == 1 else 1 / (1 - p))


def compose(plane: Plane, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, lse, weights. `inputs` by name: all that is differentiated, `scale` always among them."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    if plane.options.get("enable_gqa"):
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)

    logits = (inputs["scale"] * query) @ key.mT
    if "softcap" in inputs:
        logits = inputs["softcap"] * torch.tanh(logits / inputs["softcap"])
    if "alibi_slopes" in inputs:
        logits = logits - inputs["alibi_slopes"][..., None, None] * plane.distance
    if "bias" in inputs:
        bias = inputs["bias"]
        logits = logits + torch.where(bias == -math.inf, 0.0, bias)
    logits = torch.where(plane.visible, logits, -math.inf)

    if "sinks" in inputs:
        sinks = inputs["sinks"][..., None, None].expand(*plane.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    # where on both sides: softmax and logsumexp of a row of −inf alone have NaN for derivatives.
    nothing = (logits == -math.inf).all(dim=-1, keepdim=True)
    logits = torch.where(nothing, 0.0, logits)
    weights = torch.where(nothing, 0.0, torch.softmax(logits, dim=-1))[..., : plane.shape[-1]]
    lse = torch.where(nothing[..., 0], -math.inf, torch.logsumexp(logits, dim=-1))
    output = (weights * plane.keep_factor) @ value
    return output, lse, weights


# -- torch's own attention -----------------------------------------------------------------------------


def sdpa_expresses(case: Case) -> bool:
    """Whether torch's function has these options: one attn_mask, or is_causal, not both."""
    names = case.option_names - {"scale", "enable_gqa"}
    return len(names) == 0 or names in ({"mask"}, {"bias"}, {"is_causal"}) or is_causal_lower_right(case)


def is_causal_lower_right(case: Case) -> bool:
    return case.option_names - {"scale", "enable_gqa"} == {"is_causal", "alignment"}


def sdpa(case: Case, plane: Plane, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    attn_mask = None
    if is_causal_lower_right(case):
        attn_mask = torch_bias.causal_lower_right(*case.weights_shape[-2:])
    elif "mask" in plane.options:
        attn_mask = torch.atleast_2d(plane.options["mask"] != 0)
    elif "bias" in inputs:
        attn_mask = torch.atleast_2d(inputs["bias"])
    return torch.nn.functional.scaled_dot_product_attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        attn_mask=attn_mask,
        is_causal=plane.options.get("is_causal", False) and attn_mask is None,
        scale=inputs["scale"].item(),
        enable_gqa=plane.options.get("enable_gqa", False),
    )


def flex_expresses(case: Case) -> bool:
    """Four axes, none of size 0, equal batches and heads; no sink or dropout, which no score_mod can say."""
    return (
        len(case.query) == 4
        and 0 not in case.query + case.key + case.value
        and case.query[0] == case.key[0] == case.value[0]
        and (case.has_gqa or case.query[1] == case.key[1])
        and case.key[1] == case.value[1]
        and not case.option_names & {"sinks", "dropout_p"}
    )


def flex_output_and_lse(case: Case, plane: Plane, inputs: dict[str, torch.Tensor]):
    """The options said again, in flex_attention's way: an entry's score and visibility from (b, h, i, j)."""
    options = plane.options
    L, S = case.weights_shape[-2:]
    whole = {name: options[name].expand(case.weights_shape) for name in ("mask", "bias") if name in options}
    query_lengths = options.get("query_lengths", torch.full(case.batch, L))
    key_lengths = options.get("key_lengths", torch.full(case.batch, S))
    if options.get("alignment") == "lower_right":
        offsets = key_lengths - query_lengths
    else:
        offsets = torch.as_tensor(options.get("query_offset", 0)).expand(case.batch)
    left, right = options.get("window", (None, None))
    slopes = options["alibi_slopes"].expand(case.lse_shape[:-1]) if "alibi_slopes" in options else None

    def score_mod(score, b, h, i, j):
        if "softcap" in options:
            score = options["softcap"] * torch.tanh(score / options["softcap"])
        if slopes is not None:
            score = score - slopes[b, h] * (i + offsets[b] - j).abs()
        if "bias" in whole:
            score = score + whole["bias"][b, h, i, j]
        return score

    def mask_mod(b, h, i, j):
        visible = (i < query_lengths[b]) & (j < key_lengths[b])
        if options.get("is_causal"):
            visible = visible & (i + offsets[b] >= j)
        if left is not None:
            visible = visible & (i + offsets[b] - j <= left)
        if right is not None:
            visible = visible & (j - i - offsets[b] <= right)
        if "query_segments" in options:
            visible = visible & (options["query_segments"][b, i] == options["key_segments"][b, j])
        if "mask" in whole:
            visible = visible & (whole["mask"][b, h, i, j] != 0)
        return visible

    with torch.no_grad():
        output, auxiliary = flex.flex_attention(
            *(inputs[name].detach() for name in ("query", "key", "value")),
            score_mod=score_mod,
            block_mask=flex.create_block_mask(mask_mod, *case.lse_shape[:2], L, S, device="cpu"),
            scale=inputs["scale"].item(),
            enable_gqa=case.has_gqa,
            return_aux=flex.AuxRequest(lse=True),
        )
    return output, auxiliary.lse


# -- one case ------------------------------------------------------------------------------------------


def to_torch(option: Any) -> Any:
    return torch.from_numpy(option.copy()) if isinstance(option, numpy.ndarray) else option


def differentiated(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Leaves by name. `scale` is always one, also where it is left to its default."""
    given = {"query": inputs.query, "key": inputs.key, "value": inputs.value, **inputs.options}
    given.setdefault("scale", 1 / math.sqrt(case.query[-1]) if case.query[-1] else 1.0)
    names = [name for name in cases.DIFFERENTIABLE if name in given]
    return {name: torch.tensor(given[name], dtype=torch.float64, requires_grad=True) for name in names}


def gradients_of(results, upstream, leaves: dict[str, torch.Tensor], create_graph=False):
    gradients = torch.autograd.grad(
        results,
        list(leaves.values()),
        upstream,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, gradients, strict=True))


def compute(case: Case) -> tuple[Fixture, dict[str, str]]:
    inputs, directions = cases.make(case), cases.directions(case)
    plane = Plane(case, inputs)
    leaves = differentiated(case, inputs)
    upstream = {name: to_torch(array).requires_grad_() for name, array in inputs.upstream.items()}
    tangents = {name: to_torch(direction) for name, direction in directions.items()}

    results = dict(zip(("output", "lse", "weights"), compose(plane, leaves), strict=True))
    reached = [results[name.removeprefix("grad_")] for name in upstream]
    gradients = gradients_of(reached, list(upstream.values()), leaves, create_graph=True)
    forward_mode = jvp(plane, leaves, tangents)
    second = double_backward(gradients, tangents, leaves | upstream)
    for name in upstream:
        agree(case, second[name], forward_mode[name.removeprefix("grad_")], "double backward", "forward mode")

    oracles = {"output": "composition", "lse": "composition", "weights": "composition"}
    if flex_expresses(case):
        output, lse = flex_output_and_lse(case, plane, leaves)
        agree(case, output, results["output"], "flex_attention", "composition")
        agree(case, lse, results["lse"], "flex_attention's lse", "composition")
        results |= {"output": output, "lse": lse}
        oracles |= {"output": "flex_attention", "lse": "flex_attention"}
    sdpa_gradients = {}
    if sdpa_expresses(case):
        output = sdpa(case, plane, leaves)
        agree(case, output, results["output"], "scaled_dot_product_attention", oracles["output"])
        results["output"] = output
        oracles["output"] = "scaled_dot_product_attention"
        if "grad_output" in upstream:
            sdpa_gradients = sdpa_backward(case, plane, leaves, output, upstream["grad_output"])
            oracles["sdpa_gradients"] = "scaled_dot_product_attention"

    fixture = Fixture(
        case,
        inputs,
        directions,
        **to_numpy(results),
        gradients=to_numpy(gradients),
        tangents=to_numpy(forward_mode),
        second=to_numpy(second),
        sdpa_gradients=to_numpy(sdpa_gradients),
    )
    return fixture, oracles


def jvp(plane: Plane, leaves: dict[str, torch.Tensor], tangents: dict[str, torch.Tensor]):
    held = {name: leaf.detach() for name, leaf in leaves.items()}

    def function(*moving):
        return compose(plane, held | dict(zip(tangents, moving, strict=True)))

    primals = tuple(held[name] for name in tangents)
    _, results = torch.func.jvp(function, primals, tuple(tangents.values()))
    return dict(zip(("output", "lse", "weights"), results, strict=True))


def double_backward(gradients, tangents, leaves):
    pairing = sum((gradients[name] * tangents[name]).sum() for name in tangents)
    return gradients_of(pairing, None, leaves)


def sdpa_backward(case: Case, plane: Plane, leaves, output, grad_output) -> dict[str, torch.Tensor]:
    """Gradients of torch's own function for `grad_output` alone; its `scale` is a number without one."""
    tensors = {name: leaf for name, leaf in leaves.items() if name != "scale"}
    gradients = gradients_of(output, grad_output, tensors)
    composed = gradients_of(compose(plane, leaves)[0], grad_output, tensors)
    for name in tensors:
        agree(case, gradients[name], composed[name], f"scaled_dot_product_attention's {name}", "composition")
    return gradients


def to_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, numpy.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def agree(case: Case, got: torch.Tensor, expected: torch.Tensor, got_name: str, expected_name: str) -> None:
    if got.isnan().any() or not torch.allclose(got, expected, rtol=AGREEMENT, atol=AGREEMENT):
        raise SystemExit(f"{case.name}: {got_name} and {expected_name} differ:\n{got}\n{expected}")


# -- writing and checking ------------------------------------------------------------------------------


def write() -> None:
    fixtures.FOLDER.mkdir(exist_ok=True)
    entries = []
    for family, members in fixtures.FAMILIES.items():
        records = {}
        for case in members:
            fixture, oracles = compute(case)
            records[case.name] = fixtures.to_record(fixture)
            digest = fixtures.sha256(fixture.inputs, fixture.directions)
            entries.append({"family": family, **fixtures.describe(case), "oracles": oracles, "sha256": digest})
        numpy.savez_compressed(fixtures.FOLDER / f"{family}.npz", **records)
    manifest = {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "seed": {"random cases": fixtures.RANDOM_SEED, "arrays": 0},
        "reproduction": REPRODUCTION,
        "cases": entries,
    }
    one_case_a_line = json.dumps(manifest, ensure_ascii=False).replace(' {"family"', '\n{"family"')
    (fixtures.FOLDER / "manifest.json").write_text(one_case_a_line + "\n", encoding="utf-8")


def write_rules() -> None:
    """The cases that `numpy-sdpa verify` ships: each feature alone, and most at once; scalar options as JSON."""
    chosen = [cases.BY_NAME[name] for name in ("bare", *cases.FEATURES, "GQA 6/2, most options")]
    records = {}
    for case in chosen:
        record = fixtures.to_record(compute(case)[0])
        scalars = {name: option for name, option in case.options if not isinstance(option, cases.Array)}
        text = numpy.array(json.dumps(scalars))
        fields = [(name, record.dtype[name]) for name in record.dtype.names] + [("options", text.dtype)]
        whole = numpy.zeros((), dtype=fields)
        for name in record.dtype.names:
            whole[name] = record[name]
        whole["options"] = text
        records["plain" if case.name == "bare" else case.name.replace("GQA 6/2, ", "")] = whole
    numpy.savez_compressed(RULES, **records)


def check() -> float:
    """The largest difference from what is stored, in units of max(1, |stored|); too large, it exits."""
    digests = {entry["name"]: entry["sha256"] for entry in fixtures.manifest()["cases"]}
    largest = 0.0
    for family, case in fixtures.EVERY:
        fixture, _ = compute(case)
        if fixtures.sha256(fixture.inputs, fixture.directions) != digests[case.name]:
            raise SystemExit(f"{case.name}: the inputs are not those of the manifest")
        new, old = fixtures.to_record(fixture), fixtures.to_record(fixtures.get(family, case))
        for name in old.dtype.names:
            largest = max(largest, difference(f"{case.name}: {name}", new[name], old[name]))
    return largest


def difference(what: str, new: numpy.ndarray, old: numpy.ndarray) -> float:
    if new.shape != old.shape:
        raise SystemExit(f"{what}: shape {new.shape}, stored {old.shape}")
    finite = numpy.isfinite(old)
    if not numpy.array_equal(new[~finite], old[~finite]):
        raise SystemExit(f"{what}: entries that are not finite differ")
    new, old = new[finite].astype(float), old[finite].astype(float)
    largest = float(numpy.max(abs(new - old) / numpy.maximum(1, abs(old)), initial=0))
    if largest > REPRODUCTION:
        raise SystemExit(f"{what}: differs from what is stored by {largest:.1e}, more than {REPRODUCTION:.0e}")
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compute again and compare with what is stored")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    torch.set_default_dtype(torch.float64)
    if arguments.check:
        print(f"reproduced; largest difference {check():.1e}")
    else:
        write()
        write_rules()


if __name__ == "__main__":
    main()
