"""Document 002's `detailed_logger`; the home is `pipelines.probe_log`."""

from entropy_experiments.pipelines.probe_log import (
    CORE,
    LEVELS,
    DetailedLogger,
    newest_log,
    read_log,
)

__all__ = ["CORE", "LEVELS", "DetailedLogger", "newest_log", "read_log"]
