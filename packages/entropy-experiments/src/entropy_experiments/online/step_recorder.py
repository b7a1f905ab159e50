"""The record of a training loop that is not TRL's.

    recorder = StepRecorder("run/record", model, optimizer, facts={"loss": "grpo", ...})
    for batch in data:
        loss(batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        with recorder.step(input_ids=..., attention_mask=..., response_mask=..., advantages=...):
            optimizer.step()
        optimizer.zero_grad()
        if time_to_save:
            ...  # into run/step_N, after N steps
            recorder.saved("run/step_N")

`entropy-probe run --checkpoint run/step_N` then replays the step that was made from that checkpoint
with its own batch, and fingerprints of the gradient and of the change of the weights tell whether
the step rebuilt is the one that was made. The files are those of `record`.

Everything passes one guard (`watch.Guard`): what fails is logged once with its reason, the recorder
is off from then on, and the loop goes on with the same weights and random numbers. Bad arguments
of the constructor are the exception: they are refused before training begins. On several ranks
every one of them makes a StepRecorder and enters `step` with its own part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from entropy_experiments.checkpoints.layout import STEP
from entropy_experiments.checkpoints.optimizer_state import kind_not_rebuilt
from entropy_experiments.checkpoints.recorded_step import base_fingerprint, base_location
from entropy_experiments.checkpoints.training_facts import FactsFile, check_facts
from entropy_experiments.checkpoints.training_record import (
    SCHEMA,
    RecordContent,
    RecordedPrompts,
    RecordedRewards,
    read_record,
)
from entropy_experiments.distributed import Ranks
from entropy_experiments.online.probe import (
    check_bare,
    check_counts,
    named_gradients,
    trained_parameters,
)
from entropy_experiments.online.record import refuse_unknown
from entropy_experiments.online.record_files import PROMPTS, RecordFiles, name_parameters
from entropy_experiments.online.record_sources import rewards_entry, write_prompts
from entropy_experiments.online.trl_options import rounded_steps
from entropy_experiments.online.watch import LOG, PATIENCE, Guard
from entropy_experiments.sampling.tensor_batches import batch_from_tensors, concatenate
from entropy_experiments.types import UpdateBatch

Batch = UpdateBatch | Mapping[str, Any]
"""A microbatch: made already, or the arguments of `batch_from_tensors` by name."""


class StepRecorder:
    """Records the steps made inside `with recorder.step(...):`, in a loop of your own.

    Args:
        folder: Of the record; the batch of every step goes there.
        model: The bare model: what DDP wraps, not the wrapper. FSDP2's `fully_shard` is none.
        optimizer: The one that steps.
        facts: What decides the step and is in no checkpoint, by the names of `entropy_probe.json`:
            loss, clip_low, clip_high, beta, temperature, max_grad_norm, max_completion_length ...
            What is left out is assumed by the offline commands, and listed by them as assumed.
        unfollowed: What your loss has besides, in words; results then say that it is not followed.
        prompts: Rows with a "prompt" (texts, or lists of messages), or texts: what offline
            commands draw evaluation rollouts on. None: they ask for prompts.
        tokenizer: Makes the tokens of `prompts`; or a function from a prompt to its ids.
        reward_functions: As TRL calls them, for commands that score new rollouts.
        gradient: Keep the gradient itself beside checkpoints; None: up to 20 million numbers.
        whole_batch: Every mean of the loss is over all that a step learned from, whatever its
            microbatches and ranks. False: an entropy bonus, and bnpo, are means of the means of
            microbatches, as TRL's are.
        first_step: Steps made before, where training goes on from a checkpoint. None: as the
            optimizer's own state counts them (Adam's does); 0 where it does not.

    Raises:
        ValueError: If an argument cannot be used.

    Examples:
        >>> import tempfile, torch
        >>> checkpoint = load_checkpoint(embedded_trajectory() / "checkpoint-13")
        >>> model = checkpoint.model
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> folder = tempfile.mkdtemp()
        >>> recorder = StepRecorder(folder, model, optimizer, facts={"loss": "grpo"})
        >>> tokens = torch.tensor([[5, 6, 7], [5, 6, 8]])
        >>> batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        >>> batch |= {"response_mask": torch.tensor([[1], [1]])}
        >>> batch |= {"advantages": torch.tensor([1.0, -1.0])}
        >>> model(tokens).logits[:, 1, 7].sum().backward()  # your loss
        >>> with recorder.step(**batch):
        ...     optimizer.step()
        >>> recorder.off, recorder.steps
        (None, 1)
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        facts: Mapping[str, Any] | None = None,
        unfollowed: Sequence[str] = (),
        prompts: Sequence[Any] | None = None,
        tokenizer: Any = None,
        reward_functions: Sequence[Callable[..., Any]] = (),
        gradient: bool | None = None,
        whole_batch: bool = False,
        first_step: int | None = None,
    ) -> None:
        check_bare(model)
        if first_step is not None:
            check_counts({"first_step": first_step}, least=0)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer is a {type(optimizer).__name__}; expected a torch optimizer, which "
                "wrappers have as .optimizer."
            )
        if isinstance(prompts, str):
            raise ValueError(f"prompts is the text {prompts!r}; expected a list of texts or rows.")
        if prompts is not None and tokenizer is None:
            raise ValueError("prompts without a tokenizer; expected one, to record their tokens.")
        refuse_unknown(facts or {})
        self._facts = cast(FactsFile, check_facts(facts or {}))
        self._unfollowed = [*unfollowed, *rounded_steps(model)]
        self._model, self._optimizer = model, optimizer
        self._prompts, self._tokenizer = prompts, tokenizer
        self._reward_functions = list(reward_functions)
        self._whole_batch = whole_batch
        self.steps: int = first_step or 0
        """Steps made so far; the next one is made from checkpoint `steps`."""
        self._by_state = first_step is None
        self._skipped = 0
        """Steps that were entered and that the optimizer did not make, as under a GradScaler."""
        self._ranks = Ranks.all(PATIENCE)
        self._files = RecordFiles(Path(folder), gradient=gradient)
        self._guard = Guard(self._ranks, model=model)
        why = parameters_unlike(model, optimizer) or kind_not_rebuilt(optimizer)
        if why and not self._ranks.rank:
            LOG.warning(
                "Steps are recorded, and offline commands cannot rebuild them from a checkpoint: "
                "%s. LoopProbe measures a step while it is made.",
                why,
            )
        self._guard.run(self._describe, doing="recording the run's prompts and settings")

    @property
    def off(self) -> Exception | None:
        """Why recording ended, if it did."""
        return self._guard.error

    @contextmanager
    def step(
        self, *microbatches: Batch | Callable[[], UpdateBatch], **tensors: Any
    ) -> Iterator[None]:
        """Around `optimizer.step()`, gradients as the optimizer will see them.

        Args:
            microbatches: What the step learned from, of this rank: update batches, mappings of
                arguments of `batch_from_tensors`, or functions that make one.
            tensors: The arguments of `batch_from_tensors`, instead.
        """
        parts = (*microbatches, tensors) if tensors else microbatches
        self._guard.run(lambda: self._before(parts), doing=f"recording step {self.steps}")
        step = self.steps
        yield
        self._guard.run(lambda: self._after(step), doing=f"recording step {step}")

    def saved(self, checkpoint: str | Path) -> None:
        """A checkpoint of the weights as they are has just been written, optimizer included.

        On rank 0, or on every rank: nothing is exchanged.

        The next step's batch is put beside it, and the names of the optimizer's parameters in
        their order, where its file does not have them.

        Args:
            checkpoint: The folder: `step_N`, after N steps. `global_step_N` counts batches, of each
                of which several steps may be made; the record says how many were. Steps that a
                GradScaler skipped may be counted in N. A folder of another step is left out, with
                a warning.
        """

        def work() -> None:
            self._count()
            if self._ranks.rank:
                return
            place = Path(checkpoint)
            if self._is_of_another_step(place):
                return
            name_parameters(place, self._model, self._optimizer)
            self._files.add_checkpoint(place, self.steps, self._facts)

        self._guard.run_alone(work, doing="recording a checkpoint")

    def resumed(self, checkpoint: str | Path) -> None:
        """Training goes on from this checkpoint, which has been loaded, optimizer included.

        On rank 0, or on every rank: nothing is exchanged.

        Args:
            checkpoint: The folder.
        """

        def work() -> None:
            self._count()
            if self._ranks.rank:
                return
            place = Path(checkpoint)
            record = read_record((place,))
            named = STEP.search(place.resolve().name)
            if self._by_state and record is not None and record.step == self.steps and named:
                self._skipped = max(0, int(named[1]) - self.steps)
            if self._is_of_another_step(place):
                return
            self._files.resume(Path(checkpoint), self.steps, self._facts)

        self._guard.run_alone(work, doing="finding the checkpoint that training was resumed from")

    # inside

    def _describe(self) -> None:
        if self._ranks.rank:
            return
        content: RecordContent = {
            "schema": SCHEMA,
            "trainer": {
                "class": type(self).__name__,
                "module": type(self).__module__,
                "torch": torch.__version__,
                "transformers": version("transformers"),
                "optimizer": type(self._optimizer).__name__,
            },
            "options": {},
            "unfollowed": self._unfollowed,
            "sampling": [],
            "rewards": self._rewards(),
            "prompts": self._write_prompts(),
            "base": base_fingerprint(self._model),
            "base_location": base_location(self._model),
        }
        self._files.describe(content, self._facts)

    def _rewards(self) -> RecordedRewards:
        if self._reward_functions:
            return rewards_entry(self._reward_functions, [])
        why = "the loop handed over no reward function (StepRecorder's reward_functions)"
        return {"functions": [{"name": "reward", "why_not": why}], "weights": [1.0]}

    def _write_prompts(self) -> RecordedPrompts:
        if self._prompts is None:
            why = "the loop handed over no prompts (StepRecorder's prompts)"
            return {"sets": {}, "dropped": [], "messages": False, "why_not": why}
        rows = [row if isinstance(row, Mapping) else {"prompt": row} for row in self._prompts]
        return write_prompts(self._files.folder / PROMPTS, {"train": rows}, self._ids_of)

    def _ids_of(self, prompt: Any) -> Sequence[int]:
        tokenizer = self._tokenizer
        if not hasattr(tokenizer, "convert_tokens_to_ids"):
            return tokenizer(prompt)
        if isinstance(prompt, str):
            return tokenizer(prompt)["input_ids"]
        return tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]

    def _count(self) -> None:
        """The optimizer's state is the better witness: a resume replaces it, a skipped step leaves
        it, and no folder's name changes it."""
        counted = counted_steps(self._optimizer) if self._by_state else None
        self.steps = self.steps if counted is None else counted

    def _after(self, step: int) -> None:
        self._files.after_step(step, trained_parameters(self._model), self._ranks)
        counted = counted_steps(self._optimizer) if self._by_state else None
        self.steps = step + 1 if counted is None else counted
        self._skipped += int(self.steps == step)

    def _before(self, parts: Sequence[Batch | Callable[[], UpdateBatch]]) -> None:
        made = self.steps
        self._count()
        if self.steps < made:
            raise ValueError(
                f"the optimizer counts {self.steps} steps after {made}: its state was reset, and "
                "the batches of these steps are recorded already. Call recorder.resumed(...) after "
                "loading a checkpoint, or begin a new StepRecorder with a folder of its own."
            )
        step = self.steps
        everyones = self._ranks.all_gather(lambda: [_as_batch(part) for part in parts])
        if not self._ranks.rank:
            batch = concatenate([batch for batches in everyones for batch in batches])
            batch = replace(batch, microbatch_N=None) if self._whole_batch else batch
            self._files.add_batch(batch, step, self._facts, more={})
        self._files.add_gradient(
            named_gradients(self._model),
            trained_parameters(self._model),
            step,
            lr=float(self._optimizer.param_groups[0]["lr"]),
            ranks=self._ranks,
        )

    def _is_of_another_step(self, checkpoint: Path) -> bool:
        """Whether the folder's number is neither of the steps made nor of those with the skipped
        ones; it is then left out, with a warning."""
        name = checkpoint.resolve().name
        named = STEP.search(name)
        if named is None or name.startswith("global_step"):
            return False
        if self.steps <= int(named[1]) <= self.steps + self._skipped:
            return False
        LOG.warning(
            "%s is left out of the record: it is named as of step %s, and %d steps were made%s. "
            "Expected a name such as step_%d; give StepRecorder first_step where others were made "
            "before.",
            *(checkpoint, named[1], self.steps),
            f" and {self._skipped} skipped" if self._skipped else "",
            self.steps,
        )
        return True


def counted_steps(optimizer: torch.optim.Optimizer) -> int | None:
    """Steps that its state has counted, as Adam's does; None: it keeps no count.

    The most of all parameters: one without a gradient is left out of a step.
    """
    counts = [
        state["step"]
        for state in optimizer.state.values()
        if isinstance(state, Mapping) and isinstance(state.get("step"), (int, float, torch.Tensor))
    ]
    if counts:
        return int(max(counts))
    # an Adam whose first step was skipped has made none, and has no state yet
    begins = not optimizer.state and all("betas" in group for group in optimizer.param_groups)
    return 0 if begins else None


def parameters_unlike(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Why a checkpoint of this model does not fit its optimizer's parameters; empty: it does.

    A full checkpoint does not say what was frozen: all of it is taken as trained. What is frozen
    below an adapter is known.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    moved = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    foreign = [tuple(p.shape) for key, p in moved.items() if key not in names]
    if foreign:
        return (
            f"the optimizer has {len(foreign)} parameters that the model does not have, such as "
            f"one of shape {foreign[0]}: give them an optimizer of their own"
        )
    adapter = hasattr(model, "peft_config")
    left = [n for n, p in model.named_parameters() if id(p) not in moved]
    left = [n for n in left if not adapter or model.get_parameter(n).requires_grad]
    if left:
        return (
            f"the optimizer does not have {len(left)} of the model's parameters, such as "
            f"{left[0]!r}, and a full checkpoint does not say what was frozen"
        )
    return ""


def _as_batch(part: Batch | Callable[[], UpdateBatch]) -> UpdateBatch:
    if isinstance(part, UpdateBatch):
        return part
    if isinstance(part, Mapping):
        return batch_from_tensors(**part)
    if callable(part):
        return part()
    raise ValueError(
        f"step got a {type(part).__name__}; expected the tensors of its batch by name, an "
        "UpdateBatch, or a mapping of tensors for each microbatch."
    )
