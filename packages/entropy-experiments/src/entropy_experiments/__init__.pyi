# Written by docs/make_reference.py from _HOME: `make docs` writes it again.
from entropy_experiments.attribution.analyze import StepAnalysis, StepOptions, analyze_step
from entropy_experiments.checkpoints.base import load_base_model
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.config import Config, load_config, parse_config
from entropy_experiments.estimate.curvature import curvature
from entropy_experiments.estimate.first_order import first_order, first_order_by_part
from entropy_experiments.estimate.gradient import entropy_gradient
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.measured import Case, measured, measured_many, odd_and_even
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.resampled import resampled
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.entropy import response_scores, response_support, token_scores
from entropy_experiments.online.loop import LoopProbe
from entropy_experiments.online.noise_scale import NoiseScale
from entropy_experiments.online.step_recorder import StepRecorder
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.pipelines.evaluate import evaluate_checkpoints
from entropy_experiments.pipelines.evaluation_request import EvaluationRequest
from entropy_experiments.pipelines.influence.runner import (
    BatchRequest,
    EntropyInfluencePlan,
    EntropyInfluenceRunner,
    WorkspaceSpec,
    what_if_from,
)
from entropy_experiments.pipelines.measure import EntropyMeasurements, ExperimentPlan
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.pipelines.probe_log import DetailedLogger
from entropy_experiments.pipelines.trajectory import probe_trajectory
from entropy_experiments.results import read_log
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.sampling.rollout_files import (
    load_rollouts,
    load_update_batch,
    save_rollouts,
    save_update_batch,
)
from entropy_experiments.sampling.tensor_batches import batch_from_tensors
from entropy_experiments.types import (
    AdamGroup,
    Attribution,
    Direction,
    Estimand,
    Estimate,
    NucleusPolicy,
    OptimizerState,
    Params,
    Policy,
    Rollouts,
    Scores,
    SGDGroup,
    UpdateBatch,
)
from entropy_experiments.update.adamw import adamw_direction, compute_update_vector_adamw
from entropy_experiments.update.certificate import optimizer_certificate, step_certificate
from entropy_experiments.update.gradient import loss_gradient
from entropy_experiments.update.objective import Objective, token_coefficients
from entropy_experiments.update.observed import observed
from entropy_experiments.update.optimizer import read_state
from entropy_experiments.update.sgd import sgd_direction

__version__: str

__all__ = [
    "AdamGroup",
    "Attribution",
    "BatchRequest",
    "Case",
    "Config",
    "DetailedLogger",
    "Direction",
    "EntropyInfluencePlan",
    "EntropyInfluenceRunner",
    "EntropyMeasurements",
    "EntropyProbeCallback",
    "Estimand",
    "Estimate",
    "EstimatorOptions",
    "EvaluationRequest",
    "ExperimentPlan",
    "LoopProbe",
    "NoiseScale",
    "NucleusPolicy",
    "Objective",
    "OfflineEntropyProbe",
    "OptimizerState",
    "Params",
    "Policy",
    "Rollouts",
    "SGDGroup",
    "SampleGenerator",
    "Scores",
    "SequenceProcessor",
    "StepAnalysis",
    "StepOptions",
    "StepRecorder",
    "UpdateBatch",
    "WorkspaceSpec",
    "adamw_direction",
    "analyze_step",
    "batch_from_tensors",
    "compute_update_vector_adamw",
    "curvature",
    "embedded_trajectory",
    "entropy_gradient",
    "entropy_level",
    "evaluate_checkpoints",
    "first_order",
    "first_order_by_part",
    "load_base_model",
    "load_checkpoint",
    "load_config",
    "load_rollouts",
    "load_update_batch",
    "loss_gradient",
    "measured",
    "measured_many",
    "observed",
    "odd_and_even",
    "optimizer_certificate",
    "parse_config",
    "probe_trajectory",
    "read_log",
    "read_state",
    "resampled",
    "response_scores",
    "response_support",
    "save_rollouts",
    "save_update_batch",
    "sgd_direction",
    "step_certificate",
    "token_coefficients",
    "token_scores",
    "what_if_from",
]
