"""An evaluation in words: `evaluation.json` as tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from entropy_experiments.report import words
from entropy_experiments.results import AnyNumber, EvaluationResult

TOKENS_SHOWN = 8
REWARD = "reward:"
"""Before the name of a reward function whose mean was measured: one that is no pass or fail."""

HEADS = {
    "pass_rate": "pass rate",
    "format_rate": "format",
    "length": "tokens",
    "high_entropy_share": "tokens above the threshold",
}


def evaluation_report(result: EvaluationResult) -> list[str]:
    """Lines: what was asked, a row per checkpoint, changes from the first, tokens in doubt."""
    settings = result["settings"]
    split = f", split {settings['split']}" if settings["split"] else ""
    distribution = f"temperature {settings['temperature']:g}, top_p {settings['top_p']:g}"
    lines = [
        f"{settings['dataset']}{split}: {settings['prompts']} prompts, {settings['samples']} "
        f"responses each, {distribution}, at most {settings['max_new_tokens']} tokens, seed "
        f"{settings['seed']}",
        f"A response passes with {' and '.join(settings['rewards'])} at least 1. Intervals: "
        "95 %, by prompt.",
    ]
    lines += _table("Task", *_task(result))
    lines += _table("Responses", *_responses(result))
    if result["differences"]:
        lines += _table(*_changes(result))
    lines += _agreement(result)
    lines += _tokens(result)
    lines += _doubts(result)
    return lines


def _task(result: EvaluationResult) -> tuple[list[str], list[list[str]]]:
    names = ["pass_rate", *(f"pass@{k}" for k in result["k"] if k > 1), "format_rate", "answered"]
    graded = _graded(result)
    rows = [
        [
            one["label"],
            *(_percent(one["measures"][name]) for name in names),
            *(_mean(one["measures"].get(name)) for name in graded),
        ]
        for one in result["checkpoints"]
    ]
    means = (f"mean {name.removeprefix(REWARD)}" for name in graded)
    return ["checkpoint", *(HEADS.get(name, name) for name in names), *means], rows


def _graded(result: EvaluationResult) -> list[str]:
    """Reward functions that gave some checkpoint something else than 0 and 1."""
    every = (name for one in result["checkpoints"] for name in one["measures"])
    return [name for name in dict.fromkeys(every) if name.startswith(REWARD)]


def _mean(number: AnyNumber | None) -> str:
    return "0s and 1s alone" if number is None else _plain(number, 3)


def _responses(result: EvaluationResult) -> tuple[list[str], list[list[str]]]:
    limit = result["settings"]["threshold"]
    head = ["checkpoint", "tokens", "5 | 50 | 95 %", "truncated", "entropy", "surprisal"]
    rows = []
    for one in result["checkpoints"]:
        measures, quantile = one["measures"], one["length_quantiles"]
        rows.append(
            [
                one["label"],
                _plain(measures["length"], 1),
                " | ".join(f"{quantile[q]:.0f}" for q in ("0.05", "0.5", "0.95")),
                _percent(measures["truncated"]),
                _plain(measures["entropy"], 3),
                _plain(measures["surprisal"], 3),
                _percent(measures["high_entropy_share"]),
            ]
        )
    return [*head, f"above {limit:.2g} nats"], rows


def _changes(result: EvaluationResult) -> tuple[str, list[str], list[list[str]]]:
    largest = f"pass@{max(result['k'])}"
    names = ["pass_rate", *([largest] if largest != "pass@1" else []), "format_rate"]
    graded = _graded(result)
    rows = [
        [
            one["label"],
            *(_points(one["measures"][name]) for name in names),
            *(_change(one["measures"].get(name)) for name in graded),
            _signed(one["measures"]["length"], 1),
            _signed(one["measures"]["entropy"], 3),
        ]
        for one in result["differences"]
    ]
    first = result["differences"][0]["from"]
    means = [f"mean {name.removeprefix(REWARD)}" for name in graded]
    head = ["checkpoint", "pass rate, points", *names[1:-1], "format", *means, "tokens", "entropy"]
    return f"Change from {first}, same prompts and seeds", head, rows


def _change(number: AnyNumber | None) -> str:
    return "0s and 1s alone" if number is None else _signed(number, 3)


def _tokens(result: EvaluationResult) -> list[str]:
    lines = ["", "Tokens drawn in most doubt (mean entropy in nats, times drawn)"]
    for one in result["checkpoints"]:
        shown = one["high_entropy_tokens"][:TOKENS_SHOWN]
        tokens = ", ".join(f"{t['token']!r} {t['mean_entropy']:.2f} ({t['count']})" for t in shown)
        lines.append(f"  {one['label']}: {tokens or 'no token was drawn often enough'}")
    return lines


def _agreement(result: EvaluationResult) -> list[str]:
    """Surprisal and entropy have one mean where the distribution sampled is the one scored."""
    gaps = {
        one["label"]: one["measures"]["surprisal_minus_entropy"] for one in result["checkpoints"]
    }
    values = [f"{label} {_signed(gap, 4)}" for label, gap in gaps.items()]
    lines = ["", "Surprisal minus entropy, where 0 is expected: " + ", ".join(values)]
    off = [
        label
        for label, gap in gaps.items()
        if gap["interval"] is not None and not gap["interval"][0] <= 0 <= gap["interval"][1]
    ]
    if off:
        lines.append(
            f"  {', '.join(off)}: not 0. That is chance one time in 20 (checkpoints share their "
            "seeds, and so their luck); far from 0, the distribution sampled is not the one scored."
        )
    return lines


def _doubts(result: EvaluationResult) -> list[str]:
    """Which intervals are missing, and why."""
    missing: dict[str, list[str]] = {}
    for one in result["checkpoints"]:
        for name, measure in one["measures"].items():
            for why in measure["why_not"] if measure["interval"] is None else ():
                missing.setdefault(why, []).append(f"{_spelled(name)} of {one['label']}")
    lines = [f"No interval for {', '.join(names)}: {why}." for why, names in missing.items()]
    return ["", *lines] if lines else []


def _spelled(measure: str) -> str:
    """The name of a measure as the tables' heads have it."""
    if measure.startswith(REWARD):
        return f"mean {measure.removeprefix(REWARD)}"
    return HEADS.get(measure, measure.replace("_", " "))


def _percent(number: AnyNumber) -> str:
    bar = number["interval"]
    ends = "" if bar is None else f" ({100 * bar[0]:.1f}–{100 * bar[1]:.1f})"
    return f"{100 * number['value']:.1f} %{ends}"


def _points(number: AnyNumber) -> str:
    scaled: AnyNumber = {
        "value": 100 * number["value"],
        "interval": None if number["interval"] is None else [100 * x for x in number["interval"]],
    }
    return _signed(scaled, 1)


def _plain(number: AnyNumber, digits: int) -> str:
    bar = number["interval"]
    ends = "" if bar is None else f" ({bar[0]:.{digits}f}–{bar[1]:.{digits}f})"
    return f"{number['value']:.{digits}f}{ends}"


def _signed(number: AnyNumber, digits: int) -> str:
    bar = number["interval"]
    ends = "" if bar is None else f" ({bar[0]:+.{digits}f} to {bar[1]:+.{digits}f})"
    return words.signed(f"{number['value']:+.{digits}f}{ends}")


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    lines = ["", title]
    for first, *rest in every:
        cells = [f"{first:{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(rest, widths[1:]))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
