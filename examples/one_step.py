"""One GRPO step of a small policy: predicted before it is made, measured, and checked.

A GRU writes digits until it stops and is rewarded for their sum being a multiple of three. The
script shows what a user of the library writes: a Policy (twenty lines), a batch, an optimizer.

    python examples/one_step.py --figure one_step.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from entropy_experiments import (
    Case,
    EstimatorOptions,
    Objective,
    Rollouts,
    Scores,
    UpdateBatch,
    compute_update_vector_adamw,
    curvature,
    first_order_by_part,
    loss_gradient,
    measured_many,
    optimizer_certificate,
    read_state,
    resampled,
    response_scores,
)
from entropy_experiments.types import Params

EOS, DIGITS, PROMPTS, HORIZON = 0, 10, 12, 24
VOCABULARY = 1 + DIGITS + PROMPTS
LR, MAX_GRAD_NORM = 3e-3, 1.0


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, 1 + DIGITS, bias=False)

    def forward(self, tokens_NS: Tensor) -> Tensor:
        """Hidden states [N, S, D]; the state at s has read the tokens up to s."""
        state, states = torch.zeros(len(tokens_NS), self.cell.hidden_size), []
        for token_N in tokens_NS.unbind(1):
            state = self.cell(self.embed(token_N), state)
            states.append(state)
        return torch.stack(states, dim=1)


class GRUPolicy:
    """All that the estimators ask of a model: parameters by name, and scores of rollouts."""

    temperature = 1.0
    top_p = 1.0

    def __init__(self, model: Model) -> None:
        self.model = model
        self.params: Params = dict(model.named_parameters())

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        hidden_NSD = functional_call(self.model, dict(params), (rollouts.tokens_NS,))
        return response_scores(hidden_NSD, params["head.weight"], rollouts)

    @torch.no_grad()
    def sample(self, params: Params, prompt_N: Tensor, generator: torch.Generator) -> Rollouts:
        tokens_NS = (1 + DIGITS + prompt_N)[:, None]
        alive_N, drawn = torch.ones(len(prompt_N), dtype=torch.bool), []
        for _ in range(HORIZON):
            hidden_NSD = functional_call(self.model, dict(params), (tokens_NS,))
            law_NV = (hidden_NSD[:, -1] @ params["head.weight"].T).softmax(-1)
            token_N = torch.multinomial(law_NV, 1, generator=generator).squeeze(1)
            tokens_NS = torch.cat([tokens_NS, torch.where(alive_N, token_N, EOS)[:, None]], dim=1)
            drawn.append(alive_N)
            alive_N = alive_N & (token_N != EOS)
        response_NS = torch.stack([torch.zeros_like(alive_N), *drawn], dim=1)
        attention_NS = response_NS.clone()
        attention_NS[:, 0] = True
        return Rollouts(
            tokens_NS=tokens_NS,
            attention_NS=attention_NS,
            response_NS=response_NS,
            prompt_N=prompt_N,
            truncated_N=alive_N,
        )


def reward(rollouts: Rollouts) -> Tensor:
    said_NS = torch.where(rollouts.response_NS & (rollouts.tokens_NS <= DIGITS), 1, 0)
    total_N = (said_NS * rollouts.tokens_NS).sum(1)
    return (total_N % 3 == 0).double() - 0.02 * rollouts.tokens_N


def update_batch(rollouts: Rollouts, group: int) -> UpdateBatch:
    """Rewards, centred and scaled within each prompt's group, for every token of the response."""
    reward_N = reward(rollouts)
    by_group = reward_N.view(-1, group)
    advantage = (by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 1e-4)
    advantage_NS = advantage.view(-1, 1).expand(rollouts.tokens_NS.shape)
    return UpdateBatch(rollouts=rollouts, reward_N=reward_N, advantage_NS=advantage_NS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--figure", type=Path, help="draw the result here (needs matplotlib)")
    parser.add_argument("--warm-up", type=int, default=5, help="real steps before the probed one")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    policy = GRUPolicy(Model())
    objective = Objective(loss="dr_grpo", max_completion_length=HORIZON)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LR, weight_decay=0.01)
    group = 8
    prompt_U = torch.arange(PROMPTS).repeat_interleave(group)

    for _ in range(arguments.warm_up):
        batch = update_batch(policy.sample(policy.params, prompt_U, generator), group)
        found = loss_gradient(policy, batch, objective, microbatch=96)
        for name, parameter in policy.model.named_parameters():
            parameter.grad = found.gradient[name]
        nn.utils.clip_grad_norm_(policy.model.parameters(), MAX_GRAD_NORM)
        optimizer.step()

    # The step in question: what would it do to the entropy, and what does it do?
    batch = update_batch(policy.sample(policy.params, prompt_U, generator), group)
    state = read_state(optimizer, policy.params)
    direction, _, stats = compute_update_vector_adamw(
        policy, batch, objective, state, max_grad_norm=MAX_GRAD_NORM, microbatch=96
    )
    certificate = optimizer_certificate(
        direction, policy.params, stats.found.gradient, state, max_grad_norm=MAX_GRAD_NORM
    )

    prompt_E = torch.arange(PROMPTS).repeat_interleave(24)
    rollouts = policy.sample(policy.params, prompt_E, generator)
    etas = [LR * factor for factor in (0.125, 0.5, 1, 2, 4)]
    changes = measured_many(policy, rollouts, {"step": direction}, etas, microbatch=len(rollouts))
    options = EstimatorOptions(microbatch=len(rollouts), repackings=0)  # one noise floor will do
    by_part = first_order_by_part(policy, rollouts, direction, options)
    slope, bend = by_part.total, curvature(policy, rollouts, direction, options)

    def sampler(params: Params, generator: torch.Generator) -> Rollouts:
        return policy.sample(params, prompt_E, generator)

    fresh = {
        eta: resampled(
            policy,
            sampler,
            direction,
            eta,
            generator=generator,
            base_rollouts=rollouts,
            microbatch=len(rollouts),
            repackings=0,
        )
        for eta in etas
    }

    at_lr, predicted = changes[Case("step", LR)], LR * slope
    direct, state_term = (LR * slope.diagnostics[term].value for term in ("direct", "state"))
    passed = "passed" if certificate.passed else "FAILED"
    rows = {
        "optimizer certificate": f"{passed}, relative error {certificate.relative_error:.1e}",
        "gradient norm": f"{stats.grad_norm:.4f}, clipped by {stats.clip_factor:.3f}",
        "predicted change": predicted,
        "measured change": at_lr,
        "  predicted - measured": predicted - at_lr,
        "  bend by curvature": LR**2 / 2 * bend,
        "fresh rollouts": fresh[LR],
        **{f"  from {part}": LR * line for part, line in by_part.lines.items()},
        "direct, state term": f"{direct:.3g}, {state_term:.3g}",
        "noise floor": f"{at_lr.noise_floor:.1e}",
        "effective sample size": f"{at_lr.diagnostics['weights'].ess:.0f} of {len(rollouts)}",
        "linear range": f"{bend.diagnostics['linear_range'] / LR:.1f} learning rates",
    }
    for name, value in rows.items():
        print(f"{name:24s}{value}")
    if arguments.figure:
        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(arguments.figure, etas, slope, bend, changes, fresh)
        print(f"{'figure':24s}{arguments.figure}")


def draw(path, etas, slope, bend, changes, fresh) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    line = torch.linspace(0, max(etas), 50)
    x = line / LR
    axes.fill_between(
        x, line * slope.interval[0], line * slope.interval[1], alpha=0.2, lw=0, color="C0"
    )
    axes.plot(x, line * slope.value, color="C0", label="predicted (first order, 95 %)")
    curve = line * slope.value + line**2 / 2 * bend.value
    axes.plot(x, curve, "--", color="C0", lw=1, label="with curvature")
    axes.axvspan(0, min(bend.diagnostics["linear_range"] / LR, max(etas) / LR), color="0.93")
    for label, found, shift, colour in (
        ("measured (reweighted)", {eta: changes[Case("step", eta)] for eta in etas}, -0.03, "C1"),
        ("fresh rollouts", fresh, 0.03, "C2"),
    ):
        values = [found[eta].value for eta in etas]
        bars = [(found[eta].interval[1] - found[eta].interval[0]) / 2 for eta in etas]
        axes.errorbar(
            [eta / LR + shift for eta in etas],
            values,
            bars,
            fmt="o",
            ms=4,
            capsize=3,
            color=colour,
            label=label,
        )
    axes.axhline(0, color="0.5", lw=0.8)
    axes.set(xlabel="step, in learning rates", ylabel="change of entropy (nats per token)")
    axes.set_title("One GRPO step of a small policy; linear range shaded")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
