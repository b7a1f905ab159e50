"""Document 003's classes, over `prompt.PromptEncoder` and `policy.RefinePolicy`.

    qwen = QwenHybridPrompt(prompt_dim=256, numeric_in_dim=15, fuse="mean", qwen=QwenCfg(...))
    qwen_prompt = qwen(batch.inputs)
    refined_prompt, rl_info = policy_rl.refine_prompt(qwen_prompt, ctrl_vec, feat_sum)
    policy_rl.update(rl_info, reward)

For code that was written against the document. The trainer itself (`step.train_step`) draws several
refinements of a state; here each state has one, and is judged beside the batch's other states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arc_refine.batch import BatchInputs
from arc_refine.features import FEATURE_NAMES
from arc_refine.language import Training, load_language_model
from arc_refine.policy import RefinePolicy
from arc_refine.prompt import PromptEncoder
from arc_refine.reward import advantages

FUSED = {"mean": 0.5, "text": 0.0, "numeric": 1.0}
"""`fuse` by name: the share of the numbers."""


@dataclass(frozen=True)
class QwenCfg:
    """The language model of a `QwenHybridPrompt`.

    Args:
        model_name: A local folder, "tiny" or "smollm2".
        dtype: "float32".
        use_qwen: False: numbers only, no language model.
        train: "none", "lora" or "full"; None: full for the tiny model, lora for others.

    Raises:
        ValueError: If `dtype` is another one.

    Examples:
        >>> QwenCfg().model_name
        'tiny'
    """

    model_name: str = "tiny"
    dtype: str = "float32"
    use_qwen: bool = True
    train: Training | None = None

    def __post_init__(self) -> None:
        if self.dtype != "float32":
            raise ValueError(
                f"QwenCfg.dtype is {self.dtype!r}; expected 'float32'. Half-precision weights have "
                "half-precision gradients, which a gradient scaler cannot unscale; for speed use "
                "autocast over float32 weights (entropy-probe arc train --dtype)."
            )


class QwenHybridPrompt(PromptEncoder):
    """A prompt embedding of a task's text and numbers, with the document's arguments.

    Args:
        prompt_dim: Width of the embedding.
        numeric_in_dim: How many numbers; those that `arc_refine.features` computes.
        fuse: "mean", "text", "numeric", or the numbers' share.
        qwen: The language model; None: the tiny one.

    Raises:
        ValueError: If `fuse` or `numeric_in_dim` is another one.

    Examples:
        >>> prompt = QwenHybridPrompt(8, fuse="numeric", qwen=QwenCfg(use_qwen=False))
        >>> swap = Pair([[1, 2]], [[2, 1]])
        >>> batch = collate(leave_one_out(Task("swap", demos=(swap, swap), tests=(swap,))))
        >>> prompt(batch.inputs).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        prompt_dim: int,
        numeric_in_dim: int = len(FEATURE_NAMES),
        fuse: str | float = "mean",
        qwen: QwenCfg | None = None,
    ) -> None:
        if isinstance(fuse, str) and fuse not in FUSED:
            raise ValueError(
                f"fuse is {fuse!r}; expected {', '.join(FUSED)}, or the numbers' share, 0 to 1."
            )
        if numeric_in_dim != len(FEATURE_NAMES):
            raise ValueError(
                f"numeric_in_dim is {numeric_in_dim}; expected {len(FEATURE_NAMES)}, the numbers "
                "that arc_refine.features computes of a task."
            )
        cfg = qwen or QwenCfg()
        language = load_language_model(cfg.model_name, cfg.train) if cfg.use_qwen else None
        share = FUSED[fuse] if isinstance(fuse, str) else fuse
        super().__init__(language, prompt_dim, share, feature_dim=numeric_in_dim)

    def forward(self, inputs: BatchInputs, *others: Any) -> Tensor:
        if others:
            raise TypeError(
                f"QwenHybridPrompt got {1 + len(others)} arguments, such as (tr, inp, out); "
                "expected the batch's inputs alone. A prompt that has seen `out` knows the answer: "
                "call qwen(batch.inputs)."
            )
        return super().forward(inputs)


class PolicyRL:
    """Refines a prompt embedding by r = e + a, and learns from the reward of each refinement.

    Args:
        prompt_dim: Width of the prompt embedding.
        ctrl_dim: Width of the control vector.
        feat_dim: Width of the features.
        lr: Of its AdamW.
        bound: Largest change of an entry.
        entropy_weight: Of the entropy bonus.
        seed: Of what it draws.

    Examples:
        >>> import torch
        >>> policy = PolicyRL(prompt_dim=4, ctrl_dim=1, feat_dim=1)
        >>> control_B1, features_B1 = torch.ones(2, 1), torch.ones(2, 1)
        >>> refined_BE, info = policy.refine_prompt(torch.zeros(2, 4), control_B1, features_B1)
        >>> sorted(policy.update(info, reward=torch.tensor([0.0, 1.0])))
        ['entropy', 'policy_loss']
    """

    def __init__(
        self,
        prompt_dim: int,
        ctrl_dim: int,
        feat_dim: int,
        *,
        lr: float = 1e-3,
        bound: float = 0.5,
        entropy_weight: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.policy: RefinePolicy = RefinePolicy(prompt_dim, ctrl_dim + feat_dim, bound)
        self.entropy_weight = entropy_weight
        self.optimizer: torch.optim.AdamW = torch.optim.AdamW(self.policy.parameters(), lr=lr)
        self._generator = torch.Generator().manual_seed(seed)

    def apply(self, prompt_BE: Tensor, u_BE: Tensor) -> Tensor:
        """r = e + c tanh(u): the gradient of r is e's, undiminished."""
        return prompt_BE + self.policy.squash(u_BE)

    def refine_prompt(
        self, prompt_BE: Tensor, ctrl_vec: Tensor, feat_sum: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(r, what `update` needs): the state and the sample, neither with a graph."""
        state_BS = self.policy.state(prompt_BE, torch.cat([ctrl_vec, feat_sum], dim=-1))
        u_1BE, _ = self.policy.sample(state_BS, 1, self._generator)
        return self.apply(prompt_BE, u_1BE[0]), {"state": state_BS, "u": u_1BE[0]}

    def update(self, rl_info: dict[str, Tensor], reward: Tensor | float) -> dict[str, float]:
        """One policy-gradient step; the density is computed anew, so detached info still learns.

        `reward`: of each state, [B]. Its advantage is over the mean of the batch's other states;
        a single state has no others, and its advantage is its reward.
        """
        state_BS, u_BE = rl_info["state"], rl_info["u"]
        reward_B = torch.as_tensor(reward, dtype=state_BS.dtype).detach().reshape(-1)
        if len(reward_B) != len(state_BS):
            raise ValueError(
                f"{len(reward_B)} rewards of {len(state_BS)} refined prompts; expected one each."
            )
        advantage_B = advantages(reward_B[:, None])[:, 0] if len(reward_B) > 1 else reward_B
        log_prob_B = self.policy.log_prob(state_BS, u_BE)
        entropy = self.policy.entropy(state_BS).mean()
        loss = -(advantage_B * log_prob_B).mean() - self.entropy_weight * entropy
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return {"policy_loss": float(loss.detach()), "entropy": float(entropy.detach())}
