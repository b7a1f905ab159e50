"""Document 004's `utils.detailed_logger`; the home is `pipelines.probe_log`."""

from entropy_experiments.detailed_logger import CORE, LEVELS, DetailedLogger, newest_log, read_log

__all__ = ["CORE", "LEVELS", "DetailedLogger", "newest_log", "read_log"]
