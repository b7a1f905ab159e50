"""Finished runs and studies for all that read them."""

import pytest

from entropy_experiments import EntropyInfluenceRunner
from entropy_experiments.config import parse_config
from entropy_experiments.pipelines.influence.batches import gather_study
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.pipelines.probe_sampling import open_checkpoint
from oracles.report_runs import small_study
from oracles.small_study import BATCHES, EVERYTHING, plan, settings_in


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


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """(run directory, summary, the inputs it was made of)."""
    folder = tmp_path_factory.mktemp("study") / "run"
    settings, asked = settings_in(folder), plan(folder, **EVERYTHING)
    summary = EntropyInfluenceRunner(settings, quiet=True).run(asked)
    assert summary["update"]["norms"]["gradient"] > 0  # otherwise nothing about it has teeth
    config = asked.applied(parse_config(settings))
    return folder, summary, gather_study(config, open_checkpoint(config, None))


@pytest.fixture(scope="session")
def report_run(tmp_path_factory):
    """A run directory to be read, not written."""
    return small_study(tmp_path_factory.mktemp("report") / "run")
