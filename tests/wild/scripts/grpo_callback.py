"""The same few GRPO steps without and with our callback: what it said, and what it left behind."""

import json
import logging
import sys
from pathlib import Path

import torch
import transformers
import trl

from entropy_experiments.online.trl import EntropyProbeCallback
from oracles.tiny_grpo import assert_same_outcome, grpo, outcome


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def train(folder, callbacks):
    torch.manual_seed(0)
    trainer = grpo(folder, callbacks=callbacks, max_steps=4)
    # transformers 4 makes token types by default, which no causal LM takes.
    trainer.processing_class.model_input_names = ["input_ids", "attention_mask"]
    trainer.train()
    return trainer


def main(result):
    messages = Messages()
    logging.getLogger("entropy_experiments").addHandler(messages)
    plain = train(result.parent / "plain", [])
    expected = outcome(plain)
    callback = EntropyProbeCallback(max_overhead=None, prompts=6)
    probed = train(result.parent / "probed", [callback])
    assert_same_outcome(expected, outcome(probed))
    report = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "steps": [plain.state.global_step, probed.state.global_step],
        "rows": [row["step"] for row in callback.rows],
        "mismatch": max((row["step_mismatch"] for row in callback.rows), default=None),
        "off": None if callback.off is None else str(callback.off),
        "messages": messages.texts,
    }
    result.write_text(json.dumps(report))


main(Path(sys.argv[1]))
