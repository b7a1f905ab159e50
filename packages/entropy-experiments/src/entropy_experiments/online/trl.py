"""The probe inside TRL's GRPOTrainer or RLOOTrainer: one line, two curves.

    trainer = GRPOTrainer(..., callbacks=[EntropyProbeCallback()])

Where the trainer calls (`trl_versions` names every private of TRL's that is relied upon):

    on_step_begin, on_substep_end   between backward passes: the noise scale tells them apart
    on_pre_optimizer_step   gradients clipped and averaged, weights old, the rate in use: predict,
                            and explain (the ledger)
    on_optimizer_step       weights new: measure

Evaluation rollouts are drawn from the policy itself, with random numbers of the probe's own, on
prompts of the evaluation set, or of the training set where there is none. A callback is not told
which trainer it serves, so making the first one wraps `Trainer.train` to tell it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from entropy_experiments.checkpoints.training_facts import FactsFile
from entropy_experiments.distributed import Ranks
from entropy_experiments.estimate.own_batch import OwnBatch
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.online.evaluation_rollouts import Buffer, Fixed, Fresh, Supplied, make_draw
from entropy_experiments.online.noise_scale import MIN_STEPS
from entropy_experiments.online.probe import (
    OnlineProbe,
    check_counts,
    check_order,
    named_gradients,
    trained_parameters,
)
from entropy_experiments.online.record import Recorder, refuse_unknown
from entropy_experiments.online.rows import metrics_of
from entropy_experiments.online.step_ledger import (
    due,
    refuse_ledger,
    refuse_optimizer,
    write_ledger,
)
from entropy_experiments.online.trl_noise import (
    ALONE_MESSAGE,
    NOISE_ROWS,
    StepNoise,
    noise_metrics,
    prompts_of_passes,
    refuse_scaled,
    shared_pairs,
)
from entropy_experiments.online.trl_options import sampled_otherwise, unfollowed
from entropy_experiments.online.trl_trainer import (
    Captures,
    EvaluationPrompts,
    other_rollouts,
    own_batch,
    refuse_other_optimizers,
    refuse_other_trl,
    refuse_own_batches,
    refuse_unsupported,
    token_divisor,
    unwrapped_optimizer,
    update_batch,
    used_now,
    without_autocast,
)
from entropy_experiments.online.trl_versions import eos_of, tokenizer_of
from entropy_experiments.online.watch import LOG, PATIENCE, Throttle, Watch
from entropy_experiments.results import LEDGERS_FOLDER, ROWS_FILE, TrainingRow
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.types import Rollouts
from entropy_experiments.types.estimate import MIN_PROMPTS

try:
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise ImportError(
        "entropy_experiments.online.trl is for TRL's GRPOTrainer, and transformers cannot be "
        f"imported ({missing}). Install the extra: pip install 'entropy-experiments[trl]'."
    ) from missing

_WRAPPED = "_entropy_probe_tells"
KINDS = ("fresh", "half", "batch")
RECORD_FOLDER = "entropy_probe_record"
"""Below the trainer's output folder: the record of run_ledger=True."""
IDLE_STEPS = 10
"""Steps without any advantage, after which one warning says so."""


class EntropyProbeCallback(TrainerCallback):
    """Predicts each probed step's entropy change before it is made, and measures it afterwards.

    For TRL's GRPOTrainer and RLOOTrainer. The weights stay bit for bit as without it.

    Args:
        every: A step is probed every so many steps.
        max_overhead: Fewer, when the probe would take more than this share of the training time;
            None: no limit.
        evaluation: "fresh" rollouts, drawn anew for every `uses` probed steps; "half", those of the
            generation batch that the step does not learn from; "batch", the very rollouts it learns
            from, prompts judged by the others' gradients; or Rollouts of your own.
        prompts: How many are drawn.
        group: Responses to each.
        uses: Probed steps that fresh rollouts serve.
        microbatch: Rollouts in a pass.
        parts: Also split the prediction into momentum, decay and gradient.
        order: 2 also predicts to second order, for one more pass without gradients before the step.
        record: A folder that keeps every step's batch, the prompts, the rewards and the options of
            training, for the offline commands.
        record_gradient: Also the gradient of the step after each checkpoint; None: where it has at
            most 20 million numbers, as LoRA's has.
        facts: What the offline commands should take instead of the recorded prompts and rewards,
            such as {"dataset_name": "gsm8k", "reward_functions": ["math_verify"]}.
        ledger_every: At every so many steps the whole ledger with each token's influence, in a run
            directory of its own under OUTPUT_DIR/entropy_probe_ledgers.
        run_ledger: Keep what `entropy-probe explain OUTPUT_DIR` needs, and nothing else: every
            step's record, in OUTPUT_DIR/entropy_probe_record unless `record` names a folder. States
            between the trainer's checkpoints are replayed from it, so two checkpoints suffice.
        noise_scale: Also the gradient noise scale and the critical batch size.
        noise_window: Steps that they are computed from; None: all.
        seed: Of the evaluation rollouts.

    Raises:
        ValueError: If an option cannot be used.

    Examples:
        >>> probe = EntropyProbeCallback(every=10, ledger_every=100)
        >>> trainer = GRPOTrainer(..., callbacks=[probe])  # doctest: +SKIP
        >>> probe.rows  # one for each probed step
        []
    """

    evaluation: Literal["fresh", "half", "batch"] | Rollouts
    prompts: int
    group: int
    uses: int
    microbatch: int
    parts: bool
    seed: int
    order: int
    facts: FactsFile
    ledger_every: int | None
    run_ledger: bool
    noise_scale: bool
    noise_window: int | None

    def __init__(
        self,
        *,
        every: int = 1,
        max_overhead: float | None = 0.1,
        evaluation: Literal["fresh", "half", "batch"] | Rollouts = "fresh",
        prompts: int = 16,
        group: int = 1,
        uses: int = 1,
        microbatch: int = 8,
        parts: bool = True,
        order: int = 1,
        record: str | Path | None = None,
        record_gradient: bool | None = None,
        facts: Mapping[str, Any] | None = None,
        ledger_every: int | None = None,
        run_ledger: bool = False,
        noise_scale: bool = False,
        noise_window: int | None = 100,
        seed: int = 0,
    ) -> None:
        if not isinstance(evaluation, Rollouts) and evaluation not in KINDS:
            raise ValueError(
                f"evaluation is {evaluation!r}; expected one of {', '.join(KINDS)}, or Rollouts of "
                "your own."
            )
        check_counts({"prompts": prompts}, least=MIN_PROMPTS)  # fewer give no error bar
        check_counts({"group": group, "uses": uses, "microbatch": microbatch})
        check_order(order)
        if record is not None and not isinstance(record, str | Path):
            raise ValueError(f"record is {record!r}; expected the path of a folder, or None.")
        if facts is not None and not isinstance(facts, Mapping):
            raise ValueError(
                f"facts is {facts!r}; expected a mapping such as {{'dataset_name': 'countdown'}}."
            )
        self._every, self._max_overhead = every, max_overhead
        Throttle(every=every, max_overhead=max_overhead)  # bad options are refused now, not later
        self.evaluation, self.prompts, self.group = evaluation, prompts, group
        self.uses, self.microbatch, self.parts, self.seed = uses, microbatch, parts, seed
        self.order = order
        refuse_ledger(ledger_every, evaluation)
        if noise_window is not None and noise_window < MIN_STEPS:
            raise ValueError(
                f"noise_window is {noise_window}; expected at least {MIN_STEPS} steps, or None."
            )
        self.facts = cast(FactsFile, dict(facts or {}))
        refuse_unknown(self.facts)
        self._recorder = (
            None if record is None else Recorder(Path(record), self.facts, gradient=record_gradient)
        )
        self.run_ledger, self._record_gradient = run_ledger, record_gradient
        self._captures: Captures | None = None
        self._idle, self._warned_idle = 0, False
        self.ledger_every, self.noise_scale = ledger_every, noise_scale
        self.noise_window = noise_window
        self.ledgers: list[Path] = []
        """Run directories of the ledgers written so far (rank 0)."""
        self._noise: StepNoise | None = None
        self.trainer: Any = None
        self.resumes_from: str | bool | None = None
        """What `trainer.train(resume_from_checkpoint=...)` was given."""
        self._watch: Watch | None = None
        self._first: weakref.ref[Any] | None = None
        """The trainer that this callback serves."""
        _hand_trainers_to_callbacks()

    def attach(self, trainer: Any) -> EntropyProbeCallback:
        """Add this callback to a trainer that exists; harmless if it is there already."""
        self.trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    @property
    def rows(self) -> list[TrainingRow]:
        """What was found so far, one row per probed step (rank 0)."""
        return [] if self._watch is None else self._watch.rows

    @property
    def off(self) -> Exception | None:
        """Why the probe switched itself off, if it did."""
        return None if self._watch is None else self._watch.guard.error

    # what the trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer is None:
            raise RuntimeError(
                "EntropyProbeCallback does not know its trainer. Call .attach(trainer) before "
                "trainer.train()."
            )
        if self._first is not None and self._first() is not self.trainer:
            self._leave_to_the_first()
            return
        refuse_unsupported(self.trainer)
        refuse_own_batches(self.trainer)
        refuse_other_optimizers(self.trainer)
        self._refuse_other_distribution()
        if self.ledger_every is not None:
            refuse_optimizer(unwrapped_optimizer(self.trainer.optimizer))
        self._refuse_unknown_loss()
        if self.noise_scale:
            refuse_scaled(args)
        if self.run_ledger:
            self._keep_for_ledger(args)
        ranks = Ranks.all(PATIENCE)
        throttle = Throttle(every=self._every, max_overhead=self._max_overhead)
        watch = Watch(throttle=throttle, ranks=ranks, model=self._model)
        self._watch = watch
        self._first = weakref.ref(self.trainer)
        watch.also_forget = self._release
        watch.sampling = tuple(sampled_otherwise(self.trainer))
        self._captures = Captures(self.trainer)
        self._warn_sampling(args)
        watch.set_up(self._probe, Path(args.output_dir) / ROWS_FILE, step=state.global_step)
        self._begin_record(args, state)
        if self.noise_scale:
            self._begin_noise(args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        noise = self._noise
        if noise is not None:

            def listen() -> None:
                passes = self.trainer.current_gradient_accumulation_steps
                noise.open(prompts_of_passes(args, passes))

            self._run_guarded(listen, f"listening to step {state.global_step}")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        noise = self._noise
        if noise is not None and self._require_watch().ranks.size == 1:
            self._run_guarded(
                lambda: noise.microbatch(prompts_of_passes(args, 1)),
                f"listening to step {state.global_step}",
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        watch, step = self._require_watch(), state.global_step
        if self._noise is not None:
            noise = self._noise
            self._run_guarded(
                lambda: self._close_noise(noise, step), f"adding up the noise of {step}"
            )

        def record() -> None:
            self._warn_no_advantage(step)
            if self._recorder is not None:
                self._recorder.record(
                    self.trainer,
                    step,
                    watch.ranks,
                    gradient=named_gradients(self._model),
                    params=trained_parameters(self._model),
                    captures=self._captures,
                )

        def prepare(probe: OnlineProbe) -> OwnBatch | None:
            if self.evaluation == "batch":
                return own_batch(self.trainer, watch.ranks, self._captures)
            if isinstance(probe.buffer, Supplied):
                probe.buffer.put(other_rollouts(self.trainer, watch.ranks))
            return None

        def keep(probe: OnlineProbe) -> None:
            if self._recorder is not None and probe.evaluated is not None:
                self._recorder.evaluated(probe.evaluated, step, watch.ranks)

        watch.before(
            step,
            lambda: named_gradients(self._model),
            lambda: unwrapped_optimizer(self.trainer.optimizer),
            prepare=prepare,
            then=keep,
            always=record,
            explain=self._explain if due(self.ledger_every, step) else None,
        )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        scaler = getattr(self.trainer.accelerator, "scaler", None) is not None
        recorder, step, ranks = self._recorder, state.global_step, self._require_watch().ranks
        if recorder is not None:
            params = trained_parameters(self._model)
            self._run_guarded(
                lambda: recorder.after_step(step, params, ranks), f"recording step {step}"
            )
        self._require_watch().after(step, self._publish, scaler=scaler)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._recorder is not None:
            recorder, watch = self._recorder, self._require_watch()
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            watch.guard.run(
                lambda: recorder.saved(self.trainer, folder, watch.ranks),
                doing="recording a checkpoint",
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        watch = self._require_watch()
        watch.guard.run(watch.forget, doing="letting go of what it held")

    # inside

    def _leave_to_the_first(self) -> None:
        """The probe is off in this training; the rows of the first one stay."""
        watch = Watch(
            throttle=Throttle(every=self._every, max_overhead=self._max_overhead),
            ranks=Ranks.all(PATIENCE),
        )
        watch.rows = self.rows
        self._watch = watch

        def refuse() -> None:
            raise ValueError(
                "This EntropyProbeCallback has served another trainer: its record, its rows and "
                "the files beside the checkpoints are of that training. Make one for each trainer."
            )

        watch.guard.run(refuse, doing="it was handed to a second trainer")

    def _require_watch(self) -> Watch:
        assert self._watch is not None  # on_train_begin comes first
        return self._watch

    @property
    def _model(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def _keep_for_ledger(self, args: Any) -> None:
        """A record of every step; refused where no two checkpoints with an optimizer come of it."""
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        if strategy == "no" or args.save_only_model:
            setting = "save_strategy='no'" if strategy == "no" else "save_only_model=True"
            raise ValueError(
                f"run_ledger=True with {setting}; expected checkpoints with the optimizer's state, "
                "between which steps are replayed. Set save_strategy='steps' and save_steps, and "
                "leave save_only_model out."
            )
        if self._recorder is None:
            folder = Path(args.output_dir) / RECORD_FOLDER
            self._recorder = Recorder(folder, self.facts, gradient=self._record_gradient)

    def _begin_record(self, args: Any, state: Any) -> None:
        """The first step after a resume belongs beside the checkpoint that it is made from."""
        recorder, watch, resumed_from = self._recorder, self._require_watch(), self.resumes_from
        if recorder is None:
            return
        watch.guard.run(
            lambda: recorder.begin(self.trainer, self._model, watch.ranks),
            doing="recording the run's prompts and settings",
        )
        if not resumed_from or state.global_step == 0:
            return
        last = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        checkpoint = last if resumed_from is True else Path(resumed_from)
        watch.guard.run(
            lambda: recorder.resumed(self.trainer, checkpoint, watch.ranks),
            doing="finding the checkpoint that training was resumed from",
        )

    def _warn_no_advantage(self, step: int) -> None:
        """Counts steps in which no rollout of any rank has an advantage."""
        ranks, trainer = self._require_watch().ranks, self.trainer

        def local() -> list[Tensor]:
            used, _ = used_now(trainer)
            advantages = (trainer._buffered_inputs[place]["advantages"] for place in used)
            return [torch.tensor(sum(int((a != 0).sum()) for a in advantages))]

        self._idle = 0 if int(ranks.all_reduce(local)[0]) else self._idle + 1
        if self._idle == IDLE_STEPS and not self._warned_idle and ranks.rank == 0:
            self._warned_idle = True
            LOG.warning(
                "In the %d steps up to step %d no rollout has an advantage: every group's rewards "
                "are equal, nothing can be learned from them, and only momentum and weight decay "
                "move the weights. Look at the reward function and at num_generations, or choose "
                "prompts that the policy sometimes solves. (Logged once.)",
                IDLE_STEPS,
                step,
            )

    def _refuse_unknown_loss(self) -> None:
        """Where the loss is rebuilt from its batch, it must be one that is known here."""
        which = "ledger_every" if self.ledger_every is not None else "evaluation='batch'"
        if self.ledger_every is None and self.evaluation != "batch":
            return
        reasons = unfollowed(self.trainer)
        if getattr(self.trainer.args, "use_adaptive_entropy", False):
            reasons.append("use_adaptive_entropy, whose coefficient changes with every step")
        if reasons:
            raise ValueError(
                f"{which} rebuilds the step from its batch, and this training's loss is another: "
                f"{'; '.join(reasons)}. Leave {which} out: predictions and measurements use the "
                "trainer's own gradient, and are right for any loss."
            )

    def _refuse_other_distribution(self) -> None:
        """Training's rollouts speak only for the distribution that they were drawn from."""
        options = sampled_otherwise(self.trainer)
        if options and self.evaluation in ("half", "batch"):
            raise ValueError(
                f"evaluation={self.evaluation!r} evaluates a step on rollouts that training "
                f"sampled with {', '.join(options)}, and entropies are of the full softmax, from "
                "which those rollouts were not drawn. Use evaluation='fresh': the probe then draws "
                "its own rollouts, from the full softmax."
            )

    def _warn_sampling(self, args: Any) -> None:
        options = self._require_watch().sampling
        if options and self._require_watch().ranks.rank == 0:
            LOG.warning(
                "Training samples with %s. The probe's rollouts and entropies are of the full "
                "softmax at temperature %g, without these options: its entropy is not that of "
                "the distribution that training samples from. (Logged once.)",
                ", ".join(options),
                args.temperature,
            )

    def _probe(self) -> OnlineProbe:
        refuse_other_trl(self.trainer)  # guarded: training goes on, without the probe
        args = self.trainer.args
        policy = SequenceProcessor(self._model, temperature=args.temperature)
        return OnlineProbe(
            policy,
            self._buffer(policy),
            horizon=args.max_completion_length,
            microbatch=self.microbatch,
            parts=self.parts,
            order=self.order,
            ranks=self._require_watch().ranks,
            context=lambda: without_autocast(self._model),
        )

    def _buffer(self, policy: SequenceProcessor) -> Buffer:
        if isinstance(self.evaluation, Rollouts):
            return Fixed(self.evaluation)
        if self.evaluation in ("half", "batch"):
            return Supplied()
        trainer, ranks = self.trainer, self._require_watch().ranks
        generator = SampleGenerator(
            policy,
            tokenizer_of(trainer),
            max_new_tokens=trainer.args.max_completion_length,
            master_seed=self.seed,
        )
        generator.ends = tuple(sorted({*generator.ends, *eos_of(trainer)}))
        prompts = EvaluationPrompts(trainer, self.prompts, self.seed, generator.longest_prompt)
        return Fresh(make_draw(generator, prompts, group=self.group, ranks=ranks), uses=self.uses)

    def _publish(self, row: TrainingRow) -> None:
        self._log(metrics_of(row))

    def _log(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)

    def _explain(self, probe: OnlineProbe) -> None:
        """The ledger of the step at hand. Rank 0 makes it, with everyone's rollouts."""
        trainer, ranks = self.trainer, self._require_watch().ranks
        batch = update_batch(trainer, ranks, self._captures)
        if ranks.rank or probe.evaluated is None or probe.predicted is None:
            return
        fixed_rollouts = isinstance(self.evaluation, Rollouts)
        with without_autocast(self._model):
            folder = write_ledger(
                Path(trainer.args.output_dir) / LEDGERS_FOLDER,
                trainer=trainer,
                policy=SequenceProcessor(self._model, temperature=trainer.args.temperature),
                optimizer=unwrapped_optimizer(trainer.optimizer),
                gradient=named_gradients(self._model),
                batch=batch,
                evaluation=probe.evaluated,
                evaluated="given" if fixed_rollouts else str(self.evaluation),
                predicted=probe.predicted.change.value,
                step=probe.step,
                microbatch=self.microbatch,
                facts=self.facts,
                divisor=token_divisor(trainer),
            )
        self.ledgers.append(folder)

    # the noise scale

    def _run_guarded(self, work: Callable[[], None], doing: str) -> None:
        """Guarded; its time is the probe's, and saves no step."""
        watch = self._require_watch()
        with watch.throttle.timing(requested=True):
            watch.guard.run(work, doing=doing)

    def _begin_noise(self, args: Any) -> None:
        watch = self._require_watch()
        if watch.ranks.size == 1 and args.gradient_accumulation_steps == 1:
            LOG.warning(ALONE_MESSAGE)
            return

        def begin() -> None:
            self._noise = StepNoise(
                {name: p for name, p in self._model.named_parameters() if p.requires_grad},
                lambda: unwrapped_optimizer(self.trainer.optimizer),
                ranks=watch.ranks,
                window=self.noise_window,
                rows=Path(args.output_dir) / NOISE_ROWS,
            )

        watch.guard.run(begin, doing="the noise scale was set up")

    def _close_noise(self, noise: StepNoise, step: int) -> None:
        trainer, ranks = self.trainer, self._require_watch().ranks
        passes = trainer.current_gradient_accumulation_steps if ranks.size > 1 else 1
        if ranks.size == 1 or noise.shared is None:  # ranks are dealt their prompts once for all
            noise.saw_shared(shared_pairs(trainer, ranks))
        row = noise.close(step, prompts_of_passes(trainer.args, passes))
        self._require_watch().throttle.requested_seconds += noise.seconds
        noise.seconds = 0.0
        if row is not None:
            self._log(noise_metrics(row))

    def _release(self) -> None:
        """What is held besides the probe, and the trainer's wrapped methods."""
        self._stop_noise()
        if self._captures is not None:
            self._captures.restore()
        self._captures = None

    def _stop_noise(self) -> None:
        if self._noise is not None:
            self._noise.stop()
        self._noise = None


def _hand_trainers_to_callbacks() -> None:
    original = Trainer.train
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # the line of a fault is the caller's, for pytest and the doctor
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EntropyProbeCallback):
                callback.trainer = self
                callback.resumes_from = kwargs.get("resume_from_checkpoint", next(iter(args), None))
        return original(self, *args, **kwargs)

    setattr(train, _WRAPPED, True)
    Trainer.train = train
