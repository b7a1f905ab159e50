"""Document 004's `utils.sample_generator`; the home is `rollouts.sample`."""

from entropy_experiments.rollouts.sample import SampleGenerator, UpdateBatchDraw

__all__ = ["SampleGenerator", "UpdateBatchDraw"]
