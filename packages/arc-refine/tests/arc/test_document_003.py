"""Document 003's snippets, executed as they stand there; its model's name is a local folder."""

import sys
from pathlib import Path

import pytest
import torch

from arc.small import Small, write_tasks
from arc_refine.document_003 import PolicyRL, QwenCfg, QwenHybridPrompt
from oracles.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
MODEL = "Qwen/Qwen2.5-1.5B"
PROMPT = """
qwen = QwenHybridPrompt(
    prompt_dim=256, numeric_in_dim=15, fuse="mean",
    qwen=QwenCfg(model_name="Qwen/Qwen2.5-1.5B", dtype="float32", use_qwen=True)  # FIX: dtype="float32"
).to(device)
"""  # noqa: E501
REFINE = """
refined_prompt, rl_info = policy_rl.refine_prompt(qwen_prompt, ctrl_vec, feat_sum)

# DETACH RL INFO to make it independent of main computation graph
# This allows RL update to backward independently without graph conflicts
rl_info = {k: (v.detach() if isinstance(v, torch.Tensor) else v) for k, v in rl_info.items()}
"""
SCALER = """
scaler.scale(combined_loss).backward()  # No manual unscale_
scaler.step(optimizer)                  # Scaler handles unscaling internally
scaler.update()
"""
UPDATE = "policy_rl.update(rl_info, reward)"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model of the document's name; the root's modules can be imported."""
    tiny_model("qwen2").save_pretrained(tmp_path / MODEL)
    tiny_tokenizer().save_pretrained(tmp_path / MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("fixed", "policy_refined", "loss_function"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_its_training_step(here):
    """The whole path of its diagram: every group gets a gradient, and both updates move weights."""
    names = {"device": "cpu", "torch": torch}
    exec("from fixed import QwenHybridPrompt, QwenCfg", names)
    exec("from policy_refined import PolicyRL", names)
    exec("from loss_function import EFE", names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(PROMPT, names)
        small = Small(write_tasks(here / "tasks"), prompt_width=256)
        batch, agent = small.batch(), small.networks.agent
        qwen, efe_loss = names["qwen"], names["EFE"](256, small.config.agent_width)
        policy_rl = names["PolicyRL"](256, 15, 15)
    assert qwen.lm_trains
    assert {p.dtype for p in qwen.parameters()} == {torch.float32}
    qwen.train()
    efe_loss.observe(batch.targets)
    trained = [p for m in (qwen, agent, efe_loss) for p in m.parameters() if p.requires_grad]
    names |= {
        "policy_rl": policy_rl,
        "qwen_prompt": qwen(batch.inputs),
        "ctrl_vec": batch.inputs.features_BF,
        "feat_sum": batch.inputs.features_BF,
        "scaler": torch.amp.GradScaler("cpu"),
        "optimizer": torch.optim.AdamW(trained, lr=1e-3),
        "reward": torch.linspace(-1, 1, len(batch.inputs.texts)),
    }
    exec(REFINE, names)
    refined = names["refined_prompt"]
    assert refined.requires_grad
    assert not torch.equal(refined, names["qwen_prompt"])
    weights = small.networks.backward
    behind = weights and weights(batch.inputs, batch.targets, refined)
    terms = efe_loss(agent(batch.inputs, refined), behind, batch.targets, refined)
    names["combined_loss"] = terms.total
    before = [p.detach().clone() for p in trained]
    exec(SCALER, names)
    language = [p for n, p in qwen.named_parameters() if n.startswith("lm.") and p.requires_grad]
    assert language
    assert sum(float(p.grad.square().sum()) for p in language) > 0  # `Qwen_grad`
    moved = [not torch.equal(a, b) for a, b in zip(before, trained, strict=True)]
    assert all(moved)
    policy = [p.detach().clone() for p in policy_rl.policy.parameters()]
    main = [p.detach().clone() for p in trained]
    exec(UPDATE, names)
    assert all(
        not torch.equal(a, b) for a, b in zip(policy, policy_rl.policy.parameters(), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(main, trained, strict=True))


def test_a_prompt_that_would_see_the_answer_is_refused(here):
    qwen = QwenHybridPrompt(prompt_dim=16, qwen=QwenCfg(use_qwen=False))
    with pytest.raises(TypeError, match=r"knows the answer: call qwen\(batch.inputs\)"):
        qwen("tr", "inp", "out")


def test_what_is_refused(here):
    with pytest.raises(ValueError, match="a gradient scaler cannot unscale"):
        QwenCfg(dtype="float16")
    with pytest.raises(ValueError, match="numeric_in_dim is 12; expected 15"):
        QwenHybridPrompt(prompt_dim=16, numeric_in_dim=12)
    with pytest.raises(ValueError, match="expected mean, text, numeric"):
        QwenHybridPrompt(prompt_dim=16, fuse="max")
    with pytest.raises(FileNotFoundError, match="is no folder; expected tiny, smollm2"):
        QwenHybridPrompt(prompt_dim=16, qwen=QwenCfg(model_name="Qwen/Another"))
    policy_rl = PolicyRL(16, 15, 15)
    _, info = policy_rl.refine_prompt(torch.zeros(2, 16), torch.zeros(2, 15), torch.zeros(2, 15))
    with pytest.raises(ValueError, match="3 rewards of 2 refined prompts"):
        policy_rl.update(info, torch.zeros(3))


@pytest.mark.parametrize("states", [1, 8])
def test_the_update_learns_what_is_rewarded(states):
    """A bandit: the reward is nearness to a corner of the box."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy_rl = PolicyRL(4, 2, 1, lr=0.002)
    prompt, ctrl, feat = torch.zeros(states, 4), torch.ones(states, 2), torch.ones(states, 1)

    def rewarded() -> float:
        refined, info = policy_rl.refine_prompt(prompt, ctrl, feat)
        reward = 1 - (refined - 0.4).square().sum(-1)
        policy_rl.update(info, reward)
        return float(reward.mean())

    seen = [rewarded() for _ in range(400)]
    assert sum(seen[-20:]) / 20 > sum(seen[:20]) / 20 + 0.1
