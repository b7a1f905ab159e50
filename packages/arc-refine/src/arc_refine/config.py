"""Every option of a training run, checked before anything is loaded. Imports no torch.

Two choices are resolved here: `lm_train` is `full` for the tiny model and `lora` for every other
one, and `max_batches` counts per epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

LM_TRAIN = ("none", "lora", "full")
REFINE = ("off", "pathwise", "rl")
DTYPES = ("float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TRACKERS = ("none", "tensorboard", "wandb")
CHANGEABLE = frozenset(
    {"epochs", "max_batches", "eval_batches", "doctor", "log_every", "checkpoint_every", "tracker"}
)
"""What may change when a run is resumed: how long it goes and what it tells."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run, checked. Loss weights are in `efe`'s formulas (docs/arc.md).

    Args:
        data: "training", "evaluation", a task's .json file, or a folder of them.
        held_out: Share of the tasks that is kept for validation.
        max_tasks: At most so many tasks; None: all.
        max_side: Tasks with a longer side are left out.
        augment: Permute colours, turn and mirror episodes.
        curriculum: Small episodes first.
        shuffle_text: Ablation: the text of another episode.
        lm: "tiny", "smollm2", "none", or a local folder.
        lm_train: "none", "lora" or "full"; None: full for the tiny model, lora for others.
        prompt_width: Width of the prompt embedding.
        fuse: Share of the numbers, beside the text, in the embedding.
        agent_width: Width of the agent.
        agent_steps: Steps of the agent.
        refine: "off", "pathwise" or "rl".
        refinements: Drawn for each state.
        bound: Largest change of an embedding's entry.
        entropy_weight: Of the policy's entropy bonus.
        reward_scale: Of the reward.
        hard_weight: How much more a wrongly predicted cell weighs.
        risk_weight: Of the risk term.
        z_weight: Of the preference term.
        bi_weight: Of the agreement with the backward agent.
        back_weight: Of the backward agent's own term.
        prompt_weight: Of the prompt term.
        size_weight: Of the two size heads.
        epochs: Passes over the training episodes.
        batch_size: Episodes in a step.
        max_batches: Steps of an epoch at most; None: all.
        eval_batches: Batches of a validation; None: all.
        lr_agent: Learning rate of the agent.
        lr_lm: Learning rate of the language model.
        lr_policy: Learning rate of the policy.
        weight_decay: Of all optimizers.
        clip: Of gradient norms.
        device: "cpu" or "cuda".
        dtype: Of autocast.
        threads: Part of the configuration: sums over another number have other last bits.
        seed: Of everything that is drawn.
        doctor: Steps under the gradient doctor.
        log_every: Steps between two lines.
        checkpoint_every: Steps between two checkpoints.
        tracker: "none", "tensorboard" or "wandb".

    Raises:
        ValueError: If an option cannot be used; the message names it as it is typed.

    Examples:
        >>> TrainConfig(max_batches=5).lm_train
        'full'
    """

    # data
    data: str = "training"
    held_out: float = 0.2
    max_tasks: int | None = None
    max_side: int = 30
    augment: bool = True
    curriculum: bool = True
    shuffle_text: bool = False
    # networks
    lm: str = "tiny"
    lm_train: str | None = None
    prompt_width: int = 128
    fuse: float = 0.5
    agent_width: int = 64
    agent_steps: int = 4
    # refinement
    refine: str = "rl"
    refinements: int = 4
    bound: float = 0.5
    entropy_weight: float = 1e-5
    reward_scale: float = 1.0
    # losses
    hard_weight: float = 1.0
    risk_weight: float = 0.01
    z_weight: float = 0.01
    bi_weight: float = 0.05
    back_weight: float = 0.05
    prompt_weight: float = 0.01
    size_weight: float = 0.1
    # optimization
    epochs: int = 1
    batch_size: int = 10
    max_batches: int | None = None
    eval_batches: int | None = 4
    lr_agent: float = 1e-3
    lr_lm: float = 5e-5
    lr_policy: float = 1e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    # run
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    seed: int = 0
    doctor: int = 5
    log_every: int = 50
    checkpoint_every: int = 50
    tracker: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        if self.lm_train is None:
            usual = {"tiny": "full", "none": "none"}.get(self.lm, "lora")
            object.__setattr__(self, "lm_train", usual)
        self._choices()
        self._numbers()
        self._together()

    def _choices(self) -> None:
        choices = {"lm_train": LM_TRAIN, "refine": REFINE, "dtype": DTYPES, "tracker": TRACKERS}
        for name, allowed in choices.items():
            got = getattr(self, name)
            if got not in allowed:
                raise ValueError(f"{flag(name)} is {got!r}, expected one of {', '.join(allowed)}.")

    def _numbers(self) -> None:
        for name in _AT_LEAST_ONE:
            _check(self, name, lambda x: isinstance(x, int) and x >= 1, "a whole number above 0")
        for name in ("doctor", "seed"):
            _check(self, name, lambda x: isinstance(x, int) and x >= 0, "a whole number, 0 or more")
        for name in ("max_tasks", "max_batches", "eval_batches"):
            if getattr(self, name) is not None:
                _check(self, name, lambda x: isinstance(x, int) and x >= 1, "1 or more")
        for name in _POSITIVE:
            _check(self, name, lambda x: math.isfinite(x) and x > 0, "a finite number above 0")
        for name in _NOT_NEGATIVE:
            _check(self, name, lambda x: math.isfinite(x) and x >= 0, "a finite number, 0 or more")
        for name in ("held_out", "fuse"):
            _check(self, name, lambda x: 0 < x < 1, "between 0 and 1, both excluded")
        _check(self, "max_side", lambda x: 1 <= x <= 30, "1 to 30, the sides of ARC grids")

    def _together(self) -> None:
        if self.refine == "rl" and self.refinements < 2:
            raise ValueError(
                f"--refinements is {self.refinements}, expected 2 or more: the baseline of each "
                "refinement is the mean of the others. Use 4, or --refine pathwise."
            )
        if self.lm == "none" and self.lm_train != "none":
            raise ValueError(
                f"--lm none has nothing to train, got --lm-train {self.lm_train}. "
                "Leave --lm-train out, or choose --lm tiny."
            )
        if self.dtype == "float16" and self.device.split(":")[0] != "cuda":
            raise ValueError(
                f"--dtype float16 on {self.device}: expected cuda, whose gradient scaler it needs. "
                "Use --dtype float32; on a CPU bfloat16 works too, slowly."
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """A stored configuration; a name of another version is refused."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(
                f"The stored configuration has unknown options {unknown}. It was written by "
                "another version of arc_refine; train again, or use that version."
            )
        return cls(**values)

    def resumed_with(self, changes: Mapping[str, Any]) -> TrainConfig:
        """The stored run, with what the command line may change."""
        mine = self.to_dict()
        fixed = sorted(k for k, v in changes.items() if k not in CHANGEABLE and v != mine[k])
        if fixed:
            raise ValueError(
                "--resume continues the run as it was begun, got other values for "
                f"{', '.join(map(flag, fixed))}. Leave them out, or begin a new run. "
                f"These may change: {', '.join(map(flag, sorted(CHANGEABLE)))}."
            )
        return replace(self, **{k: v for k, v in changes.items() if k in CHANGEABLE})


_AT_LEAST_ONE = (
    *("prompt_width", "agent_width", "agent_steps", "refinements", "epochs", "batch_size"),
    *("log_every", "checkpoint_every", "threads"),
)
_POSITIVE = ("bound", "reward_scale", "lr_agent", "lr_lm", "lr_policy", "clip")
_NOT_NEGATIVE = (
    *("entropy_weight", "hard_weight", "risk_weight", "z_weight", "bi_weight", "back_weight"),
    *("prompt_weight", "size_weight", "weight_decay"),
)


def flag(name: str) -> str:
    """The option as it is typed."""
    return "--" + name.replace("_", "-")


def _check(config: TrainConfig, name: str, good: Any, expected: str) -> None:
    got = getattr(config, name)
    if isinstance(got, bool) or not isinstance(got, int | float) or not good(got):
        raise ValueError(f"{flag(name)} is {got!r}, expected {expected}.")
