"""Every step's batch on disk, and all that the offline commands need to ask about it later.

    DIR/step_N/update_batch     what step N (counted from 0) learned from: tokens, masks,
                                advantages, old log-probs, the rewards of every rollout
    DIR/step_N/evaluation       what it was probed with, if it was
    DIR/step_N/made_step        fingerprints of the gradient that was used and of the step made
    DIR/prompts                 the prompts of training and evaluation, with every column
    DIR/entropy_probe.json      the training facts
    DIR/entropy_probe_record.json   trainer, options, rewards, prompts (`training_record`)
    checkpoint-N/...            all but the prompts, beside each checkpoint that the trainer saves,
                                and beside the one that it was resumed from; there, where it is
                                small enough or asked for, the gradient itself

The copies beside a checkpoint name the weights they belong to, and are what the offline commands
read: `entropy-probe run --checkpoint checkpoint-N` replays the step that was made from it.

`entropy_probe.json` holds what decides a step and is in no checkpoint. The trainer's settings say
most of it. What they cannot know (which dataset, which rewards) comes from whoever set the training
up, and wins; notes of both are kept. A line of prompts/train.jsonl or prompts/eval.jsonl is a row
of the dataset and `_prompt_ids`, the tokens that the trainer makes of its prompt; columns that JSON
cannot hold (images, say) are left out and named.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NotRequired, TypedDict, get_args

import torch
from torch import Tensor

from entropy_experiments.artifacts import sha256, write_whole
from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.recorded_step import (
    FINGERPRINT_FILE,
    GRADIENT_FILE,
    MADE_STEP,
    RecordedStep,
    base_fingerprint,
    base_location,
    gradient_bytes,
)
from entropy_experiments.checkpoints.training_facts import FACTS_FILE, KNOWN_FACTS, FactsFile
from entropy_experiments.checkpoints.training_record import (
    RECORD_FILE,
    SCHEMA,
    PromptSet,
    RecordContent,
    RecordedPrompts,
    RecordedRewards,
    RewardSource,
    read_record,
)
from entropy_experiments.distributed import Ranks
from entropy_experiments.loss_names import Loss
from entropy_experiments.numerics.sketch import Fingerprint, sketch
from entropy_experiments.online.evaluation_rollouts import chosen_rows
from entropy_experiments.online.trl_options import (
    recorded_options,
    recorded_trainer,
    rounded_steps,
    sampled_otherwise,
    unfollowed,
)
from entropy_experiments.online.trl_trainer import (
    Captures,
    step_microbatches,
    token_divisor,
    trainer_facts,
    unwrapped_optimizer,
    update_batch,
)
from entropy_experiments.sampling.importers import BY_FUNCTION
from entropy_experiments.sampling.rollout_files import save_rollouts, save_update_batch
from entropy_experiments.types import Params, Rollouts

PROMPTS = "prompts"
IDS = "_prompt_ids"
MOST = 20_000
"""Rows of a set that are kept; of a larger one, so many chosen by chance."""
SCRIPT = "__main__"
EVALUATION, UPDATE = "evaluation", "update_batch"
GRADIENT_ELEMENTS = 20_000_000
"""A gradient of no more than this (80 MB in fp32) is kept beside a checkpoint by default."""


class BatchMeta(TypedDict):
    """Which step a stored batch belongs to; beside a checkpoint, the sha256 of its weights."""

    step: int
    weights: NotRequired[str]


class Recorder:
    """`gradient`: keep the gradient itself beside checkpoints; None: where it is small enough."""

    def __init__(self, folder: Path, facts: FactsFile, *, gradient: bool | None = None) -> None:
        refuse_unknown(facts)
        self.folder, self.facts, self.gradient = folder, facts, gradient
        self._beside: tuple[int, Path, str] | None = None
        """(step, checkpoint, its weights), what the step at hand is made from."""
        self._resumed: Path | None = None
        """The checkpoint that training was resumed from, until its batch is replaced."""
        self._record: RecordContent | None = None
        self._pending: tuple[RecordedStep, str | None] | None = None
        """(the step at hand, sha256 of the gradient that is kept of it)."""

    def begin(self, trainer: Any, model: Any, ranks: Ranks) -> None:
        """What does not change in training: prompts, rewards, options, the base."""
        # Of an earlier training of the same trainer, whose checkpoints are not this one's.
        self._beside = self._resumed = self._pending = None
        if ranks.rank:
            return
        prompts = write_prompts(self.folder / PROMPTS, trainer)
        self._record = {
            "schema": SCHEMA,
            "trainer": recorded_trainer(trainer),
            "options": recorded_options(trainer.args),
            "unfollowed": [*unfollowed(trainer), *rounded_steps(model)],
            "sampling": sampled_otherwise(trainer),
            "rewards": recorded_rewards(trainer),
            "prompts": prompts,
            "base": base_fingerprint(model),
            "base_location": base_location(model),
        }
        self._write_record(self.folder, trainer)
        write_facts(self.folder, trainer, self.facts)

    def record(
        self,
        trainer: Any,
        step: int,
        ranks: Ranks,
        *,
        gradient: Mapping[str, Tensor | None],
        params: Params,
        captures: Captures | None,
    ) -> None:
        """The batch of the step at hand, and its gradient's fingerprint."""
        batch = update_batch(trainer, ranks, captures)
        parts = step_microbatches(trainer, ranks)
        if ranks.rank:
            return
        if not (self.folder / FACTS_FILE).is_file():
            write_facts(self.folder, trainer, self.facts)
        if self._resumed is not None:
            self._describe_again(trainer, self._resumed)
        more = {"divisor": token_divisor(trainer), "rewards": _by_function(parts, trainer)}
        more = {name: value for name, value in more.items() if value is not None}
        for place, meta in self._places(step):
            save_update_batch(place / UPDATE, batch, meta={**meta, **more})
        present = {name: g.detach() for name, g in gradient.items() if g is not None}
        if not all(bool(g.isfinite().all()) for g in present.values()):
            self._pending = None  # what it does to the weights is not kept
            return  # it has no fingerprint; the probe leaves this step out and says so
        recorded = RecordedStep(
            folder=self.folder,
            step=step,
            lr=float(unwrapped_optimizer(trainer.optimizer).param_groups[0]["lr"]),
            gradient=Fingerprint.of(present),
            without_gradient=tuple(name for name, g in gradient.items() if g is None),
            change=None,  # known after the step
            # Not the parameters after the step before: anything may have changed them since.
            before=sketch(params),
        )
        places = self._places(step)
        beside = any("weights" in meta for _, meta in places)
        content = gradient_bytes(present) if beside and self._keeps(present) else None
        digest = None if content is None else hashlib.sha256(content).hexdigest()
        self._pending = (recorded, digest)
        for place, meta in places:
            _write_step(
                place, replace(recorded, gradient_sha256=digest if "weights" in meta else None)
            )
            if "weights" not in meta:
                continue
            if content is not None:
                write_whole(place / MADE_STEP / GRADIENT_FILE, content)
            else:  # one that an earlier training left is of another batch
                (place / MADE_STEP / GRADIENT_FILE).unlink(missing_ok=True)

    def after_step(self, step: int, params: Params, ranks: Ranks) -> None:
        """The optimizer has stepped: what became of the parameters."""
        if ranks.rank or self._pending is None or self._pending[0].step != step:
            return
        after = sketch(params)
        if not bool(after.isfinite().all()):
            self._pending = None
            return  # weights that overflowed have no fingerprint; measuring them says so
        recorded, digest = self._pending
        assert recorded.before is not None  # set by `record`
        stepped = replace(recorded, change=after - recorded.before)
        for place, meta in self._places(step):
            _write_step(
                place, replace(stepped, gradient_sha256=digest if "weights" in meta else None)
            )
        self._pending = None

    def evaluated(self, rollouts: Rollouts, step: int, ranks: Ranks) -> None:
        """The rollouts that the step at hand was probed with."""
        if ranks.rank:
            return
        for place, meta in self._places(step):
            save_rollouts(place / EVALUATION, rollouts, meta=meta)

    def saved(self, trainer: Any, checkpoint: Path, ranks: Ranks) -> None:
        """The trainer has just written this checkpoint: the next step's batch belongs to it."""
        if ranks.rank or not checkpoint.is_dir():
            return
        # The record before the facts, which it has too: killed in between, nothing is lost.
        self._write_record(checkpoint, trainer, files=_hashes(checkpoint))
        write_facts(checkpoint, trainer, self.facts)
        self._belongs_to(trainer.state.global_step, checkpoint)

    def resumed(self, trainer: Any, checkpoint: Path, ranks: Ranks) -> None:
        """Training goes on from this checkpoint: so does the step at hand.

        One of another run, outside the trainer's folder, is left as it is.
        """
        own = checkpoint.resolve().parent == Path(trainer.args.output_dir).resolve()
        if ranks.rank or not own or not checkpoint.is_dir():
            return
        if not (checkpoint / RECORD_FILE).is_file():
            # killed between the trainer's last file and our first
            self._write_record(checkpoint, trainer, files=_hashes(checkpoint))
            write_facts(checkpoint, trainer, self.facts)
        self._resumed = checkpoint
        self._belongs_to(trainer.state.global_step, checkpoint)

    def _describe_again(self, trainer: Any, checkpoint: Path) -> None:
        """Facts and record of the training at hand, whose batch is about to replace the earlier
        one's: its options may be others. The files are as they were saved."""
        earlier = read_record((checkpoint,))
        self._write_record(checkpoint, trainer, files=None if earlier is None else earlier.files)
        write_facts(checkpoint, trainer, self.facts)
        self._resumed = None

    def _belongs_to(self, step: int, checkpoint: Path) -> None:
        weights = find_checkpoint(checkpoint).files[0]
        self._beside = (step, checkpoint, sha256(weights))

    def _places(self, step: int) -> list[tuple[Path, BatchMeta]]:
        places: list[tuple[Path, BatchMeta]] = [(self.folder / f"step_{step}", {"step": step})]
        if self._beside is not None and self._beside[0] == step:
            _, checkpoint, weights = self._beside
            places.append((checkpoint, {"step": step, "weights": weights}))
        return places

    def _write_record(
        self, folder: Path, trainer: Any, *, files: Mapping[str, str] | None = None
    ) -> None:
        if self._record is None:  # `begin` failed, and the probe is off
            return
        prompts = self._record["prompts"].copy()
        if prompts["sets"]:
            prompts["folder"] = os.path.relpath(self.folder / PROMPTS, folder)
        facts = facts_of(trainer, self.facts)
        content = {**self._record, "prompts": prompts, "facts": facts}
        content |= {"files": files} if files else {}
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        write_whole(folder / RECORD_FILE, text.encode())

    def _keeps(self, gradient: Params) -> bool:
        if self.gradient is not None:
            return self.gradient
        return sum(g.numel() for g in gradient.values()) <= GRADIENT_ELEMENTS


def _write_step(place: Path, step: RecordedStep) -> None:
    folder = place / MADE_STEP
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FINGERPRINT_FILE, step.as_json())


def _hashes(checkpoint: Path) -> dict[str, str]:
    """sha256 of each file that the trainer wrote."""
    own = (FACTS_FILE, RECORD_FILE, UPDATE, EVALUATION, MADE_STEP)
    return {
        str(file.relative_to(checkpoint)): sha256(file)
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file() and file.relative_to(checkpoint).parts[0] not in own
    }


def _by_function(parts: list[dict[str, Any]], trainer: Any) -> dict[str, list[float | None]] | None:
    """Each reward function's values, in the batch's order; None where it had no opinion."""
    if any(part.get(BY_FUNCTION) is None for part in parts):
        return None
    value_NF = torch.cat([part[BY_FUNCTION].cpu().double() for part in parts])
    names = [one["name"] for one in recorded_rewards(trainer)["functions"]]
    for name, infinite in zip(names, value_NF.isinf().any(0).tolist(), strict=True):
        if infinite:
            raise ValueError(
                f"The reward function {name!r} gave an infinite reward; expected finite numbers, "
                "which a record can hold and advantages can be made of. Bound what it returns."
            )
    return {
        name: [None if value != value else value for value in value_NF[:, i].tolist()]
        for i, name in enumerate(names)
    }


def refuse_unknown(facts: Mapping[str, object]) -> None:
    """A name that the offline commands would refuse, before it is in every checkpoint."""
    for name in facts:
        if name not in KNOWN_FACTS:
            near = get_close_matches(name, KNOWN_FACTS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"facts has {name!r}.{hint} Expected names among {', '.join(KNOWN_FACTS)}."
            )


def facts_of(trainer: Any, own_facts: FactsFile) -> FactsFile:
    read = trainer_facts(trainer)
    if read.get("loss") not in get_args(Loss):
        read.pop("loss", None)  # the record names it among what is not followed
    return {**read, **own_facts}


def write_facts(folder: Path, trainer: Any, own_facts: FactsFile) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts_of(trainer, own_facts), indent=1, sort_keys=True) + "\n"
    write_whole(folder / FACTS_FILE, text.encode())


def write_prompts(folder: Path, trainer: Any) -> RecordedPrompts:
    """Training's prompts as files; the record's entry."""
    data = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
    if isinstance(data["eval"], dict):  # several evaluation sets: the first, as the probe does
        data["eval"] = next(iter(data["eval"].values()), None)
    sets: dict[str, PromptSet] = {}
    dropped: set[str] = set()
    for name, rows in data.items():
        if rows is None or not hasattr(rows, "__len__"):
            continue
        lines, left_out = _lines(trainer, rows)
        dropped |= left_out
        content = "".join(line + "\n" for line in lines).encode()
        write_whole(_make_folder(folder) / f"{name}.jsonl", content)
        digest = hashlib.sha256(content).hexdigest()
        sets[name] = {"rows": len(lines), "of": len(rows), "sha256": digest}
    messages = [_asks_in_messages(rows) for name, rows in data.items() if name in sets]
    entry: RecordedPrompts = {
        "sets": sets,
        "dropped": sorted(dropped),
        "messages": any(messages),
    }
    if not sets:
        entry["why_not"] = "training drew its prompts from a stream, which was not recorded"
    return entry


def _asks_in_messages(rows: Any) -> bool:
    return len(rows) > 0 and not isinstance(rows[0]["prompt"], str)


def _lines(trainer: Any, rows: Any) -> tuple[list[str], set[str]]:
    chosen = range(len(rows))
    if len(rows) > MOST:
        chosen = sorted(chosen_rows(len(rows), MOST, seed=0, step=0))
    lines, dropped = [], set[str]()
    for i in chosen:
        row, kept = rows[i], {}
        for name, value in row.items():
            try:
                kept[name] = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError):
                dropped.add(name)
        # One by one: a tokenizer's padding must not join the prompts.
        kept[IDS] = [int(t) for t in trainer._tokenize_prompts([row["prompt"]])[0][0]]
        lines.append(json.dumps(kept, ensure_ascii=False))
    return lines, dropped


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def recorded_rewards(trainer: Any) -> RecordedRewards:
    """The record's entry."""
    names: list[str] = list(getattr(trainer, "reward_func_names", ()))
    functions = list(trainer.reward_funcs)
    names = _distinct(names or [getattr(f, "__name__", type(f).__name__) for f in functions])
    weights = getattr(trainer, "reward_weights", None)
    return {
        "functions": [
            reward_source(name, function) for name, function in zip(names, functions, strict=True)
        ],
        "weights": [1.0] * len(names) if weights is None else [float(w) for w in weights],
    }


def _distinct(names: list[str]) -> list[str]:
    """Two functions of one name get numbers: results are kept by name."""
    return [
        name if names.count(name) == 1 else f"{name}_{names[:i].count(name)}"
        for i, name in enumerate(names)
    ]


def reward_source(label: str, function: Any) -> RewardSource:
    """Where `function`, which training calls `label`, can be imported from; or why it cannot."""

    def not_importable(why: str) -> RewardSource:
        return {"name": label, "why_not": why}

    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (inspect.isfunction(function) or inspect.iscoroutinefunction(function)):
        kind = type(function).__name__
        return not_importable(
            f"it is a {kind}, and only a function of a module can be imported again"
        )
    if module is None or name is None or "<" in name or "." in name:
        return not_importable(
            f"{name} is not defined at the top of a module, so nothing can import it"
        )
    if getattr(sys.modules.get(module), name, None) is not function:
        return not_importable(f"{module} has another object under the name {name}")
    source = inspect.getsourcefile(function)
    if source is None or not Path(source).is_file():
        return not_importable(f"{module} has no source file")
    file = Path(source).resolve()
    if module == SCRIPT and (statement := _acts(file)):
        return not_importable(
            f"it is defined in the script {file.name}, and importing that would run its line "
            f"{statement}; put it into a module of its own, or the rest of the script under "
            "`if __name__ == '__main__':`"
        )
    return {
        "name": label,
        "module": None if module == SCRIPT else module,
        "function": name,
        "file": str(file),
        "sha256": sha256(file),
    }


def _acts(file: Path) -> int | None:
    """The first line of a script that does more than define; None: importing it is harmless."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(
            statement,
            ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
        ):
            continue
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if text or (isinstance(statement, ast.If) and _is_main(statement.test)):
            continue
        plain = isinstance(statement, ast.Assign | ast.AnnAssign) and not any(
            isinstance(part, ast.Call | ast.Await) for part in ast.walk(statement)
        )
        if not plain:
            return statement.lineno
    return None


def _is_main(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
    )
