"""Document 004's `utils.sequence_processor`; the home is `models.scoring`."""

from entropy_experiments.models.scoring import SequenceProcessor

__all__ = ["SequenceProcessor"]
