"""verl's batches, loss and engine base around a tiny model in fp64, without and with our record.

The engine is a subclass of verl's BaseEngine, whose `train_batch` is verl's; the model runs on the
CPU. Data is a DataProto, unpadded as verl's driver does it. The driver's side is saved and resumed
by RayPPOTrainer's own methods.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, kl_penalty
from verl.utils.import_utils import load_extern_object
from verl.workers.config import ActorConfig
from verl.workers.engine.base import BaseEngine
from verl.workers.utils.padding import left_right_2_no_padding

from entropy_experiments.online.verl import record_engine, verl_batch
from oracles.own_loop import GROUP, LENGTH, Loop
from oracles.tiny_grpo import PROMPTS, assert_same_outcome

STEPS, SAVED = 5, 3
BETA, GRAD_CLIP = 0.05, 0.5
ACTOR = {
    "strategy": "fsdp2",
    "rollout_n": GROUP,
    "ppo_mini_batch_size": 4,
    "ppo_micro_batch_size_per_gpu": 8,
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.12,
    "clip_ratio_c": 1.5,
    "use_kl_loss": True,
    "kl_loss_coef": BETA,
    "kl_loss_type": "low_var_kl",
    "entropy_coeff": 0.0,
    "ppo_epochs": 1,
}
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def configuration(folder, mode):
    return OmegaConf.create(
        {
            "data": {
                "train_batch_size": 4,
                "max_response_length": LENGTH,
                "max_prompt_length": 32,
                "cache_dir": str(folder / "cache"),
                "filter_overlong_prompts": False,
                "entropy_record": str(folder / "driver_record"),
            },
            "actor_rollout_ref": {
                "actor": {
                    **ACTOR,
                    "loss_agg_mode": mode,
                    "optim": {"clip_grad": GRAD_CLIP},
                    "checkpoint": {"async_save": False},
                },
                "rollout": {"temperature": 1.0, "top_p": 1.0, "n": GROUP},
            },
            "trainer": {
                "default_local_dir": str(folder / "driver"),
                "default_hdfs_dir": None,
                "resume_mode": "auto",
                "del_local_ckpt_after_load": False,
            },
            "algorithm": {"adv_estimator": "grpo"},
        }
    )


class Engine(BaseEngine):
    """What a worker of verl's drives, on the CPU."""

    def __init__(self, loop, mode):
        self.loop, self.module, self.optimizer = loop, loop.model, loop.optimizer
        self.config = ActorConfig(**ACTOR, loss_agg_mode=mode)

    def optimizer_zero_grad(self):
        self.optimizer.zero_grad()

    def is_mp_src_rank_with_outputs(self):
        return False

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        """Two microbatches, each divided by the tokens and sequences of both."""
        mask = data["response_mask"].double()
        self.config.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=mask.sum(),
            global_batch_size=len(mask),
            loss_scale_factor=self.config.loss_scale_factor,
        )
        rows = torch.arange(len(mask)).view(2, -1)
        for part in rows:
            ids = torch.cat([data["prompts"], data["responses"]], 1)[part]
            batch = {"input_ids": ids, "attention_mask": data["attention_mask"][part]}
            logps = self.loop.logprobs(batch)
            loss, _ = compute_policy_loss_vanilla(
                old_log_prob=data["old_log_probs"][part],
                log_prob=logps,
                advantages=data["advantages"][part],
                response_mask=mask[part],
                loss_agg_mode=self.config.loss_agg_mode,
                config=self.config,
                rollout_is_weights=data["rollout_is_weights"][part],
            )
            kl = kl_penalty(logps, data["ref_log_prob"][part], self.config.kl_loss_type)
            kl_loss = agg_loss(
                kl, mask[part], self.config.loss_agg_mode, **self.config.global_batch_info
            )
            (loss + self.config.kl_loss_coef * kl_loss).backward()
        return {"metrics": {}}

    def optimizer_step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), GRAD_CLIP)
        self.optimizer.step()
        return norm.item()


def data_proto(loop, reference):
    """What verl's driver has of a step when it updates the actor."""
    batch = loop.draw()
    ids, mask, response = batch["input_ids"], batch["attention_mask"], batch["response_mask"]
    width = ids.shape[1] - LENGTH
    with torch.no_grad():
        ref = reference.logprobs(batch)
    scores = torch.zeros_like(response, dtype=torch.float64)
    scores[:, -1] = batch["rewards"]
    generator = loop.generator
    weights = 0.5 + torch.rand(response.shape, dtype=torch.float64, generator=generator)
    # As after another update of the same batch: the ratio is not 1.
    noise = 0.1 * torch.randn(response.shape, dtype=torch.float64, generator=generator)
    uid = [str(row // GROUP) for row in range(len(ids))]
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :width],
            "responses": ids[:, width:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "response_mask": response.long(),
            "old_log_probs": torch.where(response, batch["old_logprobs"] + noise, 0.0),
            "ref_log_prob": torch.where(response, ref, 0.0),
            "advantages": torch.where(response, batch["advantages"][:, None], 0.0),
            "rollout_is_weights": weights,
            "token_level_scores": scores,
        },
        non_tensors={"uid": np.array(uid, dtype=object)},
    )


def train(folder, mode, *, recorded):
    torch.manual_seed(0)
    loop, reference = Loop.begin(), Loop.begin(seed=1)
    engine = Engine(loop, mode)
    config = configuration(folder, mode)
    recorder = None
    if recorded:
        recorder = record_engine(engine, str(folder / "record"), config, tokenizer=loop.tokenizer)
    protos = []
    for made in range(STEPS):
        proto = data_proto(loop, reference)
        protos.append(proto)
        data = left_right_2_no_padding(proto.to_tensordict())
        engine.train_batch(data, loss_function=None)
        if recorded and made + 1 == SAVED:
            loop.save(folder / f"step_{SAVED}")
            recorder.saved(folder / f"step_{SAVED}")
    return loop.outcome(), recorder, protos, config


class Rows:
    """A dataloader without a state."""

    def __len__(self):
        return 100

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


class Driver:
    """What verl's trainer on the driver uses of itself to save and to resume."""

    def __init__(self, config, protos):
        self.config, self.protos, self.global_steps, self.use_critic = config, protos, 0, False
        self.train_dataloader = Rows()
        self.actor_rollout_wg = SimpleNamespace(
            load_checkpoint=lambda path, del_local_after_load: self.load(path),
            save_checkpoint=lambda path, *_, **__: self.save(path),
        )

    def load(self, path):
        assert Path(path).with_name("config.json").is_file()

    def save(self, path):
        Loop.begin(seed=self.global_steps).save(Path(path).parent)  # of actor/

    def fit(self, dataset, until):
        """RayPPOTrainer's order: load, and at each step save, count, hand over."""
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        RayPPOTrainer._load_checkpoint(self)
        while self.global_steps < until:
            self.global_steps += 1
            proto = self.protos[self.global_steps - 1]
            if self.global_steps % 2 == 0:
                RayPPOTrainer._save_checkpoint(self)
            if self.global_steps < until:  # the last one is not handed over
                dataset.on_batch_end(batch=proto)


def driver(config, protos, folder):
    """Our dataset class, loaded and called as verl does it; stopped after step 3, and resumed."""
    sys.modules |= {name: MagicMock() for name in ("uvicorn", "fastapi")}  # servers of rollouts
    data = folder / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = load_extern_object("pkg://entropy_experiments.online.verl_dataset", "RecordingDataset")
    datasets = []
    for until in (3, STEPS + 1):
        dataset = kind(data_files=str(data), tokenizer=None, config=config.data)
        Driver(config, protos).fit(dataset, until)
        datasets.append(dataset)
    return datasets


def main(result):
    report = {}
    for mode in MODES:
        folder = result.parent / mode
        folder.mkdir()
        expected, _, _, _ = train(folder, mode, recorded=False)
        outcome, recorder, protos, config = train(folder, mode, recorded=True)
        assert_same_outcome(outcome, expected)
        datasets = driver(config, [*protos, protos[0]], folder)
        padded, jagged = (
            verl_batch(data)
            for data in (protos[0], left_right_2_no_padding(protos[0].to_tensordict()))
        )
        assert padded.rollouts.fingerprint == jagged.rollouts.fingerprint
        assert torch.equal(padded.advantage_NS, jagged.advantage_NS)
        report[mode] = {
            "off": None if recorder.off is None else str(recorder.off),
            "steps": recorder.steps,
            "driver_off": [str(d._recorder.off) for d in datasets if d._recorder.off],
            "rows": len(datasets[-1]),
        }
    result.write_text(json.dumps(report))


main(Path(sys.argv[1]))
