"""The probe in a training loop of your own.

    probe = LoopProbe(model, optimizer, tokenizer, prompts=prompts, max_new_tokens=64)
    for batch in data:
        loss(batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        with probe.step():
            optimizer.step()
        optimizer.zero_grad()

`prompts` are texts; some of them, other ones each time, are answered by the policy as it is. What
was found is in `probe.rows` and, as JSON lines, in the file that `out` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from entropy_experiments.artifacts import refuse_special_file
from entropy_experiments.distributed import Ranks
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.online.evaluation_rollouts import (
    Buffer,
    Fixed,
    Fresh,
    chosen_rows,
    make_draw,
)
from entropy_experiments.online.probe import (
    OnlineProbe,
    check_bare,
    check_counts,
    check_order,
    check_positive,
    named_gradients,
)
from entropy_experiments.online.watch import PATIENCE, Throttle, Watch
from entropy_experiments.results import TrainingRow
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.types import Rollouts


class LoopProbe:
    """Predicts and measures the steps made inside `with probe.step():`, in a loop of your own.

    On several ranks every one of them makes a LoopProbe, and enters `step()`, at the same time.

    Args:
        model: The bare model: what DDP wraps, not the wrapper.
        optimizer: Adam, AdamW or SGD.
        tokenizer: Of the model.
        prompts: Texts; some of them, other ones each time, are answered by the policy as it is.
        max_new_tokens: Length limit of the answers.
        evaluation: Rollouts or a buffer, instead of drawing answers to `prompts`.
        drawn: Prompts that are answered.
        group: Answers to each.
        uses: Probed steps that they serve.
        temperature: Of the policy.
        every: A step is probed every so many steps.
        max_overhead: Fewer, when the probe would take more than this share of the training time;
            None: no limit.
        microbatch: Rollouts in a pass.
        parts: Also split the prediction into momentum, decay and gradient.
        order: 2 also predicts to second order.
        out: A file of JSON lines, one for each probed step.
        on_row: Called with each row.
        seed: Of the answers.

    Raises:
        ValueError: If there is nothing to evaluate on, or an option cannot be used.

    Examples:
        >>> import torch
        >>> from entropy_experiments.sampling.datasets import load_problems
        >>> checkpoint = load_checkpoint(embedded_trajectory() / "checkpoint-13")
        >>> model, tokenizer = checkpoint.model, checkpoint.tokenizer
        >>> adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        >>> prompts = [problem.prompt for problem in load_problems("countdown", count=8)]
        >>> probe = LoopProbe(model, adamw, tokenizer, prompts=prompts, max_new_tokens=6, drawn=8)
        >>> ids_NS = tokenizer(prompts, return_tensors="pt", padding=True).input_ids
        >>> model(input_ids=ids_NS, labels=ids_NS).loss.backward()
        >>> with probe.step():
        ...     stepped = adamw.step()
        >>> len(probe.rows)
        1
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        tokenizer: Any = None,
        *,
        prompts: Sequence[str] = (),
        max_new_tokens: int | None = None,
        evaluation: Rollouts | Buffer | None = None,
        drawn: int = 16,
        group: int = 1,
        uses: int = 1,
        temperature: float = 1.0,
        every: int = 1,
        max_overhead: float | None = 0.1,
        microbatch: int = 8,
        parts: bool = True,
        order: int = 1,
        out: str | Path | None = None,
        on_row: Callable[[TrainingRow], None] = lambda _: None,
        seed: int = 0,
    ) -> None:
        if evaluation is None and (tokenizer is None or not prompts or max_new_tokens is None):
            raise ValueError(
                "LoopProbe has nothing to evaluate on. Give a tokenizer, prompts and "
                "max_new_tokens, for answers that are drawn in training; or evaluation=Rollouts."
            )
        if evaluation is not None and not isinstance(evaluation, Rollouts | Buffer):
            raise ValueError(
                f"evaluation is {evaluation!r}; expected Rollouts, or a buffer "
                "(entropy_experiments.online.evaluation_rollouts). Words such as 'half' are for "
                "EntropyProbeCallback; to draw fresh answers leave evaluation out."
            )
        if isinstance(prompts, str):
            raise ValueError(f"prompts is the text {prompts!r}; expected a list of texts.")
        check_bare(model)
        check_counts({"drawn": drawn, "group": group, "uses": uses, "microbatch": microbatch})
        if max_new_tokens is not None:
            check_counts({"max_new_tokens": max_new_tokens})
        check_order(order)
        check_positive("temperature", temperature)
        if out is not None:
            refuse_special_file(Path(out))  # here: what set_up raises only turns the probe off
        self._model, self._optimizer, self._on_row = model, optimizer, on_row
        self._next = 0
        ranks = Ranks.all(PATIENCE)
        throttle = Throttle(every=every, max_overhead=max_overhead)
        self._watch = Watch(throttle=throttle, ranks=ranks, model=model)

        def build() -> OnlineProbe:
            policy = SequenceProcessor(model, temperature=temperature)
            if evaluation is not None:
                buffer = Fixed(evaluation) if isinstance(evaluation, Rollouts) else evaluation
            else:
                assert max_new_tokens is not None  # its absence is refused above
                generator = SampleGenerator(
                    policy, tokenizer, max_new_tokens=max_new_tokens, master_seed=seed
                )
                chosen = _Prompts(tokenizer, prompts, drawn, seed)
                buffer = Fresh(make_draw(generator, chosen, group=group, ranks=ranks), uses=uses)
            return OnlineProbe(
                policy,
                buffer,
                horizon=max_new_tokens,
                microbatch=microbatch,
                parts=parts,
                order=order,
                ranks=ranks,
            )

        self._watch.set_up(build, None if out is None else Path(out))

    @property
    def rows(self) -> list[TrainingRow]:
        return self._watch.rows

    @property
    def off(self) -> Exception | None:
        """Why the probe switched itself off, if it did."""
        return self._watch.guard.error

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around `optimizer.step()`, gradients as the optimizer will see them."""
        step, self._next = self._next, self._next + 1
        self._watch.before(step, lambda: named_gradients(self._model), lambda: self._optimizer)
        yield
        self._watch.after(step, self._on_row)


class _Prompts:
    """`count` of the texts for a step, as token ids; the same on every rank."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], count: int, seed: int) -> None:
        self.ids = list(dict.fromkeys(tuple(tokenizer(text)["input_ids"]) for text in texts))
        if () in self.ids:
            raise ValueError(
                "prompts has a text of no tokens; expected at least one token in each. Leave it "
                "out."
            )
        self.count, self.seed = min(count, len(self.ids)), seed

    def __call__(self, step: int) -> list[tuple[int, ...]]:
        return [self.ids[row] for row in chosen_rows(len(self.ids), self.count, self.seed, step)]
