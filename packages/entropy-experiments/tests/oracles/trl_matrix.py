"""Settings of TRL's trainers, and what the probe makes of each: the table of docs/howto_online.md.

`online`, `run` and `split` say what is expected; tests/online/test_trl_matrix.py checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from oracles.tiny_grpo import reward

Online = Literal["right", "noted", "not trusted", "refused"]
Run = Literal["right", "noted", "right, by the recorded gradient", "not trusted", "refused", "-"]
Split = Literal["right", "marked", "refused", "-"]
STEPS, STEP = 5, 3
"""Steps of each training, and the checkpoint whose step is asked about: its successor is not kept,
so the record alone can certify it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    setting: str
    changes: dict[str, Any] = field(default_factory=dict)
    online: Online = "right"
    run: Run = "right"
    split: Split = "right"
    ranks: int = 1
    why: str = ""
    """Of a refusal or a doubt: words that the message has."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the callback."""


def words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) / 20 for text in completions]


def kinds() -> dict[str, Any]:
    """Trainers other than GRPOTrainer, by the name that a case gives as `kind`."""
    from trl import GRPOTrainer, RLOOTrainer

    class OwnLoss(GRPOTrainer):
        """Pays for length in the loss, where nobody looks for it."""

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            length = inputs["completion_mask"].sum(1).float()
            scaled = inputs["advantages"] * (1 + length / 4)
            return super()._compute_loss(model, {**inputs, "advantages": scaled})

    return {"RLOOTrainer": RLOOTrainer, "OwnLoss": OwnLoss}


KNOWN = ("online", "run", "split", "why", "ranks", "options")


def _case(name: str, setting: str, /, **more: Any) -> Case:
    known = {key: more.pop(key) for key in KNOWN if key in more}
    return Case(name=name, setting=setting, changes=more, **known)


NOTED: dict[str, Any] = {"online": "noted", "run": "noted"}
REFUSED: dict[str, Any] = {"online": "refused", "run": "-", "split": "-"}
BY_GRADIENT: dict[str, Any] = {"run": "right, by the recorded gradient", "split": "refused"}
CASES = (
    _case("dapo", "`loss_type` dapo (TRL's default)"),
    _case("grpo", "`loss_type` grpo", loss_type="grpo"),
    _case("bnpo", "`loss_type` bnpo", loss_type="bnpo"),
    _case("dr_grpo", "`loss_type` dr_grpo", loss_type="dr_grpo"),
    _case("cispo", "`loss_type` cispo", loss_type="cispo", epsilon_high=5.0),
    _case("sapo", "`loss_type` sapo", loss_type="sapo"),
    _case(
        "luspo",
        "`loss_type` luspo, `importance_sampling_level` sequence",
        loss_type="luspo",
        importance_sampling_level="sequence",
    ),
    _case(
        "vespo",
        "`loss_type` vespo, with old rollouts",
        loss_type="vespo",
        num_iterations=2,
        vespo_k_pos=20.0,
        why="loss_type = vespo",
        **BY_GRADIENT,
    ),
    _case(
        "gspo",
        "`importance_sampling_level` sequence",
        loss_type="grpo",
        importance_sampling_level="sequence",
    ),
    _case(
        "iterations",
        "`num_iterations` 2: the second step of a batch",
        num_iterations=2,
        loss_type="dapo",
    ),
    _case("part", "a step learns from half of what was generated", steps_per_generation=4),
    _case(
        "part cispo",
        "the same with cispo",
        steps_per_generation=4,
        loss_type="cispo",
        epsilon_high=5.0,
    ),
    _case("delta", "`delta` 1.05, with old rollouts", delta=1.05, num_iterations=2),
    _case(
        "off-policy mask",
        "`off_policy_mask_threshold` 0, with old rollouts",
        off_policy_mask_threshold=0.0,
        num_iterations=2,
    ),
    _case("beta", "`beta` 0.1", beta=0.1),
    _case(
        "plain KL",
        "`beta` 0.1, `use_bias_correction_kl` off",
        beta=0.1,
        use_bias_correction_kl=False,
    ),
    _case("accumulation", "`gradient_accumulation_steps` 4", gradient_accumulation_steps=4),
    _case("scale batch", "`scale_rewards` batch", scale_rewards="batch"),
    _case("scale none", "`scale_rewards` none", scale_rewards="none"),
    _case("truncated", "`mask_truncated_completions`", mask_truncated_completions=True),
    _case(
        "two rewards",
        "two reward functions, weighted",
        rewards=[reward, words],
        reward_weights=[1.0, 0.5],
    ),
    _case("bonus", "`entropy_coef` 0.05", entropy_coef=0.05),
    _case("quantile", "`top_entropy_quantile` 0.3", top_entropy_quantile=0.3),
    _case(
        "quantile and bonus",
        "`top_entropy_quantile` 0.3 with `entropy_coef` 1",
        top_entropy_quantile=0.3,
        entropy_coef=1.0,
        why="top_entropy_quantile = 0.3 together with an entropy bonus",
        **BY_GRADIENT,
    ),
    _case(
        "subclass",
        "a subclass with a `_compute_loss` of its own",
        kind="OwnLoss",
        why="OwnLoss has a _compute_loss of its own",
        **BY_GRADIENT,
    ),
    _case("top_p", "`top_p` 0.9", top_p=0.9, why="top_p = 0.9", **NOTED),
    _case("top_k", "`top_k` 5", top_k=5, why="top_k = 5", **NOTED),
    _case("min_p", "`min_p` 0.1", min_p=0.1, why="min_p = 0.1", **NOTED),
    _case(
        "repetition",
        "`repetition_penalty` 1.2",
        repetition_penalty=1.2,
        why="repetition_penalty = 1.2",
        **NOTED,
    ),
    _case(
        "top_p half",
        '`top_p` 0.9, judged by training\'s own rollouts (`evaluation="half"`)',
        top_p=0.9,
        steps_per_generation=4,
        options={"evaluation": "half"},
        why="sampled with top_p = 0.9",
        **REFUSED,
    ),
    _case(
        "top_k batch",
        '`top_k` 5, the same (`evaluation="batch"`)',
        top_k=5,
        options={"evaluation": "batch"},
        why="sampled with top_k = 5",
        **REFUSED,
    ),
    _case("checkpointing", "`gradient_checkpointing`", gradient_checkpointing=True),
    _case("full", "full fine-tune instead of LoRA", lora=False, learning_rate=1e-3),
    _case(
        "bf16",
        "`bf16` autocast",
        bf16=True,
        run="right, by the recorded gradient",
        split="marked",
        why="training computed in bfloat16",
    ),
    _case(
        "bf16 base",
        "LoRA over a base stored in bf16",
        dtype=torch.bfloat16,
        online="not trusted",
        run="right, by the recorded gradient",
        split="marked",
        why="weights are bfloat16",
    ),
    _case(
        "bf16 weights",
        "full fine-tune of weights stored in bf16",
        dtype=torch.bfloat16,
        lora=False,
        online="not trusted",
        run="not trusted",
        split="refused",
        why="bfloat16",
    ),
    _case(
        "dropout",
        "`lora_dropout` 0.1",
        lora_dropout=0.1,
        why="lora_dropout 0.1",
        **BY_GRADIENT,
    ),
    _case("sgd", "`optim` sgd", optim="sgd", run="refused", split="-", why="is SGD"),
    _case(
        "adafactor",
        "`optim` adafactor",
        optim="adafactor",
        why="optimizer Adafactor",
        **REFUSED,
    ),
    _case("two ranks", "two ranks (DDP, gloo)", ranks=2),
    _case(
        "two ranks, quantile",
        "two ranks, `top_entropy_quantile` 0.3",
        ranks=2,
        top_entropy_quantile=0.3,
    ),
    _case("rloo", "`RLOOTrainer`", kind="RLOOTrainer"),
    _case("rloo beta", "`RLOOTrainer`, `beta` 0.1", kind="RLOOTrainer", beta=0.1),
    _case(
        "rloo iterations",
        "`RLOOTrainer`, `num_iterations` 2",
        kind="RLOOTrainer",
        num_iterations=2,
    ),
)
MEANING = {
    "right": "right",
    "noted": "right, of the full softmax, and says so",
    "not trusted": "not trusted, with the reason",
    "refused": "refused by name",
    "right, by the recorded gradient": "right, by the recorded gradient",
    "marked": "of the rebuilt step within 5 % (its distance is given), else refused",
    "-": "-",
}


def table() -> list[str]:
    """Lines of the page's table."""
    lines = [
        "| setting | online | `entropy-probe run` | split by token | named |",
        "|---|---|---|---|---|",
    ]
    for case in CASES:
        cells = [case.setting, *(MEANING[x] for x in (case.online, case.run, case.split))]
        lines.append(f"| {' | '.join(cells)} | {case.why and f'*{case.why}*'} |")
    return lines


def record_folder(folder: Path) -> Path:
    return folder / "run" / "record"
