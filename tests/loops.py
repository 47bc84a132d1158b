"""The contract's attention in scalar Python loops: an oracle that shares no code with the package.

One query row at a time, one key at a time, on plain Python numbers: arrays are only read and written
entry by entry. It is written for the eye, from the definitions alone, and is slow on purpose. Options
bear the contract's names; they are taken as valid (the package's checks have tests of their own), so
shapes are only broadcast here, never judged. A masked entry is never read, except for `scores` and
`capped_scores`, which show every product.

Everything is an analytic function of the floating inputs, computed in Python's float (binary64), or in
Python's complex where any floating input is complex, with comparisons on real parts. `jvp` and
`double_backward` use that: they are complex steps of `forward` and `backward`, without a derivation of
their own.
"""

import cmath
import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy

# A complex step has no cancellation, so it may be so small that its square is lost beside any first-order
# term (1e-80 against 1e-40); products of it must stay normal numbers (above 1e-308).
COMPLEX_STEP = 1e-40


class Forward(NamedTuple):
    output: numpy.ndarray
    lse: numpy.ndarray
    weights: numpy.ndarray
    scores: numpy.ndarray
    capped_scores: numpy.ndarray
    logits: numpy.ndarray


class Gradients(NamedTuple):
    """One gradient per input, in its shape; None where the input was not given (`scale` always has one)."""

    query: Any
    key: Any
    value: Any
    bias: Any
    sinks: Any
    alibi_slopes: Any
    scale: Any
    softcap: Any


class Row(NamedTuple):
    """One query row: the places of the keys that it sees, their logits and weights, the sink weight, lse."""

    keys: list[int]
    logits: list[Any]
    weights: list[Any]
    sink_weight: Any
    lse: Any


Index = tuple[int, ...]


def forward(query, key, value, mask=None, **options) -> Forward:
    """Attention: output, lse, weights (before dropout), scores, capped_scores and logits, as NumPy arrays."""
    return Attention(query, key, value, mask, **options).forward()


def backward(grad_output, query, key, value, mask=None, *, grad_lse=None, grad_weights=None, **options) -> Gradients:
    """Gradients of ⟨grad_output, output⟩ + ⟨grad_lse, lse⟩ + ⟨grad_weights, weights⟩; None stands for 0."""
    return Attention(query, key, value, mask, **options).backward(grad_output, grad_lse, grad_weights)


class Attention:
    def __init__(
        self,
        query,
        key,
        value,
        mask=None,
        *,
        bias=None,
        is_causal=False,
        alignment="upper_left",
        query_offset=None,
        window=None,
        query_lengths=None,
        key_lengths=None,
        query_segments=None,
        key_segments=None,
        sinks=None,
        alibi_slopes=None,
        scale=None,
        softcap=None,
        dropout_p=None,
        dropout_mask=None,
        enable_gqa=False,
    ):
        floating = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
        floating |= {"alibi_slopes": alibi_slopes, "scale": scale, "softcap": softcap}
        self.number, self.math = number_type(floating.values())

        self.query, self.key, self.value = (numpy.asarray(array) for array in (query, key, value))
        self.mask, self.bias = as_array(mask), as_array(bias)
        self.is_causal, self.alignment, self.window = is_causal, alignment, window
        self.query_offset = as_array(query_offset)
        self.query_lengths, self.key_lengths = as_array(query_lengths), as_array(key_lengths)
        self.query_segments, self.key_segments = as_array(query_segments), as_array(key_segments)
        self.sinks, self.alibi_slopes = as_array(sinks), as_array(alibi_slopes)
        self.dropout_p, self.dropout_mask = dropout_p, as_array(dropout_mask)

        self.query_length, self.head_size = self.query.shape[-2:]
        self.key_length, self.value_head_size = self.value.shape[-2:]
        self.scale = self.number(default_scale(self.head_size) if scale is None else scale)
        self.softcap = None if softcap is None else self.number(softcap)

        leads = [array.shape[:-2] for array in (self.query, self.key, self.value)]
        self.group = 1  # query heads that share a key head
        if enable_gqa:
            query_heads, key_heads = leads[0][-1], leads[1][-1]
            self.group = query_heads // key_heads
            batch = numpy.broadcast_shapes(*(lead[:-1] for lead in leads))
            self.lead = (*batch, query_heads)
        else:
            self.lead = numpy.broadcast_shapes(*leads)  # (B…, Hq); () at rank 2

    # -- reading -----------------------------------------------------------------------------------

    def read(self, array, index: Index):
        return self.number(array[place(array.shape, index)])

    def rows(self) -> Iterator[tuple[Index, int]]:
        return product(product(*map(range, self.lead)), range(self.query_length))

    def key_lead(self, lead: Index) -> Index:
        """Batch index and key head of a batch index and query head."""
        return (*lead[:-1], lead[-1] // self.group) if lead else ()

    # -- who sees whom -----------------------------------------------------------------------------

    def lengths(self, batch: Index) -> tuple[int, int]:
        query_length, key_length = self.query_length, self.key_length
        if self.query_lengths is not None:
            query_length = int(self.query_lengths[place(self.query_lengths.shape, batch)])
        if self.key_lengths is not None:
            key_length = int(self.key_lengths[place(self.key_lengths.shape, batch)])
        return query_length, key_length

    def position(self, batch: Index, i: int) -> int:
        """p(i): where among the keys query i stands."""
        if self.query_offset is not None:
            return i + int(self.query_offset[place(self.query_offset.shape, batch)])
        if self.alignment == "lower_right":
            query_length, key_length = self.lengths(batch)
            return i + key_length - query_length
        return i

    def is_visible(self, lead: Index, i: int, j: int) -> bool:
        batch = lead[:-1]
        query_length, key_length = self.lengths(batch)
        if i >= query_length or j >= key_length:
            return False
        position = self.position(batch, i)
        if self.is_causal and j > position:
            return False
        if self.window is not None:
            left, right = self.window
            if left is not None and j < position - left:
                return False
            if right is not None and j > position + right:
                return False
        if self.query_segments is not None:
            query_segment = self.query_segments[place(self.query_segments.shape, (*batch, i))]
            key_segment = self.key_segments[place(self.key_segments.shape, (*batch, j))]
            if query_segment != key_segment:
                return False
        if self.mask is not None and self.mask[place(self.mask.shape, (*lead, i, j))] == 0:
            return False
        return self.bias is None or self.read(self.bias, (*lead, i, j)).real != -math.inf

    # -- one entry, one row ------------------------------------------------------------------------

    def product(self, lead: Index, i: int, j: int, factor=1.0):
        """(factor · query i) · (key j)."""
        key_lead = self.key_lead(lead)
        total = self.number(0)
        for e in range(self.head_size):
            total += factor * self.read(self.query, (*lead, i, e)) * self.read(self.key, (*key_lead, j, e))
        return total

    def score(self, lead: Index, i: int, j: int):
        return self.product(lead, i, j, self.scale)

    def cap(self, score):
        return score if self.softcap is None else self.softcap * self.math.tanh(score / self.softcap)

    def distance(self, lead: Index, i: int, j: int) -> int:
        return abs(self.position(lead[:-1], i) - j)

    def logit(self, lead: Index, i: int, j: int):
        logit = self.cap(self.score(lead, i, j))
        if self.alibi_slopes is not None:
            logit -= self.read(self.alibi_slopes, lead) * self.distance(lead, i, j)
        if self.bias is not None:
            logit += self.read(self.bias, (*lead, i, j))
        return logit

    def row(self, lead: Index, i: int) -> Row:
        keys = [j for j in range(self.key_length) if self.is_visible(lead, i, j)]
        logits = [self.logit(lead, i, j) for j in keys]
        sink = self.number(-math.inf) if self.sinks is None else self.read(self.sinks, lead)
        if sink.real == math.inf:
            return Row(keys, logits, [self.number(0)] * len(keys), self.number(1), sink)
        if all(number.real == -math.inf for number in [*logits, sink]):
            return Row(keys, logits, [self.number(0)] * len(keys), self.number(0), self.number(-math.inf))
        shift = max(number.real for number in [*logits, sink])
        exponentials = [self.math.exp(logit - shift) for logit in logits]
        sink_exponential = self.math.exp(sink - shift)
        total = sum(exponentials) + sink_exponential
        weights = [exponential / total for exponential in exponentials]
        return Row(keys, logits, weights, sink_exponential / total, shift + self.math.log(total))

    def dropout_factor(self, lead: Index, i: int, j: int) -> float:
        if self.dropout_mask is None:
            return 1.0
        if self.dropout_p == 1 or not self.dropout_mask[place(self.dropout_mask.shape, (*lead, i, j))]:
            return 0.0
        return 1 / (1 - float(self.dropout_p))

    # -- the whole ---------------------------------------------------------------------------------

    def zeros(self, *shape: int) -> numpy.ndarray:
        return numpy.zeros(shape, dtype=self.number)

    def forward(self) -> Forward:
        plane = (*self.lead, self.query_length, self.key_length)
        output = self.zeros(*self.lead, self.query_length, self.value_head_size)
        lse = self.zeros(*self.lead, self.query_length)
        weights, scores, capped_scores, logits = (self.zeros(*plane) for _ in range(4))
        for lead, i in self.rows():
            for j in range(self.key_length):
                scores[(*lead, i, j)] = score = self.score(lead, i, j)
                capped_scores[(*lead, i, j)] = self.cap(score)
                logits[(*lead, i, j)] = -math.inf
            row = self.row(lead, i)
            lse[(*lead, i)] = row.lse
            for j, logit, weight in zip(row.keys, row.logits, row.weights, strict=True):
                logits[(*lead, i, j)] = logit
                weights[(*lead, i, j)] = weight
                dropped_weight = weight * self.dropout_factor(lead, i, j)
                for e in range(self.value_head_size):
                    value = self.read(self.value, (*self.key_lead(lead), j, e))
                    output[(*lead, i, e)] += dropped_weight * value
        return Forward(output, lse, weights, scores, capped_scores, logits)

    def backward(self, grad_output, grad_lse, grad_weights) -> Gradients:
        grad_output, grad_lse, grad_weights = (
            as_array(grad_output),
            as_array(grad_lse),
            as_array(grad_weights),
        )
        if number_type([grad_output, grad_lse, grad_weights]) == (complex, cmath):
            self.number, self.math = complex, cmath
        gradients = Gradients(
            self.zeros(*self.query.shape),
            self.zeros(*self.key.shape),
            self.zeros(*self.value.shape),
            None if self.bias is None else self.zeros(*self.bias.shape),
            None if self.sinks is None else self.zeros(*self.sinks.shape),
            None if self.alibi_slopes is None else self.zeros(*self.alibi_slopes.shape),
            self.zeros(),
            None if self.softcap is None else self.zeros(),
        )
        for lead, i in self.rows():
            self.row_backward(lead, i, grad_output, grad_lse, grad_weights, gradients)
        return gradients

    def row_backward(self, lead: Index, i: int, grad_output, grad_lse, grad_weights, gradients: Gradients):
        row = self.row(lead, i)
        if row.lse.real == -math.inf:
            return
        grad_row_lse = self.number(0) if grad_lse is None else self.read(grad_lse, (*lead, i))

        grad_row_weights = []
        for j, weight in zip(row.keys, row.weights, strict=True):
            grad_weight = self.number(0)
            if grad_weights is not None:
                grad_weight += self.read(grad_weights, (*lead, i, j))
            if grad_output is not None:
                factor = self.dropout_factor(lead, i, j)
                for e in range(self.value_head_size):
                    value_index = (*self.key_lead(lead), j, e)
                    upstream = self.read(grad_output, (*lead, i, e))
                    grad_weight += factor * upstream * self.read(self.value, value_index)
                    accumulate(gradients.value, value_index, factor * weight * upstream)
            grad_row_weights.append(grad_weight)

        # ∂weight_j/∂logit_k = weight_j (δ_jk − weight_k) and ∂lse/∂logit_k = weight_k; the sink is one
        # more k.
        mean = sum(w * g for w, g in zip(row.weights, grad_row_weights, strict=True))
        for j, weight, grad_weight in zip(row.keys, row.weights, grad_row_weights, strict=True):
            self.logit_backward(lead, i, j, weight * (grad_weight - mean + grad_row_lse), gradients)
        if self.sinks is not None:
            accumulate(gradients.sinks, lead, row.sink_weight * (grad_row_lse - mean))

    def logit_backward(self, lead: Index, i: int, j: int, grad_logit, gradients: Gradients):
        if self.bias is not None:
            accumulate(gradients.bias, (*lead, i, j), grad_logit)
        if self.alibi_slopes is not None:
            accumulate(gradients.alibi_slopes, lead, -self.distance(lead, i, j) * grad_logit)

        grad_score = grad_logit
        if self.softcap is not None:
            ratio = self.score(lead, i, j) / self.softcap
            tanh = self.math.tanh(ratio)
            grad_score = grad_logit * (1 - tanh * tanh)
            accumulate(gradients.softcap, (), grad_logit * tanh - grad_score * ratio)

        accumulate(gradients.scale, (), grad_score * self.product(lead, i, j))
        for e in range(self.head_size):
            query_index, key_index = (*lead, i, e), (*self.key_lead(lead), j, e)
            accumulate(gradients.query, query_index, grad_score * self.scale * self.read(self.key, key_index))
            accumulate(gradients.key, key_index, grad_score * self.scale * self.read(self.query, query_index))


def number_type(arrays):
    is_complex = any(numpy.iscomplexobj(array) for array in arrays if array is not None)
    return (complex, cmath) if is_complex else (float, math)


def default_scale(head_size: int) -> float:
    return 1 / math.sqrt(head_size) if head_size else 1.0


def as_array(array):
    return None if array is None else numpy.asarray(array)


@lru_cache(maxsize=2**16)  # a case asks for each of its few thousand places many times over
def place(shape: Index, index: Index) -> Index:
    """Where an array that broadcasts keeps an entry: leading axes may be missing, axes of size 1 stay."""
    index = index[len(index) - len(shape) :]
    return tuple(0 if size == 1 else i for size, i in zip(shape, index, strict=True))


def accumulate(gradient: Any, index: Index, amount) -> None:
    """The adjoint of reading by `place`: what one entry gave to many comes back summed."""
    gradient[place(gradient.shape, index)] += amount


# -- second order, by complex step -----------------------------------------------------------------


class Tangents(NamedTuple):
    output: numpy.ndarray
    lse: numpy.ndarray
    weights: numpy.ndarray


def jvp(directions: dict[str, Any], query, key, value, mask=None, **options) -> Tangents:
    """Derivative of output, lse and weights along `directions`, by input name."""
    moved = step(directions, {"query": query, "key": key, "value": value, **options})
    stepped = forward(mask=mask, **moved)
    return Tangents(*(tangent(array) for array in (stepped.output, stepped.lse, stepped.weights)))


def double_backward(
    cotangents: dict[str, Any],
    grad_output,
    query,
    key,
    value,
    mask=None,
    *,
    grad_lse=None,
    grad_weights=None,
    **options,
) -> tuple[Gradients, Tangents]:
    """Gradient of Σ⟨cotangent, backward(…)⟩ for every input and for every upstream gradient.

    The backward is a gradient, so its own derivative is symmetric: the first part is the backward's
    derivative along the cotangents, the second is the derivative of the forward results along them.
    """
    moved = step(cotangents, {"query": query, "key": key, "value": value, **options})
    stepped = backward(grad_output, mask=mask, grad_lse=grad_lse, grad_weights=grad_weights, **moved)
    gradients = Gradients(*(None if array is None else tangent(array) for array in stepped))
    return gradients, jvp(cotangents, query, key, value, mask, **options)


def step(directions: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    moved = {"scale": default_scale(numpy.shape(inputs["query"])[-1]), **inputs}
    moved["query"] = numpy.asarray(inputs["query"]).astype(complex)  # complex even where no direction is
    for name, direction in directions.items():
        # To complex128 first: a float16 or float32 array times 1j is complex64, in which the step is lost.
        start, direction = (numpy.asarray(array).astype(complex) for array in (moved[name], direction))
        moved[name] = start + 1j * COMPLEX_STEP * direction
    return moved


def tangent(stepped: numpy.ndarray) -> numpy.ndarray:
    return stepped.imag / COMPLEX_STEP
