"""GRPO and RLOO steps without and with our callback, under whichever TRL is installed here.

Asserts that training ends in the same bits; reports what the callback said and left behind. The
checkpoints and the record stay in the folder: the test replays them in its own environment.
"""

import json
import logging
import sys
from pathlib import Path

import torch
import transformers
import trl

from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.online.trl_versions import (
    GENERATE_METHOD,
    IN_TRAINING,
    REWARD_METHOD,
    eos_of,
    names_of,
    prompt_ids,
    tokenizer_of,
)
from oracles.tiny_grpo import assert_same_outcome, grpo, outcome
from oracles.tiny_models import tiny_model, tiny_tokenizer

STEPS = 50
RLOO_STEPS = 3
EVERY = 10
"""Steps from one probe to the next; recorded are all."""


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def train(folder, callbacks, **changes):
    torch.manual_seed(0)
    trainer = grpo(folder, callbacks=callbacks, **changes)
    # transformers 4 makes token types by default, which no causal LM takes.
    trainer.processing_class.model_input_names = ["input_ids", "attention_mask"]
    trainer.train()
    return trainer


def names_missing(trainer):
    """Of the table's row for this version, and of the methods whose results are kept."""
    row = names_of()
    own = (*row.read, GENERATE_METHOD, REWARD_METHOD, *IN_TRAINING)
    if isinstance(trainer, trl.GRPOTrainer):
        own = (*own, *row.masks, row.last_entropy)
    return [name for name in own if name and not hasattr(trainer, name)]


def tokens_differ(trainer):
    """Prompts of training's own batches that our tokens of the dataset do not have."""
    used = {
        tuple(ids[mask.bool()].tolist())
        for part in trainer._buffered_inputs
        for ids, mask in zip(part["prompt_ids"], part["prompt_mask"], strict=True)
    }
    return sorted(used - {prompt_ids(trainer, row["prompt"]) for row in trainer.train_dataset})


def report(plain, probed, callback):
    assert_same_outcome(outcome(plain), outcome(probed))
    return {
        "steps": [plain.state.global_step, probed.state.global_step],
        "rows": [row["step"] for row in callback.rows],
        "mismatch": max((row["step_mismatch"] for row in callback.rows), default=None),
        "off": None if callback.off is None else str(callback.off),
        "missing": names_missing(probed),
        "tokens_differ": tokens_differ(probed),
        "ends": tokenizer_of(probed).eos_token_id in eos_of(probed),
    }


def main(result):
    folder = result.parent
    messages = Messages()
    logging.getLogger("entropy_experiments").addHandler(messages)
    tiny_model().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    saves = {"save_strategy": "steps", "save_steps": STEPS - 2}
    callback = EntropyProbeCallback(
        max_overhead=None, every=EVERY, prompts=6, record=folder / "record"
    )
    reports = {
        "grpo": report(
            train(folder / "plain", [], max_steps=STEPS, **saves),
            train(folder / "run", [callback], max_steps=STEPS, **saves),
            callback,
        )
    }
    rloo = {"kind": trl.RLOOTrainer, "max_steps": RLOO_STEPS}
    callback = EntropyProbeCallback(max_overhead=None, prompts=6, record=folder / "rloo_record")
    saves = {"save_strategy": "steps", "save_steps": RLOO_STEPS - 1}
    reports["rloo"] = report(
        train(folder / "rloo_plain", [], **rloo, **saves),
        train(folder / "rloo_run", [callback], **rloo, **saves),
        callback,
    )
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    result.write_text(json.dumps({**versions, **reports, "messages": messages.texts}))


main(Path(sys.argv[1]))
