"""Why divide by √d_k? The question answered by experiment, with this library's own forward and backward.

For independent entries with mean 0 and variance 1, q·k = Σ q_i k_i has mean 0, variance d_k. `measure` draws them and
looks at the scores, the softmax and the gradients with scale 1/√d_k, 1 and 1/d_k, then at a real model's tensors;
`why_scale_figure.plot` draws what was seen.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from numpy_sdpa.attention import sdpa_backward, sdpa_forward
from numpy_sdpa.data import load_model_tensors

D_K = (4, 16, 64, 256, 1024, 4096)
LENGTH = 16  # short enough to show every weight of a row as a bar
SAMPLES = 10_000  # intervals of about ±5 % for the variance and ±0.01 for the exponent
MIN_SAMPLES = 100  # with fewer, the sample's fourth moment is too poor: 99 % is 98.4 % at 100 (docs/why_scale.md)
MAX_LENGTH = 4096  # the dense method holds several arrays of length × length
JOINT_LEVEL = 0.99
SATURATED = 0.99  # a row is called saturated where its largest weight passes this
SCALES: dict[str, Callable[[int], float]] = {
    "1/sqrt(d_k)": lambda d_k: 1 / math.sqrt(d_k),
    "1": lambda d_k: 1.0,
    "1/d_k": lambda d_k: 1 / d_k,
}
SCALED, UNSCALED, OVERSCALED = SCALES
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-math.sqrt(3), math.sqrt(3), shape),
    "rademacher": lambda rng, shape: 2.0 * rng.integers(0, 2, shape, dtype=np.int8) - 1,
}
_VALUE_SIZE = 64  # the same for every d_k, so that the upstream gradient is too
_ATTENTION_ROWS = 2048  # rows per d_k: a share of rows is then known to about ±0.02
_ENTRIES_AT_ONCE = 2**20  # 8 MiB: draws stay near the cache and memory does not grow with d_k


class Moments(NamedTuple):
    """Mean and variance of a sample along its last axis, with their standard errors."""

    mean: Any
    mean_error: Any
    variance: Any
    log_variance_error: Any


class ScoreStatistics(NamedTuple):
    """One entry for each d_k, and the exponent. All intervals hold the truth at once with probability `JOINT_LEVEL`."""

    means: list[float]
    mean_intervals: list[list[float]]
    variances: list[float]
    variance_intervals: list[list[float]]
    exponent: float
    exponent_interval: list[float]


def measure(
    d_k: Sequence[int] = D_K,
    *,
    length: int = LENGTH,
    samples: int = SAMPLES,
    distribution: str = "normal",
    seed: int = 0,
) -> dict[str, Any]:
    """The whole experiment, in numbers.

    Parameters
    ----------
    d_k : sequence of int
        Key sizes, at least two different ones: the growth of the variance is fitted over them.
    length : int, 2 to 4096
        Number of keys in a row (and of rows in a sequence).
    samples : int, at least 100
        Number of independent pairs q, k for each d_k.
    distribution : "normal", "uniform" or "rademacher"
        Of each entry of query, key and value; each has mean 0 and variance 1.
    seed : int, at least 0

    Returns
    -------
    dict, of what JSON can hold
        rows : one for each d_k and scale. `score_…` are of q·k before any scale. Means over rows: entropy (nats),
            max_weight, jacobian_norm (‖diag(p) − p pᵀ‖_F), grad_query_norm, grad_key_norm and grad_value_norm (the
            length of one row of the gradient, for an upstream gradient of length 1 in each row); `…_median`: medians
            over rows; saturated: the share of rows whose largest weight passes 0.99.
        variance_exponent, variance_exponent_ci : a in variance ∝ d_k^a.
        claims : what was claimed, whether it holds here, and what was seen.
        model : the same on a trained model's tensors. Its tokens are not independent, so there are no intervals.
        example_weights : one row's weights at the largest d_k, for each scale.
        parameters : what was asked.

    Raises
    ------
    ValueError
        Where a parameter is out of range.
    """
    import threadpoolctl

    sizes = sorted(set(d_k))
    _validate(sizes, length, samples, distribution, seed)
    statistics = score_statistics(sizes, samples=samples, distribution=distribution, seed=seed)
    rows: list[dict[str, Any]] = []
    for position, size in enumerate(sizes):
        scores = {
            "score_mean": statistics.means[position],
            "score_mean_ci": statistics.mean_intervals[position],
            "score_variance": statistics.variances[position],
            "score_variance_ci": statistics.variance_intervals[position],
        }
        with threadpoolctl.threadpool_limits(1, user_api="blas"):  # matrices so small that its threads mostly wait
            per_scale, example = _random_attention(size, length, distribution, seed)
        rows += [{"d_k": size, "scale": scale, **scores, **seen} for scale, seen in per_scale.items()]
    result = {
        "parameters": {
            "d_k": sizes,
            "length": length,
            "samples": samples,
            "distribution": distribution,
            "seed": seed,
            "joint_level": JOINT_LEVEL,
        },
        "rows": rows,
        "variance_exponent": statistics.exponent,
        "variance_exponent_ci": statistics.exponent_interval,
        "model": measure_model(),
        "example_weights": {"d_k": sizes[-1], **example},
    }
    return {**result, "claims": _claims(result)}


def agrees_with_derivation(result: dict[str, Any]) -> bool:
    """Whether every joint interval holds what was derived: mean 0, variance d_k, exponent 1."""
    return _means_hold(result) and _variances_hold(result) and _exponent_holds(result)


def jacobian_below_since(result: dict[str, Any]) -> int | None:
    """The d_k from which on the mean Jacobian norm is smaller without the scale than with it, or None."""
    since = None
    pairs = zip(at_scale(result, UNSCALED), at_scale(result, SCALED), strict=True)
    for unscaled, scaled in reversed(list(pairs)):
        if unscaled["jacobian_norm"] >= scaled["jacobian_norm"]:
            break
        since = unscaled["d_k"]
    return since


# --- the scores ---


def score_statistics(d_k: Sequence[int], *, samples: int, distribution: str, seed: int) -> ScoreStatistics:
    """Mean, variance and exponent of the variance of q·k, with joint intervals.

    Notes
    -----
    Bonferroni: of n sizes, 2n + 1 intervals (n means, n variances, the exponent) are each at 1 − (1 − 0.99) / (2n + 1),
    by Student's t with samples − 1 degrees of freedom. The exponent is the slope of log variance over log d_k by least
    squares, weighted by the variances' own standard errors.
    """
    from scipy import special

    each_tail = (1 - JOINT_LEVEL) / (2 * len(d_k) + 1) / 2
    critical = float(special.stdtrit(samples - 1, 1 - each_tail))
    moments = Moments(*np.transpose([sample_moments(_draw_scores(size, samples, distribution, seed)) for size in d_k]))
    coefficients, covariance = np.polyfit(
        np.log(d_k), np.log(moments.variance), 1, w=1 / moments.log_variance_error, cov="unscaled"
    )
    exponent, exponent_error = float(coefficients[0]), math.sqrt(covariance[0, 0])
    mean_margins = critical * moments.mean_error
    variance_factors = np.exp(critical * moments.log_variance_error)
    return ScoreStatistics(
        means=moments.mean.tolist(),
        mean_intervals=_pairs(moments.mean - mean_margins, moments.mean + mean_margins),
        variances=moments.variance.tolist(),
        variance_intervals=_pairs(moments.variance / variance_factors, moments.variance * variance_factors),
        exponent=exponent,
        exponent_interval=[exponent - critical * exponent_error, exponent + critical * exponent_error],
    )


def sample_moments(sample: np.ndarray) -> Moments:
    """Mean and unbiased variance along the last axis, and standard errors of the mean and of the variance's logarithm.

    Notes
    -----
    Var(s²) = σ⁴ (κ − (n − 3) / (n − 1)) / n exactly, with κ = E(x − μ)⁴ / σ⁴; the sample's own κ is put in. A sum of
    products is not normal: κ = 3 + (E q⁴ · E k⁴ − 3) / d_k, so that a chi-square interval is too narrow for normal
    entries and too wide for ±1. The logarithm evens out how often the interval misses on either side. D. G. Bonett,
    2006, doi:10.1016/j.csda.2004.10.003.
    """
    count = sample.shape[-1]
    mean = sample.mean(axis=-1)
    deviation = sample - mean[..., None]
    variance = (deviation**2).sum(axis=-1) / (count - 1)
    kurtosis = (deviation**4).mean(axis=-1) / (deviation**2).mean(axis=-1) ** 2
    log_variance_error = np.sqrt((kurtosis - (count - 3) / (count - 1)) / count)
    return Moments(mean, np.sqrt(variance / count), variance, log_variance_error)


def joint_coverage(
    d_k: Sequence[int], *, samples: int, distribution: str, runs: int, seed: int = 0
) -> dict[str, float]:
    """The share of `runs` experiments in which the intervals hold the truth: what `JOINT_LEVEL` promises, measured.

    Returns
    -------
    dict
        means, variances: all of them; exponent; joint: everything.
    """
    held = []
    for run in range(runs):
        seen = score_statistics(d_k, samples=samples, distribution=distribution, seed=seed + run)
        means = all(low <= 0 <= high for low, high in seen.mean_intervals)
        variances = all(low <= size <= high for size, (low, high) in zip(d_k, seen.variance_intervals, strict=True))
        exponent = seen.exponent_interval[0] <= 1 <= seen.exponent_interval[1]
        held.append((means, variances, exponent, means and variances and exponent))
    return dict(zip(("means", "variances", "exponent", "joint"), np.mean(held, axis=0).tolist(), strict=True))


def _draw_scores(d_k: int, samples: int, distribution: str, seed: int) -> np.ndarray:
    """q·k of independent pairs: no two share a query or a key, since those that do are not independent."""
    rng, _ = _generators(seed, d_k)
    draw = DISTRIBUTIONS[distribution]
    scores = []
    for start in range(0, samples, at_once := max(1, _ENTRIES_AT_ONCE // d_k)):
        shape = (min(at_once, samples - start), d_k)
        scores.append((draw(rng, shape) * draw(rng, shape)).sum(axis=-1))
    return np.concatenate(scores)


def _generators(seed: int, d_k: int) -> list[np.random.Generator]:
    """One stream for the pairs and one for the attention: a size's numbers depend on no other size."""
    return np.random.default_rng((seed, d_k)).spawn(2)


def _pairs(low: np.ndarray, high: np.ndarray) -> list[list[float]]:
    return np.stack([low, high], axis=-1).tolist()


# --- the softmax and the gradients ---


def _random_attention(
    d_k: int, length: int, distribution: str, seed: int
) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """For each scale, what is seen over some 2000 rows; and the weights of the first row."""
    _, rng = _generators(seed, d_k)
    draw = DISTRIBUTIONS[distribution]
    sequences = max(1, _ATTENTION_ROWS // length)
    at_once = max(1, _ENTRIES_AT_ONCE // (length * d_k))
    seen: dict[str, list[np.ndarray]] = {scale: [] for scale in SCALES}
    example: dict[str, list[float]] = {}
    for start in range(0, sequences, at_once):
        batch = min(at_once, sequences - start)
        query, key = (draw(rng, (batch, length, d_k)) for _ in range(2))
        value = draw(rng, (batch, length, _VALUE_SIZE))
        grad_output = rng.standard_normal((batch, length, _VALUE_SIZE))
        grad_output /= np.linalg.norm(grad_output, axis=-1, keepdims=True)
        for name, scale in SCALES.items():
            weights, per_row = _attention_rows(query, key, value, grad_output, scale(d_k))
            seen[name].append(per_row.reshape(len(per_row), -1))
            example.setdefault(name, weights[0, 0].tolist())
    return {name: _summary(np.concatenate(parts, axis=-1)) for name, parts in seen.items()}, example


def _attention_rows(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad_output: np.ndarray,
    scale: float,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The weights (…, L, L) and, for every row, entropy, largest weight, Jacobian norm, gradient norms: (6, …, L)."""
    from scipy import special

    _, residuals = sdpa_forward(query, key, value, mask, scale=scale)
    gradients = sdpa_backward(grad_output, residuals)
    weights = np.asarray(residuals.weights)  # dense, so never None
    gradient_norms = (np.linalg.norm(g, axis=-1) for g in (gradients.query, gradients.key, gradients.value))
    softmax = special.entr(weights).sum(axis=-1), weights.max(axis=-1), jacobian_norm(weights)
    return weights, np.stack([*softmax, *gradient_norms])


def jacobian_norm(weights: np.ndarray) -> np.ndarray:
    """‖diag(p) − p pᵀ‖_F of each row p, without the matrix: (…, S) → (…).

    Its square is Σ p² − 2 Σ p³ + (Σ p²)², which cancels to noise where one weight m is nearly 1. With the others, o,
    apart from it nothing large cancels: m² (Σ o)² + Σ o² (1 − o)² + 2 m² Σ o² + (Σ o²)² − Σ o⁴.
    """
    largest = weights.max(axis=-1)
    is_largest = np.arange(weights.shape[-1]) == weights.argmax(axis=-1)[..., None]
    others = np.where(is_largest, 0, weights)
    squares = (others**2).sum(axis=-1)
    diagonal = (largest * others.sum(axis=-1)) ** 2 + (others**2 * (1 - others) ** 2).sum(axis=-1)
    off_diagonal = 2 * largest**2 * squares + squares**2 - (others**4).sum(axis=-1)
    return np.sqrt(diagonal + off_diagonal)


def _summary(per_row: np.ndarray) -> dict[str, float]:
    """Means and medians over rows of (6, rows)."""
    entropy, max_weight, jacobian, grad_query, grad_key, grad_value = per_row
    return {
        "entropy": float(entropy.mean()),
        "max_weight": float(max_weight.mean()),
        "jacobian_norm": float(jacobian.mean()),
        "jacobian_norm_median": float(np.median(jacobian)),
        "grad_query_norm": float(grad_query.mean()),
        "grad_query_norm_median": float(np.median(grad_query)),
        "grad_key_norm": float(grad_key.mean()),
        "grad_value_norm": float(grad_value.mean()),
        "saturated": float((max_weight > SATURATED).mean()),
    }


def predicted_crossing(length: int) -> float:
    """The d_k from which the mean Jacobian norm should be smaller without the scale than with it, by leading orders.

    Without the scale a row's logits are √d_k times standard normal ones, and the row counts only where its two largest
    are near each other: with c(L) = L (L − 1) ∫ φ² Φ^(L−2), the density at 0 of the gap of the two largest of L, the
    mean norm is c(L) / √d_k · ∫ 2 σ(x) σ(−x) dx over x > 0, which is c(L) / √d_k. With the scale it is near √(Σ p²),
    about √(e / L). The two meet at d_k = c(L)² L / e.
    """
    from scipy import integrate, special

    def integrand(x: float) -> float:
        return math.exp(-(x**2)) / (2 * math.pi) * special.ndtr(x) ** (length - 2)

    density = length * (length - 1) * integrate.quad(integrand, -10, 10)[0]  # φ(10)² is 1e-45
    return density**2 * length / math.e


# --- the real model ---


def measure_model() -> dict[str, Any]:
    """The same measures on one layer of a trained model, over real tokens only."""
    tensors = load_model_tensors()
    real = np.broadcast_to(tensors.mask[:, :, 0, :], tensors.query.shape[:-1])  # (3, 12, 32), by token
    query, key, value, grad_output = (
        array.astype(np.float64) for array in (tensors.query, tensors.key, tensors.value, tensors.grad_output)
    )
    d_k = query.shape[-1]
    scores = query @ key.mT
    visible = real[..., :, None] & tensors.mask
    variance = float(scores[visible].var(ddof=1))
    row_variances = scores[real].var(axis=-1, ddof=1, where=visible[real])
    head_variances = [float(scores[:, head][visible[:, head]].var(ddof=1)) for head in range(scores.shape[1])]
    rows = []
    for name, scale in SCALES.items():
        _, per_row = _attention_rows(query, key, value, grad_output, scale(d_k), tensors.mask)
        rows.append({"scale": name, **_summary(per_row[:, real])})
    return {
        "source": "all-MiniLM-L6-v2, layer 3, 3 sentences, 12 heads",
        "d_k": d_k,
        "pairs": int(visible.sum()),
        "query_mean": float(query[real].mean()),
        "query_variance": float(query[real].var()),
        "key_mean": float(key[real].mean()),
        "key_variance": float(key[real].var()),
        "score_mean": float(scores[visible].mean()),
        "score_variance": variance,
        "score_variance_scaled": variance / d_k,
        "score_variance_within_rows": float(row_variances.mean()),
        "score_variance_per_head": head_variances,
        "rows": rows,
    }


# --- what was seen, in sentences ---

Claim = tuple[str, bool, str]
_MODEL_TOLERANCE = 0.1  # the model's pairs share tokens, so no interval: a tenth is what "equal to d_k" may mean
_GROWTH_TOLERANCE = 0.1  # of a gradient norm's power of d_k: a wrong scale costs 0.5; d_k = 4, not yet Gaussian, 0.02


def _claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    model_claims = _model_claims(result["model"])
    claims = [*_score_claims(result), *_softmax_claims(result), *_gradient_claims(result), *model_claims]
    return [{"claim": claim, "holds": bool(holds), "evidence": evidence} for claim, holds, evidence in claims]


def _score_claims(result: dict[str, Any]) -> list[Claim]:
    rows, parameters = at_scale(result, SCALED), result["parameters"]
    drawn = (
        f"{parameters['samples']} independent pairs of {parameters['distribution']} entries for each d_k, "
        f"joint {parameters['joint_level']:.0%} intervals"
    )
    mean = max(rows, key=lambda row: abs(row["score_mean"]) / math.sqrt(row["d_k"]))
    variance = max(rows, key=lambda row: abs(math.log(row["score_variance"] / row["d_k"])))
    low, high = result["variance_exponent_ci"]
    return [
        (
            "q.k has mean 0",
            _means_hold(result),
            f"farthest off: {mean['score_mean']:.3g} at d_k {mean['d_k']}, interval {_range(mean['score_mean_ci'])} "
            f"({drawn})",
        ),
        (
            "q.k has variance d_k, and 1/sqrt(d_k) brings it back to 1",
            _variances_hold(result),
            f"farthest off: {variance['score_variance']:.4g} at d_k {variance['d_k']}, interval "
            f"{_range(variance['score_variance_ci'])}; {variance['score_variance'] / variance['d_k']:.3g} when scaled",
        ),
        (
            "the variance grows in proportion to d_k",
            _exponent_holds(result),
            f"it grows as d_k^{result['variance_exponent']:.4f}, interval {low:.4f} to {high:.4f}",
        ),
    ]


def _softmax_claims(result: dict[str, Any]) -> list[Claim]:
    unscaled, scaled = at_scale(result, UNSCALED), at_scale(result, SCALED)
    first, last, kept = unscaled[0], unscaled[-1], scaled[-1]
    length = result["parameters"]["length"]
    since = jacobian_below_since(result)
    where = f"below the scaled one from d_k {since} on" if since else f"not below the scaled one at d_k {last['d_k']}"
    return [
        (
            "without the scale the softmax saturates as d_k grows",
            last["saturated"] > max(first["saturated"], kept["saturated"]),
            f"rows of {length} keys whose largest weight passes {SATURATED}: {first['saturated']:.1%} at "
            f"d_k {first['d_k']}, {last['saturated']:.1%} at d_k {last['d_k']}, where with 1/sqrt(d_k) it is "
            f"{kept['saturated']:.1%}",
        ),
        (
            f"without the scale the softmax Jacobian is smaller than with it, in rows of {length} keys",
            since is not None,
            f"mean norm {last['jacobian_norm']:.3g} against {kept['jacobian_norm']:.3g} at d_k {last['d_k']}, {where}; "
            "longer rows need a larger d_k, for their scaled Jacobian is small too, about sqrt(e / length)",
        ),
    ]


def _gradient_claims(result: dict[str, Any]) -> list[Claim]:
    scaled, unscaled, overscaled = (at_scale(result, scale) for scale in SCALES)
    first, last, kept = unscaled[0], unscaled[-1], scaled[-1]
    ends = f"from d_k {first['d_k']} to {last['d_k']}"
    growths = {name: _growth(scaled, f"grad_{name}_norm") for name in ("query", "key", "value")}
    fall = _growth(overscaled, "grad_query_norm")
    return [
        (
            "without the scale a typical query's gradient vanishes as d_k grows",
            last["grad_query_norm_median"] < min(first["grad_query_norm_median"], kept["grad_query_norm_median"]),
            f"the median over queries goes from {first['grad_query_norm_median']:.3g} to "
            f"{last['grad_query_norm_median']:.3g} {ends}; with 1/sqrt(d_k) it is "
            f"{kept['grad_query_norm_median']:.3g} there",
        ),
        (
            "without the scale the mean over queries vanishes too",
            last["grad_query_norm"] < min(first["grad_query_norm"], kept["grad_query_norm"]),
            f"the mean goes from {first['grad_query_norm']:.3g} to {last['grad_query_norm']:.3g} {ends}; with "
            f"1/sqrt(d_k) it is {kept['grad_query_norm']:.3g} there: the few rows with two nearly equal logits carry "
            "it, for their gradients grow as sqrt(d_k)",
        ),
        (
            "1/sqrt(d_k) keeps the gradients' size, whatever d_k",
            all(abs(growth) < _GROWTH_TOLERANCE for growth in growths.values()),
            "the mean norms change as " + ", ".join(f"d_k^{growth:.3f} ({name})" for name, growth in growths.items()),
        ),
        (
            "1/d_k is too much: the gradient of a query falls as 1/sqrt(d_k)",
            abs(fall + 0.5) < _GROWTH_TOLERANCE,
            f"its mean norm changes as d_k^{fall:.3f}; the weights become equal, with entropy "
            f"{overscaled[-1]['entropy']:.4g} nats at d_k {last['d_k']}, and ln(length) is "
            f"{math.log(result['parameters']['length']):.4g}",
        ),
    ]


def _model_claims(model: dict[str, Any]) -> list[Claim]:
    d_k, variance, per_head = model["d_k"], model["score_variance"], model["score_variance_per_head"]
    saturated = {row["scale"]: row["saturated"] for row in model["rows"]}
    return [
        (
            "a trained model's q.k has variance d_k too",
            abs(variance / d_k - 1) < _MODEL_TOLERANCE,
            f"{model['source']}: {variance:.4g} at d_k {d_k}, {model['score_variance_scaled']:.3g} after the scale "
            f"({min(per_head) / d_k:.2g} to {max(per_head) / d_k:.2g} by head), where the entries' own variances, "
            f"{model['query_variance']:.3g} (query) and {model['key_variance']:.3g} (key), would give "
            f"{model['query_variance'] * model['key_variance']:.3g}: trained entries are not independent",
        ),
        (
            "without the scale a trained model's softmax saturates",
            saturated[UNSCALED] > saturated[SCALED],
            f"rows whose largest weight passes {SATURATED}: {saturated[UNSCALED]:.1%} without the scale, "
            f"{saturated[SCALED]:.1%} with the 1/sqrt(d_k) that it was trained with",
        ),
    ]


def _range(interval: Sequence[float]) -> str:
    return f"{interval[0]:.4g} to {interval[1]:.4g}"


def at_scale(result: dict[str, Any], scale: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["scale"] == scale]


def _growth(rows: list[dict[str, Any]], measure: str) -> float:
    """a in measure ∝ d_k^a, by least squares."""
    slope, _ = np.polyfit(np.log([row["d_k"] for row in rows]), np.log([row[measure] for row in rows]), 1)
    return float(slope)


def _means_hold(result: dict[str, Any]) -> bool:
    return all(low <= 0 <= high for low, high in (row["score_mean_ci"] for row in result["rows"]))


def _variances_hold(result: dict[str, Any]) -> bool:
    return all(row["score_variance_ci"][0] <= row["d_k"] <= row["score_variance_ci"][1] for row in result["rows"])


def _exponent_holds(result: dict[str, Any]) -> bool:
    low, high = result["variance_exponent_ci"]
    return low <= 1 <= high


# --- parameters ---


def _validate(sizes: Sequence[int], length: int, samples: int, distribution: str, seed: int) -> None:
    if len(sizes) < 2:
        raise ValueError(f"d_k must have at least two different sizes, for the growth with d_k, got {list(sizes)}")
    if sizes[0] < 1:
        raise ValueError(f"d_k must be at least 1, got {sizes[0]}")
    if not 2 <= length <= MAX_LENGTH:
        raise ValueError(f"length must be in 2 to {MAX_LENGTH}, got {length}")
    if samples < MIN_SAMPLES:
        raise ValueError(f"samples must be at least {MIN_SAMPLES}, for a fourth moment to be seen, got {samples}")
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
