"""FSDP: what is sharded is a blind spot, never healthy; and the process goes on."""

import json
import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
{imports}

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
{before}
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
{wrap}
adam = torch.optim.Adam(model.parameters())
for _ in range(4):
    model(torch.randn(4, 4)).square().mean().backward()
    adam.step()
    adam.zero_grad()
dist.destroy_process_group()
print("the end")
"""
_FSDP2 = {
    "imports": "from torch.distributed.fsdp import fully_shard",
    "wrap": "fully_shard(model[0]); fully_shard(model)",
}
_UNSHARDED = _FSDP2 | {"wrap": "fully_shard(model); model.set_reshard_after_backward(False)"}
_LATE = _FSDP2 | {
    "before": """
plain = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
for _ in range(5):
    plain(torch.randn(4, 4)).square().mean().backward()
    sgd.step()
    sgd.zero_grad()
""",
}
_PLAIN = {"imports": "", "wrap": ""}


def examined(tmp_path, mode, **parts):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(**{"before": "", **parts}))
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "gradient_doctor", "--mode", mode, "--json", str(out)]
    run = subprocess.run(
        [*command, str(script), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode in (0, 3), run.stderr
    assert "the end" in run.stdout
    return json.loads(out.read_text())["findings"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "mode"),
    [(_FSDP2, "trace"), (_FSDP2, "light"), (_UNSHARDED, "auto"), (_LATE, "auto")],
    ids=["whole", "light", "unsharded", "late"],
)
def test_fully_shard_is_a_blind_spot(tmp_path, parts, mode):
    findings = examined(tmp_path, mode, **parts)
    assert {f["number"] for f in findings} == {0}, findings
    sharded = [f for f in findings if "sharded" in f["what"]]
    assert len(sharded) == 1
    assert len(sharded[0]["parameters"]) == 4
    assert not [f for f in findings if "switched off" in f["what"]]


@pytest.mark.slow
def test_without_sharding_there_is_no_such_note(tmp_path):
    assert examined(tmp_path, "auto", **_PLAIN) == []
