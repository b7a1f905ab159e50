"""One small probe for all that read what it found."""

import pytest

from entropy_experiments.pipelines.probe import OfflineEntropyProbe

BATCHES = {"batch_config": {"B_E": 8, "B_U": 2, "G": 4}, "memory_config": {"microbatch_size": 16}}


@pytest.fixture(scope="session")
def probed(tmp_path_factory):
    """(findings, decode) of a run with everything in it."""
    config = {
        **BATCHES,
        "update": {"batch": "drawn"},
        "rollouts": {"save": str(tmp_path_factory.mktemp("rollouts"))},
        "importance": {"clip_c": 5.0, "is_mode": "snis"},  # which has a to-go form beside it
    }
    return OfflineEntropyProbe(config, quiet=True).findings()
