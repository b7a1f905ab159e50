"""Document 002's `detailed_logger`; the home is `report.logs`."""

from entropy_experiments.report.logs import CORE, LEVELS, DetailedLogger, newest_log, read_log

__all__ = ["CORE", "LEVELS", "DetailedLogger", "newest_log", "read_log"]
