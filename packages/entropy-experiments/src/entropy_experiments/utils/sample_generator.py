"""Document 004's `utils.sample_generator`; the home is `sampling.generate`."""

from entropy_experiments.sampling.generate import SampleGenerator, UpdateBatchDraw

__all__ = ["SampleGenerator", "UpdateBatchDraw"]
