"""Document 004's `utils.sequence_processor`; the home is `policy.scoring`."""

from entropy_experiments.policy.scoring import SequenceProcessor

__all__ = ["SequenceProcessor"]
