"""`entropy-probe arc train|eval|show`, which is also `python -m arc_refine`.

Help imports neither torch nor numpy. Underscores are read as hyphens (`--max_batches`), and the
rates have the names of document 003 too (`--agent-lr`, `--qwen-lr`).
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from arc_refine.config import CHANGEABLE, TrainConfig, flag

EXIT_CODES = (
    "\n\b\nExit codes: 0 done, 1 a bug, 2 bad input, 3 a gradient contract is broken,\n"
    "130 interrupted; --resume goes on."
)
SPELLING = {"token_normalize_func": lambda word: word.replace("_", "-")}
HERE = Path(__file__).parent
KERNELS = "128"
app = typer.Typer(
    name="arc",
    help="Train an ARC solver whose prompt embedding is refined by RL; gradients are verified.",
    epilog="\b\nExamples:\n"
    "  entropy-probe arc train --max-batches 5\n"
    "  entropy-probe arc eval RUN\n"
    "  entropy-probe arc show RUN --out tasks.html",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
DEFAULT = TrainConfig()


def _option(name: str, text: str, *more: str, **rest: Any) -> Any:
    usual = getattr(DEFAULT, name)
    help_text = f"{text} [{usual:g}]" if isinstance(usual, float) else f"{text} [{usual}]"
    help_text = text if usual is None or isinstance(usual, bool) else help_text
    return typer.Option(flag(name), *more, help=help_text, show_default=False, **rest)


def _whole(name: str, text: str, *more: str) -> Any:
    return Annotated[int | None, _option(name, text, *more, metavar="N")]


def _number(name: str, text: str, *more: str) -> Any:
    return Annotated[float | None, _option(name, text, *more, metavar="X")]


def _word(name: str, text: str, metavar: str) -> Any:
    return Annotated[str | None, _option(name, text, metavar=metavar)]


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and only that.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Run = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]
Source = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="SET",
        help="held-out (the run's own), training, evaluation, a task's .json or a folder.",
    ),
]


@app.command(
    "train",
    context_settings=SPELLING,
    epilog="\b\nExamples:\n"
    "  entropy-probe arc train --epochs 1 --agent_lr 1e-5 --qwen_lr 5e-5 --max_batches 5\n"
    "  entropy-probe arc train --lm smollm2 --refine pathwise --out runs/pathwise\n"
    "  entropy-probe arc train --resume runs/pathwise --epochs 2\n" + EXIT_CODES,
)
def train(
    epochs: _whole("epochs", "Passes over the training episodes.") = None,  # type: ignore[valid-type]
    max_batches: _whole("max_batches", "Limit of batches per epoch.") = None,  # type: ignore[valid-type]
    eval_batches: _whole("eval_batches", "Batches of a validation; 0: all.") = None,  # type: ignore[valid-type]
    batch_size: _whole("batch_size", "Episodes per batch.") = None,  # type: ignore[valid-type]
    lr_agent: _number("lr_agent", "Learning rate of agent, encoder, loss.", "--agent-lr") = None,  # type: ignore[valid-type]
    lr_lm: _number("lr_lm", "Learning rate of the language model.", "--lm-lr", "--qwen-lr") = None,  # type: ignore[valid-type]
    lr_policy: _number("lr_policy", "Learning rate of the policy.", "--policy-lr") = None,  # type: ignore[valid-type]
    weight_decay: _number("weight_decay", "Weight decay, except of the RL policy.") = None,  # type: ignore[valid-type]
    clip: _number("clip", "Largest gradient norm.") = None,  # type: ignore[valid-type]
    lm: _word("lm", "tiny, smollm2, none or a local model's folder.", "LM") = None,  # type: ignore[valid-type]
    lm_train: _word("lm_train", "none, lora or full; others than tiny: lora.", "HOW") = None,  # type: ignore[valid-type]
    refine: _word("refine", "off, pathwise or rl.", "HOW") = None,  # type: ignore[valid-type]
    refinements: _whole("refinements", "Refinements per state, for rl.") = None,  # type: ignore[valid-type]
    bound: _number("bound", "Largest refinement of a coordinate.") = None,  # type: ignore[valid-type]
    reward_scale: _number("reward_scale", "Factor of the rewards.") = None,  # type: ignore[valid-type]
    entropy_weight: _number("entropy_weight", "Weight of the policy's entropy.") = None,  # type: ignore[valid-type]
    hard_weight: _number("hard_weight", "Extra weight of wrong cells.") = None,  # type: ignore[valid-type]
    risk_weight: _number("risk_weight", "Weight of KL(Q, C).") = None,  # type: ignore[valid-type]
    z_weight: _number("z_weight", "Weight of KL(C, colours seen).") = None,  # type: ignore[valid-type]
    bi_weight: _number("bi_weight", "Weight of JS(forward, backward).") = None,  # type: ignore[valid-type]
    back_weight: _number("back_weight", "Weight of the backward agent's loss.") = None,  # type: ignore[valid-type]
    prompt_weight: _number("prompt_weight", "Weight of 1 - cos(prompt, state).") = None,  # type: ignore[valid-type]
    size_weight: _number("size_weight", "Weight of the two size heads.") = None,  # type: ignore[valid-type]
    prompt_width: _whole("prompt_width", "Width of the prompt embedding.") = None,  # type: ignore[valid-type]
    fuse: _number("fuse", "Share of numbers, relative to text.") = None,  # type: ignore[valid-type]
    agent_width: _whole("agent_width", "Channels of the agent.") = None,  # type: ignore[valid-type]
    agent_steps: _whole("agent_steps", "Steps of the agent.") = None,  # type: ignore[valid-type]
    data: _word("data", "training, evaluation, a .json or a folder.", "SET") = None,  # type: ignore[valid-type]
    held_out: _number("held_out", "Share of tasks held out, whole.") = None,  # type: ignore[valid-type]
    max_tasks: _whole("max_tasks", "Train on the first N tasks only.") = None,  # type: ignore[valid-type]
    max_side: _whole("max_side", "Only tasks with grids up to N a side.") = None,  # type: ignore[valid-type]
    augment: Annotated[
        bool | None, typer.Option("--augment/--no-augment", help="Colours and symmetries.")
    ] = None,
    curriculum: Annotated[
        bool | None, typer.Option("--curriculum/--no-curriculum", help="Small grids first.")
    ] = None,
    shuffle_text: Annotated[
        bool | None,
        typer.Option("--shuffle-text/--own-text", help="An ablation: texts of other tasks."),
    ] = None,
    device: _word("device", "cpu or cuda.", "DEVICE") = None,  # type: ignore[valid-type]
    dtype: _word("dtype", "float32, bfloat16, or float16 on cuda.", "DTYPE") = None,  # type: ignore[valid-type]
    threads: _whole("threads", "CPU threads.") = None,  # type: ignore[valid-type]
    seed: _whole("seed", "Seed of split, weights, order, noise.") = None,  # type: ignore[valid-type]
    doctor: _whole("doctor", "Check gradients in the first N steps.") = None,  # type: ignore[valid-type]
    log_every: _whole("log_every", "A line on the screen every N batches.") = None,  # type: ignore[valid-type]
    checkpoint_every: _whole("checkpoint_every", "A checkpoint every N steps.") = None,  # type: ignore[valid-type]
    tracker: _word("tracker", "none, tensorboard or wandb.", "NAME") = None,  # type: ignore[valid-type]
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Of the run [arc_runs/<time>].")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train; metrics, checkpoints and contracts go to the run's folder."""
    options = _given(locals())
    place = resume or out or Path("arc_runs") / time.strftime("%Y%m%d-%H%M%S")
    with _ending(debug, lambda: _kept(place)):
        if resume is not None and out is not None:
            raise ValueError("--resume writes to the run's own folder. Leave --out out.")
        config = TrainConfig(**options) if resume is None else None
        # Convolutions keep a compiled kernel for each shape of batch, by default 1024 of them:
        # memory would grow for hundreds of steps. Read by torch when it is first used.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS)

        from arc_refine import train as training

        say = _voice(quiet, json)
        if config is None:
            training.resume(place, options, say=say)
        else:
            training.train(config, place, say=say)
        _tell_run(place, json=json)


@app.command(
    "eval",
    context_settings=SPELLING,
    epilog="\b\nExamples:\n"
    "  entropy-probe arc eval arc_runs/first\n"
    "  entropy-probe arc eval arc_runs/first --data evaluation --json\n" + EXIT_CODES,
)
def evaluate(
    run: Run,
    data: Source = "held-out",
    batches: Annotated[
        int | None, typer.Option("--batches", metavar="N", help="At most so many batches.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Tasks solved and cells right, before and after refinement, with Wilson intervals."""
    with _ending(debug):
        from arc_refine.evaluate import sentence, summary
        from arc_refine.runs import outcomes

        result = {"data": data, **summary(outcomes(run, data, max_batches=batches))}
        _print_result(result, sentence(result), json=json)


@app.command(
    "show",
    context_settings=SPELLING,
    epilog="\b\nExamples:\n"
    "  entropy-probe arc show arc_runs/first --count 8 --out tasks.html\n"
    "  entropy-probe arc show arc_runs/first --task 007bbfb7 --data training --out one.png\n"
    + EXIT_CODES,
)
def show(
    run: Run,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="A name ending in .html or .png.")
    ] = Path("arc_tasks.html"),
    data: Source = "held-out",
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="ID", help="This task; may be given several times."),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="Without --task: so many tasks.")
    ] = 6,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Draw tasks with the predictions before and after refinement."""
    with _ending(debug):
        from arc_refine.runs import outcomes
        from arc_refine.show import render

        drawn = outcomes(run, data, ids=tuple(task or ()), count=None if task else count)
        path = render(drawn, out, title=f"{run.name}: {data}")
        result = {"file": str(path), "tasks": [o.task_id for o in drawn]}
        _print_result(result, f"{path}: {len(drawn)} test outputs drawn", json=json)


def main() -> None:
    """The entry point of `python -m arc_refine`."""
    app(prog_name="arc_refine")


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were typed; what was not is None."""
    names = set(DEFAULT.to_dict())
    options = {k: v for k, v in values.items() if k in names and v is not None}
    if options.get("eval_batches") == 0:
        options["eval_batches"] = None
    return options


@contextmanager
def _ending(debug: bool, interrupted: Callable[[], str] = lambda: "Interrupted.") -> Iterator[None]:
    # not at the top: the probe's command line imports this module
    from entropy_experiments.cli import FINDINGS, PACKAGE, ending

    with ending(debug=debug, interrupted=interrupted, packages=(PACKAGE, HERE)):
        try:
            yield
        except ImportError as missing:
            raise ValueError(str(missing)) from missing
        except RuntimeError as failure:
            from arc_refine.contracts import ContractError
            from arc_refine.step import NonFiniteGradientError

            if debug or not isinstance(failure, ContractError | NonFiniteGradientError):
                raise
            typer.echo(f"Error: {failure}", err=True)
            raise typer.Exit(FINDINGS) from None


def _kept(place: Path) -> str:
    from arc_refine.train import kept

    return kept(place)


def _voice(quiet: bool, json: bool) -> Callable[[str], None]:
    if quiet:
        return lambda text: None
    return lambda text: print(text, file=sys.stderr if json else sys.stdout, flush=True)


def _tell_run(place: Path, *, json: bool) -> None:
    from arc_refine.metrics import METRICS, VALIDATION, read_rows

    rows, validations = (read_rows(place / name) for name in (METRICS, VALIDATION))
    row = {
        "run": str(place),
        "steps": len(rows),
        "last": rows[-1] if rows else None,
        "validation": validations[-1] if validations else None,
    }
    words = f"{len(rows)} steps in {place}; next: entropy-probe arc eval {place}"
    _print_result(row, words, json=json)


def _print_result(result: Mapping[str, Any], words: str, *, json: bool) -> None:
    typer.echo(jsonlib.dumps(result, indent=2, allow_nan=False) if json else words)


__all__ = ["CHANGEABLE", "app", "main"]
