"""Rollouts, the batch that makes an update, and the one thing an estimator knows of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Params = Mapping[str, Tensor]
"""Trainable parameters by name, as `dict(model.named_parameters())` gives them.

Examples:
    >>> import torch
    >>> params: Params = {"table": torch.zeros(5, 5)}
"""

WEIGHT_TOLERANCE = 1e-9
SCORE_TOLERANCE = 0.01
"""Nats: how far half precision may round a log-prob above 0, or an entropy below it."""


class Scores(NamedTuple):
    """What teacher forcing gives, at the policy's own temperature; zero outside the response.

    Attributes:
        logprob_NS: Log-prob of every response token.
        entropy_NS: Entropy of the distribution that it was drawn from, in nats.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> scores = policy.score(policy.params, policy.draw(seed=2))
        >>> scores.logprob_NS.shape == scores.entropy_NS.shape
        True
    """

    logprob_NS: Tensor
    entropy_NS: Tensor


class Policy(Protocol):
    """A model as the mathematics sees it: named parameters, and scores of rollouts.

    Any class with these four members is one; `SequenceProcessor` makes one of a transformers model,
    and `examples/own_policy.py` writes one in twenty lines.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy: Policy = BigramPolicy(temperature=0.7)
        >>> sorted(policy.params), policy.temperature, policy.top_p
        (['table'], 0.7, 1.0)
    """

    @property
    def params(self) -> Params: ...

    @property
    def temperature(self) -> float:
        """Part of the policy, not of the sampler."""
        ...

    @property
    def top_p(self) -> float:
        """1 for the full softmax; below 1 the policy *is* the truncated distribution."""
        ...

    def score(self, params: Params, rollouts: Rollouts) -> Scores: ...


@runtime_checkable
class NucleusPolicy(Policy, Protocol):
    """What a policy with top_p < 1 must offer besides: the support of each distribution.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> isinstance(BigramPolicy(), NucleusPolicy)  # it has no `support`: top_p = 1 only
        False
    """

    def support(self, params: Params, rollouts: Rollouts) -> Tensor:
        """[N, S] fingerprint of each position's top-p support (`entropy.response_support`)."""
        ...


@runtime_checkable
class BatchedPolicy(Policy, Protocol):
    """What a policy may offer to spare passes; without it the same numbers come one by one."""

    def gradients_by_rollout(
        self, params: Params, rollouts: Rollouts, cotangents: Sequence[Scores]
    ) -> list[dict[str, Tensor]]:
        """For each cotangent c, [n, *shape] gradients of sum(c_l l + c_h h) of each rollout."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollouts:
    """N sampled sequences, padded on either side, with the tokens the policy drew marked.

    Args:
        tokens_NS: Prompt and response, integers.
        attention_NS: True where there is a token rather than padding; one unbroken run in each row.
        response_NS: True where the policy drew the token, its final EOS included; may have holes
            (tools).
        prompt_N: Which prompt each rollout answers: the unit that error bars resample.
        weight_N: Sums to one: uniform in practice, exact probabilities in tests. None: uniform.
        behaviour_logprob_NS: Log-probs of the policy that drew the tokens, if that was not the
            policy being probed.
        truncated_N: True where the length limit ended the response. None: nowhere.
        text: The responses as text.
        uid: What the framework that made them calls each of them; None where it has no name.
        share: What the weights of a *part* of a batch sum to (see `split`), so that a part is never
            mistaken for the whole.

    Raises:
        ValueError: If shapes, masks or weights do not fit together; the message names the rollout.

    Examples:
        >>> import torch
        >>> rollouts = Rollouts(
        ...     tokens_NS=torch.tensor([[7, 1, 2], [7, 3, 0]]),
        ...     attention_NS=torch.tensor([[True, True, True], [True, True, False]]),
        ...     response_NS=torch.tensor([[False, True, True], [False, True, False]]),
        ...     prompt_N=torch.tensor([0, 0]),
        ... )
        >>> len(rollouts), rollouts.tokens_N.tolist(), rollouts.weight_N.tolist()
        (2, [2, 1], [0.5, 0.5])
    """

    tokens_NS: Tensor
    attention_NS: Tensor
    response_NS: Tensor
    prompt_N: Tensor
    weight_N: Tensor = None  # type: ignore[assignment]  # uniform if not given
    behaviour_logprob_NS: Tensor | None = None
    truncated_N: Tensor = None  # type: ignore[assignment]  # all False if not given
    text: tuple[str, ...] | None = None
    uid: tuple[str | None, ...] | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.tokens_NS.dim() != 2 or self.tokens_NS.is_floating_point():
            raise ValueError(
                f"tokens_NS must be a 2-D integer tensor [rollouts, positions]; got "
                f"{tuple(self.tokens_NS.shape)} of {self.tokens_NS.dtype}."
            )
        n, s = self.tokens_NS.shape
        if n == 0:
            raise ValueError("Rollouts is empty: got 0 rollouts, expected at least 1.")
        device = self.tokens_NS.device
        if self.weight_N is None:
            uniform_N = torch.full((n,), self.share / n, dtype=torch.float64, device=device)
            object.__setattr__(self, "weight_N", uniform_N)
        if self.truncated_N is None:
            object.__setattr__(self, "truncated_N", torch.zeros(n, dtype=torch.bool, device=device))
        for name in ("attention_NS", "response_NS"):
            _expect(name, getattr(self, name), (n, s), torch.bool)
        _expect("prompt_N", self.prompt_N, (n,), torch.int64)
        _expect("weight_N", self.weight_N, (n,), torch.float64)
        _expect("truncated_N", self.truncated_N, (n,), torch.bool)
        self._check_masks()
        self._check_weights()
        if self.behaviour_logprob_NS is not None:
            _expect("behaviour_logprob_NS", self.behaviour_logprob_NS, (n, s), None)
            _expect_finite("behaviour_logprob_NS", self.behaviour_logprob_NS, self.response_NS)
        if self.text is not None and len(self.text) != n:
            raise ValueError(f"text has {len(self.text)} entries; expected one per rollout ({n}).")
        if self.uid is not None and len(self.uid) != n:
            raise ValueError(f"uid has {len(self.uid)} entries; expected one per rollout ({n}).")

    def _check_masks(self) -> None:
        stray = self.response_NS & ~self.attention_NS
        if stray.any():
            raise ValueError(
                f"Rollout {_first_row(stray)} marks padding as response. Expected response_NS "
                "inside attention_NS: build the mask from the tokens drawn, not from lengths."
            )
        empty_N = ~self.response_NS.any(1)
        if empty_N.any():
            raise ValueError(
                f"Rollout {_first_row(empty_N)} has an empty response ({int(empty_N.sum())} of "
                f"{len(empty_N)} do). Expected at least one drawn token (EOS counts): drop these "
                "rollouts, or check that the response mask is not cut by padded prompt widths."
            )
        start_NS = self.attention_NS.clone()
        start_NS[:, 1:] &= ~self.attention_NS[:, :-1]
        broken_N = start_NS.sum(1) != 1
        if broken_N.any():
            raise ValueError(
                f"Rollout {_first_row(broken_N)} has padding between its tokens. Expected "
                "attention_NS to be one unbroken run per row: pad on the left or the right."
            )
        if (start_NS & self.response_NS).any():
            raise ValueError(
                f"Rollout {_first_row(start_NS & self.response_NS)} has a response token with "
                "nothing before it. Expected at least one prompt token (BOS will do)."
            )

    def _check_weights(self) -> None:
        total = float(self.weight_N.sum())
        if not bool((self.weight_N >= 0).all()) or abs(total - self.share) > WEIGHT_TOLERANCE:
            raise ValueError(
                f"weight_N must be non-negative and sum to {_one_or(self.share)}; got sum "
                f"{total:.12g}, minimum {float(self.weight_N.min()):.3g}. Divide by the sum, or "
                "leave it out for uniform weights."
            )

    def __len__(self) -> int:
        return self.tokens_NS.shape[0]

    @property
    def tokens_N(self) -> Tensor:
        """Response tokens of each rollout."""
        return self.response_NS.sum(1)

    @property
    def truncated_share(self) -> float:
        return float(self.weight_N[self.truncated_N].sum()) / self.share

    @property
    def fingerprint(self) -> str:
        """Same tokens for the same prompts in the same order, however padded: same string."""
        digest = hashlib.sha256()
        for part in (
            self.tokens_NS[self.attention_NS],
            self.attention_NS.sum(1),
            self.tokens_N,
            self.prompt_N,
        ):
            digest.update(part.to("cpu", torch.int64).numpy().tobytes())
        return digest.hexdigest()[:16]

    def take(self, rows_N: Tensor, columns: slice = slice(None)) -> Rollouts:
        """Some rows, some columns; the share becomes what the rows weigh."""
        weight_N = self.weight_N[rows_N]
        return replace(
            self,
            tokens_NS=self.tokens_NS[rows_N, columns],
            attention_NS=self.attention_NS[rows_N, columns],
            response_NS=self.response_NS[rows_N, columns],
            prompt_N=self.prompt_N[rows_N],
            weight_N=weight_N,
            behaviour_logprob_NS=_take(self.behaviour_logprob_NS, rows_N, columns),
            truncated_N=self.truncated_N[rows_N],
            text=None if self.text is None else tuple(self.text[int(i)] for i in rows_N),
            uid=None if self.uid is None else tuple(self.uid[int(i)] for i in rows_N),
            share=float(weight_N.sum()),
        )

    def padded(self, left: int, right: int, token: int = 0) -> Rollouts:
        """The same rollouts with more padding: no number may change."""

        def widen(x_NS: Tensor, fill: float) -> Tensor:
            return torch.nn.functional.pad(x_NS, (left, right), value=fill)

        behaviour_NS = self.behaviour_logprob_NS
        return replace(
            self,
            tokens_NS=widen(self.tokens_NS, token),
            attention_NS=widen(self.attention_NS, False),
            response_NS=widen(self.response_NS, False),
            behaviour_logprob_NS=None if behaviour_NS is None else widen(behaviour_NS, 0.0),
        )

    def split(self, microbatch: int, policy: object = None) -> Iterator[Part]:
        """Parts of at most `microbatch` rollouts of similar length, without common padding.

        For a policy that computes a shared prompt once, rollouts of one prompt are beside each
        other, and prompts in the order of their rollouts' total length. For a policy all of whose
        ranks must pass at once (`lockstep` of them), idle parts make the number a multiple.
        """
        if microbatch < 1:
            raise ValueError(f"microbatch must be at least 1; got {microbatch}.")
        length_N = self.attention_NS.sum(1)
        order_N = torch.argsort(length_N, stable=True)
        if getattr(policy, "shares_prompts", False):
            group_N = self.prompt_N.unique(return_inverse=True)[1]
            total_N = torch.zeros_like(length_N).index_add(0, group_N, length_N)[group_N]
            for key_N in (group_N, total_N):
                order_N = order_N[torch.argsort(key_N[order_N], stable=True)]
        for rows_N in order_N.split(microbatch):
            used = self.attention_NS[rows_N].any(0).nonzero()
            columns = slice(int(used[0]), int(used[-1]) + 1)
            yield Part(rows_N, columns, self.take(rows_N, columns))
        parts = -(-len(order_N) // microbatch)
        for _ in range(-parts % getattr(policy, "lockstep", 1)):
            shortest_N = length_N.argmin()[None]
            used = self.attention_NS[shortest_N].any(0).nonzero()
            columns = slice(int(used[0]), int(used[-1]) + 1)
            yield Part(order_N[:0], columns, self.take(shortest_N, columns))


FULL_REWARD = 1.0
"""What a reward function gives for all that it asks for; more than one may add up to more."""
ROUNDED = 1e-6
"""Of a reward: the rounding of weights by which functions are added up."""


class Part(NamedTuple):
    """A microbatch and where it came from: `whole[rows_N, columns]`.

    An idle part is a rollout that came from no row: it is scored, and nothing is done with it.
    """

    rows_N: Tensor
    columns: slice
    rollouts: Rollouts


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateBatch:
    """The rollouts an optimizer step learns from, with all that its loss reads.

    Args:
        rollouts: What was sampled.
        advantage_NS: Of each token; one number per rollout is expanded over its tokens.
        reward_N: Of each rollout, if it is known.
        old_logprob_NS: Log-probs in the denominator of the ratio; None: the probed policy's own
            (ratio 1).
        ref_logprob_NS: Log-probs of the reference model; needed where the loss has a KL term.
        microbatch_N: Accumulation microbatch of each rollout: bnpo and TRL's entropy bonus depend
            on it.
        loss_NS: Response tokens the loss counts, if not all: a trainer may mask truncated rollouts.

    Raises:
        ValueError: If a shape does not fit the rollouts, or a value on a response token is not
            finite.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> rollouts = BigramPolicy().draw(seed=1)
        >>> advantage_NS = torch.ones(rollouts.tokens_NS.shape)
        >>> batch = UpdateBatch(rollouts=rollouts, advantage_NS=advantage_NS)
        >>> int(batch.counted_NS.sum())  # tokens that the loss counts
        128
    """

    rollouts: Rollouts
    advantage_NS: Tensor
    reward_N: Tensor | None = None
    old_logprob_NS: Tensor | None = None
    ref_logprob_NS: Tensor | None = None
    microbatch_N: Tensor | None = None
    loss_NS: Tensor | None = None

    def __post_init__(self) -> None:
        n, s = self.rollouts.tokens_NS.shape
        for name in ("advantage_NS", "old_logprob_NS", "ref_logprob_NS"):
            value = getattr(self, name)
            if value is not None:
                _expect(name, value, (n, s), None)
                _expect_finite(name, value, self.rollouts.response_NS)
        if self.reward_N is not None:
            _expect("reward_N", self.reward_N, (n,), None)
        if self.microbatch_N is not None:
            _expect("microbatch_N", self.microbatch_N, (n,), torch.int64)
        if self.loss_NS is not None:
            _expect("loss_NS", self.loss_NS, (n, s), torch.bool)
            if bool((self.loss_NS & ~self.rollouts.response_NS).any()):
                raise ValueError(
                    "loss_NS counts tokens that are not in the response; expected a part of "
                    "response_NS."
                )

    @property
    def counted_NS(self) -> Tensor:
        return self.rollouts.response_NS if self.loss_NS is None else self.loss_NS

    @property
    def best_N(self) -> Tensor | None:
        """Rollouts with the highest reward of the batch; None without rewards.

        A batch in which nobody got anything, all rewards alike and none above 0, has no best.
        """
        if self.reward_N is None:
            return None
        reward_N = self.reward_N.double().nan_to_num(nan=-torch.inf)  # NaN: nobody judged it
        highest, lowest = reward_N.max(), reward_N.min()
        if highest == lowest and highest <= 0:
            return torch.zeros_like(reward_N, dtype=torch.bool)
        return reward_N >= highest - ROUNDED * highest.abs()

    @property
    def correct_N(self) -> Tensor | None:
        """Rollouts with the highest reward of the batch, if that is a full one: at least 1.

        A part of the reward (a right format around a wrong answer) is not correct. None: without
        rewards, and where graded ones are all below 1, so that nobody knows what a full one is.
        Of rewards that are 0 throughout none is correct.
        """
        if self.reward_N is None or self.best_N is None:
            return None
        reward_N = self.reward_N[~self.reward_N.isnan()]
        full = FULL_REWARD * (1 - ROUNDED)
        if bool((reward_N == 0).all()):
            return torch.zeros_like(self.best_N)
        return self.best_N if bool((reward_N >= full).any()) else None

    def take(self, rows_N: Tensor, columns: slice) -> UpdateBatch:
        return UpdateBatch(
            rollouts=self.rollouts.take(rows_N, columns),
            advantage_NS=self.advantage_NS[rows_N, columns],
            reward_N=None if self.reward_N is None else self.reward_N[rows_N],
            old_logprob_NS=_take(self.old_logprob_NS, rows_N, columns),
            ref_logprob_NS=_take(self.ref_logprob_NS, rows_N, columns),
            microbatch_N=None if self.microbatch_N is None else self.microbatch_N[rows_N],
            loss_NS=_take(self.loss_NS, rows_N, columns),
        )


def _expect(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    if tuple(value.shape) != shape:
        per, hint = "rollout", ""
        if len(shape) == 2:
            per = "position of tokens_NS, prompt included"
            hint = " One number per rollout fits after x_N[:, None].expand(tokens_NS.shape)."
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; expected {shape}, one entry per {per}.{hint}"
        )
    if dtype is None and not value.is_floating_point():
        raise ValueError(f"{name} has dtype {value.dtype}; expected floating point.")
    if dtype is not None and value.dtype != dtype:
        cast = {torch.bool: "bool", torch.int64: "long", torch.float64: "double"}[dtype]
        raise ValueError(f"{name} has dtype {value.dtype}; expected {dtype}: call .{cast}() on it.")


def _expect_finite(name: str, value_NS: Tensor, response_NS: Tensor) -> None:
    bad = response_NS & ~torch.isfinite(value_NS)
    if bad.any():
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"{name} is {float(value_NS[row, column])} at rollout {row}, position {column}; "
            "expected finite values on every response token."
        )


def check_logprobs(name: str, value_NS: Tensor | None, response_NS: Tensor) -> None:
    """Refuse probabilities, or losses, where log-probs belong: most of them are above 0."""
    if value_NS is None:
        return
    above = int((response_NS & (value_NS > SCORE_TOLERANCE)).sum())
    count = int(response_NS.sum())
    if 2 * above > count:
        raise ValueError(
            f"{name} is above 0 on {above} of {count} response tokens; expected log-probs, which "
            "are never above 0: take the logarithm of probabilities, or the negative of a loss."
        )


def _take(value_NS: Tensor | None, rows_N: Tensor, columns: slice) -> Tensor | None:
    return None if value_NS is None else value_NS[rows_N, columns]


def _first_row(mask: Tensor) -> int:
    return int(mask.nonzero()[0][0])


def _one_or(share: float) -> str:
    return "one" if share == 1.0 else f"its share {share:.12g}"
