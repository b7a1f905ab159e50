"""How an RL update changes a policy's entropy: predicted, measured, attributed.

The public names below are imported when first used, so that importing the package, or asking a
command for its help, does not import torch. `_HOME` is the one list of them: `make docs` writes
`__init__.pyi`, which says the same to type checkers, and a test compares the two.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME: dict[str, str] = {
    "Config": "config",
    "DetailedLogger": "pipelines.probe_log",
    "OfflineEntropyProbe": "pipelines.probe",
    "EntropyProbeCallback": "online.trl",
    "LoopProbe": "online.loop",
    "NoiseScale": "online.noise_scale",
    "StepRecorder": "online.step_recorder",
    "batch_from_tensors": "sampling.tensor_batches",
    "EntropyMeasurements": "pipelines.measure",
    "ExperimentPlan": "pipelines.measure",
    "BatchRequest": "pipelines.influence.runner",
    "EntropyInfluencePlan": "pipelines.influence.runner",
    "EntropyInfluenceRunner": "pipelines.influence.runner",
    "WorkspaceSpec": "pipelines.influence.runner",
    "what_if_from": "pipelines.influence.runner",
    "SampleGenerator": "sampling.generate",
    "SequenceProcessor": "models.scoring",
    "load_base_model": "checkpoints.base",
    "load_checkpoint": "checkpoints.load",
    "load_config": "config",
    "load_rollouts": "sampling.rollout_files",
    "load_update_batch": "sampling.rollout_files",
    "parse_config": "config",
    "EvaluationRequest": "pipelines.evaluation_request",
    "embedded_trajectory": "checkpoints.runs",
    "evaluate_checkpoints": "pipelines.evaluate",
    "probe_trajectory": "pipelines.trajectory",
    "read_log": "results",
    "save_rollouts": "sampling.rollout_files",
    "save_update_batch": "sampling.rollout_files",
    "EstimatorOptions": "estimate.options",
    "StepAnalysis": "attribution.analyze",
    "StepOptions": "attribution.analyze",
    "analyze_step": "attribution.analyze",
    "AdamGroup": "types",
    "Attribution": "types",
    "Direction": "types",
    "Estimand": "types",
    "Estimate": "types",
    "NucleusPolicy": "types",
    "OptimizerState": "types",
    "Params": "types",
    "Policy": "types",
    "Rollouts": "types",
    "SGDGroup": "types",
    "Scores": "types",
    "UpdateBatch": "types",
    "response_scores": "numerics.entropy",
    "response_support": "numerics.entropy",
    "token_scores": "numerics.entropy",
    "Objective": "update.objective",
    "token_coefficients": "update.objective",
    "loss_gradient": "update.gradient",
    "adamw_direction": "update.adamw",
    "sgd_direction": "update.sgd",
    "compute_update_vector_adamw": "update.adamw",
    "observed": "update.observed",
    "optimizer_certificate": "update.certificate",
    "step_certificate": "update.certificate",
    "read_state": "update.optimizer",
    "Case": "estimate.measured",
    "curvature": "estimate.curvature",
    "entropy_gradient": "estimate.gradient",
    "entropy_level": "estimate.level",
    "first_order": "estimate.first_order",
    "first_order_by_part": "estimate.first_order",
    "measured": "estimate.measured",
    "measured_many": "estimate.measured",
    "odd_and_even": "estimate.measured",
    "resampled": "estimate.resampled",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
