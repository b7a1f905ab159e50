"""The policy that refines a prompt embedding: a Gaussian squashed into a box.

    u ~ N(mu(s), diag sigma(s)^2),   a = c tanh(u),   r = e + a
    log pi(a | s) = log N(u; mu, sigma) - sum_i log(c (1 - tanh^2 u_i))

The density is that of a, exactly. It is computed from u: a has lost the digits that tell large u
apart. The entropy is that of the Gaussian *before* squashing, which has a closed form; the
squashed one has none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

LOG_SIGMA = (-4.0, 1.0)
"""Sigma's range. It is approached by a sigmoid, not cut: a clamp would stop the gradient."""


class RefinePolicy(nn.Module):
    """The policy that refines a prompt embedding: a Gaussian squashed into a box.

    It reads s = sg[e, f]: nothing that the policy learns from reaches the encoder.

    Args:
        prompt_width: Width of the prompt embedding.
        feature_dim: Width of the features beside it.
        bound: Half the side of the box.
        hidden: Width of the hidden layers.

    Raises:
        ValueError: If `bound` is not positive.

    Examples:
        >>> import torch
        >>> policy = RefinePolicy(prompt_width=4, feature_dim=2)
        >>> state_BS = policy.state(torch.zeros(3, 4), torch.zeros(3, 2))
        >>> u_KBE, a_KBE = policy.sample(state_BS, 5, torch.Generator().manual_seed(0))
        >>> a_KBE.shape, bool((a_KBE.abs() < 0.5).all())
        (torch.Size([5, 3, 4]), True)
    """

    def __init__(
        self, prompt_width: int, feature_dim: int, bound: float = 0.5, *, hidden: int = 64
    ) -> None:
        super().__init__()
        if not bound > 0:
            raise ValueError(f"bound is {bound}; expected > 0. To refine nothing, use refine=off.")
        self.prompt_width: int = prompt_width
        self.feature_dim: int = feature_dim
        self.bound: float = float(bound)
        self.body: nn.Sequential = nn.Sequential(
            nn.Linear(prompt_width + feature_dim, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
        )
        self.mean: nn.Linear = nn.Linear(hidden, prompt_width)
        self.spread: nn.Linear = nn.Linear(hidden, prompt_width)
        # Near zero, so that refinement starts small; not at zero, where the body would get no
        # gradient from the first step.
        for head in (self.mean, self.spread):
            nn.init.normal_(head.weight, std=0.1 / math.sqrt(hidden))
            nn.init.zeros_(head.bias)

    def state(self, e_BE: Tensor, f_BF: Tensor) -> Tensor:
        return torch.cat([e_BE.detach(), f_BF.detach().to(e_BE.dtype)], dim=-1)

    def moments(self, s_BS: Tensor) -> tuple[Tensor, Tensor]:
        """mu and log sigma."""
        wanted = self.prompt_width + self.feature_dim
        if s_BS.shape[-1] != wanted:
            raise ValueError(
                f"the policy's state has width {s_BS.shape[-1]}; expected {wanted} (prompt "
                f"{self.prompt_width} + features {self.feature_dim}). Make it with state(e, f)."
            )
        hidden = self.body(s_BS)
        low, high = LOG_SIGMA
        return self.mean(hidden), low + (high - low) * torch.sigmoid(self.spread(hidden))

    def distribution(self, s_BS: Tensor) -> torch.distributions.Normal:
        """The Gaussian before squashing."""
        mean, log_sigma = self.moments(s_BS)
        return torch.distributions.Normal(mean, log_sigma.exp())

    def squash(self, u: Tensor) -> Tensor:
        return self.bound * torch.tanh(u)

    @torch.no_grad()
    def sample(self, s_BS: Tensor, K: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """u_KBE and a_KBE, without a graph: the policy's loss makes its own from (s, u)."""
        mean, log_sigma = self.moments(s_BS)
        u_KBE = mean + log_sigma.exp() * _noise((K, *mean.shape), mean, generator)
        return u_KBE, self.squash(u_KBE)

    def rsample(self, s_BS: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One u_BE and a_BE through which the policy gets a gradient (refine=pathwise)."""
        mean, log_sigma = self.moments(s_BS)
        u_BE = mean + log_sigma.exp() * _noise(mean.shape, mean, generator)
        return u_BE, self.squash(u_BE)

    def log_prob(self, s_BS: Tensor, u: Tensor) -> Tensor:
        """log pi(a | s) of a = c tanh(u); u is [B, E] or [K, B, E]."""
        mean, log_sigma = self.moments(s_BS)
        z = (u - mean) * torch.exp(-log_sigma)
        gaussian = -0.5 * z.square() - log_sigma - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh^2 u) without subtracting from 1.
        log_slope = math.log(self.bound) + 2 * (math.log(2) - u - softplus(-2 * u))
        return (gaussian - log_slope).sum(-1)

    def entropy(self, s_BS: Tensor) -> Tensor:
        """H_B of the Gaussian before squashing, in nats: sum_i log sigma_i + log(2 pi e) / 2."""
        _, log_sigma = self.moments(s_BS)
        return (log_sigma + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def _noise(shape: tuple[int, ...] | torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn where the generator lives, so that a run on a GPU can use the CPU's stream."""
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype)
    return drawn.to(like.device)
