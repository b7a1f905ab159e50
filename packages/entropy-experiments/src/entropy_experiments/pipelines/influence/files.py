"""The files of a finished study, as bytes: summary.json, arrays, token tables, texts, drawings.

A study's results come from stages on disk, so files of a resumed study are those of one that was
never disturbed. `docs` of each array (what, shape, units) go into the manifest.

    pieces of rollout i, joined        = its response, decoded as a whole
    update_rollouts.json               prompt, gaps and facts of every rollout

A piece is what a token adds to the text before it. `decode` of a token alone is something else: a
word without the space before it, half of a character. Such a half has an empty piece; the token
that completes the character has all of it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor

from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.groups import By, Most, grouped, ranked
from entropy_experiments.attribution.step import BASELINE, FULL
from entropy_experiments.attribution.token_rows import token_rows
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.config import config_yaml
from entropy_experiments.distributed import current
from entropy_experiments.pipelines.influence.momentum import ROWS
from entropy_experiments.pipelines.influence.results import (
    EvaluationResults,
    StudyResults,
    answer_or_error,
)
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.pipelines.influence.summary_json import (
    budget_json,
    fisher_json,
    moved_rollouts,
)
from entropy_experiments.report.figures.style import INSTALL, can_draw
from entropy_experiments.report.figures.write import study_plots
from entropy_experiments.results import (
    DIFFERENTIATED,
    INFLUENCE,
    AggregateResult,
    Certified,
    EvaluationBatch,
    FisherResult,
    GroupResult,
    InfluenceResult,
    JSONObject,
    MomentumAnswer,
    MomentumResult,
    RankedToken,
    UpdateText,
    finite,
)
from entropy_experiments.study_files import ArrayFacts, NewFiles
from entropy_experiments.types import UpdateBatch

TABLE_FACTS = b"entropy_experiments.table"
GROUPS: tuple[By, ...] = (
    "advantage_probability",
    "prompt",
    "position",
    "correctness",
    "module",
    "layer",
    "rollout",
)
BEFORE, AFTER = 24, 8
"""Tokens shown around a ranked token."""
MOVED = 5
"""Evaluation rollouts whose log-prob changes summary.json tells; changes.json has all."""
SPLIT = "split so that each entry's slope in eta is the first-order contribution"
"""How a measured change is shared among evaluation rollouts: F_ij of `attribution.finite`."""
Decode = Callable[[list[int]], str]
BROKEN = "\ufffd"
"""How decoders write a character that is not complete yet."""
NOT_DRAWN = f"plots/ is left out: matplotlib is not installed ({INSTALL})"


class StudyFiles:
    """Collects files and their descriptions."""

    def __init__(self, results: StudyResults) -> None:
        self.results, self.plan = results, results.config.influence
        self.files: dict[str, bytes] = {}
        self.arrays: dict[str, ArrayFacts] = {}

    def made(self, key: str) -> tuple[dict[str, bytes], dict[str, ArrayFacts], InfluenceResult]:
        """(files, descriptions of arrays, summary)."""
        evaluations = [self._evaluation(one) for one in self.results.evaluations]
        summary = self._summary(evaluations, key)
        self.files["summary.json"] = json.dumps(summary, indent=1, allow_nan=False).encode()
        self.files["config.yaml"] = config_yaml(self.results.config).encode()
        texts = json.dumps(self._texts[0], indent=1, allow_nan=False)
        self.files["update_rollouts.json"] = texts.encode()
        if self.plan.plots and current().first:  # which writes them
            folder = self.results.folder
            self.files |= study_drawings(folder, self.files, self.arrays, summary)
        return self.files, self.arrays, summary

    @cached_property
    def _texts(self) -> tuple[list[UpdateText], list[str]]:
        return update_texts(self.results.batch, self.results.decode)

    def _array(self, name: str, values: np.ndarray, what: str, units: str = "nats") -> None:
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(values), allow_pickle=False)
        self.files[name] = buffer.getvalue()
        self.arrays[name] = {"description": what, "shape": list(values.shape), "units": units}

    def _evaluation(self, one: EvaluationResults) -> EvaluationBatch:
        results, name = self.results, one.name
        tokens, books = one.tokens, one.ledgers
        scale = results.etas[0] / results.direction.lr
        self._matrix_files(one, scale)
        self._single_files(one)
        self._table(one)
        if one.reward_N is not None:
            reward_N = one.reward_N.numpy()
            self._array(f"{name}_rewards.npy", reward_N, "reward of each evaluation rollout", "1")
        parts = float(tokens.rollout_N.abs().sum()) + sum(map(abs, tokens.baseline.values()))
        predicted = books["entropy"]["predicted"]["value"]
        residual = predicted - tokens.total
        # One budget, one entropy: that of the first evaluation batch.
        budget = self.plan.entropy_budget if one is results.evaluations[0] else None
        batch: JSONObject = {
            "name": name,
            "kind": one.request.kind,
            "params": one.request.params,
            "rollouts": len(one.rollouts),
            "prompts": len(one.rollouts.prompt_N.unique()),
            "tokens": int(one.rollouts.tokens_N.sum()),
            "mean_reward": _mean(one.reward_N),
            "fingerprint": one.rollouts.fingerprint,
            "estimand": asdict(results.estimand),
            "notes": list(one.notes),
            "level": dict(one.level),
            "aggregate": {f"{eta:g}": self._aggregate(one, eta) for eta in results.etas},
            "reconstruction": {
                "total": predicted,
                **tokens.baseline,
                "gradient": tokens.gradient,
                "residual": residual,
                "parts": parts,
                "relative": abs(residual) / parts if parts else 0.0,
                **_matrix_sums(one),
                **_differences(tokens),
            },
            "ledger": dict(books),
            "groups": _groups(one),
            "ranked": {most: self._ranked(one, most) for most in ("destroying", "creating")},
            "reliability": finite(tokens.reliability),
            "rollout_reliability": finite(tokens.rollout_reliability),
            "cancellation": {"ratio": finite(tokens.cancellation), "withheld": tokens.withheld},
            "doubts": list(tokens.doubts),
            "measured_rollouts": list(one.measured_rows),
            "leave_one_out": list(one.left_out),
            "fisher": self._fisher(one),
            "momentum": self._momentum(one),
            "what_if": list(one.what_if),
            "entropy_budget": None
            if budget is None
            else {
                "budget": budget,
                **answer_or_error(
                    lambda: budget_json(books["entropy"], results.direction.lr, budget)
                ),
            },
            "table": whatif.facts(tokens),
        }
        return cast(EvaluationBatch, batch)  # most of it is JSON of the stages

    def _matrix_files(self, one: EvaluationResults, scale: float) -> None:
        results, name, eta = self.results, one.name, self.results.etas[0]
        if self.plan.measured_matrix:
            values_EN = np.full((len(one.rollouts), len(results.batch.rollouts)), np.nan)
            for row in one.measured_rows:
                values_EN[:, row] = one.rollout_changes.tensors[f"grad|{row}|{eta!r}"].numpy()
            what = f"measured change at eta {eta:g} along each measured rollout's direction, by "
            what += f"evaluation rollout; NaN: not measured; {SPLIT}"
            self._array(f"{name}_delta_matrix.npy", values_EN, f"{what} [evaluation, update]")
        elif one.matrix is not None:
            values_EN = scale * one.matrix.matrix_EN.numpy()
            what = f"first-order contribution of every pair of rollouts at eta {eta:g}"
            self._array(f"{name}_delta_matrix.npy", values_EN, f"{what} [evaluation, update]")
        self._array(
            f"{name}_rollout_influence.npy",
            one.tokens.rollout_N.numpy(),
            f"first-order influence of each update rollout at the learning rate "
            f"{results.direction.lr:g}",
        )

    def _single_files(self, one: EvaluationResults) -> None:
        name, rows, etas = one.name, list(one.measured_rows), self.results.per_sequence_etas
        folder, singles = f"{name}_per_sequence", one.rollout_changes
        self._array(
            f"{folder}/rollouts.npy",
            np.array(rows, dtype=np.int64),
            "update rollouts that were measured: the columns of grad and baseline_plus_grad",
            "index",
        )
        for eta in dict.fromkeys((*self.results.etas, *etas)):
            for part, what in ((FULL, "the whole step"), (BASELINE, "momentum and decay")):
                values_E = one.changes.tensors[f"{part}|{eta!r}"].numpy()
                what = f"measured change along {what} at eta {eta:g}, by evaluation rollout; "
                what += SPLIT
                self._array(f"{folder}/{part}/eta_{eta:g}.npy", values_E, what)
        for eta in etas:
            grad_EN = _stack(singles.tensors, "grad", rows, eta)
            base_E1 = one.changes.tensors[f"baseline|{eta!r}"].numpy()[:, None]
            both_EN = _stack(singles.tensors, "both", rows, eta) - base_E1
            end = f"eta_{eta:g}"
            what = f"measured change at eta {eta:g} along each measured rollout's own direction; "
            what += SPLIT
            self._array(f"{folder}/grad/{end}.npy", grad_EN, f"{what} [evaluation, measured]")
            what = f"the same at eta {eta:g} on top of the baseline, minus the baseline's; {SPLIT}"
            self._array(
                f"{folder}/baseline_plus_grad/{end}.npy", both_EN, f"{what} [evaluation, measured]"
            )
            total_N = np.full(len(self.results.batch.rollouts), np.nan)
            total_N[rows] = grad_EN.sum(0)
            what = f"measured change of H at eta {eta:g} along each rollout; NaN: not measured"
            self._array(f"{name}_grad_eta/{end}.npy", total_N, what)
            facts = [{"rollout": row, **singles.facts[f"grad|{row}|{eta!r}"]} for row in rows]
            text = json.dumps(facts, indent=1, allow_nan=False)
            self.files[f"{name}_grad_eta/{end}.json"] = text.encode()

    def _fisher(self, one: EvaluationResults) -> FisherResult | None:
        stage = one.fisher
        if not isinstance(stage, Stage):
            return stage
        eta, folder = stage.facts["eta"], f"{one.name}_fisher"
        centred = ", both gradients centred" if stage.facts["centred"] else ""
        done = f"first-order change of S_i by each update rollout at eta {eta:g}"
        for name, what, units in (
            ("kernel", f"K_ij = (grad S_i)^T P (grad S_j){centred}", "nats per eta"),
            ("cosine", f"K_ij / sqrt(K_ii K_jj){centred}", "1"),
            ("contribution", done, "nats"),
        ):
            values_EN = stage.tensors[f"{name}_EN"].numpy()
            self._array(f"{folder}/{name}.npy", values_EN, f"{what} [evaluation, update]", units)
        what = f"measured change of S_i along the gradient part of the step at eta {eta:g}"
        self._array(f"{folder}/measured.npy", stage.tensors["measured_E"].numpy(), what)
        rows = moved_rollouts(stage)
        self.files[f"{folder}/changes.json"] = json.dumps(rows, indent=1).encode()
        moved = sorted(rows, key=lambda row: -abs(row["measured"]))[:MOVED]
        return fisher_json(stage, moved)

    def _momentum(self, one: EvaluationResults) -> MomentumResult | None:
        stage = one.momentum
        if not isinstance(stage, Stage):
            return stage
        self.files["momentum.parquet"] = stage.tensors[ROWS].numpy().tobytes()
        return cast(MomentumAnswer, stage.facts)

    def _table(self, one: EvaluationResults) -> None:
        import pyarrow
        import pyarrow.parquet

        rows = {
            **token_rows(one.tokens, self.results.decode),
            **whatif.fold_columns(one.tokens),
        }
        rows["piece"] = self._texts[1]
        rows["uid"] = pyarrow.array(rows["uid"], pyarrow.string())  # a type even where all is null
        table = pyarrow.table(rows)
        facts = json.dumps(whatif.facts(one.tokens)).encode()
        table = table.replace_schema_metadata({TABLE_FACTS: facts})
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer)
        self.files[f"{one.name}_tokens.parquet"] = buffer.getvalue()
        if one is self.results.evaluations[0]:
            self.files["tokens.parquet"] = buffer.getvalue()

    def _aggregate(self, one: EvaluationResults, eta: float) -> AggregateResult:
        tokens, scale = one.tokens, eta / self.results.direction.lr
        full, baseline = (one.changes.facts[f"{part}|{eta!r}"] for part in (FULL, BASELINE))
        out: AggregateResult = {
            "full": full,
            "baseline": baseline,
            "first_order": scale * tokens.total,
            "first_order_baseline": scale * sum(tokens.baseline.values()),
            "first_order_gradient": scale * tokens.gradient,
            "grad_sum_measured": None,
            "reconstruction_error": None,
        }
        rows, singles = one.measured_rows, one.rollout_changes
        if len(rows) == len(tokens.rollout_N) and eta in self.results.per_sequence_etas:
            summed = math.fsum(singles.facts[f"grad|{row}|{eta!r}"]["value"] for row in rows)
            out["grad_sum_measured"] = summed
            out["reconstruction_error"] = full["value"] - baseline["value"] - summed
        return out

    def _ranked(self, one: EvaluationResults, most: Most) -> list[RankedToken]:
        decode, rollouts, out = self.results.decode, self.results.batch.rollouts, []
        for token in ranked(one.tokens, self.plan.ranked_tokens, most=most):
            inside_S = rollouts.attention_NS[token.rollout]
            ids, at = rollouts.tokens_NS[token.rollout][inside_S].tolist(), token.position
            at -= int(inside_S.int().argmax())
            out.append(
                {
                    **{name: value for name, value in asdict(token).items() if name != "token"},
                    "token": token.token,
                    "text": decode([token.token]),
                    "before": decode(ids[max(0, at - BEFORE) : at]),
                    "after": decode(ids[at + 1 : at + 1 + AFTER]),
                    "stderr": finite(token.stderr),
                }
            )
        return out

    def _summary(self, evaluations: list[EvaluationBatch], key: str) -> InfluenceResult:
        results, step = self.results, self.results.step_json
        batch, first, notes = results.batch, evaluations[0], list(results.notes)
        if step["norms"]["gradient"] == 0 and results.real:  # a drawn batch comes with a note
            notes.append(
                "every group of the update batch has equal rewards: the update is momentum and "
                "weight decay alone"
            )
        if results.mode in DIFFERENTIATED:
            notes.append(f"differentiated {DIFFERENTIATED[results.mode]} ({results.mode})")
        if self.plan.plots and not can_draw():
            notes.append(NOT_DRAWN)
        result: JSONObject = {
            **INFLUENCE.stamp,
            "key": key,
            "checkpoint": results.checkpoint,
            "step": results.step,
            "base": results.base,
            "lr": results.direction.lr,
            "momentum_decay": results.momentum_decay,
            "coupled_decay": results.coupled_decay,
            "etas": list(results.etas),
            "per_sequence_etas": list(results.per_sequence_etas),
            "reference_eta": results.etas[0],
            "mode": results.mode,
            "clip_c": results.clip,
            "plan": results.config.documents()["influence"],
            "update": {
                "rollouts": len(batch.rollouts),
                "tokens": int(batch.counted_NS.sum()),
                "prompts": len(batch.rollouts.prompt_N.unique()),
                "real": results.real and _trainings(results, step.get("certified", {})),
                "mean_reward": _mean(batch.reward_N),
                "objective": asdict(results.objective),
                "clip_factor": step["clip_factor"],
                "norms": step["norms"],
                "loss": step["loss"],
                "certified": step.get("certified", {}),
                "fingerprint": batch.rollouts.fingerprint,
            },
            "aggregate": first["aggregate"],
            "ledger": first["ledger"]["entropy"],
            "evaluations": evaluations,
            "notes": notes,
            "assumed": dict(results.assumed),
            "not_verifiable": list(results.not_verifiable),
            "timings": dict(sorted(results.timings.items())),  # whatever was needed first
            "provenance": {
                **provenance(),
                "precision": step["precision"],
                "files": dict(results.input_hashes),
                "coverage": dict(results.coverage),
            },
        }
        if results.absent:
            result["absent"] = dict(results.absent)
        return cast(InfluenceResult, result)


def _trainings(results: StudyResults, certified: Certified) -> bool:
    """Whether the batch is training's: it names these weights, or its step is certified."""
    certain = results.bound or "step_distance" in certified
    return certain and "another_step" not in certified


def _matrix_sums(one: EvaluationResults) -> JSONObject:
    """How far the matrix is from the tokens it adds up to; nothing where there is none."""
    matrix = one.matrix
    if matrix is None:
        return {}
    return {
        "matrix_residual": matrix.total - one.tokens.gradient,
        "matrix_passes": matrix.passes,
    }


def _differences(tokens: TokenInfluence) -> JSONObject:
    """Where token influences are differences: the sum rule, and how wide they are by fold.

    `steps_wide`: from theta to either point, in lengths of the optimizer's step.
    """
    if not tokens.differences:
        return {}
    return {
        "by_reverse": tokens.gradient_by_reverse,
        "sum_rule_gap": tokens.sum_rule_gap,
        "closes": tokens.closes,
        "differences": [
            {
                "steps_wide": finite(wide),
                "forwards": one.forwards,
                "gap_to_reverse": one.gap,
            }
            for one, wide in zip(tokens.differences, tokens.steps_wide, strict=True)
        ],
    }


def _groups(one: EvaluationResults) -> dict[str, dict[str, GroupResult]]:
    """Every grouping that this batch allows."""
    scored = one.tokens.batch.reward_N is not None
    return {
        by: {
            label: cast(GroupResult, asdict(group))
            for label, group in grouped(one.tokens, by).items()
        }
        for by in GROUPS
        if by != "correctness" or scored
    }


def _stack(tensors: Mapping[str, Tensor], part: str, rows: Sequence[int], eta: float) -> np.ndarray:
    return np.stack([tensors[f"{part}|{row}|{eta!r}"].numpy() for row in rows], axis=1)


def _mean(reward_N: Tensor | None) -> float | None:
    return None if reward_N is None else float(reward_N.double().mean())


def update_texts(batch: UpdateBatch, decode: Decode) -> tuple[list[UpdateText], list[str]]:
    """(a row per rollout, a piece per response token in order of rollout and position).

    `gaps` of a rollout: text between response tokens that the policy did not write (tool output),
    by the index of the response token that follows.
    """
    rollouts, decode = batch.rollouts, _remembering(decode)
    rows: list[UpdateText] = []
    pieces: list[str] = []
    for i in range(len(rollouts)):
        inside_S = rollouts.attention_NS[i]
        ids = rollouts.tokens_NS[i][inside_S].tolist()
        written = rollouts.response_NS[i][inside_S].tolist()
        first = written.index(True) if any(written) else len(ids)
        own: list[str] = []
        gaps: dict[str, str] = {}
        for piece, mine in zip(pieces_of(ids, first, decode), written[first:]):
            if mine:
                own.append(piece)
            else:
                gaps[str(len(own))] = gaps.get(str(len(own)), "") + piece
        rows.append(
            {
                "rollout": i,
                "uid": None if rollouts.uid is None else rollouts.uid[i],
                "prompt": int(rollouts.prompt_N[i]),
                "prompt_text": decode(ids[:first]),
                "reward": None if batch.reward_N is None else float(batch.reward_N[i]),
                "truncated": bool(rollouts.truncated_N[i]),
                "gaps": gaps,
            }
        )
        pieces += own
    return rows, pieces


def pieces_of(ids: list[int], first: int, decode: Decode) -> list[str]:
    """What each of ids[first:] adds to the text of those before it."""
    out: list[str] = []
    start, told = max(first - 1, 0), first  # ids[start:told] is context whose text is out already
    for at in range(first, len(ids)):
        before, text = decode(ids[start:told]), decode(ids[start : at + 1])
        if text.endswith(BROKEN) and at + 1 < len(ids):
            out.append("")
            continue
        # Some decoders rewrite what came before (a space before a comma); then the token alone.
        out.append(text[len(before) :] if text.startswith(before) else decode(ids[told : at + 1]))
        start, told = told, at + 1
    return out


def _remembering(decode: Decode) -> Decode:
    """Short runs of tokens come back again and again."""
    seen: dict[tuple[int, ...], str] = {}

    def remembered(ids: list[int]) -> str:
        key = tuple(ids)
        if len(key) > 4:
            return decode(ids)
        if key not in seen:
            seen[key] = decode(ids)
        return seen[key]

    return remembered


def study_drawings(
    folder: Path,
    contents: Mapping[str, bytes],
    arrays: Mapping[str, ArrayFacts],
    summary: InfluenceResult,
) -> dict[str, bytes]:
    """PNG files by name, made from the study's other files; none without matplotlib."""
    if not can_draw():
        return {}
    return study_plots(NewFiles(folder=folder, contents=contents, described=arrays), summary)
