"""Results as a notebook shows them: the verdict in a sentence, and a small table.

Results are dicts, as the documents have them; these are dicts that Jupyter can draw. Every text is
escaped: checkpoints, what-ifs and notes come from files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, cast

from entropy_experiments.report import words
from entropy_experiments.report.influence_tables import LINE_NAMES
from entropy_experiments.report.momentum import shown_ledgers
from entropy_experiments.report.sections import measured_again
from entropy_experiments.results import (
    AnyNumber,
    InfluenceResult,
    LedgerResult,
    ProbeResult,
    WhatIf,
)

SUMS = ("predicted", "curvature", "measured", "unexplained")
RIGHT = ' style="text-align:right"'
LEFT = ' style="text-align:left"'
Row = Sequence[str]


class ProbeResults(dict[str, Any]):
    """What `run_mixed_probe` returns; per what its numbers are, no key says."""

    def __init__(self, results: ProbeResult, *, unit: str = "token") -> None:
        super().__init__(results)
        self.unit = unit

    def _repr_html_(self) -> str:
        return probe_html(cast(ProbeResult, self), self.unit)


class InfluenceSummary(dict[str, Any]):
    """What `EntropyInfluenceRunner.run` returns; its ledgers draw themselves, too."""

    def __init__(self, summary: InfluenceResult) -> None:
        super().__init__(summary)
        if self.get("ledger"):
            self["ledger"] = Ledger(self["ledger"])

    def _repr_html_(self) -> str:
        evaluation = self["evaluations"][0]
        ledger = evaluation["ledger"]["entropy"]
        sentence = words.sentence(
            update=words.made_by_study(cast(InfluenceResult, self)),
            change=ledger["measured"],
            level=evaluation["level"]["value"],
            unit=(evaluation.get("estimand") or {}).get("unit", "token"),
            predicted=ledger["predicted"],
        )
        doubts = [*words.doubts_of(ledger["predicted"], ledger["measured"]), *evaluation["doubts"]]
        shown = [said_html(sentence, doubts), ledger_html(shown_ledgers(evaluation)["entropy"])]
        if evaluation.get("what_if"):
            shown.append(answers_html(evaluation["what_if"]))
        if "run_directory" in self:
            shown.append(f"<p><code>{escape(str(self['run_directory']))}</code></p>")
        return "".join(shown)


class Ledger(dict[str, Any]):
    """What changed the entropy, line by line."""

    def _repr_html_(self) -> str:
        return ledger_html(cast(LedgerResult, self))


class WhatIfAnswers(dict[str, Any]):
    """What `what_if_from` returns."""

    def _repr_html_(self) -> str:
        shown = []
        for evaluation in self["evaluations"]:
            shown.append(said_html(evaluation["name"]))
            shown.append(answers_html(evaluation["what_if"]))
            if evaluation.get("entropy_budget") is not None:
                shown.append(f"<p>{escape(evaluation['entropy_budget']['text'])}</p>")
        return "".join(shown)


class Measurements(dict[str, Any]):
    """What `run_experiments` returns: means over the repeats, by step size."""

    def _repr_html_(self) -> str:
        names = [n for n in ("measured", "linear", "linquad") if n in self["summary"][0]]
        rows = [
            [
                words.plain(point["eta"]),
                *(_value(point[n]["mean"], point[n]["interval"]) for n in names),
            ]
            for point in self["summary"]
        ]
        repeats = len(self["repeats"])
        sentence = f"{self['checkpoint']}: {repeats} repeat{'s' if repeats > 1 else ''}"
        return said_html(sentence) + table_html(["η", *names], rows)


def probe_html(results: ProbeResult, unit: str) -> str:
    """Of the keys of `results_of`."""
    estimates = results["estimates"]
    predicted, measured = (estimates.get(name) for name in ("deltaH1", "deltaH_true"))
    sentence = words.of_probe(results, predicted, measured, unit)
    shown = (
        ("entropy now", "H_orig"),
        ("predicted change", "deltaH1"),
        ("measured change", "deltaH_true"),
        ("difference, paired", "difference"),
        ("curvature adds", "curvature_term"),
        ("momentum", "momentum"),
        ("weight decay", "decay"),
        ("this batch's gradient", "gradient"),
    )
    rows = [[name, *_estimate(estimates[key])] for name, key in shown if key in estimates]
    doubts = words.doubts_of(predicted, measured)
    if results.get("assumed"):
        assumed = ", ".join(f"{name} = {value}" for name, value in results["assumed"].items())
        doubts.append(f"assumed, not read from any file: {assumed}")
    return said_html(sentence, doubts) + table_html(["", "nats", "95 %", "trusted"], rows)


def ledger_html(ledger: LedgerResult) -> str:
    rows = [
        [
            LINE_NAMES.get(name, name),
            words.number(line["this_step"]),
            words.number(line.get("eventual")),
            words.plain(line.get("stderr"), 2),
        ]
        for name, line in ledger["lines"].items()
    ]
    for name in SUMS:
        number = ledger.get(name)
        if number is not None:
            stderr = words.plain(number.get("stderr"), 2)
            rows.append([name, words.number(number["value"]), "", stderr])
    return table_html(["", "this step", "eventual", "s.e."], rows)


def answers_html(answers: Iterable[WhatIf]) -> str:
    rows = []
    for one in answers:
        if "error" in one:
            rows.append([one["name"], f"no answer: {one['error']}", "", ""])
            continue
        predicted, measured = one["prediction"], measured_again(one)
        rows.append(
            [
                one["name"],
                words.number(predicted["total"]),
                words.number(predicted["change"]),
                "" if measured is None else _value(measured["value"], measured["interval"]),
            ]
        )
    return table_html(["what if", "predicted", "difference", "made and measured"], rows)


def trajectory_html(total: Mapping[str, AnyNumber], first: int, last: int) -> str:
    """`total`: predicted, measured and fresh, each as `results.numbers` writes it."""
    rows = [[name, *_estimate(number)] for name, number in total.items()]
    sentence = f"Entropy from step {first} to step {last}, summed over the steps"
    return said_html(sentence) + table_html(["", "nats", "95 %", "trusted"], rows)


def said_html(sentence: str, doubts: Iterable[str] = ()) -> str:
    lines = "".join(f"<br><small>⚠ {escape(doubt)}</small>" for doubt in doubts)
    return f"<p><strong>{escape(sentence)}</strong>{lines}</p>"


def table_html(head: Row, rows: Iterable[Row]) -> str:
    def cells(row: Row, tag: str) -> str:
        return "".join(
            f"<{tag}{LEFT if at == 0 else RIGHT}>{escape(str(cell))}</{tag}>"
            for at, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _estimate(number: AnyNumber) -> list[str]:
    trusted = number.get("trusted")
    sure = "" if trusted is None else "yes" if trusted else "no"
    return [words.number(number["value"]), words.ends(number.get("interval")), sure]


def _value(value: float, interval: Sequence[float] | None) -> str:
    bar = "" if interval is None else f" ({words.ends(interval)})"
    return f"{words.number(value)}{bar}"
