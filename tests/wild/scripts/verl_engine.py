"""verl's own FSDP engine, mini-batches and loss on gloo ranks, recorded, resumed and recorded on.

verl's TrainingWorker cuts a batch into mini-batches and passes (`train_mini_batch`), its
FSDPEngineWithLMHead computes, clips and steps, its `ppo_loss` is the loss, its checkpoint manager
saves and loads. Of verl nothing is replaced but the platform (a CPU, which it has no class for) and
the web servers of its rollout engines.
Responses have holes, and one is rejected as a whole.
"""

import inspect
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist

from oracles.processes import on_ranks
from oracles.tiny_models import tiny_model, tiny_rollouts, tiny_tokenizer

BATCHES, MINI, EPOCHS, RESPONSES = 3, 4, 2, 8
"""A batch of eight rollouts: two mini-batches, two passes over each, four steps."""
RESUMED = 2
"""Batches learned from before training was stopped and resumed."""
ACTOR = {
    "strategy": "fsdp2",
    "rollout_n": 1,
    "ppo_mini_batch_size": MINI,
    "ppo_micro_batch_size_per_gpu": 1,
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.05,
    "clip_ratio_high": 0.07,
    "clip_ratio_c": 3.0,
    "use_kl_loss": False,
    "ppo_epochs": EPOCHS,
}
CASES = {
    "one": {"size": 1, "loss_agg_mode": "token-mean", "entropy_coeff": 0.0},
    "bonus": {"size": 1, "loss_agg_mode": "token-mean", "entropy_coeff": 0.3},
    "bonus_ranks": {"size": 2, "loss_agg_mode": "token-mean", "entropy_coeff": 0.3},
    "bonus_sequences": {"size": 2, "loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.3},
}


def on_a_cpu():
    """verl's platform of CUDA, with the names of a CPU; without its servers of rollouts."""
    sys.modules["trl"] = None  # verl patches a name that today's trl no longer has
    sys.modules |= {name: MagicMock() for name in ("uvicorn", "fastapi")}
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class PlatformCPU(PlatformCUDA):
        device_name = property(lambda self: "cpu")
        device_module = property(lambda self: torch.cpu)

        def current_device(self):
            return "cpu"

        def communication_backend_name(self):
            return "gloo"

        def empty_cache(self):
            pass

    for name in ("max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda: 0)
    set_platform(PlatformCPU())


def whole_configuration(folder, case):
    actor = {**ACTOR, **{name: case[name] for name in ("loss_agg_mode", "entropy_coeff")}}
    return {
        "data": {"train_batch_size": RESPONSES, "max_response_length": 8},
        "actor_rollout_ref": {
            "actor": {**actor, "optim": {"clip_grad": 0.3}},
            "rollout": {"temperature": 0.9, "top_p": 1.0, "n": 1},  # as REINFORCE++ has it
        },
        "trainer": {"default_local_dir": str(folder), "use_v1": False},
        "algorithm": {"adv_estimator": "grpo"},
    }


def made_engine(base):
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    contents = ["model", "optimizer", "extra"]
    engine = fsdp.FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(base),
            override_config={"attn_implementation": "eager"},
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            use_remove_padding=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99), clip_grad=0.3, total_training_steps=100
        ),
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
    )
    engine.initialize()
    return engine


def worker_of(engine, case):
    """What TrainingWorker's methods use of themselves."""
    from verl.workers.config import ActorConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    settings = {name: case[name] for name in ("loss_agg_mode", "entropy_coeff")}
    worker = SimpleNamespace(
        engine=engine,
        engine_config=engine.engine_config,
        model_config=engine.model_config,
        loss_fn=partial(ppo_loss, ActorConfig(**ACTOR, **settings)),
        profiler=SimpleNamespace(step=lambda: None),
        flops_counter=None,
        device_name="cpu",
    )
    worker._postprocess_output = partial(TrainingWorker._postprocess_output, worker)
    for name in ("train_batch", "train_mini_batch"):  # without the bridge to Ray
        setattr(worker, name, partial(inspect.unwrap(getattr(TrainingWorker, name)), worker))
    return worker


def data_of(number, case, reference):
    """This rank's rows of a batch, as verl's driver hands them to an actor's update."""
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    lengths = (4, 7, 2, 6, 3, 5, 8, 1)
    rollouts = tiny_rollouts(seed=number, prompts=(3, 3, 5, 5, 3, 3, 5, 5), responses=lengths)
    width, prompts = max(lengths), 5
    ids = torch.zeros(RESPONSES, prompts + width, dtype=torch.long)
    mask, response = torch.zeros_like(ids), torch.zeros(RESPONSES, width, dtype=torch.long)
    for row in range(RESPONSES):
        drawn = rollouts.tokens_NS[row][rollouts.response_NS[row]]
        prompt = rollouts.tokens_NS[row][rollouts.attention_NS[row] & ~rollouts.response_NS[row]]
        ids[row, prompts - len(prompt) : prompts] = prompt
        ids[row, prompts : prompts + len(drawn)] = drawn
        mask[row, prompts - len(prompt) : prompts + len(drawn)] = 1
        response[row, : len(drawn)] = 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = reference(ids, attention_mask=mask, position_ids=positions).logits[:, :-1] / 0.9
    logps = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0][:, -width:]
    generator = torch.Generator().manual_seed(number)
    noise = 0.1 * torch.randn(logps.shape, generator=generator)
    counted = response.clone()
    counted[1, 2:4] = 0  # a tool's output
    counted[3] = 0  # rejected
    tensors = {
        "prompts": ids[:, :prompts],
        "responses": ids[:, prompts:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "response_mask": counted,
        "old_log_probs": (logps + noise) * response,
        "advantages": torch.randn(RESPONSES, 1, generator=generator) * response,
    }
    uid = np.array([str(row // 2) for row in range(RESPONSES)], dtype=object)
    proto = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
    size, rank = dist.get_world_size(), dist.get_rank()
    proto = proto.chunk(size)[rank]
    proto.meta_info["temperature"] = 0.9
    data = left_right_2_no_padding(proto.to_tensordict())
    tu.assign_non_tensor(
        data,
        calculate_entropy=case["entropy_coeff"] != 0.0,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=MINI,
        mini_batch_size=MINI,
        epochs=EPOCHS,
        seed=42,
        dataloader_kwargs={"shuffle": True},
        compute_loss=True,
    )
    return data


def train(folder, base, case, *, recorded, stop_at=None):
    """Weights at the end, and the recorder."""
    from entropy_experiments.online.verl import record_engine

    folder, begun = Path(folder), stop_at is None and (Path(folder) / f"global_step_{RESUMED}")
    engine, recorder = made_engine(base), None
    if recorded:
        recorder = record_engine(engine, str(folder / "record"), whole_configuration(folder, case))
    resumes = recorded and begun and begun.is_dir()
    if resumes:
        engine.load_checkpoint(str(begun / "actor"), del_local_after_load=False)
        recorder.resumed(begun)
    worker = worker_of(engine, case)
    for number in range(RESUMED if resumes else 0, BATCHES if stop_at is None else stop_at):
        worker.train_mini_batch(data_of(number, case, tiny_model()))
        if recorded:
            place = folder / f"global_step_{number + 1}"
            engine.save_checkpoint(str(place / "actor"), global_step=number + 1)
            recorder.saved(place)
    weights = {name: p.full_tensor().detach() for name, p in engine.module.named_parameters()}
    return weights, recorder


def run(folder, base, name):
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(dist.get_rank()),
    }
    on_a_cpu()
    case = CASES[name]
    plain, _ = train(folder, base, case, recorded=False)
    _, first = train(folder, base, case, recorded=True, stop_at=RESUMED)
    weights, second = train(folder, base, case, recorded=True)
    assert all(torch.equal(plain[key], value) for key, value in weights.items())
    return {"off": [str(r.off) for r in (first, second) if r.off], "steps": second.steps}


def main(result):
    base = result.parent / "base"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    report = {}
    for name, case in CASES.items():
        folder = result.parent / name
        folder.mkdir()
        report[name] = on_ranks(case["size"], run, str(folder), str(base), name)[0]
    result.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
