"""Writes a batch in each framework's dump format, for round trips: the slow and obvious way.

The layouts are those of the fixtures in tests/data/dumps, which the frameworks' own writers made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from entropy_experiments.types import UpdateBatch


def sequences(batch: UpdateBatch) -> list[dict[str, Any]]:
    """Each rollout without its padding: lists with an entry per token."""
    rollouts, out = batch.rollouts, []
    for n in range(len(rollouts)):
        inside_S = rollouts.attention_NS[n]

        def cut(x_NS: Any, n: int = n, inside_S: Any = inside_S) -> list[Any] | None:
            return None if x_NS is None else x_NS[n][inside_S].tolist()

        out.append(
            {
                "tokens": cut(rollouts.tokens_NS),
                "response": cut(rollouts.response_NS),
                "counted": cut(batch.counted_NS),
                "advantage": cut(batch.advantage_NS),
                "old": cut(batch.old_logprob_NS),
                "behaviour": cut(rollouts.behaviour_logprob_NS),
                "reward": None if batch.reward_N is None else float(batch.reward_N[n]),
                "prompt": int(rollouts.prompt_N[n]),
            }
        )
    return out


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_prime_rl(folder: Path, batch: UpdateBatch, *, step: int = 3, ranks: int = 2) -> Path:
    """Rollouts are dealt out to the ranks in blocks, as prime-rl's data loader does."""
    rows = sequences(batch)
    ranks = min(ranks, len(rows))
    bounds = [len(rows) * rank // ranks for rank in range(ranks + 1)]
    to = folder / "token_exports" / f"step_{step}"
    for rank in range(ranks):
        lines = []
        for at, row in enumerate(rows[bounds[rank] : bounds[rank + 1]]):
            count = len(row["tokens"])
            lines.append(
                {
                    "schema_version": 1,
                    "step": step,
                    "rank": rank,
                    "micro_step": at // 2,
                    "micro_sequence_idx": at % 2,
                    "export_sequence_idx": at,
                    "env_name": "toy",
                    "token_ids": row["tokens"],
                    "position_ids": list(range(count)),
                    "loss_mask": row["response"],
                    "advantages": row["advantage"],
                    "inference_logprobs": row["behaviour"],
                    "trainer_logprobs": row["old"],
                    "entropy": [1.0] * count,
                    "mismatch_kl": [None] * count,
                    "importance_ratio": [None] * count,
                    "is_masked": [None] * count,
                    "rl_weights": [float(mine) for mine in row["counted"]],
                    "ce_weights": [None] * count,
                    "ref_kl_weights": [None] * count,
                }
            )
        jsonl(to / f"rank_{rank}.jsonl", lines)
    (to / "STABLE").touch()
    return to


def write_nemo_rl(folder: Path, batch: UpdateBatch, *, step: int = 3, pad: int = 0) -> Path:
    """Every value in a list of its own, rows padded to one width."""
    rows = sequences(batch)
    width = max(len(row["tokens"]) for row in rows) + 2

    def wide(values: list[Any], fill: Any) -> list[list[Any]]:
        return [[*values, *[fill] * (width - len(values))]]

    lines = [
        {
            "content": ["..."],
            "rewards": [row["reward"]],
            "input_lengths": [len(row["tokens"])],
            "token_ids": wide(row["tokens"], pad),
            "token_loss_mask": wide([int(mine) for mine in row["response"]], 0),
            "sample_loss_mask": [float(any(row["counted"]))],
            "advantages": wide(row["advantage"], 0.0),
            "generation_logprobs": wide(row["behaviour"], 0.0),
            "prev_logprobs": wide(row["old"], 0.0),
            "idx": at,
        }
        for at, row in enumerate(rows)
    ]
    return jsonl(folder / f"train_data_step{step}.jsonl", lines)


MILES = pyarrow.schema(
    {
        "sample_index": pyarrow.int32(),
        "response_length": pyarrow.int32(),
        "total_length": pyarrow.int32(),
        "tokens": pyarrow.list_(pyarrow.int32()),
        "loss_mask": pyarrow.list_(pyarrow.int8()),
        "rollout_log_probs": pyarrow.list_(pyarrow.float32()),
    }
)


def miles_rows(batch: UpdateBatch) -> list[dict[str, Any]]:
    out = []
    for at, row in enumerate(sequences(batch)):
        first = row["response"].index(True)
        out.append(
            {
                "sample_index": 10 + at,
                "response_length": len(row["tokens"]) - first,
                "total_length": len(row["tokens"]),
                "tokens": row["tokens"],
                "loss_mask": [int(mine) for mine in row["response"][first:]],
                "rollout_log_probs": row["behaviour"][first:],
            }
        )
    return out


def write_miles(folder: Path, batch: UpdateBatch, *, step: int = 3) -> Path:
    path = folder / "dashboard_columns" / f"rollout_{step}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(miles_rows(batch), schema=MILES), path)
    about = [
        {
            "sample_index": 10 + at,
            "group_index": row["prompt"],
            "status": "completed",
            "reward": row["reward"],
            "prompt": "...",
            "messages": [],
        }
        for at, row in enumerate(sequences(batch))
    ]
    jsonl(folder / "trajectory" / f"{step}.jsonl", about)
    return path


def write_verl(folder: Path, batch: UpdateBatch, tokenizer: Any, *, step: int = 3) -> Path:
    """As text, decoded without special tokens."""
    lines = []
    for at, row in enumerate(sequences(batch)):
        first = row["response"].index(True)
        prompt, response = (
            tokenizer.decode(ids, skip_special_tokens=True)
            for ids in (row["tokens"][:first], row["tokens"][first:])
        )
        lines.append(
            {
                "input": prompt,
                "output": response,
                "gts": "?",
                "score": row["reward"],
                "step": step,
                "uid": f"u-{row['prompt']}_{at}_0",
            }
        )
    return jsonl(folder / f"{step}.jsonl", lines)
