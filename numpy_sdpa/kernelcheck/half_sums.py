"""How large errors are where a kernel adds up in a half type: measured by doing so, not guessed."""

from collections.abc import Iterable, Mapping

from numpy_sdpa.kernelcheck.problem import Array, Problem


def explains_by_half_sums(
    problem: Problem, gold: Mapping[str, Array], badness: Mapping[str, Array], names: Iterable[str]
) -> dict[str, float] | None:
    return None
