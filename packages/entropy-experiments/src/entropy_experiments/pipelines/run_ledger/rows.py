"""What one step of a run's ledger keeps: its token rows, its sums by layer, its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from torch import Tensor

from entropy_experiments.attribution.groups import layer_of, module_of
from entropy_experiments.attribution.run_ledger import ENTROPY, REWARD, TANGENT, StepShares
from entropy_experiments.attribution.token_rows import response_index
from entropy_experiments.checkpoints.recorded_step import RecordedStep
from entropy_experiments.numerics.sketch import distance, sketch
from entropy_experiments.pipelines.probe_sampling import prompt_ids, prompts_of
from entropy_experiments.pipelines.run_ledger.files import prompt_id, table_bytes
from entropy_experiments.pipelines.run_ledger.states import RunState
from entropy_experiments.pipelines.training_facts import TrainingFacts
from entropy_experiments.results import JSONObject
from entropy_experiments.results.run_ledger import LAYER_TABLE, TABLES, TOKEN_TABLE
from entropy_experiments.types import UpdateBatch


def token_columns(
    step: int, batch: UpdateBatch, shares: StepShares, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Columns of run_ledger.parquet for one step: a row per response token.

    Args:
        step: Its number.
        batch: What it learned from.
        shares: What its tokens did.
        decode: Token ids to text.
    """
    rollouts = batch.rollouts
    where = rollouts.response_NS.nonzero(as_tuple=True)
    rows_T = where[0].tolist()
    prompts = [prompt_id(ids) for ids in prompt_ids(rollouts)]
    token_T = rollouts.tokens_NS[where].tolist()
    text = {token: decode([token]) for token in set(token_T)}
    absent_T = np.full(len(rows_T), np.nan)

    def per_token(x_NS: Tensor) -> np.ndarray:
        return x_NS[where].double().cpu().numpy()

    columns = {name: per_token(x_NS) for name, x_NS in shares.tokens.items()}
    rewarded = REWARD[0] in columns
    reward_N = batch.reward_N
    return {
        "step": np.full(len(rows_T), step),
        "rollout": rows_T,
        "uid": [f"{step}-{row}" for row in rows_T],
        "prompt": [prompts[row] for row in rows_T],
        "position": response_index(batch)[where].cpu().numpy(),
        "token_id": token_T,
        "text": [text[token] for token in token_T],
        "advantage": per_token(batch.advantage_NS),
        "reward": absent_T if reward_N is None else reward_N[where[0]].double().cpu().numpy(),
        "logprob": per_token(shares.scores.logprob_NS),
        "entropy": per_token(shares.scores.entropy_NS),
        "coefficient_logprob": per_token(shares.coefficient.logprob_NS),
        "coefficient_entropy": per_token(shares.coefficient.entropy_NS),
        "dH": columns[ENTROPY[0]] + columns[ENTROPY[1]],
        **{name: columns[name] for name in ENTROPY},
        "dR": columns[REWARD[0]] + columns[REWARD[1]] if rewarded else absent_T,
        **{name: columns.get(name, absent_T) for name in REWARD},
        TANGENT: columns.get(TANGENT, absent_T),
    }


def _solved(batch: UpdateBatch) -> dict[str, list[int]] | None:
    if batch.correct_N is None:
        return None
    out: dict[str, list[int]] = {}
    for ids, correct in zip(prompt_ids(batch.rollouts), batch.correct_N.tolist(), strict=True):
        counts = out.setdefault(prompt_id(ids), [0, 0])
        counts[0] += int(correct)
        counts[1] += 1
    return out


def layer_columns(step: int, parts: Mapping[str, Mapping[str, float]]) -> dict[str, list[Any]]:
    """Products of costate and gradient, by layer and module."""
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for column, by_name in parts.items():
        for name, value in by_name.items():
            layer = layer_of(name)
            place = (layer, module_of(name).removeprefix(layer).lstrip("."))
            group = sums.setdefault(place, {})
            group[column] = group.get(column, 0.0) + value
    rows = []
    for (layer, module), group in sums.items():
        a, b = (group[name] for name in ENTROPY)
        gains = [group.get(name) for name in REWARD]
        known = gains[0] is not None and gains[1] is not None
        rows.append(
            {
                "step": step,
                "layer": layer,
                "module": module,
                "dH": a + b,
                "dH_stderr": abs(a - b),
                "dR": cast(float, gains[0]) + cast(float, gains[1]) if known else None,
                "dR_stderr": abs(cast(float, gains[0]) - cast(float, gains[1])) if known else None,
            }
        )
    return {column.name: [row[column.name] for row in rows] for column in TABLES[LAYER_TABLE]}


def step_facts(
    state: RunState,
    batch: UpdateBatch,
    shares: StepShares,
    facts: TrainingFacts,
    made: RecordedStep | None,
) -> JSONObject:
    """What a visit keeps of its step beside the token rows; `made`: what training recorded of it.

    The gradient is held against the moment that is stored after the step. Without one (the last
    checkpoint has no optimizer; a replayed moment is our own) it is held against its recorded
    fingerprint.
    """
    gradient_distance = shares.gradient_distance
    if made is not None and (gradient_distance is None or state.replayed):
        by_record = distance(sketch(shares.gradient), made.gradient.sketch)
        gradient_distance = max(by_record, gradient_distance or 0.0)
    reward_N = batch.reward_N
    return {
        "path_by_column": dict(shares.path),
        "batch": {name: float(x_NS.sum()) for name, x_NS in shares.tokens.items()},
        "batch_dH": sum(float(shares.tokens[name].sum()) for name in ENTROPY),
        "decay": dict(shares.decay),
        "uncovered": dict(shares.uncovered),
        "momentum_before": dict(shares.momentum_before),
        "unfinished": dict(shares.unfinished),
        "by_parameter": {name: dict(parts) for name, parts in shares.by_parameter.items()},
        "step_distance": shares.step_distance,
        "gradient_distance": gradient_distance,
        "clip_factor": shares.clip_factor,
        "lr": state.optimizer.lr,
        "replayed": state.replayed,
        "rollouts": len(batch.rollouts),
        "tokens": int(batch.counted_NS.sum()),
        "batch_reward": None if reward_N is None else float(reward_N.double().nanmean()),
        "prompts": _prompt_texts(state, batch),
        "solved": _solved(batch),
        "special": _special(state, batch),
        "notes": list(facts.notes),
        "assumed": facts.assumed,
    }


def _prompt_texts(state: RunState, batch: UpdateBatch) -> dict[str, str]:
    decode = state.probed.checkpoint.tokenizer.decode
    return {prompt_id(ids): decode(list(ids)) for ids in prompts_of(batch.rollouts)}


def _special(state: RunState, batch: UpdateBatch) -> list[str]:
    tokenizer = state.probed.checkpoint.tokenizer
    used = set(batch.rollouts.tokens_NS[batch.rollouts.response_NS].unique().tolist())
    return sorted(tokenizer.decode([i]) for i in used & set(tokenizer.all_special_ids))


def token_rows(state: RunState, batch: UpdateBatch, shares: StepShares) -> bytes:
    """One step of run_ledger.parquet."""
    decode = state.probed.checkpoint.tokenizer.decode
    return table_bytes(TOKEN_TABLE, token_columns(state.step, batch, shares, decode))
