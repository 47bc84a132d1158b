"""One grid of cases for every suite: named, frozen, small, and made from their names alone.

A `Case` says shapes, options and upstream gradients; `make` draws its arrays, the same on every
machine. Suites choose a list:

- `ALONE`: each option (and each of its forms) by itself;
- `PAIRS`: all pairs of options that may go together;
- `SHAPES`: zeros, ones, coinciding sizes, all ranks, broadcasting, bare and with most options on;
- `random_cases(count, seed)`, or `case_strategy()` for hypothesis: the whole grid.

Only NumPy is needed here; ml_dtypes and hypothesis are imported where they are asked for.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy

Shape = tuple[int, ...]

DTYPES = ("float16", "bfloat16", "float32", "float64")
UPSTREAM = ("grad_output", "grad_lse", "grad_weights")
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "alibi_slopes", "scale", "softcap")


class Array(NamedTuple):
    """An option that is an array: its shape, and how it is filled (a name in `FILLS`)."""

    shape: Shape
    fill: str


class Inputs(NamedTuple):
    """What `make` returns: `attention(query, key, value, **options)`, and the upstream gradients by name."""

    query: numpy.ndarray
    key: numpy.ndarray
    value: numpy.ndarray
    options: dict[str, Any]
    upstream: dict[str, numpy.ndarray]


@dataclass(frozen=True)
class Case:
    name: str
    query: Shape
    key: Shape
    value: Shape
    options: tuple[tuple[str, Any], ...] = ()  # an `Array` is drawn by `make`, anything else goes as it is
    upstream: tuple[str, ...] = UPSTREAM
    dtype: str = "float64"

    def __str__(self) -> str:
        return self.name

    @property
    def option_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.options)

    @property
    def has_gqa(self) -> bool:
        return "enable_gqa" in self.option_names

    @property
    def batch(self) -> Shape:
        return numpy.broadcast_shapes(self.query[:-3], self.key[:-3], self.value[:-3])

    @property
    def heads(self) -> Shape:
        """(Hq,), or () at rank 2."""
        if self.has_gqa:
            return self.query[-3:-2]
        return numpy.broadcast_shapes(self.query[-3:-2], self.key[-3:-2], self.value[-3:-2])

    @property
    def lse_shape(self) -> Shape:
        return (*self.batch, *self.heads, self.query[-2])

    @property
    def weights_shape(self) -> Shape:
        return (*self.lse_shape, self.key[-2])

    @property
    def output_shape(self) -> Shape:
        return (*self.lse_shape, self.value[-1])

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The given inputs that have a gradient. (`scale` has one even where it is left to its default.)"""
        given = {"query", "key", "value", *self.option_names}
        return tuple(name for name in DIFFERENTIABLE if name in given)


# -- drawing the arrays ----------------------------------------------------------------------------


def make(case: Case, seed: int = 0) -> Inputs:
    """The arrays of a case, from its name and a seed alone; each has its own stream of random numbers."""

    def draw(name: str, array: Array) -> numpy.ndarray:
        drawn = numpy.asarray(FILLS[array.fill](_stream(case, name, seed), array.shape, case))
        return cast(drawn, case.dtype) if drawn.dtype == numpy.float64 else drawn

    upstream_shapes = {
        "grad_output": case.output_shape,
        "grad_lse": case.lse_shape,
        "grad_weights": case.weights_shape,
    }
    return Inputs(
        query=draw("query", Array(case.query, "normal")),
        key=draw("key", Array(case.key, "normal")),
        value=draw("value", Array(case.value, "normal")),
        options={name: draw(name, option) if isinstance(option, Array) else option for name, option in case.options},
        upstream={name: draw(name, Array(upstream_shapes[name], "normal")) for name in case.upstream},
    )


def directions(case: Case, seed: int = 0) -> dict[str, numpy.ndarray]:
    """A direction (or cotangent) for each given differentiable input, in its shape."""
    inputs = make(case, seed)
    given = {"query": inputs.query, "key": inputs.key, "value": inputs.value, **inputs.options}

    def draw(name: str) -> numpy.ndarray:
        rng = _stream(case, f"direction of {name}", seed)
        return cast(rng.standard_normal(numpy.shape(given[name])), case.dtype)

    return {name: draw(name) for name in case.differentiable}


def cast(array: numpy.ndarray, dtype: str) -> numpy.ndarray:
    if dtype == "bfloat16":
        import ml_dtypes

        return numpy.asarray(array).astype(ml_dtypes.bfloat16)
    return numpy.asarray(array).astype(dtype)


def _stream(case: Case, name: str, seed: int) -> numpy.random.Generator:
    return numpy.random.default_rng([zlib.crc32(case.name.encode()), zlib.crc32(name.encode()), seed])


def _mask(rng: numpy.random.Generator, shape: Shape, case: Case) -> numpy.ndarray:
    """True for two in three, and one row that sees nothing (where there is more than one row)."""
    return (rng.random(shape) < 2 / 3) & ~_one_row(rng, shape)


def _bias(rng: numpy.random.Generator, shape: Shape, case: Case) -> numpy.ndarray:
    """Normal numbers, one in six −inf, and one row of nothing but −inf (where there is more than one row)."""
    bias = rng.standard_normal(shape)
    return numpy.where((rng.random(shape) < 1 / 6) | _one_row(rng, shape), -numpy.inf, bias)


def _one_row(rng: numpy.random.Generator, shape: Shape) -> numpy.ndarray:
    rows = math.prod(shape[:-1])
    chosen = numpy.zeros(rows, dtype=bool)
    if rows > 1:
        chosen[rng.integers(rows)] = True
    return numpy.reshape(chosen, (*shape[:-1], 1) if shape else ())


def _sinks_with_minus_inf(rng: numpy.random.Generator, shape: Shape, case: Case) -> numpy.ndarray:
    """No sink for the first head; at rank 2, for the only one."""
    first_head = numpy.arange(shape[-1]) == 0 if shape else True
    return numpy.where(first_head, -numpy.inf, rng.standard_normal(shape))


def _lengths(rng: numpy.random.Generator, shape: Shape, whole: int) -> numpy.ndarray:
    """From 0 to the whole; the last hides one position, so that no case hides them all."""
    lengths = numpy.array(rng.integers(0, whole + 1, shape))
    if lengths.size:
        lengths.flat[-1] = max(whole - 1, min(whole, 1))
    return lengths


# How each kind of array is filled. Lengths reach from 0 to the whole, ids of query segments go past
# those of the keys (so that some queries see nothing), slopes keep distances of a few keys at logits of
# order 1, offsets reach past both ends.
FILLS: dict[str, Callable[[numpy.random.Generator, Shape, Case], Any]] = {
    "normal": lambda rng, shape, case: rng.standard_normal(shape),
    "mask": _mask,
    "integer mask": lambda rng, shape, case: _mask(rng, shape, case) * rng.integers(1, 4, shape),
    "float mask": lambda rng, shape, case: _mask(rng, shape, case).astype(float),
    "bias": _bias,
    "query_lengths": lambda rng, shape, case: _lengths(rng, shape, case.query[-2]),
    "key_lengths": lambda rng, shape, case: _lengths(rng, shape, case.key[-2]),
    "query_segments": lambda rng, shape, case: rng.integers(0, 3, shape),
    "key_segments": lambda rng, shape, case: rng.integers(0, 2, shape),
    "query_offset": lambda rng, shape, case: rng.integers(-2, 4, shape),
    "sinks with -inf": _sinks_with_minus_inf,
    "alibi_slopes": lambda rng, shape, case: rng.normal(0.3, 0.3, shape),
    "dropout_mask": lambda rng, shape, case: rng.random(shape) < 0.6,
}


# -- shapes and options by name --------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The contract's letters; `heads` are (Hq, Hkv), or () for rank 2."""

    batch: Shape = (2,)
    heads: Shape = (2, 2)
    L: int = 4
    S: int = 5
    E: int = 3
    Ev: int = 2

    @property
    def lead(self) -> Shape:
        return (*self.batch, *self.heads[:1])

    def case(self, name: str, options: "Options") -> Case:
        key_lead = (*self.batch, *self.heads[1:])
        shapes = (*self.lead, self.L, self.E), (*key_lead, self.S, self.E), (*key_lead, self.S, self.Ev)
        return Case(name, *shapes, tuple(options.items()))


Options = dict[str, Any]

# Each option in its main form. `alignment` and `query_offset` only speak through causal, window and
# ALiBi: here causal.
FEATURES: dict[str, Callable[[Sizes], Options]] = {
    "mask": lambda n: {"mask": Array((*n.lead, n.L, n.S), "mask")},
    "bias": lambda n: {"bias": Array((*n.lead, n.L, n.S), "bias")},
    "causal": lambda n: {"is_causal": True},
    "lower_right": lambda n: {"is_causal": True, "alignment": "lower_right"},
    "query_offset": lambda n: {"is_causal": True, "query_offset": Array(n.batch, "query_offset")},
    "window": lambda n: {"window": (1, 1)},
    "query_lengths": lambda n: {"query_lengths": Array(n.batch, "query_lengths")},
    "key_lengths": lambda n: {"key_lengths": Array(n.batch, "key_lengths")},
    "segments": lambda n: {
        "query_segments": Array((*n.batch, n.L), "query_segments"),
        "key_segments": Array((*n.batch, n.S), "key_segments"),
    },
    "sinks": lambda n: {"sinks": Array(n.heads[:1], "normal")},
    "alibi": lambda n: {"alibi_slopes": Array(n.heads[:1], "alibi_slopes")},
    "scale": lambda n: {"scale": 0.8},
    "softcap": lambda n: {"softcap": 1.5},
    "dropout": lambda n: {
        "dropout_p": 0.4,
        "dropout_mask": Array((*n.lead, n.L, n.S), "dropout_mask"),
    },
    "gqa": lambda n: {"enable_gqa": True},
}

EXCLUSIVE = frozenset({frozenset({"lower_right", "query_offset"})})

# Other forms of the options, each by itself.
FORMS: dict[str, Callable[[Sizes], Options]] = {
    "mask (L, S)": lambda n: {"mask": Array((n.L, n.S), "mask")},
    "mask (S,)": lambda n: {"mask": Array((n.S,), "mask")},
    "mask per batch": lambda n: {"mask": Array((*n.batch, 1, 1, n.S), "mask")},
    "mask per head": lambda n: {"mask": Array((1,) * len(n.batch) + (*n.heads[:1], n.L, 1), "mask")},
    "mask of integers": lambda n: {"mask": Array((n.L, n.S), "integer mask")},
    "mask of floats": lambda n: {"mask": Array((n.L, n.S), "float mask")},
    "bias 0-d": lambda n: {"bias": Array((), "normal")},
    "bias (S,)": lambda n: {"bias": Array((n.S,), "bias")},
    "bias (L, S)": lambda n: {"bias": Array((n.L, n.S), "bias")},
    "bias (L, 1)": lambda n: {"bias": Array((n.L, 1), "bias")},
    "bias per batch": lambda n: {"bias": Array((*n.batch, 1, 1, n.S), "bias")},
    "bias per head": lambda n: {"bias": Array((1,) * len(n.batch) + (*n.heads[:1], n.L, n.S), "bias")},
    "bias finite": lambda n: {"bias": Array((*n.lead, n.L, n.S), "normal")},
    "offset int": lambda n: {"is_causal": True, "query_offset": 2},
    "offset negative": lambda n: {"is_causal": True, "query_offset": -2},
    "window left": lambda n: {"window": (1, None)},
    "window right": lambda n: {"window": (None, 0)},
    "window wide": lambda n: {"window": (2, 1)},
    "window of one": lambda n: {"window": (0, 0)},
    "window causal": lambda n: {"window": (2, 2), "is_causal": True},
    "window at lower_right": lambda n: {"window": (1, 0), "alignment": "lower_right"},
    "window at offset": lambda n: {"window": (1, 1), "query_offset": Array(n.batch, "query_offset")},
    "window at lengths": lambda n: {
        "window": (1, 1),
        "alignment": "lower_right",
        "query_lengths": Array(n.batch, "query_lengths"),
        "key_lengths": Array(n.batch, "key_lengths"),
    },
    "causal at lengths": lambda n: {
        "is_causal": True,
        "alignment": "lower_right",
        "query_lengths": Array(n.batch, "query_lengths"),
        "key_lengths": Array(n.batch, "key_lengths"),
    },
    "sinks per batch": lambda n: {"sinks": Array(n.lead, "normal")},
    "sinks -inf": lambda n: {
        "sinks": Array(n.lead, "sinks with -inf"),
        "mask": Array((*n.lead, n.L, n.S), "mask"),
    },
    "alibi per batch": lambda n: {"alibi_slopes": Array(n.lead, "alibi_slopes")},
    "alibi at lower_right": lambda n: {
        "alibi_slopes": Array(n.heads[:1], "alibi_slopes"),
        "alignment": "lower_right",
    },
    "alibi at offset": lambda n: {"alibi_slopes": Array(n.heads[:1], "alibi_slopes"), "query_offset": -3},
    "alibi at lengths": lambda n: {
        "alibi_slopes": Array(n.heads[:1], "alibi_slopes"),
        "alignment": "lower_right",
        "key_lengths": Array(n.batch, "key_lengths"),
    },
    "scale negative": lambda n: {"scale": -2.0},
    "scale 0": lambda n: {"scale": 0.0},
    "softcap tight": lambda n: {"softcap": 0.2},
    "softcap wide": lambda n: {"softcap": 50.0},
    "dropout (L, S)": lambda n: {"dropout_p": 0.25, "dropout_mask": Array((n.L, n.S), "dropout_mask")},
    "dropout of all": lambda n: {"dropout_p": 1.0, "dropout_mask": Array((n.L, n.S), "dropout_mask")},
}


def _options(sizes: Sizes, features: Iterable[str]) -> Options:
    options: Options = {}
    for feature in features:
        options |= (FEATURES | FORMS)[feature](sizes)
    return options


def _build(name: str, sizes: Sizes, features: Sequence[str]) -> Case:
    if "gqa" in features and sizes.heads == Sizes.heads:
        sizes = replace(sizes, heads=(4, 2))
    return sizes.case(name, _options(sizes, features))


def _alone() -> tuple[Case, ...]:
    cases = [_build("bare", Sizes(), [])]
    for feature in FEATURES | FORMS:
        cases.append(_build(feature, Sizes(), [feature]))
    return tuple(cases)


def _pairs() -> tuple[Case, ...]:
    """Pairs, with more keys than queries, more queries than keys, and as many, in turn."""
    bases = itertools.cycle([Sizes(L=3, S=5), Sizes(L=5, S=3, E=2, Ev=3), Sizes(L=4, S=4)])
    cases = []
    for pair in itertools.combinations(FEATURES, 2):
        if frozenset(pair) not in EXCLUSIVE:
            cases.append(_build(" + ".join(pair), next(bases), pair))
    return tuple(cases)


# Most options at once. Sinks and slopes, a bias with −inf, a mask and lengths: some rows see nothing,
# most see something.
MOST = [
    "mask",
    "bias",
    "window wide",
    "lower_right",
    "key_lengths",
    "sinks",
    "alibi",
    "scale",
    "softcap",
    "dropout",
]

SIZES: dict[str, Sizes] = {
    "B = 0": Sizes(batch=(0,)),
    "H = 0": Sizes(heads=(0, 0)),
    "L = 0": Sizes(L=0),
    "S = 0": Sizes(S=0),
    "E = 0": Sizes(E=0),
    "Ev = 0": Sizes(Ev=0),
    "L = S = 0": Sizes(L=0, S=0),
    "B = 1": Sizes(batch=(1,)),
    "H = 1": Sizes(heads=(1, 1)),
    "L = 1": Sizes(L=1),
    "S = 1": Sizes(S=1),
    "E = 1": Sizes(E=1),
    "Ev = 1": Sizes(Ev=1),
    "all 1": Sizes((1,), (1, 1), 1, 1, 1, 1),
    "B = H": Sizes((3,), (3, 3), 4, 5, 3, 2),
    "H = S": Sizes((2,), (4, 4), 3, 4, 3, 2),
    "B = L": Sizes((3,), (2, 2), 3, 5, 3, 2),
    "B = H = L = S = E = Ev": Sizes((3,), (3, 3), 3, 3, 3, 3),
    "L < S": Sizes(L=2, S=7),
    "L > S": Sizes(L=7, S=2),
    "E < Ev": Sizes(E=2, Ev=5),
    "E > Ev": Sizes(E=5, Ev=1),
    "GQA 6/2": Sizes((1,), (6, 2), 3, 4, 2, 2),
    "GQA 4/1": Sizes((2,), (4, 1), 3, 4, 2, 3),
    "GQA 3/3": Sizes((2,), (3, 3), 2, 4, 2, 2),
    "GQA rank 3": Sizes((), (4, 2), 3, 4, 2, 2),
    "GQA rank 5": Sizes((2, 1), (4, 2), 2, 3, 2, 2),
    "GQA S = 0": Sizes((1,), (4, 2), 3, 0, 2, 2),
    "rank 2": Sizes((), ()),
    "rank 3": Sizes((), (2, 2)),
    "rank 5": Sizes((2, 3), (2, 2), 3, 4, 2, 2),
    "rank 6": Sizes((2, 1, 2), (2, 2), 3, 2, 2, 2),
}

# Axes of size 1 that are broadcast: shapes of query, key, value.
BROADCAST: dict[str, tuple[Shape, Shape, Shape]] = {
    "key of batch 1": ((3, 2, 4, 3), (1, 2, 5, 3), (3, 2, 5, 2)),
    "key and value of batch 1": ((3, 2, 4, 3), (1, 2, 5, 3), (1, 2, 5, 2)),
    "query of batch 1": ((1, 2, 4, 3), (3, 2, 5, 3), (3, 2, 5, 2)),
    "value of batch 3 alone": ((1, 2, 4, 3), (1, 2, 5, 3), (3, 2, 5, 2)),
    "two batch axes crossed": ((2, 1, 2, 3, 3), (1, 3, 2, 4, 3), (2, 3, 2, 4, 2)),
    "batch 1 against 0": ((1, 2, 4, 3), (0, 2, 5, 3), (1, 2, 5, 2)),
    "key and value of one head": ((2, 3, 4, 3), (2, 1, 5, 3), (2, 1, 5, 2)),
    "query of one head": ((2, 1, 4, 3), (2, 3, 5, 3), (2, 3, 5, 2)),
    "value of one head": ((2, 3, 4, 3), (2, 3, 5, 3), (2, 1, 5, 2)),
    "value of three heads alone": ((2, 1, 4, 3), (2, 1, 5, 3), (2, 3, 5, 2)),
    "one head at rank 3": ((3, 4, 3), (1, 5, 3), (1, 5, 2)),
    "batch and head of 1": ((3, 1, 2, 2), (1, 2, 4, 2), (1, 1, 4, 3)),
}


def _shapes() -> tuple[Case, ...]:
    cases = []
    for name, sizes in SIZES.items():
        gqa = ["gqa"] if name.startswith("GQA") else []
        cases.append(_build(name, sizes, gqa))
        cases.append(_build(f"{name}, most options", sizes, gqa + MOST))
    for name, shapes in BROADCAST.items():
        bare = Case(name, *shapes)
        whole = Sizes(bare.batch, bare.heads * 2, bare.query[-2], bare.key[-2])
        cases.append(bare)
        options = tuple(_options(whole, MOST).items())
        cases.append(replace(bare, name=f"{name}, most options", options=options))
    return tuple(cases)


ALONE = _alone()
PAIRS = _pairs()
SHAPES = _shapes()
ALL = ALONE + PAIRS + SHAPES
BY_NAME = {case.name: case for case in ALL}


# -- random combinations over the whole grid -------------------------------------------------------


class Chooser:
    """The choices a random case is built from, so that NumPy and hypothesis draw from one grid."""

    def integer(self, low: int, high: int) -> int:
        """Low and high included."""
        raise NotImplementedError

    def pick(self, choices) -> Any:
        choices = list(choices)
        return choices[self.integer(0, len(choices) - 1)]

    def chance(self) -> bool:
        return self.integer(0, 1) == 1


class NumpyChooser(Chooser):
    def __init__(self, seed):
        self.rng = numpy.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))


def random_cases(count: int, seed: int) -> tuple[Case, ...]:
    """Random option combinations at sizes of at least 1, for suites that store results."""
    return tuple(
        random_case(NumpyChooser([seed, number]), f"random {seed}/{number}", smallest=1) for number in range(count)
    )


def case_strategy(dtypes: tuple[str, ...] = ("float64",), smallest: int = 0, without: tuple[str, ...] = ()):
    """A hypothesis strategy of random cases over the whole grid; `without` names options to leave out."""
    from hypothesis import strategies

    class HypothesisChooser(Chooser):
        def __init__(self, draw):
            self.draw = draw

        def integer(self, low: int, high: int) -> int:
            return self.draw(strategies.integers(low, high))

    @strategies.composite
    def cases(draw):
        choose = HypothesisChooser(draw)
        name = f"drawn {choose.integer(0, 2**16 - 1)}"  # the arrays come from the name
        return random_case(choose, name, smallest, dtype=choose.pick(dtypes), without=without)

    return cases()


def random_case(
    choose: Chooser, name: str, smallest: int, dtype: str = "float64", without: tuple[str, ...] = ()
) -> Case:
    rank = choose.integer(2, 6)
    is_gqa = rank > 2 and "enable_gqa" not in without and choose.chance()

    def size(largest: int) -> int:
        """At least 1, or (one time in twelve, where `smallest` allows) 0."""
        return 0 if smallest == 0 and choose.integer(0, 11) == 11 else choose.integer(1, largest)

    def held(shape: Shape) -> Shape:
        """The shape with some axes broadcast from 1; mostly none."""
        return tuple(1 if choose.integer(0, 5) == 5 else size for size in shape)

    # Small batch axes: the loops' time grows with their product.
    batch = tuple(size(3 if rank == 4 else 2) for _ in range(rank - 3))
    L, S, E, Ev = size(7), size(7), size(5), size(5)
    if is_gqa:
        key_heads: Shape = (choose.integer(1, 2),)
        query = (*held(batch), key_heads[0] * choose.integer(1, 3), L, E)
        key, value = (*held(batch), *key_heads, S, E), (*held(batch), *key_heads, S, Ev)
        bare = Case(name, query, key, value, (("enable_gqa", True),))
    else:
        lead = (*batch, size(3)) if rank > 2 else ()
        bare = Case(name, (*held(lead), L, E), (*held(lead), S, E), (*held(lead), S, Ev))
    options = _random_options(choose, bare, without)
    upstream = tuple(name for name in UPSTREAM if name not in without and choose.chance()) or ("grad_output",)
    return replace(bare, options=bare.options + tuple(options.items()), upstream=upstream, dtype=dtype)


def _random_options(choose: Chooser, case: Case, without: tuple[str, ...]) -> Options:
    batch, heads = case.batch, case.heads
    lead = (*batch, *heads)
    plane = case.weights_shape

    def plane_shape() -> Shape:
        shape = choose.pick([plane, plane, plane[-2:], plane[-1:], ()])
        return tuple(1 if choose.integer(0, 3) == 3 else size for size in shape)

    def per_head() -> Shape:
        return choose.pick([heads, lead])

    def on(*names: str) -> bool:
        return not set(names) & set(without) and choose.integer(0, 2) == 2

    options: Options = {}
    if on("mask"):
        options["mask"] = Array(plane_shape(), choose.pick(["mask", "integer mask"]))
    if on("bias"):
        options["bias"] = Array(plane_shape(), choose.pick(["bias", "normal"]))
    if on("is_causal"):
        options["is_causal"] = True
    position = choose.pick(["none", "lower_right", "int", "array"])
    if position == "lower_right" and "alignment" not in without:
        options["alignment"] = "lower_right"
    elif position == "int" and "query_offset" not in without:
        options["query_offset"] = choose.integer(-3, 4)
    elif position == "array" and "query_offset" not in without:
        options["query_offset"] = Array(batch, "query_offset")
    if on("window"):
        options["window"] = choose.pick([(1, 1), (0, 0), (2, 1), (0, 3), (1, None), (None, 1), (3, None)])
    if on("query_lengths"):
        options["query_lengths"] = Array(batch, "query_lengths")
    if on("key_lengths"):
        options["key_lengths"] = Array(batch, "key_lengths")
    if on("query_segments", "key_segments"):
        options["query_segments"] = Array((*batch, plane[-2]), "query_segments")
        options["key_segments"] = Array((*batch, plane[-1]), "key_segments")
    if on("sinks"):
        options["sinks"] = Array(per_head(), choose.pick(["normal", "sinks with -inf"]))
    if on("alibi_slopes"):
        options["alibi_slopes"] = Array(per_head(), "alibi_slopes")
    if on("scale"):
        options["scale"] = choose.pick([0.8, -1.5, 0.0, 2.5])
    if on("softcap"):
        options["softcap"] = choose.pick([0.5, 2.0, 20.0])
    if on("dropout_p", "dropout_mask"):
        options["dropout_p"] = choose.pick([0.25, 0.5, 1.0])
        options["dropout_mask"] = Array(plane_shape(), "dropout_mask")
    return options
