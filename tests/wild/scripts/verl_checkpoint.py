"""Two gloo ranks train a tiny model under FSDP2, and verl's own manager writes the checkpoint."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from oracles.processes import on_ranks
from oracles.tiny_models import VOCABULARY, tiny_model, tiny_tokenizer

RANKS, STEPS = 2, 3
CONTENTS = ["model", "optimizer", "extra"]


def write_checkpoint(folder):
    from omegaconf import OmegaConf
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(RANKS)}
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(3, VOCABULARY, (4, 8), generator=generator)
    for _ in range(STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    manager = FSDPCheckpointManager(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        processing_class=tiny_tokenizer(),
        checkpoint_config=OmegaConf.create({"save_contents": CONTENTS, "load_contents": CONTENTS}),
    )
    manager.save_checkpoint(folder, global_step=STEPS)


def main(result):
    folder = result.parent / f"global_step_{STEPS}" / "actor"
    on_ranks(RANKS, write_checkpoint, str(folder))
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    result.write_text(json.dumps({"checkpoint": str(folder.parent), "files": files}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
