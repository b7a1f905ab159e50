"""Document 004's `entropy_experiment_runner`; the home is `pipelines.measure`."""

from entropy_experiments.pipelines.measure import EntropyMeasurements, ExperimentPlan

__all__ = ["EntropyMeasurements", "ExperimentPlan"]
