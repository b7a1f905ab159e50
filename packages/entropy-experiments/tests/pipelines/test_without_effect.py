"""Keys that would draw a batch, where a batch is there already: refused or noted, never silent."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from entropy_experiments import Rollouts
from entropy_experiments.cli import app
from entropy_experiments.config import ConfigError, load_config, parse_config
from entropy_experiments.config.sections import BatchRequest
from entropy_experiments.pipelines.influence.batches import gather_study
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.pipelines.probe_sampling import open_checkpoint
from entropy_experiments.pipelines.without_effect import (
    DRAWING_UPDATE,
    SCORING,
    FixedBatch,
    evaluation_without_effect,
    update_without_effect,
)

pytestmark = pytest.mark.faults

FACTS = {"reward_functions": ["countdown"], "reward_weights": None, "advantage": "group"}


def batch(prompts: tuple[int, ...] = (0, 0, 1, 1, 2, 2)) -> FixedBatch:
    """Three prompts with two responses each, unless told otherwise."""
    n = len(prompts)
    response_NS = torch.tensor([[False, True]]).expand(n, 2)
    return FixedBatch(
        what="the update batch is the recorded one",
        instead="set data.update_rollouts: drawn",
        rollouts=Rollouts(
            tokens_NS=torch.zeros(n, 2, dtype=torch.int64),
            attention_NS=torch.ones(n, 2, dtype=torch.bool),
            response_NS=response_NS,
            prompt_N=torch.tensor(prompts),
        ),
    )


OTHER = {
    "data.update_prompts": "2",
    "data.responses_per_prompt": "4",
    "data.update_split": "test",
    "data.resample_equal_rewards": "false",
    "data.zero_advantage_tolerance": "0.1",
    "data.max_resamples": "0",
    "data.reward_functions": "[format]",
    "data.reward_weights": "[2.0]",
    "update.advantage": "none",
}


def test_every_key_of_a_drawn_batch_is_tried_below():
    assert set(OTHER) == {*DRAWING_UPDATE, *SCORING}


@pytest.mark.parametrize("key", OTHER)
def test_an_option_that_cannot_take_effect_is_refused(key):
    more = ["data.reward_functions=[countdown]"] if key == "data.reward_weights" else []
    config = load_config().with_overrides([*more, f"{key}={OTHER[key]}"])
    with pytest.raises(
        ConfigError,
        match=rf"--set: {key}: got .*, which has no effect: the update batch is the recorded one, "
        r"which .*\. Leave it out, or set data\.update_rollouts: drawn\.",
    ):
        update_without_effect(config, batch(), FACTS)


def test_the_message_says_what_the_record_has():
    config = parse_config({}).with_overrides(["batch_config.B_U=2", "data.responses_per_prompt=4"])
    with pytest.raises(
        ConfigError, match=r"(?s)update_prompts: got 2,.* has 3\..*got 4,.* has 2\."
    ):
        update_without_effect(config, batch(), FACTS)


def test_the_recorded_sizes_may_be_named():
    same = ["data.update_prompts=3", "data.responses_per_prompt=2", "update.advantage=group"]
    config = load_config().with_overrides([*same, "data.reward_functions=[countdown]"])
    assert update_without_effect(config, batch(), FACTS) == []
    with pytest.raises(ConfigError, match="which is taken as it is"):  # 1 to 3 responses
        update_without_effect(config, batch((0, 1, 1, 2, 2, 2)), FACTS)


def test_a_file_of_ones_own_is_meant_and_a_template_is_not(tmp_path):
    """A copy of a template repeats defaults: a note. Another value was chosen: an error."""
    assert update_without_effect(load_config("quick_look"), batch(), FACTS) == []
    file = tmp_path / "mine.yaml"
    file.write_text("data:\n  update_prompts: 16\n  max_resamples: 5\n")
    (note,) = update_without_effect(load_config(file), batch(), FACTS)
    assert note == (
        "without effect: data.update_prompts, data.max_resamples; "
        "the update batch is the recorded one"
    )
    file.write_text("data:\n  update_prompts: 5\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: line 2: data\.update_prompts: got 5,"):
        update_without_effect(load_config(file), batch(), FACTS)
    with pytest.raises(ConfigError, match=r"config: data\.update_prompts: got 5,"):
        update_without_effect(parse_config({"data": {"update_prompts": 5}}), batch(), FACTS)


def test_files_of_the_documents_still_run(tmp_path):
    """They are older than recorded batches, and always say B_U."""
    file = tmp_path / "theirs.yaml"
    file.write_text("batch_config: {B_U: 8, G: 4}\n")
    config = load_config(file)
    (note,) = update_without_effect(config, batch(), FACTS)
    assert note.startswith("without effect: data.update_prompts, data.responses_per_prompt;")
    with pytest.raises(ConfigError, match=r"--set: data\.update_prompts: got 4"):
        update_without_effect(config.with_overrides(["batch_config.B_U=4"]), batch(), FACTS)


def test_what_the_command_uses_elsewhere_is_not_refused():
    config = load_config().with_overrides(["data.reward_functions=[format]"])
    assert update_without_effect(config, batch(), FACTS, ["data.reward_functions"]) == []


def test_how_rewards_were_scaled_may_be_told_where_nothing_is_recorded():
    config = load_config().with_overrides(["update.advantage=none"])
    assert update_without_effect(config, batch(), {}) == []


def test_evaluation_rollouts_have_their_own_keys():
    config = load_config().with_overrides(["data.evaluation_prompts=3"])
    assert evaluation_without_effect(config, batch()) == []
    config = load_config().with_overrides(["data.evaluation_prompts=8", "data.evaluation_split=a"])
    with pytest.raises(
        ConfigError, match=r"(?s)evaluation_prompts: got 8,.* has 3.*_split: got 'a'"
    ):
        evaluation_without_effect(config, batch())


def test_run_refuses_it_before_anything_is_drawn(tmp_path):
    options = ["--set", "data.update_prompts=2", "--out", str(tmp_path), "--quiet"]
    result = CliRunner().invoke(app, ["run", *options])
    assert result.exit_code == 2
    assert "--set: data.update_prompts: got 2, which has no effect" in result.stderr
    assert "which has 48. Leave it out, or draw a batch, for a hypothetical step" in result.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.fixture(scope="module")
def opened():
    return open_checkpoint(parse_config({}), None)


def test_an_influence_study_refuses_it_in_every_form(opened):
    """By the data section, by its own section, and for a key that it needs for nothing else."""
    for changes, message in (
        ({"data.update_prompts": 2}, r"data\.update_prompts: got 2, .* has 48"),
        (
            {"influence.update_batch": {"params": {"prompts": 2}}},
            r"influence\.update_batch\.params: data\.update_prompts: got 2",
        ),
        ({"update.advantage": "none"}, r"update\.advantage: got 'none', .* has 'group'"),
        (
            {"influence.reward": False, "data.reward_functions": ["format"]},
            r"data\.reward_functions: got \['format'\]",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            gather_study(parse_config({}).replaced(changes), opened)


def test_saved_batches_decide_as_well(tmp_path):
    kept = tmp_path / "kept"
    sizes = ["data.evaluation_prompts=5", "data.update_prompts=1", "data.responses_per_prompt=2"]
    sizes += ["data.update_rollouts=drawn", "data.max_resamples=0", "sampling.max_new_tokens=3"]
    config = parse_config({}).with_overrides(sizes)
    gather(config.with_overrides([f"sampling.save={kept}"]), None)
    again = config.with_overrides([f"sampling.load={kept}"])
    with pytest.raises(
        ConfigError, match=r"data\.max_resamples: got 0, .*leave sampling\.load out"
    ):
        gather(again, None)
    again = again.replaced({"data.max_resamples": 5, "data.evaluation_prompts": 6})
    with pytest.raises(ConfigError, match=r"max_resamples"):  # 5 was asked for, too
        gather(again, None)
    sizes = [text for text in sizes if "max_resamples" not in text]
    again = parse_config({}).with_overrides([*sizes, f"sampling.load={kept}"])
    assert len(gather(again, None).evaluation) == 5
    again = again.with_overrides(["data.evaluation_prompts=6"])
    with pytest.raises(ConfigError, match=r"evaluation_prompts: got 6, .* which has 5\. Leave it"):
        gather(again, None)
    request = BatchRequest(params={"prompts": 4}).model_dump()
    study = parse_config({}).replaced(
        {"sampling.load": str(kept), "influence.evaluation_batches": [request]}
    )
    study = study.with_overrides(["sampling.max_new_tokens=3", "data.update_rollouts=drawn"])
    with pytest.raises(ConfigError, match=r"params: prompts: has no effect on evaluation rollouts"):
        gather_study(study, open_checkpoint(study, None))
