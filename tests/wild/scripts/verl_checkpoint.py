"""gloo ranks train tiny models with verl's own parts, and its manager saves them around one step.

verl's `apply_fsdp2`, `build_optimizer`, policy loss and `FSDPCheckpointManager`; three AdamW steps,
then global_step_3 with the batch of the next step beside it, that step, and global_step_4. Full
fine-tunes and LoRA, on one, two and three ranks, in fp64, so that the step can be compared to more
digits than fp32 has; and one in fp32, as people train.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from entropy_experiments.models.precision import true_float64
from entropy_experiments.sampling.rollout_files import save_update_batch
from entropy_experiments.types import UpdateBatch
from oracles.processes import on_ranks
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts, tiny_tokenizer

STEPS, LR = 3, 1e-3
CONTENTS = ["model", "optimizer", "extra"]
FACTS = {
    "loss": "dapo",
    "advantage": "group",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "beta": 0.0,
    "max_grad_norm": 0.3,
    "max_completion_length": 8,
    "temperature": 1.0,
}
"""What no checkpoint holds; token-mean of verl is the loss that TRL calls dapo."""
CASES = {
    1: [("full", True), ("lora", True)],
    2: [("full", True), ("lora", True), ("full", False), ("fsdp1", False)],
    3: [("full", True), ("lora", True)],
}
"""By world size: kind, and whether in fp64."""


def batch_of(step):
    """Six rollouts, so that each of one, two or three ranks has as many."""
    rollouts = tiny_rollouts(seed=step, prompts=(3, 3, 3, 5, 5, 5), responses=(4, 7, 2, 6, 3, 5))
    generator = torch.Generator().manual_seed(1000 + step)
    advantage_N1 = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    return UpdateBatch(rollouts=rollouts, advantage_NS=advantage_N1 * rollouts.response_NS)


def token_logprobs(model, rollouts):
    attention_NS = rollouts.attention_NS.long()
    inputs = {"input_ids": rollouts.tokens_NS, "attention_mask": attention_NS}
    positions_NS = (attention_NS.cumsum(1) - 1).clamp(min=0)
    logits_NSV = model(**inputs, position_ids=positions_NS).logits[:, :-1]
    logp_NSV = logits_NSV.log_softmax(-1)
    return logp_NSV.gather(-1, rollouts.tokens_NS[:, 1:, None])[..., 0]


def learn(model, optimizer, batch, kind):
    """One step on this rank's share, by verl's loss: the mean over all tokens of the batch."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    size, rank = dist.get_world_size(), dist.get_rank()
    share = slice(rank * 6 // size, (rank + 1) * 6 // size)
    rollouts = batch.rollouts.take(torch.arange(6)[share])
    response_NS = rollouts.response_NS[:, 1:]
    logp_NS = token_logprobs(model, rollouts)
    about = {"dp_size": size, "batch_num_tokens": int(batch.rollouts.response_NS.sum())}
    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    loss, _ = compute_policy_loss_vanilla(
        old_log_prob=logp_NS.detach(),
        log_prob=logp_NS,
        advantages=batch.advantage_NS[share, 1:].to(logp_NS.dtype),
        response_mask=response_NS,
        config=OmegaConf.create({**clip, "global_batch_info": about}),
    )
    loss.backward()
    if kind != "fsdp1":
        fsdp2_clip_grad_norm_(model.parameters(), max_norm=FACTS["max_grad_norm"])
    optimizer.step()
    optimizer.zero_grad()


def made_model(kind, double):
    plain = tiny_model()
    plain.config.architectures = [type(plain).__name__]  # as of a model that was loaded
    model = tiny_lora(base=plain) if kind == "lora" else plain
    return true_float64(model) if double else model


def save(model, optimizer, folder, step):
    from omegaconf import OmegaConf
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    manager = FSDPCheckpointManager(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        processing_class=tiny_tokenizer(),
        checkpoint_config=OmegaConf.create({"save_contents": CONTENTS, "load_contents": CONTENTS}),
    )
    manager.save_checkpoint(str(folder / f"global_step_{step}" / "actor"), global_step=step)


def sharded(model, kind):
    from verl.utils.fsdp_utils import apply_fsdp2

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh)
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
    return model


def train(folder):
    import verl.utils.fsdp_utils
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

    verl.utils.fsdp_utils.get_device_id = lambda: "cpu"  # clipping asks CUDA for its device
    size, rank = dist.get_world_size(), dist.get_rank()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    for kind, double in CASES[size]:
        out = Path(folder) / case_name(kind, size, double)
        model = sharded(made_model(kind, double), kind)
        settings = FSDPOptimizerConfig(lr=LR, weight_decay=0.1, betas=(0.9, 0.99))
        optimizer = build_optimizer(model.parameters(), settings)
        for step in range(STEPS):
            learn(model, optimizer, batch_of(step), kind)
        save(model, optimizer, out, STEPS)
        if kind == "fsdp1":
            continue
        following = batch_of(STEPS)
        if rank == 0:
            save_update_batch(out / f"global_step_{STEPS}" / "update_batch", following)
            (out / "entropy_probe.json").write_text(json.dumps(FACTS))
        learn(model, optimizer, following, kind)
        save(model, optimizer, out, STEPS + 1)
        dist.barrier()


def case_name(kind, size, double):
    return f"{kind}_{size}_{'fp64' if double else 'fp32'}"


def main(result):
    runs = {}
    for size, cases in CASES.items():
        on_ranks(size, train, str(result.parent))
        for kind, double in cases:
            name = case_name(kind, size, double)
            folder = result.parent / name / f"global_step_{STEPS}"
            files = [path for path in folder.rglob("*") if path.is_file()]
            runs[name] = {
                "checkpoint": str(folder),
                "files": sorted(str(path.relative_to(folder)) for path in files),
            }
    result.write_text(json.dumps(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
