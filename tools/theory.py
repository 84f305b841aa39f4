"""What drafting should bring, from what was measured: Leviathan et al., arXiv:2211.17192, with the cost of a pass.

A draft of γ tokens, each kept with chance α if those before it are, brings (1 - α^(γ+1)) / (1 - α) tokens, and costs
v(γ) + γ c plain passes: v(γ) what verifying takes, c what drafting a token takes. This module knows rounds and
milliseconds; it does not know who drafted.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from specdec.runtime.request import Round


def acceptance(history: Sequence[Round]) -> float | None:
    """α, most likely for these rounds: kept / (kept + rounds that rejected a token). None where nothing was drafted.

    Accepted over proposed is another figure: a rejection also throws away what was drafted after it.
    """
    kept = sum(each.kept for each in history)
    rejected = sum(each.kept < each.depth for each in history)
    return kept / (kept + rejected) if kept + rejected else None


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens that a round with a draft of `depth` tokens brings, the target's own included."""
    return sum(alpha**place for place in range(depth + 1))


def predicted_speedup(
    history: Sequence[Round], draft_ms: float, pass_ms: Mapping[int, float], least: int, decode_ms: float
) -> float | None:
    """Speedup of rounds with these drafts: tokens by the formula over v(γ) + γ c, summed over rounds.

    `pass_ms`: of a pass, by its width. `least`: narrowest pass that is run. `decode_ms`: t_decode, a pass of plain
    decoding. `draft_ms`: of all drafting, which is the sum of γ c. None where nothing was drafted.
    """
    alpha = acceptance(history)
    if alpha is None or not decode_ms:
        return None
    tokens = sum(expected_tokens(alpha, each.depth) for each in history)
    passes = sum(_between(pass_ms, max(least, each.depth + 1)) for each in history)
    return tokens * decode_ms / (passes + draft_ms)


def _between(pass_ms: Mapping[int, float], width: int) -> float:
    """Milliseconds at a width: linear between the measured ones, and beyond them as between the last two."""
    widths = sorted(pass_ms)
    if len(widths) == 1:
        return pass_ms[widths[0]]
    after = min(max(bisect_left(widths, width), 1), len(widths) - 1)
    low, high = widths[after - 1 : after + 1]
    return pass_ms[low] + (pass_ms[high] - pass_ms[low]) * (width - low) / (high - low)
