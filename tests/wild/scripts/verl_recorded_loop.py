"""verl's batches, loss and engine base around a tiny model in fp64, without and with our record.

The engine is a subclass of verl's BaseEngine, whose `train_batch` is verl's; the model runs on the
CPU, which verl's FSDP engine cannot. Data is a DataProto, unpadded as verl's driver does it.
"""

import json
import sys
from pathlib import Path

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
                "actor": {**ACTOR, "loss_agg_mode": mode, "optim": {"clip_grad": GRAD_CLIP}},
                "rollout": {"temperature": 1.0, "top_p": 1.0, "n": GROUP},
            },
            "trainer": {"default_local_dir": str(folder)},
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


def driver(config, protos, folder):
    """Our dataset class, loaded and called as verl does it."""
    data = folder / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = load_extern_object("pkg://entropy_experiments.online.verl_dataset", "RecordingDataset")
    dataset = kind(data_files=str(data), tokenizer=None, config=config.data)
    for proto in protos:
        dataset.on_batch_end(batch=proto)
    return dataset


def main(result):
    report = {}
    for mode in MODES:
        folder = result.parent / mode
        folder.mkdir()
        expected, _, _, _ = train(folder, mode, recorded=False)
        outcome, recorder, protos, config = train(folder, mode, recorded=True)
        assert_same_outcome(outcome, expected)
        dataset = driver(config, protos, folder)
        padded, jagged = (
            verl_batch(data)
            for data in (protos[0], left_right_2_no_padding(protos[0].to_tensordict()))
        )
        assert padded.rollouts.fingerprint == jagged.rollouts.fingerprint
        assert torch.equal(padded.advantage_NS, jagged.advantage_NS)
        report[mode] = {
            "off": None if recorder.off is None else str(recorder.off),
            "steps": recorder.steps,
            "driver_off": None if dataset._recorder.off is None else str(dataset._recorder.off),
            "rows": len(dataset),
        }
    result.write_text(json.dumps(report))


main(Path(sys.argv[1]))
