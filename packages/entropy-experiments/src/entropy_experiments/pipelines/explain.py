"""`entropy-probe explain`: the ledger of a recorded run, from its checkpoints to a run directory.

The walk goes backwards through the checkpoints of the window (`attribution.run_ledger`). A visit of
checkpoint t draws its evaluation rollouts, takes g_H and g_R there, and accounts for batch t with
the costate of the visit before. Each visit leaves two stages on disk,

    step_t      token rows, numbers and influence values: all that the files are made of
    costate_t   gradients at t and rho A_t: all that the next visit needs; the one before is deleted

so a run that is killed goes on after its last finished visit, with the same bits, and memory holds
one step's states whatever the length of the run. Between sparse checkpoints the states are replayed
(`pipelines.replay`), a segment at a time, and kept on disk until the segment is done.

Evaluation prompts are the same at every checkpoint and no prompts of the run; responses are drawn
anew at each, independently, so that E_t is independent of the steps it judges. The two ends have
further responses to the same prompts, by which the change is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from entropy_experiments.artifacts import (
    digest_of,
    json_bytes,
    read_json_object,
    sha256,
    sweep_partials,
    write_changed,
)
from entropy_experiments.attribution.groups import layer_of, module_of
from entropy_experiments.attribution.run_ledger import (
    ENTROPY,
    REWARD,
    TANGENT,
    Columns,
    LedgerStep,
    StepShares,
    columns_of,
    slopes_at,
    step_shares,
)
from entropy_experiments.attribution.token_rows import response_index
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.recorded_run import RecordedRun, find_run
from entropy_experiments.checkpoints.runs import embedded_trajectory, provenance
from entropy_experiments.config import Config
from entropy_experiments.distributed import current
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.reward import reward_estimand
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.sums import by_prompt, tail_check
from entropy_experiments.pipelines.explain_files import (
    StoredStep,
    prompt_id,
    table_bytes,
    write_run_ledger,
)
from entropy_experiments.pipelines.influence.packing import pack_params, unpacked
from entropy_experiments.pipelines.influence.store import Stage, StageStore
from entropy_experiments.pipelines.probe_inputs import (
    as_the_loss_sees,
    estimator_options,
    limits_of,
    other_start,
    refuse_foreign,
    with_reference,
)
from entropy_experiments.pipelines.probe_sampling import (
    OpenCheckpoint,
    PromptIds,
    Sampler,
    named_contents,
    prompt_ids,
    prompts_of,
    recorded_rate,
    response_ids,
)
from entropy_experiments.pipelines.replay import certify_arrival, learning_rates, replay_step
from entropy_experiments.pipelines.run_conditions import (
    analysis_conditions,
    own_device,
    refuse_sharding,
)
from entropy_experiments.pipelines.training_facts import (
    TrainingFacts,
    reward_of,
    training_facts,
    with_learning_rate,
)
from entropy_experiments.results import RUN_LEDGER, JSONObject, RunLedgerResult, numbers
from entropy_experiments.results.run_ledger import (
    LAYER_TABLE,
    LINES,
    MANIFEST_FILE,
    TABLES,
    TOKEN_TABLE,
    Arrival,
    RunLine,
    RunStep,
    read_run_ledger,
)
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.rollout_files import load_update_batch, recorded_meta
from entropy_experiments.study_files import PAGE
from entropy_experiments.types import (
    Estimand,
    Estimate,
    OptimizerState,
    Params,
    Rollouts,
    UpdateBatch,
)
from entropy_experiments.types.estimate import Influence, combine
from entropy_experiments.update.certificate import APART, CLOSE
from entropy_experiments.update.gradient import loss_gradient

RESULTS = Path("results") / "run_ledger"
IDENTITY = "explain.json"
VERSION = 2
"""Raise it when a stage changes its meaning: earlier ones are then computed again."""
FRESH = 4
"""Responses to each prompt at both ends, by which the change is measured."""
NOT_RESULTS = ("detailed_logging", "output", "training", "experiment", "influence", "rollouts")
"""Sections of the configuration that change no number."""
SMALL = 0.05
"""Of the total: an unexplained rest below this is said to be small."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """What part of a run is explained, and how.

    Args:
        start: First checkpoint of the window; None: the run's first.
        end: Last one; None: the run's last.
        every: Read every so many checkpoints and replay the steps between.
        tangent: Also by the slope before each step alone.
        responses: Of each evaluation prompt at each checkpoint; two or more compare rewards within
            prompts, which has less noise.
        training_prompts: Evaluate on the run's own prompts, where it has no others.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> ExplainOptions(start=10, end=20, every=5).responses
        2
    """

    start: int | None = None
    end: int | None = None
    every: int = 1
    tangent: bool = False
    responses: int = 2
    training_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "responses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise ValueError(
                f"The window is from checkpoint {self.start} to {self.end}; expected its end after "
                "its start."
            )


@dataclass(frozen=True, kw_only=True)
class Window:
    """Checkpoints from `start` to `end`; those of `anchors` are read, the others replayed."""

    start: int
    end: int
    anchors: tuple[int, ...]

    @property
    def steps(self) -> range:
        return range(self.start, self.end)

    def segment(self, step: int) -> tuple[int, int]:
        """The stored checkpoints around a replayed one."""
        return (
            max(a for a in self.anchors if a <= step),
            min(a for a in self.anchors if a > step),
        )


def find_window(run: RecordedRun, options: ExplainOptions) -> Window:
    """The window, all of whose batches are recorded.

    Args:
        run: The run.
        options: Which part of it.

    Returns:
        Its ends and the checkpoints that are read.

    Raises:
        ValueError: If an end is no checkpoint, or a batch is missing.
    """
    stored = sorted(run.checkpoints)
    start = stored[0] if options.start is None else options.start
    end = stored[-1] if options.end is None else options.end
    for name, step in (("--from", start), ("--to", end)):
        if step not in run.checkpoints:
            near = min(stored, key=lambda s: abs(s - step))
            raise ValueError(
                f"{name} is {step}, and {run.folder} has no checkpoint of that step; expected one "
                f"of {_few(stored)}. The nearest is {near}."
            )
    if start >= end:
        raise ValueError(
            f"The window of {run.folder} is from checkpoint {start} to {end}; expected two "
            "checkpoints or more, the end after the start."
        )
    missing = [step for step in range(start, end) if run.batch(step) is None]
    if missing:
        whole = max((s for s in stored if s <= missing[0]), default=start)
        advice = f" Checkpoints {start} to {whole} are complete (--to {whole})."
        raise ValueError(
            f"{len(missing)} of {end - start} steps of {run.folder} have no recorded batch (the "
            f"first is step {missing[0]}); expected update_batch/ for each, as "
            "EntropyProbeCallback(record=...) or run_ledger=True keeps it."
            f"{advice if whole > start else ''}"
        )
    kept = [s for s in stored if start <= s <= end and (s - start) % options.every == 0]
    return Window(start=start, end=end, anchors=tuple(sorted({start, *kept, end})))


def explain(
    config: Config,
    run: str | Path | None = None,
    options: ExplainOptions | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    say: Say | None = None,
) -> RunLedgerResult:
    """Who changed the entropy and the reward of a run: every token of every batch.

    Args:
        config: How rollouts are drawn and entropy is estimated.
        run: Folder of the checkpoints; None: the embedded run.
        options: Which part of the run, and how.
        out: Run directory; None: results/run_ledger/...
        overwrite: Replace another ledger there.
        say: Called with a line of progress.

    Returns:
        summary.json, and `run_directory`, where the tables are.

    Raises:
        FileNotFoundError: If there is no such run, or it recorded no batches.
        ValueError: If the window has gaps, or a replay does not arrive.

    Examples:
        >>> summary = explain(parse_config({}), options=ExplainOptions(end=3))  # doctest: +SKIP
        >>> explain(parse_config({}), "no_such_run")
        Traceback (most recent call last):
        FileNotFoundError: Run not found: no_such_run; ...
    """
    options, ranks = options or ExplainOptions(), current()
    recorded = find_run(embedded_trajectory() if run is None else Path(run))
    window = find_window(recorded, options)
    refuse_sharding(config)
    with analysis_conditions():
        key = ranks.broadcast_from_zero(lambda: _key(config, recorded, window, options))
        name = "embedded" if run is None else recorded.folder.resolve().name
        folder = Path(out) if out is not None else RESULTS / f"{name}_{key[:8]}"
        ranks.broadcast_from_zero(lambda: _bind(folder, key, overwrite=overwrite))
        if ranks.broadcast_from_zero(lambda: _finished(folder, key)):
            if say is not None:
                say(f"{folder}: finished already, nothing was computed")
        else:
            config = config.replaced(
                {"sampling.save": str(folder / "rollouts")}, where="entropy-probe explain"
            )
            walk = Walk(
                config=config,
                run=recorded,
                window=window,
                options=options,
                stages=StageStore(folder / "stages"),
                key=key,
                say=say,
            )
            walk.go()
            summary = walk.summary()
            ranks.broadcast_from_zero(
                lambda: write_run_ledger(folder, key, summary, walk.stored_steps())
            )
        summary = ranks.broadcast_from_zero(lambda: read_run_ledger(folder))
    return cast(RunLedgerResult, {**summary, "run_directory": str(folder)})


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """One checkpoint of the walk, stored or replayed."""

    step: int
    probed: OpenCheckpoint
    replayed: bool

    @property
    def params(self) -> Params:
        return self.probed.policy.params

    @property
    def optimizer(self) -> OptimizerState:
        return self.probed.optimizer


@dataclass(kw_only=True, eq=False)
class Walk:
    """The backward walk over one window; its stages are on disk."""

    config: Config
    run: RecordedRun
    window: Window
    options: ExplainOptions
    stages: StageStore
    key: str
    say: Say | None
    _open: dict[int, Opened] = field(default_factory=dict)
    _avoid: set[PromptIds] | None = None
    _problems: list[Problem] | None = None

    def go(self) -> None:
        """Every visit that is not on disk yet."""
        first, last = self.window.start, self.window.end
        done = self._resumed_from()
        for step in range(last, last if done is None else done, -1):
            current().broadcast_from_zero(partial(self._forget, step))  # killed before it could
        visits, started, made = list(range(last, first - 1, -1)), time.perf_counter(), 0
        for step in visits:
            if done is not None and step >= done:
                continue
            facts = self._visit(step)
            made += 1
            left = step - first
            if self.say is not None:
                spent = (time.perf_counter() - started) / made
                rest = f", about {_minutes(left * spent)} left" if left else ""
                entropy = cast(JSONObject, facts["level"])["value"]
                self.say(
                    f"checkpoint {step}: entropy {entropy:.4f}"
                    + (f", batch {facts['batch_dH']:+.4g}" if step < last else "")
                    + f" ({spent:.1f} s a step{rest})"
                )

    # The stages.

    def _resumed_from(self) -> int | None:
        """The lowest checkpoint whose visit is finished, all after it included."""
        done = None
        for step in range(self.window.end, self.window.start - 1, -1):
            if not self._holds(f"step_{step}"):
                break
            done = step
        if done is None or self._holds(f"costate_{done}"):
            return done
        # Killed between the two stages of a visit: it is made again.
        return None if done == self.window.end else done + 1

    def _facts(self, step: int) -> JSONObject:
        """Of a finished visit, without what the tables alone need."""
        tables = ("by_parameter", "prompts", "solved", "special")
        facts = self._stage(f"step_{step}").facts
        return {name: value for name, value in facts.items() if name not in tables}

    def _holds(self, name: str) -> bool:
        return current().broadcast_from_zero(lambda: self.stages.holds(name, self.key))

    def _stage(self, name: str) -> Stage:
        """Rank 0 alone reads, and tells the others what is in the file."""
        stage = current().broadcast_from_zero(lambda: self.stages.get(name, self.key))
        if stage is None:
            raise FileNotFoundError(
                f"{self.stages.folder} has no stage {name}, which this run needs. Delete the "
                "folder and run the same command again."
            )
        return stage

    def _costate(self, step: int) -> tuple[Columns, Columns | None]:
        """(gradients at a checkpoint, rho A there; None at the window's end)."""
        stage = self._stage(f"costate_{step}")
        names = stage.facts["columns"]
        device = next(iter(self.at(step - 1).params.values())).device
        groups = unpacked(stage.tensors, [f"{kind}.{name}" for kind in "gA" for name in names])

        def of(kind: str) -> dict[str, dict[str, Tensor]]:
            return {
                name: {key: value.to(device) for key, value in groups[f"{kind}.{name}"].items()}
                for name in names
                if groups[f"{kind}.{name}"]
            }

        return of("g"), of("A") or None

    # States.

    def at(self, step: int) -> Opened:
        """The model at a checkpoint; of at most two at a time, neighbours."""
        if step not in self._open:
            stored = step in self.window.anchors
            opened = self._read(step) if stored else self._replayed(step)
            self._open = {s: o for s, o in self._open.items() if abs(s - step) <= 1}
            self._open[step] = opened
        return self._open[step]

    def _read(self, step: int) -> Opened:
        settings = self.config.checkpoint
        last = step == self.window.end
        checkpoint = load_checkpoint(
            self.run.checkpoints[step],
            base=settings.base,
            backbone=settings.backbone,
            dtype=settings.dtype,
            device_map=own_device(settings.device),
            need_optimizer=not last,
        )
        facts = training_facts(self.config, checkpoint.facts, checkpoint.fact_sources)
        policy = SequenceProcessor(
            checkpoint.model,
            temperature=facts["temperature"],
            top_p=facts["top_p"],
            checkpointing=self.config.memory.gradient_checkpointing,
        )
        if checkpoint.optimizer is None:  # after the last step nobody needs it
            before = max(anchor for anchor in self.window.anchors if anchor < step)
            groups = self._read(before).optimizer.groups
            optimizer = OptimizerState(groups=groups, state={})
        else:
            optimizer, recorded = checkpoint.optimizer, recorded_rate(checkpoint)
            if recorded is not None:
                optimizer = with_learning_rate(optimizer, recorded)
        probed = OpenCheckpoint(
            checkpoint=checkpoint, policy=policy, facts=facts, optimizer=optimizer
        )
        return Opened(step=step, probed=probed, replayed=False)

    def _replayed(self, step: int) -> Opened:
        start, end = self.window.segment(step)
        if not self._holds(f"replay_{end}"):
            self._replay(start, end)
        return self._restored(self._read(start), step)

    def _restored(self, opened: Opened, step: int) -> Opened:
        """The model of a stored checkpoint with the parameters of a replayed one."""
        stage = self._stage(f"state_{step}")
        names = ["params", *stage.facts["moments"]]
        groups = unpacked(stage.tensors, names)
        _put(opened.params, groups["params"])
        state = {
            name: {
                **({} if count is None else {"step": count}),
                **{m: groups[m][name] for m in stage.facts["moments"] if name in groups[m]},
            }
            for name, count in stage.facts["counts"].items()
        }
        optimizer = with_learning_rate(
            OptimizerState(groups=opened.optimizer.groups, state=state), stage.facts["lr"]
        )
        return Opened(step=step, probed=replace(opened.probed, optimizer=optimizer), replayed=True)

    def _replay(self, start: int, end: int) -> None:
        """States of the steps between two stored checkpoints, certified at the second."""
        last = self._read(end)
        stored = {name: theta.detach().clone() for name, theta in last.params.items()}
        opened = self._read(start)
        before = {name: theta.detach().clone() for name, theta in opened.params.items()}
        end_rate = last.optimizer.lr
        del last
        rates = [*learning_rates(self.run, start, end, opened.optimizer.lr, end_rate), None]
        probed = replace(opened.probed, optimizer=_rated(opened.optimizer, rates[0]))
        opened = replace(opened, probed=probed)
        distances: list[float | None] = []
        for step in range(start, end):
            name = f"state_{step + 1}"
            if not self._holds(name):
                batch, facts, trained = self.batch(opened)
                gradient = loss_gradient(
                    trained, batch, facts.objective, microbatch=self._microbatch
                ).gradient
                state = replay_step(
                    self.run,
                    step,
                    opened.params,
                    gradient,
                    opened.optimizer,
                    max_grad_norm=facts["max_grad_norm"] or None,
                    next_rate=rates[step - start + 1],
                )
                stage = _state_stage(state.params, state.optimizer, state.gradient_distance)
                current().broadcast_from_zero(partial(self.stages.put, name, self.key, stage, 0.0))
                if self.say is not None:
                    self.say(f"step {step} replayed")
            opened = self._restored(opened, step + 1)
            distances.append(self._stage(name).facts["gradient_distance"])
        distance = certify_arrival(
            self.run,
            start,
            end,
            before,
            opened.params,
            stored,
            distances,
            reasons=lambda: [
                *opened.probed.facts.unfollowed,
                *limits_of(opened.probed.checkpoint.model, opened.probed.facts, real=True),
            ],
        )
        arrival: Arrival = {"start": start, "end": end, "distance": distance}
        current().broadcast_from_zero(
            lambda: self.stages.put(f"replay_{end}", self.key, Stage(facts={**arrival}), 0.0)
        )
        if self.say is not None:
            self.say(f"replay from {start} arrived at checkpoint {end} (off by {distance:.1e})")

    @property
    def _microbatch(self) -> int:
        return self.config.memory.microbatch_size

    def batch(self, opened: Opened) -> tuple[UpdateBatch, TrainingFacts, SequenceProcessor]:
        """A step's recorded batch, the facts of its loss, and the policy as the loss sees it."""
        folder = self.run.batch(opened.step)
        assert folder is not None  # find_window looked
        batch, meta = load_update_batch(folder)
        checkpoint = opened.probed.checkpoint
        if meta.get("step", opened.step) != opened.step:
            raise ValueError(
                f"The update batch in {folder} is of step {meta['step']}; expected that of step "
                f"{opened.step}. Put each batch beside the checkpoint it was drawn from."
            )
        bound = {} if opened.replayed else meta  # replayed weights have no file
        refuse_foreign(batch, {**bound, "step": opened.step}, checkpoint, folder)
        made = self.run.made(opened.step)
        if made is not None and made.without_gradient:
            raise ValueError(
                f"In step {opened.step} of {self.run.folder} {len(made.without_gradient)} "
                "parameters had no gradient; expected one for each: the optimizer left these "
                "alone, which the ledger of a run does not follow. Choose a window without it."
            )
        if not opened.replayed and (reason := other_start(made, opened.params)):
            raise ValueError(f"Step {opened.step} of {self.run.folder}: {reason}.")
        facts = opened.probed.facts
        divisor = recorded_meta(folder).get("divisor")
        if divisor is not None:
            facts = replace(facts, values={**facts.values, "divisor": divisor})
        batch = with_reference(self.config, opened.probed, batch, real=True)
        policy = as_the_loss_sees(self.config, opened.probed.policy, facts, real=True)
        return batch, facts, cast(SequenceProcessor, policy.as_trained())

    # One visit.

    def _visit(self, step: int) -> JSONObject:
        first, last = self.window.start, self.window.end
        after = None if step == last else _cloned(self.at(step + 1).params)
        later = None if step == last else self.at(step + 1).optimizer
        opened = self.at(step)
        self._open.pop(step + 1, None)  # two models at a time, not three
        before = None if step == first else _cloned(self.at(step - 1).params)
        estimator = self._estimator(opened)
        sampler = self._sampler(opened)
        evaluation = self._draw(sampler, f"evaluation-{step}", self.options.responses)
        reward_N = self._rewards(opened, evaluation, self.options.responses)
        slopes = slopes_at(
            opened.probed.policy,
            evaluation,
            reward_N,
            before,
            after,
            estimator,
            tangent=self.options.tangent,
        )
        facts: JSONObject = {
            **{
                name: _packed(getattr(slopes, name))
                for name in ("level", "reward", "path", "tangent", "reward_path")
            },
            "evaluation": {
                "prompts": len(evaluation.prompt_N.unique()),
                "rollouts": len(evaluation),
                "tokens": int(evaluation.tokens_N.sum()),
            },
        }
        if step in (first, last):
            facts["fresh"] = self._fresh(opened, sampler, estimator)
        columns = columns_of(slopes, tangent=self.options.tangent)
        groups: dict[str, Params] = {f"g.{name}": g for name, g in slopes.gradients.items()}
        tokens = None
        if after is not None:
            there, carried = self._costate(step + 1)
            batch, own, trained = self.batch(opened)
            shares = step_shares(
                LedgerStep(
                    trained=trained,
                    after=after,
                    batch=batch,
                    objective=own.objective,
                    optimizer=opened.optimizer,
                    max_grad_norm=own["max_grad_norm"] or None,
                    later=None if step + 1 == last else later,
                ),
                columns,
                there,
                carried,
                mode=estimator.mode,
                microbatch=estimator.microbatch,
            )
            groups |= {f"A.{name}": value for name, value in shares.carried.items()}
            facts |= self._step_facts(opened, batch, shares, own)
            tokens = self._rows(opened, batch, shares)
        ranks = current()
        stage = Stage(
            facts=facts,
            tensors={} if tokens is None else {"tokens": _as_tensor(tokens)},
        )
        costate = Stage(facts={"columns": list(columns)}, tensors=pack_params(groups))
        ranks.broadcast_from_zero(partial(self.stages.put, f"step_{step}", self.key, stage, 0.0))
        ranks.broadcast_from_zero(
            partial(self.stages.put, f"costate_{step}", self.key, costate, 0.0)
        )
        ranks.broadcast_from_zero(lambda: self._forget(step + 1))
        return facts

    def _forget(self, step: int) -> None:
        """What no later visit needs: the costate and the replayed state one checkpoint on."""
        self.stages.remove(f"costate_{step}", self.key)
        self.stages.remove(f"state_{step}", self.key)

    def _estimator(self, opened: Opened) -> EstimatorOptions:
        horizon = self.config.sampling.max_new_tokens
        horizon = horizon or opened.probed.facts["max_completion_length"]
        return replace(estimator_options(self.config, horizon), repackings=0)

    def _sampler(self, opened: Opened) -> Sampler:
        return Sampler(self.config, opened.probed, units=1)

    def _draw(self, sampler: Sampler, name: str, responses: int) -> Rollouts:
        rollouts = sampler.generator.generate(self._asked(sampler), group=responses, name=name)
        return replace(rollouts, behaviour_logprob_NS=None)  # of the very policy that is probed

    def _asked(self, sampler: Sampler) -> list[Problem]:
        """The evaluation prompts: the same at every checkpoint, and none of the run's."""
        if self._problems is None:
            if self._avoid is None:
                self._avoid = set() if self.options.training_prompts else self._run_prompts()
            data = self.config.data
            try:
                self._problems = sampler.problems(
                    "evaluation", data.evaluation_split, data.evaluation_prompts, self._avoid
                )
            except ValueError as error:
                if self.options.training_prompts:
                    raise
                raise ValueError(
                    f"{error} The prompts of all {len(self.window.steps)} steps are left out; "
                    "--training-prompts evaluates on them, with fresh responses."
                ) from error
        return self._problems

    def _run_prompts(self) -> set[PromptIds]:
        out: set[PromptIds] = set()
        for step in self.window.steps:
            folder = self.run.batch(step)
            assert folder is not None  # find_window looked
            out |= prompts_of(load_update_batch(folder)[0].rollouts)
        return out

    def _rewards(self, opened: Opened, rollouts: Rollouts, responses: int) -> Tensor | None:
        facts, problems = opened.probed.facts, self._problems
        assert problems is not None  # drawn before
        if facts.values.get("reward_absent") or not facts["reward_functions"]:
            return None
        reward = reward_of(facts, self.config).at_checkpoint(opened.probed.checkpoint.path)
        each = [problem for problem in problems for _ in range(responses)]
        texts, ids = list(rollouts.text or ()), response_ids(rollouts)
        # By one rank: a judge that is asked twice may answer twice.
        result = current().broadcast_from_zero(lambda: reward(texts, each, completion_ids=ids))
        return result.total_N

    def _fresh(self, opened: Opened, sampler: Sampler, estimator: EstimatorOptions) -> JSONObject:
        """Entropy and reward by further responses: what the ledger is measured against."""
        policy = opened.probed.policy
        rollouts = self._draw(sampler, f"fresh-{opened.step}", FRESH)
        reward_N = self._rewards(opened, rollouts, FRESH)
        reward = None
        if reward_N is not None:
            reward = _mean_reward(policy, rollouts, reward_N, estimator)
        level = entropy_level(policy, rollouts, estimator)
        return {"level": _packed(level), "reward": _packed(reward)}

    def _step_facts(
        self, opened: Opened, batch: UpdateBatch, shares: StepShares, facts: TrainingFacts
    ) -> JSONObject:
        reward_N = batch.reward_N
        return {
            "path_by_column": dict(shares.path),
            "batch": {name: float(x_NS.sum()) for name, x_NS in shares.tokens.items()},
            "batch_dH": sum(float(shares.tokens[name].sum()) for name in ENTROPY),
            "decay": dict(shares.decay),
            "uncovered": dict(shares.uncovered),
            "momentum_before": dict(shares.momentum_before),
            "unfinished": dict(shares.unfinished),
            "by_parameter": {name: dict(parts) for name, parts in shares.by_parameter.items()},
            "step_distance": shares.step_distance,
            "gradient_distance": shares.gradient_distance,
            "clip_factor": shares.clip_factor,
            "lr": opened.optimizer.lr,
            "replayed": opened.replayed,
            "rollouts": len(batch.rollouts),
            "tokens": int(batch.counted_NS.sum()),
            "batch_reward": None if reward_N is None else float(reward_N.double().nanmean()),
            "prompts": self._prompt_texts(opened, batch),
            "solved": _solved(batch),
            "special": self._special(opened, batch),
            "notes": list(facts.notes),
            "assumed": facts.assumed,
        }

    def _prompt_texts(self, opened: Opened, batch: UpdateBatch) -> dict[str, str]:
        decode = opened.probed.checkpoint.tokenizer.decode
        return {prompt_id(ids): decode(list(ids)) for ids in prompts_of(batch.rollouts)}

    def _special(self, opened: Opened, batch: UpdateBatch) -> list[str]:
        tokenizer = opened.probed.checkpoint.tokenizer
        used = set(batch.rollouts.tokens_NS[batch.rollouts.response_NS].unique().tolist())
        return sorted(tokenizer.decode([i]) for i in used & set(tokenizer.all_special_ids))

    def _rows(self, opened: Opened, batch: UpdateBatch, shares: StepShares) -> bytes:
        decode = opened.probed.checkpoint.tokenizer.decode
        return table_bytes(TOKEN_TABLE, token_columns(opened.step, batch, shares, decode))

    # What the files are made of.

    def stored_steps(self) -> Any:
        """Every step's rows, one at a time."""
        for step in self.window.steps:
            stage = self._stage(f"step_{step}")
            facts = stage.facts
            yield StoredStep(
                tokens=stage.tensors["tokens"].numpy().tobytes(),
                prompts=facts["prompts"],
                solved=facts["solved"],
                layers=_layer_columns(step, facts["by_parameter"]),
                special=facts["special"],
            )

    def summary(self) -> RunLedgerResult:
        """summary.json."""
        visits = [self._facts(step) for step in range(self.window.start, self.window.end + 1)]
        steps, first, last = visits[:-1], visits[0], visits[-1]
        rewarded = first["reward"] is not None
        start, end = (_unpacked(x["fresh"]["level"]) for x in (first, last))
        assert start is not None and end is not None  # both ends have fresh rollouts
        path = _total(visits, "path")
        measured = end - start
        unexplained = measured - path
        tangent = _total(steps, "tangent") if self.options.tangent else None
        lines = {name: _line(name, steps, rewarded=rewarded) for name in LINES}
        reward_path = _total(visits, "reward_path") if rewarded else None
        reward_ends = [_unpacked(x["fresh"]["reward"]) for x in (first, last)]
        earned = missed = None
        if reward_path is not None and reward_ends[0] is not None and reward_ends[1] is not None:
            earned = reward_ends[1] - reward_ends[0]
            missed = earned - reward_path
        replays = [
            cast(Arrival, self._stage(f"replay_{b}").facts)
            for a, b in zip(self.window.anchors, self.window.anchors[1:])
            if b > a + 1
        ]
        why_not = [*path.why_not, *_doubts(steps, self.window, replays, unexplained)]
        if reward_path is not None:
            why_not += [f"reward: {reason}" for reason in reward_path.why_not]
        if missed is not None and missed.interval is not None and not missed.covers(0.0):
            why_not.append(
                f"reward: the path leaves {missed.value:.3g} of the measured change unexplained, "
                "more than chance"
            )
        unfinished = steps[-1]["unfinished"]
        notes = dict.fromkeys(note for one in steps for note in one["notes"])
        if self.options.training_prompts:
            notes["evaluated on the run's own prompts, with fresh responses"] = None
        if not rewarded:
            notes["no rewards: the reward functions cannot be called here"] = None
        summary: JSONObject = {
            **RUN_LEDGER.stamp,
            "key": self.key,
            "run": self.run.folder.name,
            "window": {
                "from": self.window.start,
                "to": self.window.end,
                "steps": len(self.window.steps),
                "every": self.options.every,
            },
            "entropy": {
                "start": numbers(start),
                "end": numbers(end),
                "unit": path.estimand.unit,
            },
            "reward": None
            if earned is None
            else {
                name: numbers(cast(Estimate, x))
                for name, x in zip(("start", "end"), reward_ends, strict=True)
            },
            "total": {
                "path": numbers(path),
                "tangent": None if tangent is None else numbers(tangent),
                "reward": None if reward_path is None else numbers(reward_path),
            },
            "lines": lines,
            "memo": {
                "unfinished": {
                    "dH": sum(unfinished[name] for name in ENTROPY),
                    "dR": sum(unfinished[name] for name in REWARD) if rewarded else None,
                }
            },
            "measured": numbers(measured),
            "measured_reward": None if earned is None else numbers(earned),
            "unexplained": numbers(unexplained),
            "unexplained_reward": None if missed is None else numbers(missed),
            "steps": [
                _step_row(step, facts, rewarded=rewarded, tangent=self.options.tangent)
                for step, facts in zip(self.window.steps, steps, strict=True)
            ],
            "replays": replays,
            "evaluation": {**first["evaluation"], "fresh_responses": FRESH},
            "trusted": not why_not,
            "why_not": why_not,
            "notes": list(notes),
            "assumed": steps[0]["assumed"],
            "provenance": provenance(),
        }
        return cast(RunLedgerResult, summary)


def token_columns(
    step: int, batch: UpdateBatch, shares: StepShares, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Columns of run_ledger.parquet for one step: a row per response token.

    Args:
        step: Its number.
        batch: What it learned from.
        shares: What its tokens did.
        decode: Token ids to text.
    """
    rollouts = batch.rollouts
    where = rollouts.response_NS.nonzero(as_tuple=True)
    rows_T = where[0].tolist()
    prompts = [prompt_id(ids) for ids in prompt_ids(rollouts)]
    token_T = rollouts.tokens_NS[where].tolist()
    text = {token: decode([token]) for token in set(token_T)}
    absent_T = np.full(len(rows_T), np.nan)

    def per_token(x_NS: Tensor) -> np.ndarray:
        return x_NS[where].double().cpu().numpy()

    columns = {name: per_token(x_NS) for name, x_NS in shares.tokens.items()}
    rewarded = REWARD[0] in columns
    reward_N = batch.reward_N
    return {
        "step": np.full(len(rows_T), step),
        "rollout": rows_T,
        "uid": [f"{step}-{row}" for row in rows_T],
        "prompt": [prompts[row] for row in rows_T],
        "position": response_index(batch)[where].cpu().numpy(),
        "token_id": token_T,
        "text": [text[token] for token in token_T],
        "advantage": per_token(batch.advantage_NS),
        "reward": absent_T if reward_N is None else reward_N[where[0]].double().cpu().numpy(),
        "logprob": per_token(shares.scores.logprob_NS),
        "entropy": per_token(shares.scores.entropy_NS),
        "coefficient_logprob": per_token(shares.coefficient.logprob_NS),
        "coefficient_entropy": per_token(shares.coefficient.entropy_NS),
        "dH": columns[ENTROPY[0]] + columns[ENTROPY[1]],
        **{name: columns[name] for name in ENTROPY},
        "dR": columns[REWARD[0]] + columns[REWARD[1]] if rewarded else absent_T,
        **{name: columns.get(name, absent_T) for name in REWARD},
        TANGENT: columns.get(TANGENT, absent_T),
    }


def _solved(batch: UpdateBatch) -> dict[str, list[int]] | None:
    if batch.correct_N is None:
        return None
    out: dict[str, list[int]] = {}
    for ids, correct in zip(prompt_ids(batch.rollouts), batch.correct_N.tolist(), strict=True):
        counts = out.setdefault(prompt_id(ids), [0, 0])
        counts[0] += int(correct)
        counts[1] += 1
    return out


def _layer_columns(step: int, parts: Mapping[str, Mapping[str, float]]) -> dict[str, list[Any]]:
    """Products of costate and gradient, by layer and module."""
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for column, by_name in parts.items():
        for name, value in by_name.items():
            layer = layer_of(name)
            place = (layer, module_of(name).removeprefix(layer).lstrip("."))
            group = sums.setdefault(place, {})
            group[column] = group.get(column, 0.0) + value
    rows = []
    for (layer, module), group in sums.items():
        a, b = (group[name] for name in ENTROPY)
        gains = [group.get(name) for name in REWARD]
        known = gains[0] is not None and gains[1] is not None
        rows.append(
            {
                "step": step,
                "layer": layer,
                "module": module,
                "dH": a + b,
                "dH_stderr": abs(a - b),
                "dR": cast(float, gains[0]) + cast(float, gains[1]) if known else None,
                "dR_stderr": abs(cast(float, gains[0]) - cast(float, gains[1])) if known else None,
            }
        )
    return {column.name: [row[column.name] for row in rows] for column in TABLES[LAYER_TABLE]}


def _total(visits: Sequence[JSONObject], name: str) -> Estimate:
    """The sum over checkpoints, judged as a whole: a tail of one of them is averaged out."""
    estimates = [x for visit in visits if (x := _unpacked(visit[name])) is not None]
    total = combine([(1.0, replace(estimate, given_reasons=())) for estimate in estimates])
    for influence in total.influences:
        for reason in tail_check(influence):
            total = total.doubted(reason)
    return total


def _line(name: str, steps: Sequence[JSONObject], *, rewarded: bool) -> RunLine:
    """One line of the ledger; its standard error from the two halves."""
    kinds = {"batches": "batch", "decay": "decay", "uncovered": "uncovered"}
    parts = [steps[0]["momentum_before"]] if name not in kinds else [s[kinds[name]] for s in steps]

    def half(column: str) -> float:
        return sum(part[column] for part in parts)

    a, b = (half(column) for column in ENTROPY)
    gains = [half(column) for column in REWARD] if rewarded else None
    return {
        "dH": a + b,
        "stderr": abs(a - b),
        "dR": None if gains is None else sum(gains),
        "dR_stderr": None if gains is None else abs(gains[0] - gains[1]),
    }


def _step_row(step: int, facts: JSONObject, *, rewarded: bool, tangent: bool) -> RunStep:
    def of(name: str, columns: Sequence[str]) -> float:
        return sum(facts[name][column] for column in columns)

    level, reward = _unpacked(facts["level"]), _unpacked(facts["reward"])
    assert level is not None  # every checkpoint has rollouts
    return {
        "step": step,
        "entropy": level.value,
        "entropy_stderr": level.stderr,
        "reward": None if reward is None else reward.value,
        "batch_reward": facts["batch_reward"],
        "rollouts": facts["rollouts"],
        "tokens": facts["tokens"],
        "dH_path": of("path_by_column", ENTROPY),
        "dH_tangent": facts["path_by_column"][TANGENT] if tangent else None,
        "dR_path": of("path_by_column", REWARD) if rewarded else None,
        "dH_batches": of("batch", ENTROPY),
        "dR_batches": of("batch", REWARD) if rewarded else None,
        "dH_decay": of("decay", ENTROPY),
        "dR_decay": of("decay", REWARD) if rewarded else None,
        "dH_uncovered": of("uncovered", ENTROPY),
        "dR_uncovered": of("uncovered", REWARD) if rewarded else None,
        "replayed": facts["replayed"],
        "step_distance": facts["step_distance"],
        "gradient_distance": facts["gradient_distance"],
        "clip_factor": facts["clip_factor"],
        "lr": facts["lr"],
    }


def _doubts(
    steps: Sequence[JSONObject], window: Window, replays: Sequence[Arrival], rest: Estimate
) -> list[str]:
    """Why the ledger is not trusted; empty: it is."""
    doubts = []
    apart = [s for s, facts in zip(window.steps, steps) if not facts["step_distance"] <= APART]
    if apart:
        worst = max(facts["step_distance"] for facts in steps)
        doubts.append(
            f"{len(apart)} of {len(steps)} steps rebuilt here are not the steps that training made "
            f"(the first is step {apart[0]}, the worst is {worst:.0%} away): their tokens' shares "
            "are of other steps"
        )
    other = {
        step: facts["gradient_distance"]
        for step, facts in zip(window.steps, steps)
        if facts["gradient_distance"] is not None and not facts["gradient_distance"] <= APART
    }
    if other:
        doubts.append(
            f"{len(other)} of {len(steps)} gradients rebuilt here are not those that training used "
            f"(the first is of step {min(other)}, the worst is {max(other.values()):.0%} away): "
            "momentum hides it in the step, and their tokens' shares are of another loss"
        )
    late = [one for one in replays if one["distance"] > CLOSE]
    if late:
        worst = max(late, key=lambda one: one["distance"])
        doubts.append(
            f"the replay from checkpoint {worst['start']} arrives {worst['distance']:.1%} of the "
            f"way off checkpoint {worst['end']}"
        )
    if rest.interval is not None and not rest.covers(0.0):
        doubts.append(
            f"the path leaves {rest.value:.3g} nats of the measured change unexplained, more than "
            "chance: steps are too long for it, or evaluation prompts too few"
        )
    return doubts


def _mean_reward(
    policy: SequenceProcessor | Any,
    rollouts: Rollouts,
    reward_N: Tensor,
    estimator: EstimatorOptions,
) -> Estimate:
    reward_N = reward_N.to(rollouts.weight_N)
    return by_prompt(
        lambda top, bottom: top / bottom,
        torch.stack([reward_N, torch.ones_like(reward_N)], 1),
        rollouts,
        reward_estimand(policy, prompts=estimator.prompts, horizon=estimator.horizon),
    )


def _packed(estimate: Estimate | None) -> JSONObject | None:
    """An estimate with its influence values as JSON, whose floats come back bit by bit."""
    if estimate is None:
        return None
    return {
        "value": estimate.value,
        "noise_floor": estimate.noise_floor,
        "given_reasons": list(estimate.given_reasons),
        "estimand": asdict(estimate.estimand),
        "influences": [
            {
                "value_C": one.value_C.tolist(),
                "prompt_C": one.prompt_C.tolist(),
                "stratum_C": one.stratum_C.tolist(),
                "sample": one.sample,
            }
            for one in estimate.influences
        ],
    }


def _unpacked(packed: JSONObject | None) -> Estimate | None:
    if packed is None:
        return None
    return Estimate.build(
        value=packed["value"],
        estimand=Estimand(**packed["estimand"]),
        noise_floor=packed["noise_floor"],
        why_not=packed["given_reasons"],
        influences=[
            Influence(
                value_C=torch.tensor(one["value_C"], dtype=torch.float64),
                prompt_C=torch.tensor(one["prompt_C"], dtype=torch.int64),
                stratum_C=torch.tensor(one["stratum_C"], dtype=torch.int64),
                sample=one["sample"],
            )
            for one in packed["influences"]
        ],
    )


def _state_stage(params: Params, optimizer: OptimizerState, apart: float | None) -> Stage:
    moments = sorted(
        {
            key
            for entry in optimizer.state.values()
            for key, value in entry.items()
            if key != "step" and isinstance(value, Tensor)
        }
    )
    groups: dict[str, Params] = {"params": params}
    for key in moments:
        groups[key] = {n: entry[key] for n, entry in optimizer.state.items() if key in entry}
    return Stage(
        facts={
            "moments": moments,
            "counts": {
                name: float(entry["step"]) if "step" in entry else None
                for name, entry in optimizer.state.items()
            },
            "lr": optimizer.lr,
            "gradient_distance": apart,
        },
        tensors=pack_params(groups),
    )


def _put(params: Params, values: Params) -> None:
    """Other parameters into a model that this process loaded for itself."""
    with torch.no_grad():
        for name, theta in params.items():
            theta.copy_(values[name])


def _rated(optimizer: OptimizerState, rate: float | None) -> OptimizerState:
    return optimizer if rate is None else with_learning_rate(optimizer, rate)


def _cloned(params: Params) -> dict[str, Tensor]:
    return {name: theta.detach().clone() for name, theta in params.items()}


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _key(config: Config, run: RecordedRun, window: Window, options: ExplainOptions) -> str:
    """Everything that decides the numbers, known before anything is drawn."""
    settings = {
        name: value for name, value in config.documents().items() if name not in NOT_RESULTS
    }
    settings["checkpoint"] = {"dtype": settings["checkpoint"]["dtype"]}
    batches = {step: run.batch(step) for step in window.steps}
    loaded = load_checkpoint(
        run.checkpoints[window.start],
        base=config.checkpoint.base,
        backbone=config.checkpoint.backbone,
        dtype=config.checkpoint.dtype,
        device_map=own_device(config.checkpoint.device),
        need_optimizer=False,
        read_optimizer=False,
    )
    facts = training_facts(config, loaded.facts, loaded.fact_sources)
    return digest_of(
        {"format": RUN_LEDGER.stamp, "version": VERSION, "fresh": FRESH},
        settings,
        {**asdict(options), "start": window.start, "end": window.end},
        {name: value for name, value in provenance().items() if name != "git"},
        dict(loaded.hashes),  # the base's files, too
        named_contents(facts, [config.data.file or facts.values.get("dataset_path")]),
        {str(step): _hashes(run.checkpoints[step]) for step in window.anchors},
        {str(step): [] if path is None else _hashes(path) for step, path in batches.items()},
    )


def _hashes(folder: Path) -> list[str]:
    """Of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return [f"{p.relative_to(folder)} {sha256(p)}" for p in files]


def _bind(folder: Path, key: str, *, overwrite: bool) -> None:
    """Declare whose folder this is, or refuse another ledger's."""
    path = folder / IDENTITY
    identity = read_json_object(path, advice=f"Delete {folder}.")
    others = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    if identity is None and others:
        raise ValueError(
            f"{folder} has files that are no ledger's ({', '.join(sorted(others)[:4])}); expected "
            "an empty or a new folder, or one of an earlier `entropy-probe explain`."
        )
    # A command that was refused before its first stage leaves a name and nothing to lose.
    holds = (folder / MANIFEST_FILE).exists() or any((folder / "stages").glob("*"))
    if identity is not None and identity.get("key") != key and holds and not overwrite:
        raise ValueError(
            f"{folder} holds another ledger: another run, window or setting, or another version of "
            "the package. Give another folder, or let this one replace it with --overwrite."
        )
    folder.mkdir(parents=True, exist_ok=True)
    sweep_partials(folder)
    if identity is None or identity.get("key") != key:
        (folder / PAGE).unlink(missing_ok=True)  # it showed the ledger that was here
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        for stage in (folder / "stages").glob("*"):
            stage.unlink()
    write_changed(path, json_bytes({**RUN_LEDGER.stamp, "key": key}))


def _finished(folder: Path, key: str) -> bool:
    """Whether every file of this very ledger is there, bit by bit."""
    manifest = read_json_object(folder / MANIFEST_FILE, advice=f"Delete {folder}.")
    if manifest is None or manifest.get("key") != key:
        return False
    return all(
        (folder / name).is_file() and sha256(folder / name) == facts["sha256"]
        for name, facts in manifest["files"].items()
    )


def _few(numbers: Sequence[int]) -> str:
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:4]))}, ..., {numbers[-1]}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
