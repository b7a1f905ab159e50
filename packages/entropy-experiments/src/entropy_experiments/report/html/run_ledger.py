"""The page of a run's ledger: entropy and reward over the run, and who changed them.

    entropy-probe report RUN_DIR        RUN_DIR/report.html

Groups are chosen on the page: the drawings of every grouping are inside (`account_dH_class_sum`, a
name for grouping, quantity and manner), and report.js puts the chosen one in place. Links of the
form `#prompt=ID` and `#rollout=STEP-ROLLOUT&token=K` open a prompt's rollouts or one token.

A bar of the account at step t is what batch t did in the *whole window*, now and through momentum
later; so are the sums. The line of the entropy itself is what happened by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from entropy_experiments.report import words
from entropy_experiments.report.html.marks import Figure, Trace, across, figure_of, line, upright
from entropy_experiments.report.html.page import checked, drawn, embedded, packed, slim, written
from entropy_experiments.report.html.token_views import DIGITS
from entropy_experiments.report.run_ledger import (
    Group,
    Grouping,
    LedgerRollout,
    RunLedgerView,
    Selection,
    confirmed,
    run_ledger_view,
    stands_out,
)
from entropy_experiments.report.words import contains_zero
from entropy_experiments.results.run_ledger import CHECKED, LINES, RunLedgerResult
from entropy_experiments.study_files import PAGE

LINE_NAMES = {
    "batches": "recorded batches",
    "decay": "weight decay",
    "momentum_before_record": "momentum from before the window",
    "uncovered": "not covered by the rebuilt steps",
}
PALETTE = (
    *("#4a7fb5", "#e07b53", "#4f9d69", "#c9a227", "#6fb7c9", "#a8577e"),
    *("#8a8f98", "#8c6bb1", "#b5895b", "#5f8f3f", "#d48bb0", "#3f6f6f"),
)
"""Of groups, in their order; told apart on light and dark paper."""
QUANTITIES = ("dH", "dR")
MANNERS = {"sum": "summed over the batches so far", "each": "batch by batch"}
MOST_TOKENS = 60_000
"""Of all rollouts on the page."""
LONGEST_TEXT = 160
"""Characters of a prompt in the table; the whole is beside its rollouts."""
SIGNIFICANT = 2.0


class LineRow(TypedDict):
    name: str
    kind: str
    """line, total or rest."""
    dH: float
    dH_stderr: float | None
    dR: float | None
    dR_stderr: float | None


def write_run_ledger_page(folder: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a finished run directory.

    Args:
        folder: As `entropy-probe explain` wrote it.
        path: Where the page goes; None: report.html in the folder.

    Returns:
        Its path.

    Raises:
        FileNotFoundError: If the folder is not finished.
        ValueError: If a file is damaged, or the page cannot be made here.
    """
    checked()
    page = render_run_ledger(run_ledger_view(folder))
    return written(page, Path(folder) / PAGE if path is None else Path(path))


def render_run_ledger(view: RunLedgerView) -> str:
    """The whole page as text."""
    summary = view["summary"]
    views = token_views(view)
    return drawn(
        "templates/run_ledger.html.j2",
        run_ledger_figures(view),
        title=f"Who spent the entropy of {summary['run']}?",
        view=view,
        summary=summary,
        what=what_happened(summary),
        sure=how_sure(summary),
        advice=what_next(view),
        points=points(view),
        lines=line_rows(summary),
        groupings=view["groupings"],
        manners=MANNERS,
        unit=words_of_unit(summary),
        short=short,
        percent=percent,
        luck=luck,
        group_name=group_name(view),
        views=packed(embedded(slim(views))),
        scale=views["scale"],
        left_out=views["left_out"],
    )


def words_of_unit(summary: RunLedgerResult) -> str:
    return "nats per token" if summary["entropy"]["unit"] == "token" else "nats per response"


def run_ledger_lines(view: RunLedgerView) -> list[str]:
    """The page's head, its lines and its groups as text, for a terminal."""
    out = [sentence(view), *points(view), ""]
    out += [f"not trusted: {reason}" for reason in view["summary"]["why_not"]]
    for row in line_rows(view["summary"]):
        out.append(_text_row(row["name"], row["dH"], row["dH_stderr"], row["dR"], None))
    name_of = group_name(view)
    for grouping in view["groupings"]:
        out += ["", f"by {grouping['title']:31}{'entropy':>12}{'+-':>11}{'reward':>12}{'rate':>12}"]
        for group in grouping["groups"]:
            rate = group["rate"]
            out.append(
                _text_row(
                    name_of(grouping, group),
                    group["dH"],
                    group["dH_stderr"],
                    group["dR"],
                    None if rate is None else rate["value"],
                )
            )
    return out


def _text_row(
    name: str, dH: float, stderr: float | None, dR: float | None, rate: float | None
) -> str:
    spread = "" if stderr is None else f"{stderr:.2g}"
    gain = "" if dR is None else f"{dR:+.4g}"
    price = "" if rate is None else f"{rate:+.3g}"
    return f"{short(name, 33):34}{dH:>+12.4g}{spread:>11}{gain:>12}{price:>12}".rstrip()


# Sentences.


def sentence(view: RunLedgerView) -> str:
    """What happened, how sure that is, what to do next."""
    summary = view["summary"]
    text = f"{what_happened(summary)}. How sure: {how_sure(summary)}. Next: {what_next(view)}."
    return text if summary["trusted"] else f"Not trusted, for the reasons below: {text}"


def what_happened(summary: RunLedgerResult) -> str:
    """The change of entropy over the window, and of reward."""
    window, measured, unit = summary["window"], summary["measured"], words_of_unit(summary)
    begin, end = (summary["entropy"][name]["value"] for name in ("start", "end"))
    low, high = sorted(abs(x) for x in measured["interval"] or (0.0, 0.0))
    where = f"from checkpoint {window['from']} to {window['to']}"
    if measured["interval"] is None or contains_zero(measured):
        bar = "" if measured["interval"] is None else f" (95 % {words.ends(measured['interval'])})"
        text = (
            f"Entropy changed by {words.number(measured['value'], 2)} {unit}{bar} {where}, too "
            "little to tell from nothing with these rollouts; along the path the steps changed it "
            f"by {words.with_bar(summary['total']['path'], 2)}"
        )
    else:
        verb = "fell" if measured["value"] < 0 else "rose"
        text = (
            f"Entropy {verb} by {words.plain(abs(measured['value']), 2)} {unit} (95 % "
            f"{words.plain(low, 2)} to {words.plain(high, 2)}) {where}, from "
            f"{words.plain(begin, 3)} to {words.plain(end, 3)}"
        )
    gain = summary["measured_reward"]
    if gain is None:
        return text
    return f"{text}; expected reward changed by {words.with_bar(gain, 2)}"


def how_sure(summary: RunLedgerResult) -> str:
    """Whether the ledger closes, and what was found against it."""
    rest, measured = summary["unexplained"], summary["measured"]["value"]
    share = abs(rest["value"] / measured) if measured else 0.0
    if rest["interval"] is None:
        closing = "two ends with too few prompts cannot say whether the ledger closes"
    elif contains_zero(rest):
        closing = "the ledger closes"
        if not contains_zero(summary["measured"]):
            closing += f", {percent(share)} of the change is unexplained, consistent with 0"
    else:
        closing = f"the ledger does not close, {percent(share)} of the change is unexplained"
    count = len(summary["why_not"])
    doubts = f"{count} reason{'s' if count > 1 else ''} for doubt below"
    return f"{closing}; {doubts if count else CHECKED}"


def what_next(view: RunLedgerView) -> str:
    """One piece of advice, and only what an interval or the other half supports."""
    summary = view["summary"]
    if not summary["trusted"]:
        return "remove the reason for doubt before you read shares"
    if contains_zero(summary["total"]["path"]):
        return (
            "explain a longer window (--from, --to) or draw more evaluation prompts (--set "
            "data.evaluation_prompts=N)"
        )
    before, path = summary["lines"]["momentum_before_record"], summary["total"]["path"]
    if abs(before["dH"]) > abs(path["value"]) / 2:
        return (
            f"begin the window earlier (--from): {percent(before['dH'] / path['value'])} of the "
            "change is momentum from before it, which no batch of the window explains; to split "
            "that of a run's first steps, save a checkpoint before step 0"
        )
    name_of = group_name(view)
    for key in ("difficulty", "class"):
        grouping = next((one for one in view["groupings"] if one["key"] == key), None)
        if grouping is None:
            continue
        sure = [group for group in grouping["groups"] if group["dH"] < 0 and stands_out(group)]
        if sure:
            dear = min(sure, key=lambda group: group["dH"])
            kind = "prompts" if key == "difficulty" else "tokens of the class"
            return (
                f"look first at the {kind} “{name_of(grouping, dear)}”, {_cost(dear, summary)} "
                "(its 95 % interval leaves out 0)"
            )
    chosen = view["prompt_selection"]
    if confirmed(chosen):
        share = percent(chosen["cross_fitted"] / chosen["in_sample"])
        return (
            f"look at the {chosen['chosen']} dearest prompts below, of whose cost the other half "
            f"of the evaluation prompts confirms {share}; no whole group stands out of the noise"
        )
    return (
        "draw more evaluation prompts (--set data.evaluation_prompts=N) before you single out a "
        "group or a prompt, none of which stands out of the noise"
    )


def _cost(group: Group, summary: RunLedgerResult) -> str:
    """A share of what the batches did, unless groups cancel: then in nats."""
    total = summary["lines"]["batches"]["dH"]
    if total and abs(group["dH"]) <= abs(total):
        return f"{percent(group['dH'] / total)} of what the batches did"
    return f"{words.number(group['dH'], 2)} nats, more than all batches together"


def points(view: RunLedgerView) -> list[str]:
    """Beside the head: the memo, replays, what the numbers are not."""
    summary = view["summary"]
    memo = summary["memo"]["unfinished"]
    out = [
        f"Unfinished, not in the sum: the momentum at the window’s end would still change the "
        f"entropy by about {words.number(memo['dH'], 2)}, at the slope there"
        + ("" if memo["dR"] is None else f" and the reward by {words.number(memo['dR'], 2)}")
        + "."
    ]
    if summary["replays"]:
        worst = max(one["distance"] for one in summary["replays"])
        out.append(
            f"{len(summary['replays'])} replays between stored checkpoints arrived; the worst is "
            f"{worst:.1e} of its way off."
        )
    out.append(
        "Shares are direct effects through the optimizer. Attribution is not removal: training "
        "without a prompt changes later batches, too."
    )
    out += [f"{note[0].upper()}{note[1:]}." for note in summary["notes"]]
    out += [f"Not grouped by {name}: {reason}." for name, reason in view["absent"].items()]
    return out


def line_rows(summary: RunLedgerResult) -> list[LineRow]:
    """The lines, their sum, the measurement and what is left."""
    rows: list[LineRow] = [
        {
            "name": LINE_NAMES[name],
            "kind": "line",
            "dH": line["dH"],
            "dH_stderr": line["stderr"],
            "dR": line["dR"],
            "dR_stderr": line["dR_stderr"],
        }
        for name in LINES
        for line in (summary["lines"][name],)
    ]
    for name, kind, entropy, reward in (
        ("sum: along the path", "total", summary["total"]["path"], summary["total"]["reward"]),
        ("measured", "total", summary["measured"], summary["measured_reward"]),
        ("unexplained", "rest", summary["unexplained"], summary["unexplained_reward"]),
    ):
        rows.append(
            {
                "name": name,
                "kind": kind,
                "dH": entropy["value"],
                "dH_stderr": entropy["stderr"],
                "dR": None if reward is None else reward["value"],
                "dR_stderr": None if reward is None else reward["stderr"],
            }
        )
    return rows


def luck(selection: Selection) -> str:
    """How far the dearest are dear, and how far they were lucky to be chosen."""
    text = (
        f"Together {words.number(selection['in_sample'], 2)} nats; chosen by one half of the "
        f"evaluation prompts and added up by the other, "
        f"{words.number(selection['cross_fitted'], 2)}. The rest is luck of the choice"
    )
    if selection["correlation"] is None:
        return f"{text}."
    halves = f"the halves correlate at {words.plain(selection['correlation'], 2)}"
    return f"{text}; over all {selection['of']}, {halves}."


def percent(share: float) -> str:
    """Whole, with a true minus, and no minus of zero."""
    return words.signed(f"{round(100 * share) + 0} %")


def short(text: str, longest: int = LONGEST_TEXT) -> str:
    """On one line, cut; what cannot be seen is shown as a mark."""
    text = text.replace("\n", "⏎")
    shown = "".join(letter if letter.isprintable() else "·" for letter in text)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def group_name(view: RunLedgerView) -> Any:
    """How a group is called: a prompt by the beginning of its text, a layer without its prefix."""
    texts = view["prompt_texts"]

    def name_of(grouping: Grouping, group: Group) -> str:
        name = group["name"]
        if grouping["key"] == "prompt":
            return short(texts.get(name, "").strip(), 40) or name
        if grouping["key"] == "layer":
            return name.removeprefix("base_model.model.")
        return name

    return name_of


# Drawings.


def run_ledger_figures(view: RunLedgerView) -> dict[str, Figure]:
    """By name: the run itself, and of every grouping its accounts and rates."""
    summary = view["summary"]
    out = {"run_entropy": _level(summary, "entropy")}
    rewarded = summary["total"]["reward"] is not None
    if rewarded:
        out["run_reward"] = _level(summary, "reward")
    name_of = group_name(view)
    for grouping in view["groupings"]:
        names = [escape(name_of(grouping, group), quote=False) for group in grouping["groups"]]
        for manner in MANNERS:
            for quantity in QUANTITIES if rewarded else QUANTITIES[:1]:
                out[f"account_{quantity}_{grouping['key']}_{manner}"] = _account(
                    view, grouping, names, quantity, manner
                )
        if rates := _rates(grouping, names):
            out[f"rates_{grouping['key']}"] = rates
    return out


def _reach(summary: RunLedgerResult) -> list[float]:
    return [summary["window"]["from"] - 0.6, summary["window"]["to"] + 0.6]


def _level(summary: RunLedgerResult, name: str) -> Figure:
    """Of the evaluation rollouts before every step, the path's sum, and both ends fresh."""
    steps, window = summary["steps"], summary["window"]
    entropy = name == "entropy"
    ends = summary["entropy"] if entropy else summary["reward"]
    at = [step["step"] for step in steps]
    colour = "$accent" if entropy else "$create"
    traces: list[Trace] = []
    if entropy:
        spread = [SIGNIFICANT * (step["entropy_stderr"] or 0.0) for step in steps]
        low = [step["entropy"] - s for step, s in zip(steps, spread)]
        high = [step["entropy"] + s for step, s in zip(steps, spread)]
        traces.append(
            {
                "x": [*at, *reversed(at)],
                "y": [*high, *reversed(low)],
                "mode": "lines",
                "fill": "toself",
                "fillcolor": "$wash",
                "line": {"width": 0},
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    elif all(step["batch_reward"] is not None for step in steps):
        batch = [step["batch_reward"] or 0.0 for step in steps]
        traces.append(line(at, batch, "training batches", "$muted", width=1))
    values = [step["entropy"] if entropy else step["reward"] for step in steps]
    known = [(x, y) for x, y in zip(at, values) if y is not None]
    fresh_name = "evaluation rollouts" + (", ± 2 s.e." if entropy else "")
    traces.append(line([x for x, _ in known], [y for _, y in known], fresh_name, colour, width=1.5))
    if ends is not None:
        changes = [step["dH_path"] if entropy else step["dR_path"] or 0.0 for step in steps]
        start = ends["start"]["value"]
        path = [start, *(start + change for change in accumulate(changes))]
        traces.append(line([*at, window["to"]], path, "along the path", "$ink", dash="dot"))
        both = [ends["start"], ends["end"]]
        values = [one["value"] for one in both]
        bars = [one["interval"] or [one["value"]] * 2 for one in both]
        traces.append(
            {
                "x": [window["from"], window["to"]],
                "y": values,
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [bar[1] - v for bar, v in zip(bars, values)],
                    "arrayminus": [v - bar[0] for bar, v in zip(bars, values)],
                    "color": "$ink",
                    "thickness": 1.2,
                    "width": 0,
                },
                "mode": "markers",
                "marker": {"color": "$ink", "size": 8},
                "name": "fresh rollouts, 95 %",
                "hovertemplate": "checkpoint %{x}: %{y:.4g}<extra>fresh</extra>",
            }
        )
    title = words_of_unit(summary) if entropy else "expected reward"
    return figure_of(
        traces,
        300 if entropy else 220,
        margin={"l": 64},
        xaxis={
            "showgrid": False,
            "range": _reach(summary),
            **({} if entropy else {"title": {"text": "optimizer step"}}),
        },
        yaxis={"title": {"text": f"entropy, {title}" if entropy else title}, "nticks": 6},
        showlegend=True,
    )


def _account(
    view: RunLedgerView, grouping: Grouping, names: Sequence[str], quantity: str, manner: str
) -> Figure:
    """What the batches of each group did, stacked from zero; lines for all together."""
    bins, traces = view["bins"], list[Trace]()
    at = [(low + high) / 2 for low, high in bins]
    steps = [f"step {a}" if a == b else f"steps {a} to {b}" for a, b in bins]
    net = np.zeros(len(bins))
    for place, (group, name) in enumerate(zip(grouping["groups"], names, strict=True)):
        by_bin = group["dH_by_bin"] if quantity == "dH" else group["dR_by_bin"] or []
        values = np.cumsum(by_bin) if manner == "sum" else np.asarray(by_bin)
        net = net + values
        traces.append(
            {
                "type": "bar",
                "x": at,
                "y": values.tolist(),
                "name": name,
                "marker": {"color": PALETTE[place % len(PALETTE)], "line": {"width": 0}},
                "text": steps,
                "textposition": "none",
                "hovertemplate": "%{text}: %{y:.3g}<extra>" + name.replace("%", "") + "</extra>",
            }
        )
    traces.append(line(at, net.tolist(), "all batches", "$ink", width=1.6))
    title = f"entropy, {words_of_unit(view['summary'])}" if quantity == "dH" else "expected reward"
    return figure_of(
        traces,
        330 if quantity == "dH" else 260,
        barmode="relative",
        margin={"l": 64},
        shapes=[across(0.0)],
        xaxis={
            "title": {"text": "optimizer step that learned from the batch"},
            "showgrid": False,
            "range": _reach(view["summary"]),
        },
        yaxis={"title": {"text": f"change of {title}"}, "nticks": 6},
        showlegend=quantity == "dH",
    )


def _rates(grouping: Grouping, names: Sequence[str]) -> Figure | None:
    """Nats per unit of reward of each group whose change of reward is sure."""
    some = [
        (place, name, rate)
        for place, (name, group) in enumerate(zip(names, grouping["groups"], strict=True))
        if (rate := group["rate"]) is not None
    ]
    if not some:
        return None
    marks = {
        "x": [rate["value"] for *_, rate in some],
        "y": [name for _, name, _ in some],
        "error_x": {
            "type": "data",
            "array": [rate["stderr"] or 0.0 for *_, rate in some],
            "color": "$whisker",
            "thickness": 1.2,
            "width": 0,
        },
        "mode": "markers",
        "marker": {"size": 9, "color": [PALETTE[place % len(PALETTE)] for place, *_ in some]},
        "hovertemplate": "%{y}: %{x:.3g} nats per unit of reward<extra></extra>",
        "showlegend": False,
    }
    return figure_of(
        [marks],
        90 + 28 * len(some),
        shapes=[upright(0.0)],
        xaxis={"title": {"text": "exchange rate, nats per unit of reward (± s.e.)"}},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False},
    )


# Rollouts.


def token_views(view: RunLedgerView, *, most: int = MOST_TOKENS) -> dict[str, Any]:
    """The rollouts as report.js reads them (`report.html.token_views`), as many as fit."""
    vocabulary: dict[str, int] = {}
    prompts: dict[str, int] = {}
    kept: list[LedgerRollout] = []
    tokens = 0
    for rollout in view["rollouts"]:
        length = len(rollout["columns"]["dH"])
        if tokens + length > most and kept:
            break
        kept.append(rollout)
        tokens += length
    columns = [rollout["columns"] for rollout in kept]
    influence = np.concatenate([one["dH"] for one in columns]) if columns else np.zeros(0)
    size = float(np.abs(influence).max(initial=0.0))
    unit = size / 1e5 if size else 1.0
    rewarded = bool(columns) and not any(np.isnan(one["dR"]).any() for one in columns)
    units = {"logprob": DIGITS, "entropy": DIGITS, "advantage": DIGITS, "influence": unit}
    if rewarded:
        largest = max(float(np.abs(one["dR"]).max(initial=0.0)) for one in columns)
        units["reward"] = largest / 1e5 if largest else 1.0
    rows = []
    for i, (rollout, one) in enumerate(zip(kept, columns, strict=True)):
        texts = rollout["texts"]
        prompt = prompts.setdefault(rollout["prompt"], len(prompts))
        agree = np.sign(one["dH_a"]) == np.sign(one["dH_b"])
        reward = float(one["reward"][0])
        row: dict[str, Any] = {
            "i": i,
            "name": rollout["uid"],
            "pid": rollout["prompt"],
            "n": len(texts),
            "prompt": prompt,
            "p": prompt,
            "reward": None if np.isnan(reward) else reward,
            "advantage": float(np.nanmean(one["advantage"])),
            "influence": float(one["dH"].sum()),
            "t": [vocabulary.setdefault(text, len(vocabulary)) for text in texts],
            "l": _whole(one["logprob"], DIGITS),
            "h": _whole(one["entropy"], DIGITS),
            "a": _whole(one["advantage"], DIGITS),
            "v": _whole(one["dH"], unit),
            "e": _whole(np.abs(one["dH_a"] - one["dH_b"]), unit),
            "s": "".join("0" if same else "1" for same in agree),
        }
        if rewarded:
            row["gain"] = float(one["dR"].sum())
            row["r"] = _whole(one["dR"], units["reward"])
        rows.append(row)
    sizes = np.abs(influence[influence != 0])
    return {
        "vocabulary": list(vocabulary),
        "prompts": [view["prompt_texts"].get(name, "") for name in prompts],
        "units": units,
        "scale": float(np.percentile(sizes, 99.5)) if len(sizes) else 1.0,
        "folds": 2,
        "t": None,
        "rollouts": rows,
        "tokens": tokens,
        "left_out": len(view["rollouts"]) - len(kept),
    }


def _whole(x_T: np.ndarray, unit: float) -> list[int]:
    return np.rint(np.nan_to_num(x_T) / unit).astype(np.int64).tolist()
