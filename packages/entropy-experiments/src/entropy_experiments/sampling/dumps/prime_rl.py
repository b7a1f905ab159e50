"""prime-rl's token exports: `token_exports/step_N/rank_R.jsonl`, finished when `STABLE` is there.

Written by prime_rl.trainer.rl.token_export (schema_version 1, read at commit 559b447) with
`trainer.enable_token_export = true`: a line per packed sequence that has a token in the loss, every
list aligned with `token_ids` (log-probs are already shifted: entry s is about token s).

prime-rl's loss has the ratio exp(trainer_logprobs - inference_logprobs): the engine's log-probs are
its denominator. So they are read as `old_logprob_NS`, which is a fact about the loss, and as
behaviour; as *scores* they are never used. What the loss multiplies into a token's policy term is
folded into the advantage: 0 where the trust region dropped the token (`is_masked`), and rl_weights.

With context parallelism only one rank of each group writes: rank numbers are then evenly spaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropy_experiments.input_errors import read_jsonl, short
from entropy_experiments.sampling.dumps.rows import (
    DumpFacts,
    DumpRow,
    Line,
    assemble,
    count_from_zero,
    entries,
    logprobs,
    mask,
    numbers,
    one_step,
    required,
    token_ids,
)
from entropy_experiments.sampling.text_dumps import Imported

FORMAT = "prime-rl token export"
SCHEMA = 1
FOLDER, STABLE = "token_exports", "STABLE"
RANK = re.compile(r"rank_(\d+)\.jsonl")
STEP = re.compile(r"step_(\d+)")
NEEDED = ("token_ids", "loss_mask", "advantages", "inference_logprobs", "export_sequence_idx")
KEYS = {"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}
"""By which a line of this format is known."""
LINE = '{"schema_version": 1, "step": 0, "rank": 0, "token_ids": [...], "loss_mask": [...], ...}'
USED = {
    "loss_mask": "tokens of the response",
    "advantages": "of each token; 0 where is_masked dropped it, times rl_weights",
    "inference_logprobs": "denominators of the ratio, as in prime-rl's loss, and of the policy "
    "that drew the tokens; never scores",
    "trainer_logprobs, entropy, importance_ratio, mismatch_kl": "not used: the checkpoint scores "
    "the tokens again",
}
MISSING = (
    "rewards",
    "the loss's own settings (dppo_mask_low and _high, adv_tau, kl_tau)",
    "temperatures",
    "which responses the length limit cut off",
    "names of the rollouts (uid is RANK/LINE of the export)",
)


def is_rank_file(path: Path) -> bool:
    return RANK.fullmatch(path.name) is not None


def step_folder(path: Path, step: int | None) -> Path | None:
    """The folder of one step in `path`: itself, or below it; None: no token exports here."""
    if path.is_file():
        return path.parent if is_rank_file(path) else None
    if any(is_rank_file(file) for file in path.iterdir()):
        return path
    steps = _steps(path if path.name == FOLDER else path / FOLDER)
    if not steps:
        return None
    if step is None and len(steps) == 1:
        (step,) = steps
    if step not in steps:
        asked = "one is needed" if step is None else f"step {step} is not there"
        raise ValueError(
            f"{path} holds prime-rl's exports of the steps {_few(sorted(steps))}; {asked}: set "
            "step, or give the folder step_N itself."
        )
    return steps[step]


def _steps(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    named = {STEP.fullmatch(sub.name): sub for sub in folder.iterdir() if sub.is_dir()}
    return {int(match[1]): sub for match, sub in named.items() if match is not None}


def files(folder: Path, ranks: int | None = None) -> dict[int, Path]:
    """Each rank's file, in order of rank; refuses an export that is not whole."""
    matches = [(RANK.fullmatch(file.name), file) for file in folder.iterdir()]
    by_rank = {int(match[1]): file for match, file in matches if match is not None}
    if not (folder / STABLE).exists():
        raise ValueError(
            f"{folder} has no {STABLE}: prime-rl writes it when every rank has written its file. "
            "Wait for the step to end, or take an earlier step; a killed run leaves the last one "
            "unfinished."
        )
    if not by_rank:
        raise ValueError(f"{folder} has no rank_R.jsonl; expected one for each rank of prime-rl.")
    if ranks is not None and len(by_rank) != ranks:
        raise ValueError(
            f"{folder} has the files of {len(by_rank)} ranks; expected {ranks}. Copy all of them, "
            "or correct ranks."
        )
    present = sorted(by_rank)
    spacing = present[1] - present[0] if len(present) > 1 else 1
    whole = list(range(0, present[-1] + 1, spacing))
    if ranks is None and present != whole:
        raise ValueError(
            f"{folder} has the ranks {_few(present)}; expected every rank from 0 (evenly spaced "
            "with context parallelism). Copy all ranks' files; where a rank had nothing to write, "
            f"say so by ranks: {len(present)}."
        )
    return {rank: by_rank[rank] for rank in present}


def read(
    path: Path,
    tokenizer: Any,
    *,
    step: int | None = None,
    ranks: int | None = None,
    vocabulary: int | None = None,
) -> Imported:
    """One step's export: every rank's file, put together in order of rank and line."""
    folder = step_folder(path, step)
    if folder is None:
        raise ValueError(f"{path} holds no token exports of prime-rl; expected {FOLDER}/step_N.")
    parts = files(folder, ranks)
    if path.is_file() and len(parts) > 1:
        raise ValueError(
            f"{path} is one of {len(parts)} ranks' files; one update is made of all of them. Give "
            f"the folder {folder}."
        )
    rows: list[DumpRow] = []
    steps: list[Any] = []
    microbatches: dict[tuple[int, Any], int] = {}
    last: dict[int, Any] = {}
    dropped = counted = unmasked = 0
    for rank, file in parts.items():
        lines = [(f"{file}:{number}", line) for number, line in read_jsonl(file, LINE)]
        _check_file(file, rank, lines)
        for where, line in lines:
            steps.append(line.get("step"))
            place = microbatches.setdefault((rank, line.get("micro_step")), len(microbatches))
            unmasked += _is_null(line.get("is_masked"))
            row, out = _row(where, line, uid=f"{rank}/{line['export_sequence_idx']}", place=place)
            rows.append(row)
            last[rank] = line.get("micro_step")
            dropped, counted = dropped + out, counted + sum(row.response)
    named = STEP.fullmatch(folder.name)
    number = one_step(folder, steps, None if named is None else int(named[1]))
    if step is not None and step != number:
        raise ValueError(f"{folder} is of step {number}; step {step} was asked for.")
    notes = [
        f"{FORMAT} of step {number}: {len(rows)} rollouts of the ranks {_few(list(parts))}"
        + ("" if ranks is not None else " (the export does not say how many there were: ranks)")
    ]
    if len(set(last.values())) > 1:
        listed = ", ".join(f"rank {rank} at {at}" for rank, at in list(last.items())[:8])
        notes.append(
            f"the ranks' files end at different micro steps ({listed}): some had nothing to write, "
            "or a file lost its end, which nothing in it would show"
        )
    if dropped:
        notes.append(
            f"prime-rl's trust region dropped {dropped} of {counted} tokens (is_masked): their "
            "advantage is 0"
        )
    used, missing = dict(USED), MISSING
    if unmasked == len(rows):
        used["advantages"] = "of each token, times rl_weights"
    if unmasked:
        missing = (
            f"is_masked of {unmasked} of {len(rows)} rollouts, as with a loss that is not "
            "prime-rl's default: what a trust region dropped is not known, and every token counts "
            "with its whole advantage",
            *missing,
        )
    facts = DumpFacts(format=FORMAT, used=used, missing=missing, notes=tuple(notes), step=number)
    return assemble(rows, facts, tokenizer=tokenizer, vocabulary=vocabulary)


def _check_file(file: Path, rank: int, lines: Sequence[tuple[str, Line]]) -> None:
    for where, line in lines:
        if line.get("schema_version") != SCHEMA:
            raise ValueError(
                f"{where}: schema_version is {short(repr(line.get('schema_version')), 40)}; this "
                f"version reads {SCHEMA}."
            )
        required(where, line, NEEDED, "prime-rl")
        if type(line.get("micro_step")) not in (int, type(None)):
            raise ValueError(
                f"{where}: micro_step is {short(repr(line['micro_step']), 40)}; expected a whole "
                "number."
            )
        if line.get("rank") != rank:
            raise ValueError(
                f"{where}: rank is {short(repr(line.get('rank')), 40)} in the file of rank {rank}; "
                "expected the same. Was a file renamed?"
            )
    indices = [line["export_sequence_idx"] for _, line in lines]
    count_from_zero(str(file), "export_sequence_idx", indices, "Copy the file again.")


def _row(where: str, line: Line, *, uid: str, place: int) -> tuple[DumpRow, int]:
    tokens = token_ids(where, "token_ids", line["token_ids"])
    count = len(tokens)
    response = mask(where, "loss_mask", line["loss_mask"], count)
    if line.get("position_ids") is not None:
        positions = entries(where, "position_ids", line["position_ids"], count)
        if positions != list(range(count)):
            raise ValueError(
                f"{where}: position_ids do not count from 0; expected one sequence per line. Were "
                "packed sequences not taken apart?"
            )
    for name in ("ce_weights", "ref_kl_weights"):
        if any(_optional(where, line, name, count, 0.0)):
            raise ValueError(
                f"{where}: {name} is not 0: this step also learned by another loss than the policy "
                "gradient, which is not followed here. Only steps of the rl component are read."
            )
    weight = _optional(where, line, "rl_weights", count, 1.0)
    is_masked = [bool(x) for x in _optional(where, line, "is_masked", count, 0.0)]
    advantage = numbers(where, "advantages", line["advantages"], response)
    folded = [0.0 if out else a * w for a, w, out in zip(advantage, weight, is_masked, strict=True)]
    behaviour = logprobs(where, "inference_logprobs", line["inference_logprobs"], response)
    row = DumpRow(
        where=where,
        tokens=tokens,
        response=response,
        counted=[mine and w != 0 for mine, w in zip(response, weight, strict=True)],
        advantage=folded,
        old_logprob=behaviour,
        behaviour_logprob=behaviour,
        uid=uid,
        microbatch=place,
    )
    return row, sum(out and mine for out, mine in zip(is_masked, response, strict=True))


def _optional(where: str, line: Line, name: str, count: int, absent: float) -> list[float]:
    """A column that may be left out, or null throughout: then `absent`."""
    value = line.get(name)
    if value is None:
        return [absent] * count
    values = entries(where, name, value, count)
    if _is_null(values):
        return [absent] * count
    if name == "is_masked":
        return [float(one) for one in mask(where, name, values, count)]
    return numbers(where, name, values, [True] * count)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(one is None for one in value))


def _few(values: Sequence[int]) -> str:
    listed = ", ".join(str(value) for value in values[:8])
    return listed + (", ..." if len(values) > 8 else "")
