"""`SampleGenerator`: evaluation and update batches, drawn from the policy's own distribution.

A batch is planned before it is drawn. Its rollouts are sorted by prompt length and cut into units
of `batch_size`, at most a quarter of the batch: a unit is decoded together and stored when finished
(Ctrl-C loses the one under way). Each rollout's uniforms come from its own generator, seeded by

    sha256(master_seed, name of the batch, problem id, index of the sample)

The plan does not depend on what has been drawn already. So a run that was interrupted and finds
some units in its `RolloutStore` continues with the same bits as one that was not. Nor does it
depend on the number of processes: units that are not there yet are dealt out to the current ranks
(`distributed.across`), each of which stores its own, and all have all of them in the end.

An update batch replaces groups whose rewards are all equal (they move nothing) by groups of
further problems. That selects prompts by their outcome, as trainers with dynamic sampling do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any, cast

import torch
from torch import Tensor

from entropy_experiments.distributed import current, is_shard
from entropy_experiments.input_errors import library_errors
from entropy_experiments.models.call_conditions import eval_mode, math_attention
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import ShardedPolicy
from entropy_experiments.numerics.derivatives import no_autocast
from entropy_experiments.sampling.advantages import Scale, group_advantages
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.decode import Draw, Drawn, LastLogits, Step, decode, draw_here
from entropy_experiments.sampling.rewards import Reward, RewardResult
from entropy_experiments.sampling.rollout_files import RolloutStore
from entropy_experiments.sampling.units import Meter, ProgressBar, ProgressCallback, draw_units
from entropy_experiments.types import Rollouts, UpdateBatch

SEVERAL, UNITS = 32, 4
"""A batch of at least so many rollouts is cut into at least so many units."""
STOP_MARGIN = 8
"""Tokens decoded beyond the longest stop string's bytes, to look for it at the end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateBatchDraw:
    """An update batch, and how it came about."""

    batch: UpdateBatch
    problems: tuple[Problem, ...]
    """In the order of `batch.rollouts.prompt_N`."""
    rewards: RewardResult
    retries: int
    """Groups that were replaced, or drawn as a replacement in vain."""
    equal_groups: int
    """Groups of the batch whose advantages are all (nearly) zero."""
    all_equal: bool
    """Not one group has an advantage: the update is momentum and decay alone."""
    notes: tuple[str, ...]


class SampleGenerator:
    """Draws rollouts of one policy. The model, its mode and the global RNG stay as they are.

    Args:
        policy: What to draw from, at its own temperature and top_p.
        tokenizer: Of the model.
        max_new_tokens: Length limit of a response.
        stop: Texts that end a response.
        batch_size: Responses drawn at a time.
        master_seed: Every rollout has a seed of its own, made of this one, its problem and its
            number.
        progress: True: a progress bar; or a function that is called.
        store: Keeps finished units, so that an interrupted run goes on.
        units: Into how many a batch is cut.

    Raises:
        ValueError: If a number is below 1, or `stop` has an empty text.

    Examples:
        >>> checkpoint = load_checkpoint(embedded_trajectory() / "checkpoint-13")
        >>> policy = SequenceProcessor(checkpoint.model)
        >>> from entropy_experiments.sampling.datasets import load_problems
        >>> problems = load_problems("countdown", count=2)
        >>> generator = SampleGenerator(policy, checkpoint.tokenizer, max_new_tokens=6)
        >>> rollouts = generator.generate_evaluation_batch(problems, group=2)
        >>> len(rollouts), rollouts.prompt_N.tolist()
        (4, [0, 0, 1, 1])
    """

    policy: SequenceProcessor | ShardedPolicy
    tokenizer: Any
    max_new_tokens: int
    batch_size: int
    stop: tuple[str, ...]
    units: int
    master_seed: int
    store: RolloutStore | None
    progress: ProgressCallback | None
    ends: tuple[int, ...]

    def __init__(
        self,
        policy: SequenceProcessor | ShardedPolicy,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        batch_size: int = 64,
        master_seed: int = 0,
        progress: ProgressCallback | bool | None = None,
        store: RolloutStore | None = None,
        units: int = UNITS,
    ) -> None:
        sizes = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "units": units}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1.")
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop is {stop!r}; expected a list of non-empty strings.")
        self.policy, self.tokenizer = policy, tokenizer
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.stop, self.units = tuple(stop), units
        self.master_seed, self.store = master_seed, store
        self.progress = ProgressBar() if progress is True else (progress or None)
        self.ends = end_tokens(policy.model, tokenizer)

    def generate_evaluation_batch(self, problems: Sequence[Problem], *, group: int = 1) -> Rollouts:
        return self.generate(problems, group=group, name="evaluation")

    def generate(self, problems: Sequence[Problem], *, group: int, name: str) -> Rollouts:
        """`group` responses to each problem, side by side; prompt_N counts the problems."""
        drawn = self._draw(problems, group, name)
        return self._pack(problems, group, drawn)

    def generate_update_batch(
        self,
        problems: Iterable[Problem],
        *,
        prompts: int,
        group: int,
        reward: Reward,
        scale: Scale = "group",
        filter_zero_advantage: bool = True,
        tol: float = 1e-8,
        max_attempts: int = 5,
    ) -> UpdateBatchDraw:
        """`prompts` groups with advantages, from a pool of problems (more than `prompts`, if any).

        A group without advantage is replaced up to `max_attempts` times, while the pool lasts.
        """
        if group < 2:
            raise ValueError(
                f"group is {group}; expected at least 2 (data.responses_per_prompt): an "
                "advantage compares responses to one prompt."
            )
        pool = iter(problems)
        wanted = _next(pool, prompts)
        if len(wanted) < prompts:
            raise ValueError(
                f"The update needs {prompts} problems, the pool has {len(wanted)}. Lower "
                "data.update_prompts, or give a larger dataset."
            )
        kept: list[_Group | None] = [None] * prompts
        places, retries, exhausted = list(range(prompts)), 0, False
        for attempt in range(max_attempts + 1):
            for place, drawn_group in zip(
                places, self._groups(wanted, group, reward, scale, tol), strict=False
            ):
                # The first draw stands until something better is found.
                if kept[place] is None or drawn_group.moves:
                    kept[place] = drawn_group
            places = [
                p
                for p, drawn_group in enumerate(kept)
                if drawn_group is not None and not drawn_group.moves
            ]
            if not places or not filter_zero_advantage or attempt == max_attempts:
                break
            wanted = _next(pool, len(places))
            exhausted = len(wanted) < len(places)
            if not wanted:
                break
            retries += len(wanted)
        groups = [drawn_group for drawn_group in kept if drawn_group is not None]
        return self._update_batch(groups, group, scale, retries, exhausted, max_attempts)

    def _groups(
        self, problems: Sequence[Problem], group: int, reward: Reward, scale: Scale, tol: float
    ) -> list[_Group]:
        drawn = self._draw(problems, group, "update")
        texts = [self.text(rollout.tokens) for rollout in drawn]
        repeated = [problem for problem in problems for _ in range(group)]
        # By one rank: a judge that is asked twice may answer twice.
        ids = [rollout.tokens for rollout in drawn]
        result = current().broadcast_from_zero(lambda: reward(texts, repeated, completion_ids=ids))
        # Whether a group moves anything does not depend on the spread of the other groups.
        own = "group" if scale == "group" else "none"
        advantage_PG = group_advantages(result.total_N, group, own).view(-1, group)
        return [
            _Group(
                problem=problem,
                drawn=drawn[p * group : (p + 1) * group],
                rewards=result.take(slice(p * group, (p + 1) * group)),
                moves=bool(advantage_PG[p].abs().max() > tol),
            )
            for p, problem in enumerate(problems)
        ]

    def _update_batch(
        self,
        groups: Sequence[_Group],
        group: int,
        scale: Scale,
        retries: int,
        exhausted: bool,
        max_attempts: int,
    ) -> UpdateBatchDraw:
        problems = tuple(drawn_group.problem for drawn_group in groups)
        rollouts = self._pack(
            problems, group, [x for drawn_group in groups for x in drawn_group.drawn]
        )
        rewards = RewardResult.join([drawn_group.rewards for drawn_group in groups])
        advantage_N = group_advantages(rewards.total_N, group, scale)
        equal = sum(not drawn_group.moves for drawn_group in groups)
        notes = []
        if equal:
            ended = "the pool of problems ran out" if exhausted else f"{max_attempts} attempts"
            notes.append(
                f"{equal} of {len(groups)} groups have equal rewards throughout and move nothing "
                f"({retries} groups drawn as replacements; {ended})"
            )
        if equal == len(groups):
            notes.append(
                "no group has an advantage: the update is momentum and decay alone, and nothing "
                "said about the gradient part can be trusted. Raise sampling.max_new_tokens, or "
                "choose a task that the policy sometimes solves"
            )
        batch = UpdateBatch(
            rollouts=rollouts,
            advantage_NS=torch.where(rollouts.response_NS, advantage_N[:, None], 0.0),
            reward_N=rewards.total_N,
        )
        return UpdateBatchDraw(
            batch=batch,
            problems=problems,
            rewards=rewards,
            retries=retries,
            equal_groups=equal,
            all_equal=equal == len(groups),
            notes=tuple(notes),
        )

    def text(self, tokens: Sequence[int]) -> str:
        """A response as its reader sees it: without EOS and other special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        ids = problem.facts.get("ids")  # a trainer's own tokens, if it gave them
        if ids is None:
            # A chat template has written the special tokens already.
            special = not problem.facts.get("chat")
            with library_errors(
                f"The prompt of problem {problem.id!r} cannot be tokenised",
                "Expected text in Unicode: correct it, or leave the problem out.",
            ):
                ids = self.tokenizer(problem.prompt, add_special_tokens=special)["input_ids"]
        ids = tuple(ids)
        if not ids:
            raise ValueError(
                f"Problem {problem.id!r} has the prompt {problem.prompt!r}, which is no token; "
                "expected at least one. Correct it, or leave the problem out."
            )
        longest = self.longest_prompt
        if longest is not None and len(ids) > longest:
            raise ValueError(
                f"Problem {problem.id!r} has a prompt of {len(ids)} tokens; with "
                f"{self.max_new_tokens} new ones that exceeds the model's "
                f"{longest + self.max_new_tokens} positions. Lower max_new_tokens (in a config: "
                "sampling.max_new_tokens), or leave the problem out."
            )
        return ids

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of a prompt that leave positions for a whole response; None: no end to them."""
        limit = getattr(self.policy.model.config, "max_position_embeddings", None)
        return None if limit is None else limit - self.max_new_tokens

    def _draw(self, problems: Sequence[Problem], group: int, name: str) -> list[Drawn]:
        ids = [problem.id for problem in problems]
        if len(set(ids)) < len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise ValueError(
                f"Problems {twice[:3]} appear twice; expected different ids: the same problem "
                "would be answered with the same random numbers."
            )
        prompts = [self.prompt_ids(problem) for problem in problems]
        draws = [
            Draw(prompt=prompt, seed=self._seed(name, problem.id, index))
            for problem, prompt in zip(problems, prompts, strict=True)
            for index in range(group)
        ]
        plan = self._units(draws)
        units = [[draws[n] for n in rows] for rows in plan]
        results: list[Drawn | None] = [None] * len(draws)
        meter = Meter(self.progress, name, len(draws))
        identity = None if self.store is None else self.identity()
        together = isinstance(self.policy, ShardedPolicy)
        for part in draw_units(units, self._decode, self.store, identity, meter, together=together):
            for at, drawn in part.items():
                for n, rollout in zip(plan[at], drawn, strict=True):
                    results[n] = rollout
        return [rollout for rollout in results if rollout is not None]

    def _decode(self, unit: Sequence[Draw], meter: Meter) -> list[Drawn]:
        policy = self.policy

        def decode_unit(broadcast: Callable[[Callable[[], Step]], Step]) -> list[Drawn]:
            return decode(
                LastLogits(policy),
                unit,
                temperature=policy.temperature,
                top_p=policy.top_p,
                max_new_tokens=self.max_new_tokens,
                ends=self.ends,
                stops=self._stops if self.stop else None,
                report=meter.tokens_drawn,
                broadcast=broadcast,
            )

        with torch.no_grad(), no_autocast(), eval_mode(policy.model), math_attention():
            if isinstance(policy, ShardedPolicy):
                # The ranks stay in step only if they go on with the same tokens.
                return policy.sharded.run_pass(
                    lambda: decode_unit(policy.ranks.broadcast_from_zero)
                )
            return decode_unit(draw_here)

    def _units(self, draws: Sequence[Draw]) -> list[list[int]]:
        """Rows of each unit: similar prompt lengths together, decided before anything is drawn."""
        order = sorted(range(len(draws)), key=lambda n: (len(draws[n].prompt), n))
        if self._padding_is_safe():
            blocks = [order]
        else:
            lengths = sorted({len(draw.prompt) for draw in draws})
            blocks = [[n for n in order if len(draws[n].prompt) == size] for size in lengths]
        size = min(self.batch_size, ceil(len(draws) / (self.units if len(draws) >= SEVERAL else 1)))
        return [block[i : i + size] for block in blocks for i in range(0, len(block), size)]

    def _padding_is_safe(self) -> bool:
        """Eager attention masks with fp64's smallest number and then takes an fp32 softmax, where
        that is -inf: a padded position that sees nothing becomes NaN and spoils its row."""
        config = self.policy.model.config
        wide = next(self.policy.model.parameters()).dtype == torch.float64
        return not wide or getattr(config, "_attn_implementation", "sdpa") == "sdpa"

    def _stops(self, tokens: list[int]) -> bool:
        # The end is enough: an earlier stop string would have ended the rollout earlier.
        reach = max(len(stop.encode()) for stop in self.stop) + STOP_MARGIN
        tail = self.tokenizer.decode(tokens[-reach:], skip_special_tokens=False)
        return any(stop in tail for stop in self.stop)

    def _seed(self, name: str, problem: str, index: int) -> int:
        digest = hashlib.sha256(
            json.dumps([self.master_seed, name, problem, index]).encode()
        ).digest()
        return int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits for certain

    def identity(self) -> dict[str, Any]:
        """Everything besides seeds and prompts that decides what is drawn."""
        return {
            "model": self._model_hash(),
            "dtype": str(next(self.policy.model.parameters()).dtype),
            "temperature": self.policy.temperature,
            "top_p": self.policy.top_p,
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "eos": list(self.ends),
            "batch_size": self.batch_size,
            "master_seed": self.master_seed,
        }

    def _model_hash(self) -> str:
        if isinstance(self.policy, ShardedPolicy):
            # It gathers the shards, so it begins as every exchange does.
            return self.policy.sharded.run_in_step(lambda: model_hash(self.policy.model))
        return model_hash(self.policy.model)

    def _pack(self, problems: Sequence[Problem], group: int, drawn: Sequence[Drawn]) -> Rollouts:
        prompts = [ids for problem in problems for ids in [self.prompt_ids(problem)] * group]
        width = max(len(p) + len(d.tokens) for p, d in zip(prompts, drawn, strict=True))
        pad = self.tokenizer.pad_token_id
        tokens_NS = torch.full((len(drawn), width), 0 if pad is None else pad)
        attention_NS = torch.zeros(len(drawn), width, dtype=torch.bool)
        response_NS = attention_NS.clone()
        logprob_NS = torch.zeros(len(drawn), width, dtype=torch.float64)
        for n, (prompt, rollout) in enumerate(zip(prompts, drawn, strict=True)):
            start, end = len(prompt), len(prompt) + len(rollout.tokens)
            tokens_NS[n, :end] = torch.tensor([*prompt, *rollout.tokens])
            attention_NS[n, :end] = True
            response_NS[n, start:end] = True
            logprob_NS[n, start:end] = torch.tensor(rollout.logprobs, dtype=torch.float64)
        return Rollouts(
            tokens_NS=tokens_NS,
            attention_NS=attention_NS,
            response_NS=response_NS,
            prompt_N=torch.arange(len(problems)).repeat_interleave(group),
            behaviour_logprob_NS=logprob_NS,
            truncated_N=torch.tensor([rollout.truncated for rollout in drawn]),
            text=tuple(self.text(rollout.tokens) for rollout in drawn),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    problem: Problem
    drawn: list[Drawn]
    rewards: RewardResult
    moves: bool


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: the generation config's and the tokenizer's, as in TRL."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = (
        configured
        if isinstance(configured, list | tuple)
        else []
        if configured is None
        else [configured]
    )
    wrong = [x for x in listed if isinstance(x, bool) or not isinstance(x, int)]
    if wrong:
        raise ValueError(
            f"eos_token_id of the generation config (or config.json) has {wrong[0]!r}; expected "
            "token ids, which are whole numbers. Restore the file."
        )
    ids = set(listed)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def model_hash(model: torch.nn.Module) -> str:
    """sha256 of all parameters and buffers, by name; of shards, in `ShardedModel.run_in_step`."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        if is_shard(value):
            value = cast(Any, value).full_tensor()  # on all ranks at once
        value = value.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _next(pool: Any, count: int) -> list[Problem]:
    return list(islice(pool, count))
