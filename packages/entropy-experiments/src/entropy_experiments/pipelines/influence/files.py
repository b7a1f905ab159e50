"""The files of a finished study, as bytes: summary.json, arrays, token tables, drawings.

Everything here is made from stages on disk, so files of a resumed study are those of one that was
never disturbed. `docs` of each array (what, shape, units) go into the manifest.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, cast

import numpy as np

from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.groups import By, Most, grouped, ranked
from entropy_experiments.attribution.token_rows import token_rows
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.config import config_yaml
from entropy_experiments.distributed import current
from entropy_experiments.pipelines.influence.certified import still_open
from entropy_experiments.pipelines.influence.drawings import NOT_DRAWN, can_draw, study_drawings
from entropy_experiments.pipelines.influence.evaluation import Evaluation, evaluations_of
from entropy_experiments.pipelines.influence.facts import (
    budget_facts,
    fisher_facts,
    prediction_facts,
)
from entropy_experiments.pipelines.influence.ledgers import ledgers
from entropy_experiments.pipelines.influence.questions import confirmed, fisher, left_out
from entropy_experiments.pipelines.influence.stages import Study
from entropy_experiments.pipelines.influence.texts import update_texts
from entropy_experiments.results import (
    DIFFERENTIATED,
    INFLUENCE,
    EvaluationBatch,
    InfluenceResult,
    JSONObject,
    RankedToken,
    finite,
)
from entropy_experiments.study_files import ArrayFacts

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


class StudyFiles:
    """Collects files and their descriptions."""

    def __init__(self, study: Study) -> None:
        self.study, self.evaluations = study, evaluations_of(study)
        self.files: dict[str, bytes] = {}
        self.arrays: dict[str, ArrayFacts] = {}

    def made(self, key: str) -> tuple[dict[str, bytes], dict[str, ArrayFacts], InfluenceResult]:
        """(files, descriptions of arrays, summary)."""
        evaluations = [self._evaluation(found) for found in self.evaluations]
        summary = self._summary(evaluations, key)
        self.files["summary.json"] = json.dumps(summary, indent=1, allow_nan=False).encode()
        self.files["config.yaml"] = config_yaml(self.study.config).encode()
        texts = json.dumps(self._texts[0], indent=1, allow_nan=False)
        self.files["update_rollouts.json"] = texts.encode()
        if self.study.asked.plots and current().first:  # which writes them
            folder = self.study.store.folder.parent
            self.files |= study_drawings(folder, self.files, self.arrays, summary)
        return self.files, self.arrays, summary

    @cached_property
    def _texts(self) -> tuple[list[JSONObject], list[str]]:
        return update_texts(self.study.probe.update, self.study.probe.checkpoint.tokenizer.decode)

    def _array(self, name: str, values: np.ndarray, what: str, units: str = "nats") -> None:
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(values), allow_pickle=False)
        self.files[name] = buffer.getvalue()
        self.arrays[name] = {"description": what, "shape": list(values.shape), "units": units}

    def _evaluation(self, found: Evaluation) -> EvaluationBatch:
        study, name = self.study, found.name
        matrix, tokens, books = found.matrix, found.tokens, ledgers(found)
        scale = study.etas[0] / study.direction.lr
        self._matrix_files(found, scale)
        self._single_files(found)
        self._table(found)
        if found.batch.reward_N is not None:
            reward_N = found.batch.reward_N.numpy()
            self._array(f"{name}_rewards.npy", reward_N, "reward of each evaluation rollout", "1")
        parts = float(tokens.rollout_N.abs().sum()) + sum(map(abs, tokens.baseline.values()))
        predicted = books["entropy"]["predicted"]["value"]
        residual = predicted - tokens.total
        # One budget, one entropy: that of the first evaluation batch.
        budget = study.asked.entropy_budget if found is self.evaluations[0] else None
        batch: JSONObject = {
            "name": name,
            "kind": found.batch.request.kind,
            "params": found.batch.request.params,
            "rollouts": len(found.rollouts),
            "prompts": len(found.rollouts.prompt_N.unique()),
            "tokens": int(found.rollouts.tokens_N.sum()),
            "mean_reward": _mean(found.batch.reward_N),
            "fingerprint": found.rollouts.fingerprint,
            "estimand": asdict(study.estimand),
            "notes": list(found.batch.notes),
            "level": found.level,
            "aggregate": {f"{eta:g}": _aggregate(found, eta) for eta in study.etas},
            "reconstruction": {
                "total": predicted,
                **tokens.baseline,
                "gradient": tokens.gradient,
                "residual": residual,
                "parts": parts,
                "relative": abs(residual) / parts if parts else 0.0,
                "matrix_residual": matrix.total - tokens.gradient,
                "matrix_passes": matrix.passes,
            },
            "ledger": books,
            "groups": _groups(found),
            "ranked": {most: self._ranked(found, most) for most in ("destroying", "creating")},
            "reliability": finite(tokens.reliability),
            "rollout_reliability": finite(tokens.rollout_reliability),
            "cancellation": {"ratio": finite(tokens.cancellation), "withheld": tokens.withheld},
            "doubts": list(tokens.doubts),
            "measured_rollouts": found.measured_rows,
            "leave_one_out": [
                {"rollout": row, **_answered(lambda row=row: left_out(found, row))}
                for row in study.asked.leave_one_out
            ],
            "fisher": self._fisher(found) if study.asked.fisher else None,
            "what_if": [self._what_if(found, text) for text in study.asked.what_if],
            "entropy_budget": None
            if budget is None
            else {
                "budget": budget,
                **_answered(lambda: budget_facts(books["entropy"], study.direction.lr, budget)),
            },
            "table": whatif.facts(tokens),
        }
        return cast(EvaluationBatch, batch)  # most of it is JSON of the stages

    def _matrix_files(self, found: Evaluation, scale: float) -> None:
        study, name, eta = self.study, found.name, self.study.etas[0]
        if study.asked.finite:
            values_EN = np.full((len(found.rollouts), len(study.probe.update.rollouts)), np.nan)
            for row in found.measured_rows:
                values_EN[:, row] = found.singles.tensors[f"grad|{row}|{eta!r}"].numpy()
            what = f"measured change at eta {eta:g} along each measured rollout's direction, by "
            what += f"evaluation rollout; NaN: not measured; {SPLIT}"
        else:
            values_EN = scale * found.matrix.matrix_EN.numpy()
            what = f"first-order contribution of every pair of rollouts at eta {eta:g}"
        self._array(f"{name}_delta_matrix.npy", values_EN, f"{what} [evaluation, update]")
        self._array(
            f"{name}_rollout_influence.npy",
            found.tokens.rollout_N.numpy(),
            f"first-order influence of each update rollout at the learning rate "
            f"{study.direction.lr:g}",
        )

    def _single_files(self, found: Evaluation) -> None:
        name, rows = found.name, found.measured_rows
        folder, singles = f"{name}_per_sequence", found.singles
        self._array(
            f"{folder}/rollouts.npy",
            np.array(rows, dtype=np.int64),
            "update rollouts that were measured: the columns of grad and baseline_plus_grad",
            "index",
        )
        for eta in dict.fromkeys((*self.study.etas, *self.study.per_sequence_etas)):
            for part, what in (("full", "the whole step"), ("baseline", "momentum and decay")):
                values_E = found.whole.tensors[f"{part}|{eta!r}"].numpy()
                what = f"measured change along {what} at eta {eta:g}, by evaluation rollout; "
                what += SPLIT
                self._array(f"{folder}/{part}/eta_{eta:g}.npy", values_E, what)
        for eta in self.study.per_sequence_etas:
            grad_EN = _stack(singles.tensors, "grad", rows, eta)
            base_E1 = found.whole.tensors[f"baseline|{eta!r}"].numpy()[:, None]
            both_EN = _stack(singles.tensors, "both", rows, eta) - base_E1
            end = f"eta_{eta:g}"
            what = f"measured change at eta {eta:g} along each measured rollout's own direction; "
            what += SPLIT
            self._array(f"{folder}/grad/{end}.npy", grad_EN, f"{what} [evaluation, measured]")
            what = f"the same at eta {eta:g} on top of the baseline, minus the baseline's; {SPLIT}"
            self._array(
                f"{folder}/baseline_plus_grad/{end}.npy", both_EN, f"{what} [evaluation, measured]"
            )
            total_N = np.full(len(self.study.probe.update.rollouts), np.nan)
            total_N[rows] = grad_EN.sum(0)
            what = f"measured change of H at eta {eta:g} along each rollout; NaN: not measured"
            self._array(f"{name}_grad_eta/{end}.npy", total_N, what)
            said = [{"rollout": row, **singles.facts[f"grad|{row}|{eta!r}"]} for row in rows]
            text = json.dumps(said, indent=1, allow_nan=False)
            self.files[f"{name}_grad_eta/{end}.json"] = text.encode()

    def _fisher(self, found: Evaluation) -> JSONObject:
        def answer() -> JSONObject:
            stage = fisher(found)
            eta, folder = stage.facts["eta"], f"{found.name}_fisher"
            centred = ", both gradients centred" if stage.facts["centred"] else ""
            done = f"first-order change of S_i by each update rollout at eta {eta:g}"
            for name, what, units in (
                ("kernel", f"K_ij = (grad S_i)^T P (grad S_j){centred}", "nats per eta"),
                ("cosine", f"K_ij / sqrt(K_ii K_jj){centred}", "1"),
                ("contribution", done, "nats"),
            ):
                values_EN, what = (
                    stage.tensors[f"{name}_EN"].numpy(),
                    f"{what} [evaluation, update]",
                )
                self._array(f"{folder}/{name}.npy", values_EN, what, units)
            what = f"measured change of S_i along the gradient part of the step at eta {eta:g}"
            self._array(f"{folder}/measured.npy", stage.tensors["measured_E"].numpy(), what)
            told = fisher_facts(stage)
            rows = told.pop("rollouts")
            self.files[f"{folder}/changes.json"] = json.dumps(rows, indent=1).encode()
            moved = sorted(rows, key=lambda row: -abs(row["measured"]))[:MOVED]
            return {**told, "moved": moved}

        return _answered(answer)

    def _table(self, found: Evaluation) -> None:
        import pyarrow
        import pyarrow.parquet

        decode = self.study.probe.checkpoint.tokenizer.decode
        rows = {**token_rows(found.tokens, decode), **whatif.fold_columns(found.tokens)}
        rows["piece"] = self._texts[1]
        table = pyarrow.table(rows)
        facts = json.dumps(whatif.facts(found.tokens)).encode()
        table = table.replace_schema_metadata({TABLE_FACTS: facts})
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer)
        self.files[f"{found.name}_tokens.parquet"] = buffer.getvalue()
        if found is self.evaluations[0]:
            self.files["tokens.parquet"] = buffer.getvalue()

    def _ranked(self, found: Evaluation, most: Most) -> list[RankedToken]:
        decode = self.study.probe.checkpoint.tokenizer.decode
        rollouts, out = self.study.probe.update.rollouts, []
        for token in ranked(found.tokens, self.study.asked.ranked_tokens, most=most):
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

    def _what_if(self, found: Evaluation, text: str) -> JSONObject:
        def answer() -> JSONObject:
            prediction = whatif.repredict(found.tokens, text)
            confirmation = None
            if self.study.asked.confirm:
                confirmation = _answered(lambda: confirmed(found, text))
            return {
                "name": prediction.name,
                "prediction": prediction_facts(prediction),
                "confirmation": confirmation,
            }

        return {"name": text, **_answered(answer)}

    def _summary(self, evaluations: list[EvaluationBatch], key: str) -> InfluenceResult:
        study, probe = self.study, self.study.probe
        step, batch = study.step_stage.facts, probe.update
        first, notes = evaluations[0], list(probe.notes)
        if step["norms"]["gradient"] == 0 and probe.real:  # a drawn batch comes with a note
            notes.append(
                "every group of the update batch has equal rewards: the update is momentum and "
                "weight decay alone"
            )
        if study.mode in DIFFERENTIATED:
            notes.append(f"differentiated {DIFFERENTIATED[study.mode]} ({study.mode})")
        if study.asked.plots and not can_draw():
            notes.append(NOT_DRAWN)
        result: JSONObject = {
            **INFLUENCE.stamp,
            "key": key,
            "checkpoint": probe.checkpoint.name,
            "step": probe.checkpoint.step,
            "base": probe.checkpoint.base,
            "lr": study.direction.lr,
            **study.lasting,
            "etas": list(study.etas),
            "per_sequence_etas": list(study.per_sequence_etas),
            "reference_eta": study.etas[0],
            "mode": study.mode,
            "clip_c": study.config.importance.clip_c,
            "plan": study.config.dump()["influence"],
            "update": {
                "rollouts": len(batch.rollouts),
                "tokens": int(batch.counted_NS.sum()),
                "prompts": len(batch.rollouts.prompt_N.unique()),
                "real": probe.real,
                "mean_reward": _mean(batch.reward_N),
                "objective": asdict(study.objective),
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
            "assumed": dict(probe.facts.assumed),
            "not_verifiable": list(
                still_open(probe.not_verifiable, step.get("certified", {}).get("step_distance"))
            ),
            "timings": dict(sorted(study.timings.items())),  # whatever was needed first
            "provenance": {
                **provenance(),
                "precision": step["precision"],
                "files": dict(probe.checkpoint.hashes),
                "coverage": dict(probe.checkpoint.coverage),
            },
        }
        return cast(InfluenceResult, result)


def _answered(answer: Callable[[], JSONObject]) -> JSONObject:
    """A question that has no answer says why, and costs the study nothing else."""
    try:
        return answer()
    except ValueError as error:
        return {"error": str(error)}


def _aggregate(found: Evaluation, eta: float) -> JSONObject:
    tokens, scale = found.tokens, eta / found.study.direction.lr
    out: JSONObject = {part: found.whole.facts[f"{part}|{eta!r}"] for part in ("full", "baseline")}
    baseline = sum(tokens.baseline.values())
    out |= {
        "first_order": scale * tokens.total,
        "first_order_baseline": scale * baseline,
        "first_order_gradient": scale * tokens.gradient,
        "grad_sum_measured": None,
        "reconstruction_error": None,
    }
    rows = found.measured_rows
    if len(rows) == len(tokens.rollout_N) and eta in found.study.per_sequence_etas:
        summed = math.fsum(found.singles.facts[f"grad|{row}|{eta!r}"]["value"] for row in rows)
        out["grad_sum_measured"] = summed
        out["reconstruction_error"] = out["full"]["value"] - out["baseline"]["value"] - summed
    return out


def _groups(found: Evaluation) -> JSONObject:
    """Every grouping that this batch allows."""
    scored = found.tokens.batch.reward_N is not None
    return {
        by: {label: asdict(group) for label, group in grouped(found.tokens, by).items()}
        for by in GROUPS
        if by != "correctness" or scored
    }


def _stack(tensors: Mapping[str, Any], part: str, rows: list[int], eta: float) -> np.ndarray:
    return np.stack([tensors[f"{part}|{row}|{eta!r}"].numpy() for row in rows], axis=1)


def _mean(reward_N: Any) -> float | None:
    return None if reward_N is None else float(reward_N.double().mean())
