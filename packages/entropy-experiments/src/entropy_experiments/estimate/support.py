"""The support of a top_p distribution, which a step may change: then its entropy jumps."""

from __future__ import annotations

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.types import NucleusPolicy, Params, Policy, Rollouts


class Support:
    """Remembers which tokens the policy at theta allows; does nothing for the full softmax."""

    def __init__(self, policy: Policy, rollouts: Rollouts, microbatch: int) -> None:
        self._policy, self._rollouts, self._microbatch = policy, rollouts, microbatch
        self._here_NS = self._fingerprints(policy.params) if policy.top_p < 1 else None

    def refuse_if_moved(self, params: Params, eta: float) -> None:
        if self._here_NS is None:
            return
        response_NS = self._rollouts.response_NS
        moved = response_NS & (self._here_NS != self._fingerprints(params))
        if moved.any():
            raise ValueError(
                f"At eta = {eta:g} the top_p = {self._policy.top_p:g} support changes at "
                f"{int(moved.sum())} of {int(response_NS.sum())} tokens: the entropy of a "
                "truncated distribution jumps there and cannot be measured by reweighting. Use a "
                "smaller eta, or top_p = 1."
            )

    def _fingerprints(self, params: Params) -> Tensor:
        policy = self._policy
        if not isinstance(policy, NucleusPolicy):
            raise TypeError(
                f"The policy has top_p = {policy.top_p:g} but no method `support`, without which "
                "a moved support would go unseen. See numerics.entropy.response_support."
            )
        ranks = current()

        def local() -> list[Tensor]:
            out_NS = torch.zeros_like(self._rollouts.tokens_NS)
            with torch.no_grad():
                for rows_N, columns, part in ranks.shard(self._rollouts.split(self._microbatch)):
                    out_NS[rows_N, columns] = policy.support(params, part)
            return [out_NS]

        return ranks.all_reduce(local)[0]
