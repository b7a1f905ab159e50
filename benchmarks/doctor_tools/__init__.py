"""The tools that `benchmarks.doctor_comparison` compares with, one adapter each.

An adapter applies a tool to one script the way its documentation does, as strongly as that form
allows, and returns the messages it gave. `kinds` are the classes of fault (numbers of
`gradient_doctor`) that the message names in so many words; read generously: "no gradient" counts
for every class in which a gradient is missing, whatever took it away.
"""

from benchmarks.doctor_tools.base import Tool
from benchmarks.doctor_tools.linters import torch_preflight, torchfix
from benchmarks.doctor_tools.live import gradtracer, neuraldbg, torch_audit, torcheck
from benchmarks.doctor_tools.one_batch import preflight_ml, tinytorchtest, torchtest2
from benchmarks.doctor_tools.torch_itself import detect_anomaly, torch_alone

TOOLS = (
    Tool("torch alone", "", torch_alone, "the script as it is: torch's errors and warnings"),
    Tool("detect_anomaly", "", detect_anomaly, "the script under it, torch's errors included"),
    Tool("torch-audit", "torch-audit", torch_audit, "attached to the live loop, every step"),
    Tool("torcheck", "torcheck", torcheck, "attached to the live loop, every parameter"),
    Tool("neuraldbg", "neuraldbg", neuraldbg, "attached to the live loop, 12 steps", True),
    Tool("gradtracer", "gradtracer", gradtracer, "attached to the live loop, 12 steps", True),
    Tool("torchtest2", "torchtest2", torchtest2, "model, loss function and one batch"),
    Tool("tinytorchtest", "tinytorchtest", tinytorchtest, "model, loss function and one batch"),
    Tool("preflight-ml", "preflight-ml", preflight_ml, "model, loss function and one batch"),
    Tool("torch-preflight", "torch-preflight", torch_preflight, "linter, on the file"),
    Tool("torchfix", "torchfix", torchfix, "linter, on the file, all rules"),
)
