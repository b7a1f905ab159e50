"""The dialect of documents 001 to 004, translated into the schema and back.

`FIELDS` is the dialect: every key of the documents, in their order, with the key it is today. A
file may use either name of a setting; both with different values are an error. Some settings have
several names in the documents: null under a second name says nothing.

`as_documents` is the way back. What identifies a resumable study or an interrupted run is hashed in
this form, so that folders written before the schema had its names are continued.

Sizes with gradient (microbatch_size) and without (tf_batch_size) are two settings: document 004
advises raising the second, which costs little memory, and document 002 lowering the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from entropy_experiments.config.fields import Section
from entropy_experiments.config.keys import (
    MISSING,
    Alias,
    Resolved,
    copied,
    every_key,
    look,
    put,
    remove,
    shown,
    unify,
)
from entropy_experiments.config.problems import EXPECTED, MOST, described, nearest

FIELDS: dict[str, str] = {
    "checkpoint.checkpoint_path": "checkpoint.path",
    "checkpoint.adapter_path": "checkpoint.adapter",
    "checkpoint.optimizer_path": "checkpoint.optimizer",
    "checkpoint.base": "checkpoint.base",
    "checkpoint.backbone": "checkpoint.backbone",
    "checkpoint.dtype": "checkpoint.dtype",
    "checkpoint.device_map": "checkpoint.device",
    "checkpoint.sharding": "checkpoint.sharding",
    "batch_config.dataset_name": "data.dataset",
    "batch_config.dataset_path": "data.file",
    "batch_config.split": "data.split",
    "batch_config.E_split": "data.evaluation_split",
    "batch_config.U_split": "data.update_split",
    "batch_config.chat_template": "data.chat_template",
    "batch_config.B_E": "data.evaluation_prompts",
    "batch_config.B_U": "data.update_prompts",
    "batch_config.G": "data.responses_per_prompt",
    "batch_config.evaluation": "data.evaluation_rollouts",
    "batch_config.filter_zero_advantage_prompts": "data.resample_equal_rewards",
    "batch_config.advantage_filter_tol": "data.zero_advantage_tolerance",
    "batch_config.max_resample_attempts": "data.max_resamples",
    "generation.temperature": "sampling.temperature",
    "generation.top_p": "sampling.top_p",
    "generation.max_new_tokens": "sampling.max_new_tokens",
    "generation.gen_batch_size": "sampling.batch_size",
    "generation.tf_batch_size": "memory.forward_batch_size",
    "generation.stop": "sampling.stop",
    "update.loss": "update.loss",
    "update.advantage": "update.advantage",
    "update.ratio": "update.ratio",
    "update.clip_low": "update.clip_low",
    "update.clip_high": "update.clip_high",
    "update.delta": "update.delta",
    "update.sapo_positive": "update.sapo_positive",
    "update.sapo_negative": "update.sapo_negative",
    "update.beta": "update.beta",
    "update.kl_ratio": "update.kl_ratio",
    "update.entropy_coef": "update.entropy_coef",
    "update.max_grad_norm": "update.max_grad_norm",
    "update.max_completion_length": "update.max_completion_length",
    "update.num_iterations": "update.num_iterations",
    "update.lr": "update.lr",
    "update.amp_dtype": "update.amp_dtype",
    "update.batch": "data.update_rollouts",
    "reward.functions": "data.reward_functions",
    "reward.weights": "data.reward_weights",
    "reward.seconds": "data.reward_seconds",
    "rollouts.save": "sampling.save",
    "rollouts.load": "sampling.load",
    "probe_rework.compute_delta_h1": "predict.enabled",
    "probe_rework.master_seed": "sampling.seed",
    "importance.enabled": "measure.enabled",
    "importance.is_mode": "measure.weighting",
    "importance.report_per_token": "entropy.unit",
    "importance.clip_c": "measure.clip_log_weights",
    "estimator.eta_list": "measure.learning_rates",
    "estimator.eta_sweep": "measure.sweep",
    "estimator.single_eta": "measure.learning_rate",
    "estimator.use_simple_entropy_for_x": "entropy.surprisal",
    "approx_delta_h.method": "predict.method",
    "approx_delta_h.normalize": "entropy.unit",
    "approx_delta_h.microbatch_size": "memory.microbatch_size",
    "approx_delta_h.baseline": "predict.baseline",
    "approx_delta_h.variance": "predict.noise_floor",
    "approx_delta_h.curvature": "predict.curvature",
    "true_delta_h.enabled": "measure.enabled",
    "true_delta_h.is_mode": "measure.weighting",
    "true_delta_h.report_per_token": "entropy.unit",
    "true_delta_h.clip_c": "measure.clip_log_weights",
    "true_delta_h.microbatch_size": "memory.microbatch_size",
    "true_delta_h.tf_batch_size": "memory.forward_batch_size",
    "memory_config.microbatch_size": "memory.microbatch_size",
    "memory_config.gradient_checkpointing": "memory.gradient_checkpointing",
    "influence.workspace.kind": "influence.update_batch.kind",
    "influence.workspace.params": "influence.update_batch.params",
    "influence.workspace.load_path": "influence.update_batch.load_path",
    "influence.workspace.save_path": "influence.update_batch.save_path",
    "influence.evaluation_requests": "influence.evaluation_batches",
    "influence.etas": "influence.learning_rates",
    "influence.per_sequence_etas": "influence.rollout_learning_rates",
    "influence.grad_chunk_size": "influence.directions_per_pass",
    "influence.microbatch_size": "memory.microbatch_size",
    "influence.measured_rollouts": "influence.measured_rollouts",
    "influence.finite": "influence.measured_matrix",
    "influence.leave_one_out": "influence.leave_one_out",
    "influence.fisher": "influence.fisher",
    "influence.fisher_centred": "influence.fisher_centred",
    "influence.folds": "influence.folds",
    "influence.block_mb": "influence.gradient_block_mb",
    "influence.reward": "influence.reward",
    "influence.ranked_tokens": "influence.ranked_tokens",
    "influence.what_if": "influence.what_if",
    "influence.confirm": "influence.confirm",
    "influence.entropy_budget": "influence.entropy_budget",
    "influence.plots": "influence.plots",
    "influence.run_directory": "influence.folder",
    "experiment.compute_true": "measure.measured",
    "experiment.compute_linear": "measure.first_order",
    "experiment.compute_linquad": "measure.second_order",
    "experiment.eta_list": "measure.learning_rates",
    "experiment.repeats": "measure.repeats",
    "experiment.clip_overrides": "measure.more_clips",
    "precision.runtime_dtype": "checkpoint.dtype",
    "detailed_logging.enabled": "output.log",
    "detailed_logging.level": "output.level",
    "detailed_logging.log_sequences": "output.log_sequences",
    "detailed_logging.log_tokens": "output.log_tokens",
    "detailed_logging.log_raw_tensors": "output.log_raw_tensors",
    "detailed_logging.output_directory": "output.folder",
    "detailed_logging.compress": "output.compress",
    "detailed_logging.max_files": "output.max_logs",
    "output.results_path": "output.results_file",
}
"""Key of the documents: key of the schema."""

SECOND_NAMES = {
    "importance.report_per_token",
    "approx_delta_h.microbatch_size",
    "true_delta_h.enabled",
    "true_delta_h.is_mode",
    "true_delta_h.report_per_token",
    "true_delta_h.clip_c",
    "true_delta_h.microbatch_size",
    "true_delta_h.tf_batch_size",
    "influence.microbatch_size",
    "experiment.eta_list",
    "precision.runtime_dtype",
}
"""Keys that repeat another one of the documents: null there is *not set*."""

BARE_NAMES: dict[str, str] = {
    "microbatch_size": "memory.microbatch_size",
    "tf_micro_batch": "memory.forward_batch_size",
    "rollout_batch_size": "sampling.batch_size",
    "batch_config.rollout_batch_size": "sampling.batch_size",
}
"""Names of document 001 for the same; a stored configuration never had them."""

UNIT = {True: "per_token", False: "per_sequence"}
_TRUE_OR_FALSE = {"importance.report_per_token": UNIT, "true_delta_h.report_per_token": UNIT}

_WEIGHTS = "the update's token weights are update.loss, the entropy's unit entropy.unit"
_STEP = (
    "the step is rebuilt in the parameters' precision, and the verdict notes it where training's "
    "(update.amp_dtype) was another"
)
_SUMS = "sums over ranks are always exact, there is nothing to choose"
_TRAINING = "training has a configuration of its own: entropy-probe train --config"
RETIRED: dict[str, str] = {
    "probe_rework.weighting_mode": _WEIGHTS,
    "probe_rework.mb_size_prompts": "passes count sequences: memory.microbatch_size",
    "probe_rework.buffers_dtype": "sums are kept in float64",
    "probe_rework.compute_conditional_variance": "intervals are always by prompt",
    "probe_rework.conditional_variance_batch_size": "intervals are always by prompt",
    "probe_rework.compute_vx_vy_variance": "intervals are always by prompt",
    "probe_rework.ddp_allreduce": _SUMS,
    "memory_config.amp": _STEP,
    "memory_config.dtype": "the weights' precision is checkpoint.dtype",
    "generation.rb_requires_grad": "gradients are computed where they are needed",
    "precision.update_vector": _STEP,
    "precision.entropy_dtype": "logits are at least float32, sums over tokens always float64",
    "approx_delta_h.baseline.kind": "there is one baseline: predict.baseline true or false",
    "true_delta_h.measure": "weights follow the distribution that was sampled: sampling.top_p",
    "output.log_level": "the screen is --quiet, the log's detail is output.level",
    "simple_entropy_probe.debug": "the log's detail is output.level",
    "simple_entropy_probe.enabled": _TRAINING,
    "total_steps": _TRAINING,
    "buffer_size": _TRAINING,
    "training": _TRAINING,
    "distributed": _SUMS,
}
"""Keys of the documents without a meaning today: accepted with one line that says why."""


class Precision(Section):
    """Keys with one value: the documents may say it, the schema has no choice to offer."""

    allow_tf32: bool = False
    matmul_precision: Literal["highest", "high", "medium"] = "highest"

    @model_validator(mode="after")
    def _full(self) -> Precision:
        wrong = []
        if self.allow_tf32:
            wrong.append("precision.allow_tf32 is true, expected false")
        if self.matmul_precision != "highest":
            got = self.matmul_precision
            wrong.append(f"precision.matmul_precision is {got!r}, expected 'highest'")
        if wrong:
            raise ValueError(
                f"{'; '.join(wrong)}. TF32 keeps 10 bits of a product, fewer than the change of "
                "entropy needs: the probe asserts that float32 means float32. Leave the key out; "
                "less memory is checkpoint.dtype: bfloat16."
            )
        return self


class _Constants(Section):
    precision: Precision = Precision()


ALIASES: tuple[Alias, ...] = tuple(
    Alias(
        spelling=old,
        canonical=new,
        values=_TRUE_OR_FALSE.get(old),
        nullable=old in FIELDS and old not in SECOND_NAMES,
    )
    # First names first: of two spellings that disagree, the message calls the second one wrong.
    for old, new in sorted({**FIELDS, **BARE_NAMES}.items(), key=lambda row: row[0] in SECOND_NAMES)
    if old != new
)
"""Every name of the documents that is not the schema's own."""


@cache
def aliases_of(canonical: str) -> tuple[Alias, ...]:
    """The documents' names of one key of the schema."""
    return tuple(alias for alias in ALIASES if alias.canonical == canonical)


def spellings(key: str) -> set[str]:
    """All names of the settings that `key` is, or is the section of."""
    inside = f"{key}."
    canonical = {
        alias.canonical
        for alias in ALIASES
        if key in (alias.spelling, alias.canonical)
        or alias.canonical.startswith(inside)
        # a section replaces its own settings, not those that it names a second time
        or (alias.spelling.startswith(inside) and alias.spelling not in SECOND_NAMES)
    }
    return canonical | {alias.spelling for alias in ALIASES if alias.canonical in canonical} | {key}


def translate(mapping: Mapping[str, Any], fields: Mapping[str, Any]) -> Resolved:
    """Any mixture of the two dialects in the schema's keys. `fields`: those of the schema."""
    resolved = Resolved(mapping=copied(mapping))
    for section in [key for key, value in resolved.mapping.items() if value is None]:
        resolved.mapping[section] = {}  # a section whose keys are all commented out
    for key, why in RETIRED.items():
        if look(resolved.mapping, key) is not MISSING:
            remove(resolved.mapping, key)
            resolved.notes.append(f"{key}: has no effect; {why}.")
    for canonical in dict.fromkeys(alias.canonical for alias in ALIASES):
        unify(resolved, canonical, aliases_of(canonical))
    _check_constants(resolved)
    for section in SECTIONS:
        if section not in fields:
            _refuse_rest(resolved, section, fields)
    _refuse_rest(resolved, "influence.workspace", fields)
    return resolved


def _check_constants(resolved: Resolved) -> None:
    section = resolved.mapping.get("precision", MISSING)
    if not isinstance(section, Mapping):
        return
    own = {name: section[name] for name in Precision.model_fields if name in section}
    try:
        _Constants.model_validate({"precision": own})
    except ValidationError as failure:
        resolved.wrong += described(failure, _documents(), {})[0]
    for name in own:
        remove(resolved.mapping, f"precision.{name}")


def _refuse_rest(resolved: Resolved, section: str, fields: Mapping[str, Any]) -> None:
    """Whatever stays in a section of the documents once its known keys are taken out."""
    rest = look(resolved.mapping, section)
    if rest is MISSING:
        return
    if not isinstance(rest, Mapping):
        resolved.wrong.append((section, f"got {shown(rest)}, expected {EXPECTED['model_type']}."))
    else:
        for key in islice(rest, MOST):
            dotted = f"{section}.{key}"
            hint = nearest(dotted, known_keys(fields), listed=fields)
            resolved.wrong.append((dotted, f"unknown key. {hint}"))
        resolved.more += max(0, len(rest) - MOST)
    remove(resolved.mapping, section)


def as_documents(dump: Mapping[str, Any]) -> dict[str, Any]:
    """A whole configuration, as `Config.dump` gives it, under the documents' keys.

    All of them, second names too, in the documents' order: what stored studies were hashed by.
    """
    out: dict[str, Any] = {}
    for old, new in FIELDS.items():
        value = look(dump, new)
        values = _TRUE_OR_FALSE.get(old)
        put(out, old, value if values is None else _inverse(values)[value])
    out["precision"] |= Precision().model_dump(mode="json")
    return out


def renamed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a run stored, of whichever version, under the schema's keys; nothing is judged.

    For readers of finished runs: a key that nobody knows any more stays as it is.
    """
    out = copied(stored)
    for alias in reversed(ALIASES):  # of several names the first one's value stays
        value = look(out, alias.spelling)
        if value is not MISSING:
            remove(out, alias.spelling)
            put(out, alias.canonical, alias.read(value))
    for name in Precision.model_fields:
        remove(out, f"precision.{name}")
    return out


def _inverse(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {value: key for key, value in values.items()}


SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(old.partition(".")[0] for old in FIELDS))
"""Sections of the documents, in their order."""


@cache
def _documents() -> dict[str, Any]:
    """The documents' keys, nested; values are the keys of the schema."""
    out: dict[str, Any] = {}
    for old, new in FIELDS.items():
        put(out, old, new)
    for name in Precision.model_fields:
        put(out, f"precision.{name}", None)
    return out


def document_keys() -> tuple[str, ...]:
    """Every key of the documents that has a meaning, in their order."""
    return tuple(every_key(_documents()))


def known_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the schema, then those of the documents, nested: what a misspelt key may be."""
    out = copied(fields)
    for key in document_keys():
        if look(out, key) is MISSING:
            put(out, key, None)
    return out


def translation(origin: Mapping[str, str]) -> str | None:
    """One line that says what the documents' keys of a file became."""
    if not origin:
        return None
    pairs = [f"{old} is {new}" for new, old in origin.items()]
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    return (
        f"written in the documents' keys: {', '.join(pairs[:3])}{more}. `entropy-probe config "
        "migrate FILE` writes today's."
    )


def explained() -> Iterable[tuple[str, str]]:
    """Accepted keys that the schema does not have, with what becomes of them."""
    for alias in ALIASES:
        yield alias.spelling, f"Read as {alias.canonical}."
    for name in Precision.model_fields:
        yield f"precision.{name}", f"Has one value: {shown(getattr(Precision(), name))}."
    for key, why in RETIRED.items():
        yield key, f"Has no effect: {why}."
