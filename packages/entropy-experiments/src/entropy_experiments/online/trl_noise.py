"""The gradient noise scale of a GRPOTrainer's steps, from gradients as backward passes give them.

A hook on every trainable parameter sees the gradient of each backward pass before it is added to
`.grad`, before DDP averages it and before it is clipped. It is read and left as it is.

    one rank         the microbatches of a step differ: at least two are needed
    several ranks    the ranks differ, each with all of its microbatches: g_r = sum of its passes

Noise is counted in prompts: a prompt's responses share their baseline. TRL deals the responses of a
rank's generation batch out to its microbatches at random, so on one rank two microbatches may have
answers to the same prompt, which are not independent. `shared_pairs` is the share of such pairs:

    E[g_i . g_j] = (1 - shared) |G|^2 + shared C,       C >= E|G_prompt|^2 >= |G|^2

(docs/theory.md), so |G|^2 comes out too large and the noise scale too small. Between ranks prompts
are not shared, unless the data repeats them or a group is cut between two ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from entropy_experiments.distributed import Ranks
from entropy_experiments.online.noise_scale import NoiseScale, NoiseScaleResult, adam_preconditioner
from entropy_experiments.online.rows import PREFIX, RowFile
from entropy_experiments.online.trl_trainer import used_now
from entropy_experiments.online.watch import LOG

NOISE_ROWS = "entropy_probe_noise.jsonl"
SCHEMA = 1
ALONE_MESSAGE = (
    "noise_scale: a step has one backward pass on one rank here, so there is no second gradient to "
    "compare it with, and no noise scale. Training goes on, and so does the rest of the probe. Set "
    "gradient_accumulation_steps to 2 or more (with a smaller per_device_train_batch_size; in "
    "`entropy-probe train`: lower microbatch_size), or train on several ranks."
)


def refuse_scaled(args: Any) -> None:
    if args.fp16:
        raise ValueError(
            "noise_scale with fp16: gradients pass multiplied by a scale that changes. Expected "
            "bf16 or full precision. Leave noise_scale out."
        )


class NoiseRow(TypedDict):
    """A row of the file: the noise scale so far, in both metrics; adam's needs a step of Adam."""

    schema: int
    step: int
    shared_pairs: float | None
    raw: NoiseScaleResult
    adam: NoiseScaleResult | None


class StepNoise:
    """Listens to a trainer's backward passes; see `open`, `microbatch` and `close`."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        optimizer: Callable[[], torch.optim.Optimizer],
        *,
        ranks: Ranks,
        window: int | None,
        rows: Path | None,
    ) -> None:
        self.noise = NoiseScale(dict(params), window=window)
        self._params, self._optimizer, self._ranks = dict(params), optimizer, ranks
        self._listening, self._scale = False, 1.0
        self._error: Exception | None = None
        self.seconds = 0.0
        """Spent in hooks since it was last set to 0."""
        self._shares: list[float] = []
        self._file = None if rows is None or ranks.rank else RowFile(rows)
        self._hooks = [p.register_hook(self._hook(name)) for name, p in params.items()]

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def passing(gradient: Tensor) -> None:
            if not self._listening:
                return
            began = time.perf_counter()
            try:
                self.noise.add_piece(name, gradient, scale=self._scale)
            except Exception as error:  # inside of training's backward: told when the step closes
                self._error, self._listening = error, False
            self.seconds += time.perf_counter() - began

        return passing

    def open(self, prompts: float) -> None:
        """A step of `prompts` prompts on this rank begins."""
        self.noise.discard_step()
        optimizer = self._optimizer()
        metric = None
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            metric = adam_preconditioner(optimizer, self._params)
        self.noise.open_step(metric, merged=self._ranks.size > 1)
        # The loss of a pass is divided by the number of passes: their sum is this rank's mean.
        self._scale, self._listening = prompts, True

    def microbatch(self, prompts: float) -> None:
        """A backward pass over so many prompts, not the last of its step, has ended."""
        if self._listening and self._ranks.size == 1:
            self.noise.end_microbatch(prompts)

    def close(self, step: int, prompts: float) -> NoiseRow | None:
        """The step's last pass has ended, of `prompts` prompts (several ranks: all of its passes).

        A row for the file; None: a gradient was not finite, or this is not rank 0.
        """

        def failed() -> None:
            error, self._error = self._error, None
            if error is not None:
                raise error
            if not self._listening:
                raise RuntimeError("a step is closed that was never opened")
            self.noise.end_microbatch(prompts)

        self._ranks.all_gather(failed)  # before anything waits for a rank that has failed
        self._listening = False
        counted = self.noise.close_step(distributed=self._ranks.size > 1)
        if not counted or self._ranks.rank:
            return None
        row: NoiseRow = {
            "schema": SCHEMA,
            "step": step,
            "shared_pairs": self.shared,
            "raw": self.noise.estimate("raw").as_dict(),
            "adam": self.noise.estimate("adam").as_dict() if self.noise.adam_steps else None,
        }
        if self._file is not None:
            self._file.add(row)
        return row

    @property
    def shared(self) -> float | None:
        """Of all steps so far, in the mean; None: not known yet."""
        return sum(self._shares) / len(self._shares) if self._shares else None

    def saw_shared(self, share: float) -> None:
        if not self._shares and self._ranks.rank == 0:
            say_shared(share, several=self._ranks.size > 1)
        self._shares.append(share)

    def stop(self) -> None:
        """Let go of the parameters and of the buffer."""
        self._listening = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def noise_metrics(row: NoiseRow) -> dict[str, float]:
    """The numbers of a row under the names that trackers get; what is not known is left out.

    critical_batch_size is the noise scale in the metric of the optimizer's own step.
    """
    out: dict[str, float | None] = {"noise_scale_shared_pairs": row["shared_pairs"]}
    for estimate, end in ((row["raw"], ""), (row["adam"], "_adam")):
        if estimate is None:
            continue
        low, high = estimate["critical_batch_interval"] or (None, None)
        out |= {
            f"noise_scale{end}": estimate["critical_batch"],
            f"noise_scale{end}_low": low,
            f"noise_scale{end}_high": high,
            f"gradient_signal{end}": estimate["signal"]["value"],
            f"gradient_noise{end}": estimate["noise"]["value"],
        }
        out["critical_batch_size"] = estimate["critical_batch"]
        out["batch_prompts"] = estimate["samples"]
    return {PREFIX + name: float(value) for name, value in out.items() if value is not None}


def prompts_of_passes(args: Any, passes: int) -> float:
    """Prompts in so many backward passes of this rank."""
    return passes * args.per_device_train_batch_size / args.num_generations


def shared_pairs(trainer: Any, ranks: Ranks) -> float:
    """Of all pairs of responses that are in different units, the share with one prompt.

    A unit is a microbatch on one rank, and a rank's whole step on several.
    """

    def mine() -> list[Counter[tuple[int, ...]]]:
        used, _ = used_now(trainer)
        parts = [_prompts(trainer._buffered_inputs[place]) for place in used]
        return parts if ranks.size == 1 else [sum(parts, Counter())]

    units = [unit for units in ranks.all_gather(mine) for unit in units]
    return shared_share(units)


def shared_share(units: Sequence[Counter[Any]]) -> float:
    same = pairs = 0
    for k, one in enumerate(units):
        for other in units[k + 1 :]:
            pairs += one.total() * other.total()
            same += sum(count * other[prompt] for prompt, count in one.items())
    return same / pairs if pairs else 0.0


def _prompts(inputs: Mapping[str, Any]) -> Counter[tuple[int, ...]]:
    ids_NP, mask_NP = inputs["prompt_ids"], inputs["prompt_mask"].bool()
    return Counter(
        tuple(ids_P[mask_P].tolist()) for ids_P, mask_P in zip(ids_NP, mask_NP, strict=True)
    )


def say_shared(share: float, *, several: bool) -> None:
    why = "as TRL mixes a rank's responses"
    instead = " On several ranks it is taken between ranks, which are dealt prompts of their own."
    if several:
        why, instead = "as the data repeats it, or a group is cut between ranks", ""
    if share > 0:
        LOG.warning(
            "noise_scale: %.0f%% of the pairs of responses that are compared have the same prompt, "
            "%s: |G|^2 comes out too large and the noise scale too small.%s (Logged once.)",
            100 * share,
            why,
            instead,
        )
