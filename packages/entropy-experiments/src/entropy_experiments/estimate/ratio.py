"""Entropy as a ratio of two sums, each a pure function of log-ratios and per-token entropies.

With r_ik the log-ratio of token (i, k) between the policy meant and the policy that drew it:

    snis          A_i = W_i sum_k h_ik,       B_i = W_i T_i,        W_i  = exp sum_k r_ik
    per_decision  A_i = sum_k W_ik h_ik,      B_i = sum_k W_ik,     W_ik = exp sum_{j<k} r_ij
    H = sum_i w_i A_i / sum_i w_i B_i         per sequence: B_i = W_i, and 1 per decision

Everything this package says about entropy is made of these A_i and B_i: a measurement evaluates
them at theta + eta v, a slope differentiates them at theta, a curvature does so twice, and reverse
mode takes their gradient in (l, h). That is how a slope is the derivative of *exactly* what is
measured; written out, it is the matched form for snis and the to-go form for per_decision.

"Simple" entropy puts -l_ik for h_ik. It depends on the token itself, so its per-decision weight
includes r_ik (the count of tokens in B does not).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from entropy_experiments.distributed import Ranks, current, local_part
from entropy_experiments.numerics.derivatives import no_autocast, norm, require_full_precision
from entropy_experiments.numerics.sums import whole
from entropy_experiments.numerics.weights import (
    diagnose,
    per_decision_logweights,
    snis_logweights,
)
from entropy_experiments.types import (
    Estimand,
    Params,
    Policy,
    Rollouts,
    Scores,
)
from entropy_experiments.types.estimate import Entropy, Form, Prompts, Unit
from entropy_experiments.types.rollouts import SCORE_TOLERANCE, check_logprobs

UNIFORM = 1e4
"""A temperature at which logits of ordinary size differ by less than fp32 has digits."""
REPEATABLE = 1e-3
"""Nats: far above what nondeterministic kernels do, far below dropout."""


def estimand_of(
    policy: Policy,
    *,
    prompts: Prompts,
    unit: Unit,
    form: Form,
    entropy: Entropy,
    horizon: int | None,
) -> Estimand:
    return Estimand(
        prompts=prompts,
        temperature=policy.temperature,
        top_p=policy.top_p,
        horizon=horizon,
        unit=unit,
        form=form,
        entropy=entropy,
    )


def ratio_sums(
    payload_NS: Tensor,
    logratio_NS: Tensor,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """A_N and B_N of the module docstring; `clip` bounds |log-weight|."""
    response_NS = rollouts.response_NS
    payload_NS = torch.where(response_NS, payload_NS, 0.0)
    logratio_NS = torch.where(response_NS, logratio_NS, 0.0)
    if estimand.form == "per_decision":
        before_NS = per_decision_logweights(logratio_NS)
        seen_NS = before_NS + logratio_NS if estimand.entropy == "simple" else before_NS
        top_N = torch.where(response_NS, _exp(seen_NS, clip) * payload_NS, 0.0).sum(1)
        if estimand.unit == "sequence":
            return top_N, torch.ones_like(top_N)
        return top_N, torch.where(response_NS, _exp(before_NS, clip), 0.0).sum(1)
    weight_N = _exp(snis_logweights(logratio_NS), clip)
    top_N = weight_N * payload_NS.sum(1)
    if estimand.unit == "sequence":
        return top_N, weight_N
    return top_N, weight_N * rollouts.tokens_N.to(top_N.dtype)


def payload(scores: Scores, estimand: Estimand) -> Tensor:
    """h_ik, or -l_ik for the simple form."""
    return -scores.logprob_NS if estimand.entropy == "simple" else scores.entropy_NS


def drawn_with(base: Scores, rollouts: Rollouts) -> Tensor:
    """Log-probs the rollouts were drawn with: those of `base`, unless somebody else drew them."""
    if rollouts.behaviour_logprob_NS is None:
        return base.logprob_NS.detach()
    check_logprobs("behaviour_logprob_NS", rollouts.behaviour_logprob_NS, rollouts.response_NS)
    return rollouts.behaviour_logprob_NS.to(base.logprob_NS.dtype)


def stale_reasons(base: Scores | None, rollouts: Rollouts, estimand: Estimand) -> tuple[str, ...]:
    """Doubts about rollouts that another policy drew: their weights at theta itself."""
    if base is None or rollouts.behaviour_logprob_NS is None:
        return ()
    logratio_NS = base.logprob_NS - drawn_with(base, rollouts)
    weights = diagnose(logratio_NS, rollouts, per_decision=estimand.form == "per_decision")
    return tuple(f"stale rollouts: {reason}" for reason in weights.why_not)


def check_estimand(policy: Policy, estimand: Estimand) -> None:
    """Refuse an entropy that reweighted rollouts of this policy do not estimate."""
    if estimand.quantity != "entropy":
        raise ValueError(
            f"The estimand is {estimand.quantity!r}; expected 'entropy'. Make it with "
            "slope_estimand(policy, form=...)."
        )
    if estimand.form == "resampled":
        raise ValueError(
            "The estimand has form 'resampled', which has no slope and weighs nothing; expected "
            "'snis' or 'per_decision'. Fresh samples are estimate.resampled.resampled."
        )
    if (estimand.temperature, estimand.top_p) != (policy.temperature, policy.top_p):
        raise ValueError(
            f"The estimand has temperature {estimand.temperature:g} and top_p {estimand.top_p:g}; "
            f"the policy has {policy.temperature:g} and {policy.top_p:g}. Make the estimand of "
            "this policy: slope_estimand(policy, form=...)."
        )


def score_all(
    policy: Policy,
    params: Params,
    rollouts: Rollouts,
    *,
    microbatch: int,
    ranks: Ranks | None = None,
) -> Scores:
    """Scores of every rollout in fp64, without gradients. The pass that others share.

    `ranks`: None are the current ones, of `distributed.across`.
    """
    (scores,) = score_each(policy, [params], rollouts, microbatch=microbatch, ranks=ranks)
    return scores


def score_each(
    policy: Policy,
    settings: Sequence[Params],
    rollouts: Rollouts,
    *,
    microbatch: int,
    ranks: Ranks | None = None,
) -> list[Scores]:
    """The same under several parameter settings: the microbatches are gone through once."""
    ranks = ranks or current()
    whole(rollouts)
    for params in settings:
        require_full_precision(params)

    def local() -> list[Tensor]:
        out = [no_scores(rollouts) for _ in settings]
        with torch.no_grad(), no_autocast():
            for rows_N, columns, part in ranks.shard(rollouts.split(microbatch, policy)):
                for into, params in zip(out, settings, strict=True):
                    scores = policy.score(params, part)
                    check_scores(scores, part, rows_N, columns)
                    check_signs(scores, part, rows_N)
                    for whole_NS, part_NS in zip(into, scores, strict=True):
                        whole_NS[rows_N, columns] = part_NS.double()
        return [x_NS for scores in out for x_NS in scores]

    found = ranks.all_reduce(local)
    return [Scores(*pair) for pair in zip(found[::2], found[1::2], strict=True)]


def no_scores(rollouts: Rollouts) -> Scores:
    """Zeros in fp64, to be filled in."""
    like = rollouts.tokens_NS
    return Scores(
        *(torch.zeros(like.shape, dtype=torch.float64, device=like.device) for _ in Scores._fields)
    )


def check_repeatable(policy: Policy, rollouts: Rollouts) -> None:
    """Refuse a model that gives two answers: dropout, most often.

    A policy that tries itself on a few tokens, and says so by `repeatable`, is believed.
    """
    if getattr(policy, "repeatable", False):
        return
    one = shortest(rollouts)
    with torch.no_grad():
        first, again = (policy.score(policy.params, one).logprob_NS for _ in range(2))
    gap = float(torch.where(one.response_NS, first - again, 0.0).abs().max())
    if gap > REPEATABLE:
        raise ValueError(
            f"Policy.score gave log-probs {gap:.3g} apart for the same rollout and parameters; "
            "expected the same twice. Is dropout on? Call model.eval()."
        )


def shortest(rollouts: Rollouts) -> Rollouts:
    """One rollout, to try something on."""
    row = int(rollouts.attention_NS.sum(1).argmin())
    (_, _, one), *_ = rollouts.take(torch.tensor([row])).split(1)
    return one


def refuse_unmoved(policy: Policy, rollouts: Rollouts, v: Params) -> None:
    """For scores that did not react to a step: an error, if they react to no other step either.

    A step may rightly move nothing: weight decay of a fresh LoRA adapter scales A while B is 0.
    """
    if norm(v) == 0:
        return
    generator = torch.Generator().manual_seed(0)
    elsewhere = {name: theta.detach().clone() for name, theta in policy.params.items()}
    for theta in elsewhere.values():
        own = local_part(theta)
        own += torch.randn(own.shape, generator=generator).to(own)
    one = shortest(rollouts)
    with torch.no_grad():
        here, there = (policy.score(p, one).logprob_NS for p in (policy.params, elsewhere))
    if torch.equal(here, there):
        if policy.temperature > UNIFORM:
            raise ValueError(
                f"At temperature {policy.temperature:g} every token is as likely as any other, "
                "whatever the parameters: no step changes the entropy. Set the temperature that "
                "training samples with (in a config: sampling.temperature)."
            )
        raise ValueError(
            "The scores do not change along the direction at all. Policy.score must compute with "
            "the `params` it is given: torch.func.functional_call(model, params, ...), not "
            "model(...)."
        )


def check_scores(scores: Scores, part: Rollouts, rows_N: Tensor, columns: slice) -> Scores:
    """Refuse a score that is not a number, naming the token it belongs to."""
    for name, value_NS in zip(Scores._fields, scores, strict=True):
        if value_NS.shape != part.tokens_NS.shape:
            raise ValueError(
                f"Policy.score gave {name} of shape {tuple(value_NS.shape)}; expected "
                f"{tuple(part.tokens_NS.shape)}, the shape of tokens_NS."
            )
        bad = part.response_NS & ~torch.isfinite(value_NS)
        if len(rows_N) and bad.any():  # an idle part's rollout is looked at in its own place
            row, column = (int(i) for i in bad.nonzero()[0])
            raise ValueError(
                f"Policy.score gave {name} = {float(value_NS[row, column])} for rollout "
                f"{int(rows_N[row])}, position {column + (columns.start or 0)} (token "
                f"{int(part.tokens_NS[row, column])}). Expected finite values: the logits are NaN "
                "or infinite, or the token is outside the policy's top_p support."
            )
    return scores


def check_signs(scores: Scores, part: Rollouts, rows_N: Tensor) -> None:
    """Refuse scores that no distribution over tokens has."""
    for name, wrong_NS, expected in (
        ("logprob_NS", scores.logprob_NS > SCORE_TOLERANCE, "at most 0, as log-probs are"),
        ("entropy_NS", scores.entropy_NS < -SCORE_TOLERANCE, "at least 0, as entropies are"),
    ):
        bad = part.response_NS & wrong_NS
        if len(rows_N) and bad.any():
            row, column = (int(i) for i in bad.nonzero()[0])
            value = float(getattr(scores, name)[row, column])
            raise ValueError(
                f"Policy.score gave {name} = {value:.4g} for rollout {int(rows_N[row])}; expected "
                f"{expected}. Score(logprob_NS, entropy_NS) are log p of the drawn token and the "
                "entropy of its distribution, both in nats."
            )


def _exp(logweight: Tensor, clip: float | None) -> Tensor:
    return (logweight if clip is None else logweight.clamp(-clip, clip)).exp()
