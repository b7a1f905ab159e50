"""`entropy-probe explain`: who spent the entropy of a whole run, and what it bought."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entropy_experiments.cli.job import shared_ending
from entropy_experiments.cli.options import (
    AsJson,
    ConfigFile,
    Debug,
    Overrides,
    Quiet,
    Threads,
    interrupt_message,
    keep_stdout_for_json,
    load_settings,
    print_notes,
    print_results,
    try_to_write,
)
from entropy_experiments.results.run_ledger import CHECKED

if TYPE_CHECKING:
    from entropy_experiments.config import Config
    from entropy_experiments.results import RunLedgerResult

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe explain                       the run shipped with the package\n"
    "  entropy-probe explain --from 10 --to 20     a part of it\n"
    "  entropy-probe explain runs/grpo --out DIR   your own, recorded run\n"
    "  entropy-probe explain runs/grpo --every 10  sparse checkpoints, steps replayed\n"
    "  entropy-probe explain --set data.evaluation_prompts=256\n"
    "  torchrun --nproc-per-node 4 -m entropy_experiments.cli explain runs/grpo"
)
WORDS = {
    "batches": "the recorded batches",
    "decay": "weight decay",
    "momentum_before_record": "momentum from before the window",
    "uncovered": "not covered by the rebuilt steps",
}


def explain(
    run: Annotated[
        Path | None,
        typer.Argument(help="Folder of a recorded run. Default: the embedded run."),
    ] = None,
    start: Annotated[
        int | None,
        typer.Option("--from", metavar="K", help="First checkpoint. Default: the run's first."),
    ] = None,
    end: Annotated[
        int | None,
        typer.Option("--to", metavar="L", help="Last checkpoint. Default: the run's last."),
    ] = None,
    every: Annotated[
        int,
        typer.Option(
            "--every",
            metavar="N",
            min=1,
            help="Read every N-th checkpoint and replay the steps between.",
        ),
    ] = 1,
    tangent: Annotated[
        bool, typer.Option("--tangent", help="Also predict each step from its start alone.")
    ] = False,
    responses: Annotated[
        int, typer.Option("--responses", min=1, help="Responses per evaluation prompt and step.")
    ] = 2,
    training_prompts: Annotated[
        bool,
        typer.Option("--training-prompts", help="Evaluate on the run's own prompts."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory. Default: results/run_ledger/...")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another ledger in the run directory.")
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    threads: Threads = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say which batches, prompts and tokens changed entropy and reward over a whole run."""
    settings: Config | None = None
    with shared_ending(
        debug=debug,
        threads=threads,
        interrupted=lambda: interrupt_message(settings, lambda _: _kept(out)),
    ) as speaks:
        quiet = quiet or not speaks
        settings = load_settings(config, {}, None, overrides)
        print_notes(settings, quiet=quiet)
        try_to_write(settings, out)

        from entropy_experiments.pipelines.explain import ExplainOptions
        from entropy_experiments.pipelines.explain import explain as explain_run

        options = ExplainOptions(
            start=start,
            end=end,
            every=every,
            tangent=tangent,
            responses=responses,
            training_prompts=training_prompts,
        )
        with keep_stdout_for_json(as_json=as_json):
            summary = explain_run(
                settings,
                run,
                options,
                out=out,
                overwrite=overwrite,
                say=None if quiet else _to_stderr,
            )
        if speaks:
            page = _page(summary, quiet=quiet)
            lines = [] if page is None else [f"Report: {page}"]
            print_results(summary, lambda: [*text_lines(summary), *lines], as_json=as_json)


def _page(summary: RunLedgerResult, *, quiet: bool) -> Path | None:
    """The finished ledger as one HTML file beside its tables; None: what draws is not installed."""
    from entropy_experiments.report.html.page import missing, write_report

    folder = summary.get("run_directory")
    assert folder is not None  # explain() says where its files are
    if (lacking := missing()) is not None:
        if not quiet:
            _to_stderr(f"No HTML report: {lacking}")
        return None
    return write_report(folder)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _kept(out: Path | None) -> str:
    place = out or "results/run_ledger"
    return f"Finished steps are kept in {place}; the same command continues."


def text_lines(summary: RunLedgerResult) -> list[str]:
    """The ledger in words, for a terminal."""
    window, entropy, total = summary["window"], summary["entropy"], summary["total"]
    path, rest = total["path"], summary["unexplained"]
    unit = "nats per token" if entropy["unit"] == "token" else "nats per response"
    lines = [
        f"{summary['run']}: checkpoints {window['from']} to {window['to']}, {window['steps']} "
        f"steps ({unit})",
        f"entropy  {entropy['start']['value']:.4f} -> {entropy['end']['value']:.4f}",
    ]
    if (reward := summary["reward"]) is not None:
        lines.append(f"reward   {reward['start']['value']:.4f} -> {reward['end']['value']:.4f}")
    lines += ["", f"{'':34}{'entropy':>12}{'+- (1)':>11}{'reward':>12}"]
    for name, line in summary["lines"].items():
        lines.append(_line(WORDS[name], line["dH"], line["stderr"], line["dR"]))
    gain = total["reward"]
    lines.append(f"{'':34}{'':>12}{'+- (2)':>11}")
    lines += [
        _line("along the path", path["value"], path["stderr"], gain and gain["value"]),
        _line(
            "measured by fresh rollouts",
            summary["measured"]["value"],
            summary["measured"]["stderr"],
            (m := summary["measured_reward"]) and m["value"],
        ),
        _line(
            "unexplained",
            rest["value"],
            rest["stderr"],
            (u := summary["unexplained_reward"]) and u["value"],
        ),
    ]
    memo = summary["memo"]["unfinished"]
    lines += [
        "",
        "(1) standard error from two halves of the evaluation prompts: it tells noise from signal",
        "(2) standard error over all evaluation prompts",
        f"memo: the last batches would still do {memo['dH']:+.4f} after the window, through "
        "momentum, at the slope of its end",
        "Shares are direct effects through the optimizer. Attribution is not removal.",
    ]
    lines += [f"note: {note}" for note in summary["notes"]]
    if summary["assumed"]:
        named = ", ".join(f"{name} = {value}" for name, value in summary["assumed"].items())
        lines.append(f"ASSUMED, neither read nor given: {named}")
    lines.append(
        f"trusted: {CHECKED}"
        if summary["trusted"]
        else f"not trusted: {'; '.join(summary['why_not'])}"
    )
    if (folder := summary.get("run_directory")) is not None:
        lines.append(f"Files: {folder}")
    return lines


def _line(name: str, value: float, stderr: float | None, gain: Any) -> str:
    spread = "" if stderr is None else f"{stderr:.4f}"
    bought = "" if gain is None else f"{gain:+.4f}"
    return f"{name:34}{value:>+12.4f}{spread:>11}{bought:>12}"
