"""What our callback says to ms-swift's own GRPOTrainer when training begins.

The class is ms-swift's; it is not trained, since its constructor needs a model and a template of
ms-swift's registry, from its hub. What the refusal says is looked up in its code: the batches that
it keeps are lists of its own samples.
"""

import json
import sys
import typing
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import trl
from swift.rl_core.data import GRPOBatch, GRPOSample
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

from entropy_experiments.online.trl import EntropyProbeCallback


def main(result):
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.accelerator = SimpleNamespace(distributed_type="NO", state=SimpleNamespace())
    callback = EntropyProbeCallback()
    callback.trainer = trainer
    said = None
    try:
        callback.on_train_begin(SimpleNamespace(), None, None)
    except ValueError as error:
        said = str(error)
    returned = typing.get_type_hints(GRPOTrainer._rollout_samples)["return"]
    report = {
        "swift": version("ms_swift"),
        "trl": trl.__version__,
        "of_trl": issubclass(GRPOTrainer, trl.GRPOTrainer),
        "said": said,
        "off": callback.off is not None,
        "own_samples": returned == list[GRPOSample] or GRPOSample in typing.get_args(returned),
        "a_mapping": issubclass(GRPOBatch, dict),
    }
    result.write_text(json.dumps(report))


main(Path(sys.argv[1]))
