"""Update and evaluation batches of an influence study, from whatever was asked for.

Prompts of E are never prompts of U, nor of another drawn E: the update moves its own prompts most.
The one exception is asked for by name, `kind: update`, and says so in its notes. As in the probe,
E is drawn before U, since prompts that U tries and drops for equal rewards must not fill E.

E's rewards are its own: of its own responses, by the functions that training used. The update batch
as a workspace sets sizes, and is kept in a folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.interventions import Objected
from entropy_experiments.config import Config, ConfigError
from entropy_experiments.config.sections import BatchRequest, Workspace
from entropy_experiments.distributed import current
from entropy_experiments.pipelines import probe_inputs
from entropy_experiments.pipelines.influence.requests import (
    EvaluationDrawn,
    EvaluationUpdate,
    File,
    Sequences,
    WorkspaceDrawn,
    WorkspaceUpdate,
    evaluation_params,
    workspace_params,
)
from entropy_experiments.pipelines.influence.rollout_sources import (
    FOREIGN_REWARDS,
    Made,
    RolloutReader,
    rewards_fit,
)
from entropy_experiments.pipelines.influence.store import batch_digest
from entropy_experiments.pipelines.probe_inputs import ProbeInputs, timed
from entropy_experiments.pipelines.probe_sampling import (
    OpenCheckpoint,
    PromptIds,
    Sampler,
    prompt_ids,
    prompts_of,
    response_ids,
)
from entropy_experiments.pipelines.training_facts import reward_of
from entropy_experiments.pipelines.without_effect import FixedBatch, update_without_effect
from entropy_experiments.sampling.datasets import Problem, load_problems
from entropy_experiments.sampling.rewards import Reward
from entropy_experiments.sampling.rollout_files import (
    MANIFEST,
    load_update_batch,
    save_rollouts,
    save_update_batch,
)
from entropy_experiments.types import Rollouts, UpdateBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationBatch:
    """One E: what its request asked for, and what came of it."""

    name: str
    request: BatchRequest
    rollouts: Rollouts
    reward_N: Tensor | None
    """Rewards of these very rollouts; None where nothing can score them."""
    notes: tuple[str, ...] = ()
    folds: int = 1
    """Parts of its prompts that give standard errors: influence.folds, or one for each prompt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyInputs:
    """`probe` has the first evaluation batch; `of(batch)` is the same for another."""

    probe: ProbeInputs
    evaluations: tuple[EvaluationBatch, ...]
    identity: dict[str, Any]
    """What decides the rollouts drawn; see `SampleGenerator.identity`."""

    def of(self, batch: EvaluationBatch) -> ProbeInputs:
        return replace(self.probe, evaluation=batch.rollouts)


def check_requests(config: Config) -> None:
    """Refuse bad parameters before anything is loaded."""
    influence = config.influence
    workspace_params(influence.update_batch)
    if not influence.evaluation_batches:
        raise ValueError(
            "influence.evaluation_batches is empty; expected at least one {kind, params}: without "
            "evaluation rollouts there is no entropy to explain."
        )
    for i, request in enumerate(influence.evaluation_batches):
        evaluation_params(request, f"influence.evaluation_batches[{i}]")


def gather_study(config: Config, probed: OpenCheckpoint, *, quiet: bool = True) -> StudyInputs:
    """Every batch that the plan names, of a checkpoint that was opened with this config."""
    check_requests(config)
    config, timing = workspace_sizes(config), dict[str, float]()
    with timed(timing, "sampling"):
        maker = _Maker(config, probed, quiet=quiet)
        made, evaluations = maker.all()
    with_kl = _with_kl(config.influence.what_if)
    update = probe_inputs.with_reference(
        config, probed, made.batch, real=made.real, what_if=with_kl
    )
    limits = probe_inputs.limits_of(probed.checkpoint.model, probed.facts, real=made.real)
    recorded = made.real and config.influence.update_batch.load_path is None
    facts = probed.facts
    if recorded:
        facts = probe_inputs.with_divisor(facts, probed.checkpoint)
    probe = ProbeInputs(
        config=config,
        checkpoint=probed.checkpoint,
        policy=probed.policy,
        facts=facts,
        optimizer=probed.optimizer,
        horizon=maker.sampler.horizon,
        evaluation=evaluations[0].rollouts,
        update=update,
        real=made.real,
        bound=made.bound,
        retries=maker.sampler.retries,
        notes=(*config.notes, *facts.notes, *made.notes, *maker.sampler.notes, *limits),
        timing=timing,
        made=probe_inputs.made_step(probed.checkpoint) if recorded else None,
    )
    identity = maker.sampler.generator.identity()
    return StudyInputs(probe=probe, evaluations=evaluations, identity=identity)


def _with_kl(questions: Sequence[str]) -> str | None:
    """The first what-if with a KL term."""
    for text in questions:
        for intervention in whatif.parse(text):
            if not isinstance(intervention, Objected) or intervention.field != "beta":
                continue
            if intervention.value:
                return text
    return None


def folded(batch: EvaluationBatch, folds: int) -> EvaluationBatch:
    """With as many folds as there are prompts for."""
    prompts = len(batch.rollouts.prompt_N.unique())
    if prompts >= folds:
        return replace(batch, folds=folds)
    note = f"{prompts} evaluation prompts: influence.folds is {prompts} here instead of {folds}"
    if prompts == 1:
        note = (
            "one evaluation prompt: one fold, hence no standard error of a token's influence, and "
            "no token is ranked"
        )
    return replace(batch, folds=prompts, notes=(*batch.notes, note))


class _Maker:
    """Makes the batches of one study, each after those it must not share prompts with."""

    def __init__(self, config: Config, probed: OpenCheckpoint, *, quiet: bool) -> None:
        self.config, self.probed = config, probed
        self.sampler = Sampler(config, probed, quiet=quiet)
        self.tokenizer = probed.checkpoint.tokenizer
        self.given = RolloutReader(probed=probed, model=self.sampler.generator.identity()["model"])

    def all(self) -> tuple[Made, tuple[EvaluationBatch, ...]]:
        influence = self.config.influence
        made = self._workspace(influence.update_batch)
        taken = set[PromptIds]() if made is None else prompts_of(made.batch.rollouts)
        evaluations: dict[int, EvaluationBatch] = {}
        drawn = set[PromptIds]()
        checkpoint = self.probed.checkpoint
        for_want = probe_inputs.drawn_for_want_of_a_record(self.config, checkpoint)
        asked = isinstance(workspace_params(influence.update_batch), WorkspaceUpdate)
        with for_want if made is None and asked else nullcontext():
            for i, request in enumerate(influence.evaluation_batches):
                if request.kind != "update":
                    evaluations[i] = self._evaluation(i, request, taken | drawn)
                    drawn |= prompts_of(evaluations[i].rollouts)
            if made is None:
                batch, notes = self.sampler.update(drawn)
                made = Made(batch=batch, notes=tuple(notes))
                probe_inputs.refuse_shared(drawn & prompts_of(batch.rollouts))
        if not rewards_fit(made.batch):
            unscored = replace(made.batch, reward_N=None)
            made = replace(made, batch=unscored, notes=(*made.notes, FOREIGN_REWARDS))
        for i, request in enumerate(influence.evaluation_batches):
            if request.kind == "update":
                evaluations[i] = self._own_prompts(i, request, made.batch)
        kept, model = made, self.given.model
        current().broadcast_from_zero(
            lambda: save_workspace(influence.update_batch, kept, self.probed, model)
        )
        return made, tuple(folded(evaluations[i], influence.folds) for i in sorted(evaluations))

    def _workspace(self, workspace: Workspace) -> Made | None:
        """The update batch; None: it is to be drawn, after E."""
        if workspace.load_path is not None:
            where = "influence.update_batch.load_path"
            made = self.given.folder(Path(workspace.load_path), where)
            fixed = FixedBatch(
                what=f"the update batch is the one in {workspace.load_path} ({where})",
                instead=f"leave {where} out",
                rollouts=made.batch.rollouts,
            )
            notes = update_without_effect(self.config, fixed, {}, self._used_elsewhere)
            return replace(made, notes=(*made.notes, *notes))
        params = workspace_params(workspace)
        where = "influence.update_batch.params"
        if isinstance(params, WorkspaceUpdate):
            made = probe_inputs.made_already(
                self.config, self.probed, self.sampler, self._used_elsewhere
            )
            if made is None:
                return None
            batch, real, notes = made
            bound = real and probe_inputs.weights_of_batch(self.probed.checkpoint) is not None
            return Made(batch=batch, real=real, bound=bound, notes=tuple(notes))
        if isinstance(params, WorkspaceDrawn):
            return None
        if workspace.kind == "prompt_ids":
            return self._answered(self._by_index(params.ids, params.split, where))
        if workspace.kind == "custom_prompts":
            return self._answered(_custom(params))
        return self.given.update(params, where)

    @property
    def _used_elsewhere(self) -> tuple[str, ...]:
        """Keys that score evaluation rollouts, or rebuild the step without a rollout."""
        influence = self.config.influence
        rewards = ("data.reward_functions", "data.reward_weights") if influence.reward else ()
        return (*rewards, *(["update.advantage"] if influence.leave_one_out else []))

    def _answered(self, problems: Sequence[Problem]) -> Made:
        """G answers to each of these problems, whatever their rewards."""
        drawn = self.sampler.generator.generate_update_batch(
            problems,
            prompts=len(problems),
            group=self.config.data.responses_per_prompt,
            reward=self._reward(),
            scale=self.probed.facts["advantage"],
            filter_zero_advantage=False,
        )
        batch = replace(
            drawn.batch, rollouts=replace(drawn.batch.rollouts, behaviour_logprob_NS=None)
        )
        return Made(batch=batch, notes=drawn.notes)

    def _evaluation(self, i: int, request: BatchRequest, avoid: set[PromptIds]) -> EvaluationBatch:
        where = f"influence.evaluation_batches[{i}].params"
        params = evaluation_params(request, where.removesuffix(".params"))
        name = f"eval_{i:02d}"
        if isinstance(params, Sequences | File):
            rollouts, reward_N, notes = self.given.rollouts(params, where)
            self._refuse_shared(avoid, rollouts, where)
            return EvaluationBatch(
                name=name, request=request, rollouts=rollouts, reward_N=reward_N, notes=notes
            )
        if isinstance(params, EvaluationDrawn):
            again = probe_inputs.recorded_evaluation(self.config, self.probed.checkpoint)
            if again is not None:
                notes = self._as_they_are(again, params, where)
                return self._probed_with(name, request, again, avoid, notes)
            if self.config.sampling.load is not None:
                rollouts = self.sampler.evaluation(avoid)
                note = f"evaluation rollouts reused from {self.config.sampling.load}, unscored"
                self._refuse_shared(avoid, rollouts, "sampling.load")
                notes = (note, *self._as_they_are(rollouts, params, where))
                return EvaluationBatch(
                    name=name, request=request, rollouts=rollouts, reward_N=None, notes=notes
                )
            batch = self.config.data
            split = params.split or batch.evaluation_split
            count = params.prompts or batch.evaluation_prompts
            problems = self.sampler.problems("evaluation", split, count, avoid)
        elif request.kind == "prompt_ids":
            problems = self._by_index(params.ids, params.split, where)
        else:
            problems = _custom(params)
        return self._asked(name, request, problems, params.group, avoid, where)

    def _as_they_are(
        self, rollouts: Rollouts, params: EvaluationDrawn, where: str
    ) -> tuple[str, ...]:
        """Notes on settings that would draw others than these recorded or saved rollouts."""
        if params.model_fields_set:
            raise ConfigError(
                where,
                [
                    f"{name}: has no effect on evaluation rollouts that are not drawn. Leave it "
                    "out, or draw some: data.evaluation_rollouts: drawn, without sampling.load."
                    for name in sorted(params.model_fields_set)
                ],
            )
        return tuple(probe_inputs.evaluation_notes(self.config, rollouts))

    def _probed_with(
        self,
        name: str,
        request: BatchRequest,
        rollouts: Rollouts,
        avoid: set[PromptIds],
        more: tuple[str, ...],
    ) -> EvaluationBatch:
        """The rollouts that this step was probed with in training."""
        notes = ["evaluation rollouts are those that the step was probed with in training", *more]
        shared = len(prompts_of(rollouts) & avoid)
        if shared:
            notes.append(
                f"{shared} evaluation prompts are prompts of the update batch, which the update "
                "moves most"
            )
        generator = self.sampler.generator
        by_ids = {generator.prompt_ids(problem): problem for problem in self.sampler.all_problems()}
        ids = response_ids(rollouts)
        recorded = [by_ids.get(prompt) for prompt in prompt_ids(rollouts)]
        problems = [problem for problem in recorded if problem is not None]
        reward_N = None
        if len(problems) == len(recorded):
            texts = [generator.text(tokens) for tokens in ids]
            reward_N, absent = self._scored(texts, problems, ids)
            notes += absent
        else:
            notes.append("no reward column: the rollouts' prompts are not among the recorded ones")
        return EvaluationBatch(
            name=name, request=request, rollouts=rollouts, reward_N=reward_N, notes=tuple(notes)
        )

    def _scored(
        self, texts: Sequence[str], problems: Sequence[Problem], ids: Sequence[Sequence[int]]
    ) -> tuple[Tensor | None, list[str]]:
        """Rewards by the run's own functions, or why there are none."""
        facts = self.probed.facts.values
        if not self.config.influence.reward:
            return None, []
        if facts.get("reward_absent"):
            return None, [f"no reward column: {facts['reward_absent']}"]
        if "reward_sources" not in facts and not all(problem.answer for problem in problems):
            return None, []
        reward = self._reward()
        scores = current().broadcast_from_zero(lambda: reward(texts, problems, completion_ids=ids))
        return scores.total_N, []

    def _asked(
        self,
        name: str,
        request: BatchRequest,
        problems: Sequence[Problem],
        group: int,
        avoid: set[PromptIds],
        where: str,
        notes: tuple[str, ...] = (),
    ) -> EvaluationBatch:
        """`group` answers to each problem, drawn from the policy that is probed."""
        prompts = {self.sampler.generator.prompt_ids(problem) for problem in problems}
        if prompts & avoid:
            self._refuse_shared(avoid, prompts, where)
        rollouts = self.sampler.generator.generate_evaluation_batch(problems, group=group)
        rollouts = replace(rollouts, behaviour_logprob_NS=None)
        texts, asked_of = list(rollouts.text or ()), [p for p in problems for _ in range(group)]
        reward_N, absent = self._scored(texts, asked_of, response_ids(rollouts))
        notes = (*notes, *absent)
        if self.config.sampling.save is not None:
            folder, meta = Path(self.config.sampling.save) / name, self.sampler.meta
            current().broadcast_from_zero(lambda: save_rollouts(folder, rollouts, meta=meta))
        return EvaluationBatch(
            name=name, request=request, rollouts=rollouts, reward_N=reward_N, notes=notes
        )

    def _own_prompts(self, i: int, request: BatchRequest, batch: UpdateBatch) -> EvaluationBatch:
        """The update's own rollouts, or fresh answers to its prompts."""
        where = f"influence.evaluation_batches[{i}]"
        params = evaluation_params(request, where)
        assert isinstance(params, EvaluationUpdate)
        if params.fresh:
            problems = self._as_problems(batch.rollouts, where)
            note = "fresh answers to the update's own prompts, which the update moves most"
            return self._asked(
                f"eval_{i:02d}", request, problems, params.group, set(), where, (note,)
            )
        # No rewards: along a step, the reward of the batch that made it rises by construction.
        note = (
            "these are the very rollouts that made the update: the change on them says nothing "
            "about other answers (params: {fresh: true} draws some)"
        )
        return EvaluationBatch(
            name=f"eval_{i:02d}",
            request=request,
            rollouts=batch.rollouts,
            reward_N=None,
            notes=(note,),
        )

    def _as_problems(self, rollouts: Rollouts, where: str) -> list[Problem]:
        problems = []
        for ids in sorted(prompts_of(rollouts)):
            text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
            key = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
            # The decoded text has its special tokens already.
            problem = Problem(id=f"update:{key}", prompt=text, answer="", facts={"chat": True})
            if self.sampler.generator.prompt_ids(problem) != ids:
                raise ValueError(
                    f"{where}: prompt {text[:40]!r} of the update batch does not tokenise back to "
                    "its own tokens, so no fresh answer can be drawn to it. Use prompt_ids or "
                    "custom_prompts."
                )
            problems.append(problem)
        return problems

    def _by_index(self, ids: Sequence[int], split: str | None, where: str) -> list[Problem]:
        """Problems of the dataset, counted in the order that the seed gives."""
        batch, facts = self.config.data, self.probed.facts
        available = load_problems(
            facts["dataset_name"],
            path=batch.file or facts.values.get("dataset_path"),
            split=split or batch.split or facts.values.get("split"),
            count=max(ids) + 1,
            seed=self.config.sampling.seed,
            tokenizer=self.tokenizer,
            chat=facts.chat,
            conversation=facts.conversation,
        )
        beyond = [i for i in ids if i >= len(available)]
        if beyond:
            raise ValueError(
                f"{where}.ids: {beyond[:5]} are beyond {facts['dataset_name']}, which has "
                f"{len(available)} problems; expected 0 to {len(available) - 1}."
            )
        return [available[i] for i in ids]

    def _reward(self) -> Reward:
        return reward_of(self.probed.facts, self.config).at_checkpoint(self.probed.checkpoint.path)

    def _refuse_shared(
        self, avoid: set[PromptIds], prompts: Rollouts | set[PromptIds], where: str
    ) -> None:
        shared = avoid & (prompts_of(prompts) if isinstance(prompts, Rollouts) else prompts)
        if shared:
            text = self.tokenizer.decode(list(min(shared)))
            raise ValueError(
                f"{where}: {len(shared)} prompts are also prompts of the update batch or of an "
                f"earlier evaluation batch (such as {text[:40]!r}); expected others: an update "
                "moves its own prompts most. The update's own prompts are kind: update."
            )


def _custom(params: Any) -> list[Problem]:
    answers = params.answers or [""] * len(params.prompts)
    facts = params.facts or [{"style": "free"}] * len(params.prompts)
    return [
        Problem(
            id=f"custom:{hashlib.sha256(prompt.encode()).hexdigest()[:16]}",
            prompt=prompt,
            answer=answer,
            facts=fact,
        )
        for prompt, answer, fact in zip(params.prompts, answers, facts, strict=True)
    ]


def workspace_sizes(config: Config) -> Config:
    """The configuration with the sizes that influence.update_batch sets for a drawn batch."""
    params = workspace_params(config.influence.update_batch)
    changes: dict[str, Any] = {}
    if isinstance(params, WorkspaceUpdate | WorkspaceDrawn):
        changes["data.update_prompts"] = params.prompts
    if isinstance(params, WorkspaceUpdate):
        changes["data.update_rollouts"] = params.batch
    if isinstance(params, WorkspaceDrawn):
        changes["data.update_split"] = params.split or config.data.evaluation_split
    changes["data.responses_per_prompt"] = getattr(params, "group", None)
    changes = {key: value for key, value in changes.items() if value is not None}
    return config.replaced(changes, where="influence.update_batch.params") if changes else config


def save_workspace(asked: Workspace, made: Made, probed: OpenCheckpoint, model: str) -> None:
    """Into save_path, once: a rerun changes nothing, and another batch is refused."""
    if asked.save_path is None or asked.save_path == asked.load_path:
        return
    folder = Path(asked.save_path)
    meta = {
        "model": model,
        "kind": asked.kind,
        "params": asked.params,
        "dataset": probed.facts["dataset_name"],
        "real": made.real,
        "bound": made.bound,
    }
    if not (folder / MANIFEST).is_file():
        save_update_batch(folder, made.batch, meta=meta)
        return
    theirs, their_meta = load_update_batch(folder)
    if their_meta == meta and _same(theirs, made.batch):
        return
    raise ValueError(
        f"influence.update_batch.save_path: {folder} holds another update batch (fingerprint "
        f"{theirs.rollouts.fingerprint[:12]}... there, {made.batch.rollouts.fingerprint[:12]}"
        "... here, or other advantages, log-probs or settings). Give another folder, or delete "
        "that one."
    )


def _same(one: UpdateBatch, other: UpdateBatch) -> bool:
    ours, theirs = (batch.rollouts.fingerprint for batch in (one, other))
    return ours == theirs and batch_digest(one) == batch_digest(other)
