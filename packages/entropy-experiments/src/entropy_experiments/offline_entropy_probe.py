"""Documents 002 and 004's `offline_entropy_probe`; the home is `pipelines.probe`."""

from entropy_experiments.pipelines.probe import OfflineEntropyProbe

__all__ = ["OfflineEntropyProbe"]
