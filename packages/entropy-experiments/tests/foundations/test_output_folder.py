"""One folder, one run: other settings in the same --out are refused, and a failure leaves none."""

import json

import pytest

from entropy_experiments.config import parse_config
from entropy_experiments.output_folder import CLAIM, claim_folder
from entropy_experiments.pipelines.influence.store import RunDirectory, Stage
from entropy_experiments.sampling.rollout_files import RolloutStore

pytestmark = pytest.mark.faults


def config(**changes):
    return parse_config({}).replaced({key.replace("__", "."): v for key, v in changes.items()})


def test_the_same_settings_go_on_and_others_are_refused(tmp_path):
    out = tmp_path / "out"
    with claim_folder(out, config(), verb="run"):
        (out / "results.json").write_text("{}")
    with claim_folder(out, config(detailed_logging__level="debug"), verb="run"):
        pass  # what is written down is no other result
    with (
        pytest.raises(ValueError, match=r"evaluation_prompts is \d+ there and 7 here.*--overwrite"),
        claim_folder(out, config(batch_config__B_E=7), verb="run"),
    ):
        pytest.fail("two runs in one folder")
    with (
        pytest.raises(ValueError, match="holds results of `entropy-probe run`"),
        claim_folder(out, config(), verb="measure"),
    ):
        pytest.fail("two verbs in one folder")
    with claim_folder(out, config(batch_config__B_E=7), verb="measure", overwrite=True):
        pass
    assert json.loads((out / CLAIM).read_text())["verb"] == "measure"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
def test_a_claim_that_is_none(tmp_path, text):
    (tmp_path / CLAIM).write_text(text)
    with (
        pytest.raises(ValueError, match=r"run\.json"),
        claim_folder(tmp_path, config(), verb="run"),
    ):
        pytest.fail("somebody else's folder")


def test_what_failed_at_once_claims_nothing(tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(ValueError, match="no such task"), claim_folder(out, config(), verb="run"):
        raise ValueError("no such task")
    assert not out.exists()

    def interrupted():
        with claim_folder(out, config(), verb="run"):
            (out / "rollouts").mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (out / CLAIM).is_file()  # what is finished can be gone on with


def test_rollouts_without_a_result_claim_nothing_against_other_settings(tmp_path):
    out = tmp_path / "out"

    def failed():
        with claim_folder(out, config(), verb="run"):
            (out / "logs" / "rollouts" / "units").mkdir(parents=True)
            (out / "logs" / "rollouts" / "units" / "a.safetensors").touch()
            raise ValueError("too few prompts")

    with pytest.raises(ValueError, match="too few prompts"):
        failed()
    with claim_folder(out, config(batch_config__B_E=7), verb="run"):
        (out / "results.json").write_text("{}")
    assert json.loads((out / CLAIM).read_text())["settings"]["batch_config.B_E"] == 7
    with pytest.raises(ValueError, match="holds results"), claim_folder(out, config(), verb="run"):
        pytest.fail("two runs in one folder")


def test_a_folder_deleted_meanwhile_is_an_error(tmp_path):
    """Not a few files of a run in a folder that was made anew."""
    store = RolloutStore(tmp_path / "rollouts")
    store.bind({"policy": "a"})
    (tmp_path / "rollouts" / RolloutStore.IDENTITY).unlink()
    (tmp_path / "rollouts").rmdir()
    with pytest.raises(FileNotFoundError, match=r"its folder is gone.*Run the same command again"):
        store.put("key", {})
    run = RunDirectory(tmp_path / "study")
    run.bind("a" * 64)
    (tmp_path / "study" / "study.json").unlink()
    (tmp_path / "study").rmdir()
    with pytest.raises(FileNotFoundError, match="study"):
        run.stages.put("base", "b" * 64, Stage(), 0.0)
