"""Finds the number of workers for a load by simulation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cli.bench.verdict import MAX_GROWTH, MIN_GOOD_SHARE
from cli.plan.replay import Outcome, Played
from cli.plan.requests import spread

MAX_WORKERS = 256
Play = Callable[[int], Played]  # by number of workers


@dataclass(frozen=True)
class Enough:
    """The result of ``num`` workers; a non-empty ``problem`` explains why no number is enough."""

    num: int
    played: Played
    problem: str = ""


def enough_workers(play: Play, targets_ms: dict[str, float]) -> Enough:
    """The smallest number that keeps up, or the number beyond which more workers do not help."""
    found = Enough(1, play(1))
    while problems := objections(found.played, targets_ms):
        more = Enough(2 * found.num, play(2 * found.num))
        if more.num > MAX_WORKERS or _brings_nothing(found, more, targets_ms):
            text = f"{found.num} workers are not enough, and more do not help: "
            return replace(found, problem=text + "; ".join(problems))
        found = more
    below = found.num // 2
    while found.num - below > 1:
        middle = (found.num + below) // 2
        if objections(played := play(middle), targets_ms):
            below = middle
        else:
            found = Enough(middle, played)
    return found


def _brings_nothing(fewer: Enough, more: Enough, targets_ms: dict[str, float]) -> bool:
    """True if most workers are idle, and twice as many do not meet more targets."""
    is_idle = fewer.played.num_open < fewer.num / 2
    return is_idle and (
        good_share(more.played.outcomes, targets_ms)
        <= good_share(fewer.played.outcomes, targets_ms)
    )


def objections(played: Played, targets_ms: dict[str, float]) -> list[str]:
    """Reasons for a negative verdict, by the rules of ``shoal bench serve --verdict``."""
    found = []
    if targets_ms:
        share = good_share(played.outcomes, targets_ms)
        if share < MIN_GOOD_SHARE:
            found.append(f"{share:.1%} met the targets, not {MIN_GOOD_SHARE:.0%}")
    ttfts_ms = [each.ttft_s * 1000 for each in _whole(played.outcomes)]
    if third := len(ttfts_ms) // 3:
        first_ms, last_ms = sum(ttfts_ms[:third]) / third, sum(ttfts_ms[-third:]) / third
        if last_ms > MAX_GROWTH * first_ms:
            found.append(f"the queue grows: mean TTFT went from {first_ms:.1f} to {last_ms:.1f} ms")
    return found


def good_share(outcomes: Sequence[Outcome], targets_ms: dict[str, float]) -> float:
    """The share among requests that a worker can take at all."""
    whole = _whole(outcomes)
    return sum(_meets(each, targets_ms) for each in whole) / len(whole) if whole else 0.0


def _meets(outcome: Outcome, targets_ms: dict[str, float]) -> bool:
    e2e_s = outcome.last_s - outcome.arrived_s
    times_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2e": e2e_s}
    return all(times_s[name] * 1000 <= limit for name, limit in targets_ms.items())


def _whole(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if not each.error]


def describe(played: Played, targets_ms: dict[str, float]) -> dict[str, Any]:
    """For JSON."""
    whole = _whole(played.outcomes)
    tpots = [each.tpot_s * 1000 for each in whole if each.tpot_s is not None]
    return {
        "num_requests": len(played.outcomes),
        "num_refused": len(played.outcomes) - len(whole),
        "good_share": good_share(played.outcomes, targets_ms) if targets_ms else None,
        "output_tokens_per_s": played.output_tokens_per_s,
        "prompt_tokens_per_s": sum(each.request.num_prompt_tokens for each in whole)
        / played.duration_s,
        "ttft_ms": spread([each.ttft_s * 1000 for each in whole]) if whole else None,
        "tpot_ms": spread(tpots) if tpots else None,
        "num_open": played.num_open,
        "num_preemptions": played.num_preemptions,
    }
