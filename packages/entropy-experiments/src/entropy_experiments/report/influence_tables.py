"""An influence study in words: what changed the entropy, what it bought, what else could have been.

`influence_report` makes lines for a terminal of the dict that is in summary.json, and of nothing
else: a finished study can be reported again without a model. A section whose key is absent is left
out. Texts of rollouts are made printable first: a policy may well write escape sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import cast

from entropy_experiments.report import words
from entropy_experiments.report.momentum import (
    largest,
    one_line_because,
    shown_ledgers,
    split_of,
)
from entropy_experiments.report.words import cell, contains_zero, left_over, spoken, value_of
from entropy_experiments.results import (
    AnyNumber,
    Confirmation,
    ConfirmationAnswer,
    EvaluationBatch,
    InfluenceResult,
    JSONObject,
    LedgerLine,
    LedgerResult,
    RankedToken,
)

InfluenceDict = JSONObject
"""`EntropyInfluenceRunner.run` returns a dict that a notebook can draw."""
SECTIONS = (
    *("change", "ledger", "trust", "groups", "tokens"),
    *("momentum", "left_out", "fisher", "what_if", "budget"),
)
TOKENS = 10
GROUPS = 12
CONTRIBUTORS = 3
"""Update rollouts named for each evaluation rollout that moved."""
RELIABLE = 0.5
CONTEXT = 28
"""Characters shown on either side of a token."""
LINE_NAMES = {
    "momentum": "momentum",
    "decay": "weight decay",
    "positive": "tokens with A > 0",
    "negative": "tokens with A < 0",
    "kl": "KL penalty",
    "entropy_bonus": "entropy bonus",
}
GROUP_NAMES = {
    "advantage_probability": "advantage and probability",
    "correctness": "correctness",
    "position": "position in the response",
    "layer": "layer",
    "rollout": "rollout",
}
"""Groups that are shown; summary.json has them also by prompt and by module."""
PART_NAMES = {
    "matrix": "the first-order matrix of every pair of rollouts",
    "fisher": "the Fisher kernel",
}
"""Parts that a study may not have."""
NAME, WIDE, NARROW, SHARE = 18, 10, 8, 6
"""Widths of a ledger's columns: names, changes, standard errors, shares of the entropy's change."""


def influence_report(
    summary: InfluenceResult | InfluenceDict, *, sections: Collection[str] = SECTIONS
) -> list[str]:
    """Lines to print, the answer first; all sections or some."""
    summary = cast(InfluenceResult, summary)
    telling: dict[str, Callable[[EvaluationBatch], list[str]]] = {
        "change": _change,
        "ledger": _ledger,
        "trust": partial(_trust, imported=words.of_uncertified_import(summary)),
        "groups": _groups,
        "tokens": _tokens,
        "left_out": _left_out,
        "momentum": _momentum,
        "fisher": _fisher,
        "what_if": _what_if,
        "budget": _budget,
    }
    evaluations = summary.get("evaluations", [])
    lines = _headline(summary)
    for evaluation in evaluations:
        if len(evaluations) > 1:
            lines += ["", f"On {evaluation['name']} ({evaluation.get('kind', 'evaluation')}):"]
        bars = _bars(evaluation)
        for name in sections:
            section = telling[name](evaluation)
            if section and name in ("groups", "tokens"):
                section, bars = [*bars, *section], []
            lines += section
        lines += [
            *(f"Note: {note}." for note in evaluation.get("notes", ())),
        ]
    return [*lines, *_absent(summary), *words.study_certificate(summary), *_provenance(summary)]


def _headline(summary: InfluenceResult) -> list[str]:
    if "checkpoint" not in summary:
        return []
    checkpoint, batch = summary["checkpoint"], summary["update"]
    certified = batch.get("certified") or {}
    unchecked, another = certified.get("unchecked"), certified.get("another_step")
    if another:
        what = f"A hypothetical update from {checkpoint} (its batch was imported)"
    elif words.of_uncertified_import(summary):
        what = f"The step from this batch at {checkpoint} (its batch was imported)"
    elif not batch["real"]:
        what = f"A hypothetical update from {checkpoint} (its batch was made for this study)"
    elif unchecked:
        what = f"The update that the batch recorded after {checkpoint} makes"
    else:
        what = f"The update that training made after {checkpoint}"
    lines = [
        f"{what}, {batch['rollouts']} rollouts, {batch['tokens']} tokens, at learning rate "
        f"{summary['lr']:.3g}:"
    ]
    if another:
        lines.append(f"  not the step that training made: {another}")
    elif unchecked:
        lines.append(f"  not checked against the step that training made: {unchecked}")
    lines += [f"  {point}" for point in words.sampling_points(summary.get("notes") or ())]
    return [*lines, *_assumed(summary)]


def _assumed(summary: InfluenceResult) -> list[str]:
    """Beside the headline: what had to be assumed, and what it rests on."""
    if not summary.get("assumed"):
        return []
    named = ", ".join(f"{name} = {value}" for name, value in summary["assumed"].items())
    return [
        "  ASSUMED, not read from any file (set them in the config, or in entropy_probe.json): "
        f"{named}"
    ]


def _absent(summary: InfluenceResult) -> list[str]:
    """Parts that this study cannot have; those of one reason on one line."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in (summary.get("absent") or {}).items():
        by_reason.setdefault(reason, []).append(PART_NAMES.get(name, name))
    return [f"Not in this study: {', '.join(n)}; {reason}." for reason, n in by_reason.items()]


def _change(evaluation: EvaluationBatch) -> list[str]:
    ledger, level = _entropy(evaluation), evaluation.get("level")
    lines = []
    if level is not None:
        unit = (evaluation.get("estimand") or {}).get("unit", "token")
        lines.append(f"  entropy now      {value_of(level):.4f} nats per {unit}")
    if ledger is not None:
        lines.append(f"  predicted change {spoken(ledger['predicted'])}")
        lines.append(f"  measured change  {spoken(ledger['measured'])}")
    return lines


def _entropy(evaluation: EvaluationBatch) -> LedgerResult | None:
    return (evaluation.get("ledger") or {}).get("entropy")


# The ledger: entropy and reward side by side.


def _ledger(evaluation: EvaluationBatch) -> list[str]:
    if _entropy(evaluation) is None:
        return []
    shown = shown_ledgers(evaluation)
    entropy, reward = shown["entropy"], shown.get("reward")
    total = value_of(entropy["predicted"])
    # None where parts cancel, or where the total is lost in its own error bar.
    shares = total and not _withheld(evaluation) and not contains_zero(entropy["predicted"])
    books = [("entropy, nats", entropy), *([("expected reward", reward)] if reward else [])]
    columns = f"{'this step':>{WIDE}} {'eventual':>{WIDE}} {'stderr':>{NARROW}}"
    heads = [columns + (f" {'share':>{SHARE}}" if shares else ""), columns][: len(books)]
    titles = [f"  {title:^{len(head)}}" for (title, _), head in zip(books, heads, strict=True)]
    # Lines of the entropy alone stand where they are in its sum, those of the reward alone first.
    names = [n for n in (reward or entropy)["lines"] if n not in entropy["lines"]]
    names += entropy["lines"]
    width = max(NAME, *(len(LINE_NAMES.get(name, name)) for name in names))
    lines = [
        "What changed it, to first order (eventual: with the momentum it leaves to later steps"
        + ("; share: of the predicted entropy change):" if shares else "):"),
        (f"  {'':{width}}" + "".join(titles)).rstrip(),
        f"  {'':{width}}" + "".join(f"  {head}" for head in heads),
    ]
    for name in names:
        line = entropy["lines"].get(name)
        share = _share(None if line is None else line["this_step"] / total) if shares else ""
        first, *others = (f"  {_line_cells(book['lines'].get(name))}" for _, book in books)
        row = f"  {LINE_NAMES.get(name, name):{width}}{first}{share}{''.join(others)}"
        lines.append(row.rstrip())
    for name in ("predicted", "curvature", "measured", "unexplained"):
        blank = " " * (SHARE + 1) if shares else ""
        cells = blank.join(f"  {_sum_cells(book.get(name))}" for _, book in books)
        lines.append(f"  {name:{width}}{cells}".rstrip())
    for title, book in books:
        rest = book.get("unexplained")
        if rest is not None:
            lines.append(f"  unexplained {title.split(',')[0]}: {_settled(rest, book['measured'])}")
        lines += [f"  Note: {note}." for note in book.get("notes", ())]
    return lines


def _line_cells(line: LedgerLine | None) -> str:
    if line is None:
        return f"{cell(None, WIDE)} {cell(None, WIDE)} {cell(None, NARROW)}"
    return (
        f"{cell(line['this_step'], WIDE)} {cell(line.get('eventual'), WIDE)} "
        f"{cell(line.get('stderr'), NARROW, '.1e')}"
    )


def _sum_cells(estimate: AnyNumber | None) -> str:
    value, stderr = (
        (None, None) if estimate is None else (estimate["value"], estimate.get("stderr"))
    )
    return f"{cell(value, WIDE)} {'':>{WIDE}} {cell(stderr, NARROW, '.1e')}"


def _share(share: float | None) -> str:
    if share is None:
        return f" {'':>{SHARE}}"
    return f" {share:>+{SHARE}.0%}" if abs(share) >= 0.005 else f" {'none':>{SHARE}}"


def _settled(rest: AnyNumber, measured: AnyNumber) -> str:
    interval = rest["interval"]
    if interval is None:
        return "no interval, so nothing can be said"
    return f"95% {interval[0]:+.2g} to {interval[1]:+.2g}: {left_over(rest, measured)}"


# How far to believe it.


def _trust(evaluation: EvaluationBatch, *, imported: bool) -> list[str]:
    lines = []
    if "cancellation" in evaluation:
        ratio = evaluation["cancellation"]["ratio"]
        size = "not defined: their sum is 0" if ratio is None else f"{ratio:.3g}"
        lines.append(
            f"Cancellation: sum of |parts| / |total| = {size}."
            + (" Shares are withheld: they would mean nothing." if _withheld(evaluation) else "")
        )
    if "reliability" in evaluation:
        reliabilities = ", ".join(
            f"{what} {'undefined' if (r := evaluation.get(key)) is None else f'{r:.2f}'}"
            for what, key in (("tokens", "reliability"), ("rollouts", "rollout_reliability"))
        )
        lines.append(
            f"Reliability of single influences (split-half over E's prompts): {reliabilities}."
        )
        tokens = evaluation["reliability"]
        if tokens is None or tokens < RELIABLE:
            lines.append(
                "  Another sample of E would rank other tokens: read the groups, or raise "
                "data.evaluation_prompts."
            )
    ledger = _entropy(evaluation)
    sums = (None, None, None)
    if ledger is not None:
        sums = (ledger.get("predicted"), ledger.get("measured"), ledger.get("curvature"))
    for name, estimate in zip(("predicted", "measured"), sums):
        if estimate is None:
            continue
        if estimate.get("why_not"):
            lines.append(f"The {name} change is NOT trusted: {'; '.join(estimate['why_not'])}.")
        elif estimate.get("trusted"):
            of = ", for the step from this batch" if imported else ""
            lines.append(f"The {name} change is trusted{of}.")
    why_not = None if sums[2] is None else sums[2].get("why_not")
    if why_not:
        lines.append(
            f"The curvature, and with it what is unexplained, is NOT trusted: {'; '.join(why_not)}."
        )
    return [
        *lines,
        *_sum_rule(evaluation),
        *(f"Doubt: {doubt}." for doubt in evaluation.get("doubts", ())),
    ]


def _sum_rule(evaluation: EvaluationBatch) -> list[str]:
    """Where influences are differences: whether they add up to what reverse mode says."""
    sums = evaluation.get("reconstruction") or {}
    if "by_reverse" not in sums:
        return []
    verdict = "closes" if sums["closes"] else "does NOT close"
    widths = ", ".join(
        "?" if one["steps_wide"] is None else f"{one['steps_wide']:.2g}"
        for one in sums["differences"]
    )
    return [
        f"Token influences are differences, {widths} steps wide. Sum rule: they add up to "
        f"{sums['gradient']:+.5g}, reverse mode gives {sums['by_reverse']:+.5g}; it {verdict} "
        f"({sums['sum_rule_gap']:.1g} of the sum of |influences|)."
    ]


def _withheld(evaluation: EvaluationBatch) -> bool:
    return bool((evaluation.get("cancellation") or {}).get("withheld"))


def _bars(evaluation: EvaluationBatch) -> list[str]:
    """Where the error bars of groups and tokens come from: said once."""
    folds = len((evaluation.get("table") or {}).get("share_K") or ())
    if not folds:
        return []
    if folds == 1:
        return ["No +- below: E's prompts are in one fold."]
    parts = "halves" if folds == 2 else "parts"
    rough = " (a rough one: two numbers tell little of a spread)" if folds == 2 else ""
    return [f"+- below is a standard error from {folds} {parts} of E's prompts{rough}."]


def _groups(evaluation: EvaluationBatch) -> list[str]:
    lines = []
    for by in GROUP_NAMES:
        groups = (evaluation.get("groups") or {}).get(by)
        if not groups:
            continue
        # Where no reward is a full one, the groups are the best of the batch and the others.
        judged = by != "correctness" or {"correct", "incorrect"} & set(groups)
        named = GROUP_NAMES[by] if judged else "reward"
        lines.append(f"By {named} (this batch's tokens, nats):")
        # Where the loss counts nothing (A = 0), nothing was done.
        groups = {name: group for name, group in groups.items() if group["value"] != 0}
        shown = list(groups.items())
        if len(shown) > GROUPS:
            # Of many, the largest; in their own order.
            by_size = sorted(shown, key=lambda pair: -abs(pair[1]["value"]))[:GROUPS]
            shown = [pair for pair in shown if pair in by_size]
        width = max((len(name) for name, _ in shown), default=0)
        for name, group in shown:
            unsure = "" if group.get("stable", True) else "  sign unsure"
            error = cell(group.get("stderr"), 5, ".0e")
            lines.append(
                f"  {name:{width}}  {group['value']:+.3e} +- {error}  {group['tokens']:>6} tokens"
                f"{unsure}"
            )
        left = len(groups) - len(shown)
        if left:
            rest = sum(g["value"] for name, g in groups.items() if (name, g) not in shown)
            lines.append(f"  and {left} smaller ones, {rest:+.3e} together")
    return lines


# Tokens in their context.


def _tokens(evaluation: EvaluationBatch, most: str = "destroying") -> list[str]:
    tokens = (evaluation.get("ranked") or {}).get(most)
    if tokens is None:
        return []
    if not tokens:
        return [f"No token is {most} entropy with a sign that all of E agrees on."]
    shown = tokens[:TOKENS]
    lines = [f"The {len(shown)} most entropy-{most} tokens, >>marked<< in their context:"]
    for place, token in enumerate(shown, start=1):
        lines.append(
            f"  {place:>2}. {token['value']:+.2e} +- {cell(token.get('stderr'), 5, '.0e')}  "
            f"p {token['probability']:.2f}  A {token['advantage']:+.2f}  "
            f"rollout {token['rollout']}, token {token['k']}"
        )
        lines.append(f"      {in_context(token)}")
    return lines


def in_context(token: RankedToken) -> str:
    """What stands around a token, on one line."""
    before, text, after = (printable(str(token.get(k, ""))) for k in ("before", "text", "after"))
    head = before if len(before) <= CONTEXT else "..." + before[-CONTEXT:]
    tail = after if len(after) <= CONTEXT else after[:CONTEXT] + "..."
    return f"{head}>>{text}<<{tail}"


def printable(text: str) -> str:
    """Line breaks and control characters as escapes: nothing may steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# What else could have been. A question without an answer is shown with the reason.


def _left_out(evaluation: EvaluationBatch) -> list[str]:
    removals = evaluation.get("leave_one_out")
    if not removals:
        return []
    lines = ["Steps made anew without a rollout (its share is what it did in the step as made):"]
    for one in removals:
        if "error" in one:
            lines.append(f"  without rollout {one['rollout']}: no answer. {one['error']}")
            continue
        lines.append(
            f"  without rollout {one['rollout']}: predicted {spoken(one['first_order'])}, measured "
            f"{value_of(one['measured']):+.4g}; its removal adds "
            f"{-value_of(one['difference']):+.2e}, its share was {one['influence']:+.2e}"
        )
    return lines


def _momentum(evaluation: EvaluationBatch) -> list[str]:
    """The batches of most influence through momentum, or why it is one line."""
    if (reason := one_line_because(evaluation)) is not None:
        return [f"Momentum is one line: {reason}."]
    momentum = split_of(evaluation)
    if momentum is None:
        return []
    count, named = len(momentum["batches"]), largest(momentum)
    lines = [
        f"Momentum {momentum['total']:+.4g} nats comes from the batches before this step; "
        f"{count} of them rebuilt, their tokens are in momentum.parquet (--momentum N: N batches)."
    ]
    lines.append("  Of most influence:" if named else "  No single batch stands out of its noise.")
    for one in named:
        bar = cell(one["stderr"], 0, ".1e")
        lines.append(
            f"    batch {one['step']:<5} {one['dH']:+.2e} +- {bar}   (weight {one['weight']:.3f})"
        )
    off = [one["step"] for one in momentum["batches"] if one["other_gradient"]]
    if off:
        lines.append(
            f"  Doubt: the gradients rebuilt of {len(off)} of {count} batches are not those that "
            f"training used (the newest: batch {max(off)})."
        )
    return lines


def _fisher(evaluation: EvaluationBatch) -> list[str]:
    fisher = evaluation.get("fisher")
    if not fisher:
        return []
    if "error" in fisher:
        return [f"Fisher kernel: no answer. {fisher['error']}"]
    gap, r = fisher["relative_gap"], fisher["correlation"]
    agree = "nothing moved" if gap is None else f"they differ by {gap:.0%} of the measured"
    lines = [
        "Fisher kernel: log-probs of evaluation rollouts, moved by the gradient part of the step "
        f"at eta {fisher['eta']:g}:",
        f"  predicted against measured: {'' if r is None else f'correlation {r:.4f}, '}{agree}",
    ]
    for one in fisher["moved"]:
        most = ", ".join(
            f"{c['rollout']} ({c['value']:+.2g})" for c in one["contributors"][:CONTRIBUTORS]
        )
        lines.append(
            f"  evaluation rollout {one['rollout']}: predicted {one['predicted']:+.3g}, measured "
            f"{one['measured']:+.3g}; most by update rollouts {most}"
        )
    return lines


def _what_if(evaluation: EvaluationBatch) -> list[str]:
    results = evaluation.get("what_if")
    if not results:
        return []
    lines = ["What if (advantages, normalisers, P and clip factor as they were):"]
    for result in results:
        if "error" in result:
            lines.append(f"  {result['name']}: no answer. {result['error']}")
            continue
        predicted = result["prediction"]
        error = predicted.get("change_stderr")
        lines.append(
            f"  {result['name']}: predicted {predicted['total']:+.4g} nats instead of "
            f"{predicted['recorded']:+.4g}, a difference of {predicted['change']:+.3g}"
            f"{'' if error is None else f' +- {error:.0e}'} "
            f"({predicted['changed_tokens']} tokens changed)"
        )
        lines += [f"    {note}" for note in predicted.get("notes", ())]
        lines += _confirmed(result.get("confirmation"), predicted["change"])
    return lines


def _confirmed(confirmation: Confirmation | None, predicted: float) -> list[str]:
    """The effect first: a step that came out as predicted may still differ little from another."""
    if confirmation is None:
        return []
    if "error" in confirmation:
        return [f"    not made: {confirmation['error']}"]
    lines = []
    if "change" in confirmation:  # against the step as it was, both measured
        lines.append(
            f"    effect {_effect(confirmation)}: predicted {predicted:+.3g}, measured "
            f"{spoken(confirmation['change'])} against the step as it was"
        )
    lines.append(f"    the whole step, made and measured: {spoken(confirmation['measured'])}")
    if confirmation.get("agrees") is None:
        return [*lines, "    no interval, so nothing is confirmed"]
    settled = "explained" if confirmation.get("accounted") else "NOT explained"
    beyond = confirmation.get("beyond_linear", False)
    if not confirmation["agrees"]:
        lines.append(f"    its prediction is outside the measured interval, {settled} by")
    elif confirmation.get("accounted") and not beyond:
        # An effect that did not come is not covered up by a whole step that is mostly the old one.
        whole = (
            ", but its effect is not confirmed (see above)"
            if _effect(confirmation).startswith(NOT_AS_PREDICTED)
            else ": confirmed, as a whole"
        )
        lines.append(f"    its prediction is inside the measured interval{whole}")
    else:
        doubt = "not confirmed" if confirmation.get("accounted") else "NOT explained by"
        lines.append(f"    its prediction is inside the measured interval, but {doubt}")
    gap = value_of(confirmation["recomputed"]) - value_of(confirmation["frozen"])
    parts = [f"denominator and clip {gap:+.2g}"]
    bend = confirmation.get("curvature")
    if bend is not None:
        parts.append(f"curvature {value_of(bend):+.2g}")
    parts.append(f"rest {value_of(confirmation['rest']):+.2g}")
    lines.append(f"    measured - predicted: {', '.join(parts)}")
    if beyond:
        lines.append(
            "    beyond the linear range: curvature or rest is over half of the slope's share"
        )
    return lines


NOT_AS_PREDICTED = "NOT as predicted"


def _effect(confirmation: ConfirmationAnswer) -> str:
    seen, agrees = confirmation.get("effect"), confirmation.get("effect_agrees")
    if seen is None and agrees is not None:  # an older summary
        seen = "as predicted" if agrees else "not as predicted"
    if seen is None:
        return "unknown (no interval)"
    # What was hoped for and did not come must not be read over.
    return seen.replace("not as predicted", NOT_AS_PREDICTED)


def _budget(evaluation: EvaluationBatch) -> list[str]:
    budget = evaluation.get("entropy_budget")
    if not budget:
        return []
    wanted = f"To change the entropy by {budget['budget']:+.4g} nats: "
    if "error" in budget:
        return [f"{wanted}no answer. {budget['error']}"]
    curved = budget.get("curved")
    text = f"{wanted}learning rate {budget['linear']:.4g} by the slope alone"
    if budget.get("curvature_known", True):
        text += f", {'none' if curved is None else f'{curved:.4g}'} with curvature"
    return [text, *(f"  {note}" for note in budget.get("notes", ()))]


def _provenance(summary: InfluenceResult) -> list[str]:
    lines = [f"Note: {note}." for note in summary.get("notes", ())]
    if summary.get("not_verifiable"):
        lines.append("Not verifiable from the files: " + "; ".join(summary["not_verifiable"]) + ".")
    return lines
