"""The scripts of the comparison: each judged fault, each document, and the clean recipes.

A tool that looks at one batch gets another script of the same fault: the same lines, with what
`preflight` needs in the place of the training loop.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.doctor_tools.base import Subject

LOOP = {"main", "update"}  # functions of the recipes that hold the training loop
NO_LOSS = "the script has no function from a batch to a loss that could be handed over"

# The documents whose script has one: what a one-batch tool is given.
DOCUMENT_BATCH = {
    "no_grad_apply.py": """\
modules = {"qwen": PromptEncoder(), "agent": Agent()}
batch = {
    "features": torch.randn(6, 15), "control": torch.randn(6, 16),
    "grid": torch.rand(6, 9), "target": torch.randint(0, 10, (6, 9)),
}
def loss_fn(batch):
    refined = Refiner().apply(modules["qwen"](batch["features"]), batch["control"])
    logits = modules["agent"](batch["grid"], refined)
    return F.cross_entropy(logits.transpose(1, 2), batch["target"])
""",
    "throwaway_projection.py": """\
modules = {"qwen": HybridPrompt(), "agent": nn.Linear(16, 10)}
batch = {"features": torch.randn(6, 15), "colour": torch.randint(0, 10, (6,))}
def loss_fn(batch):
    return F.cross_entropy(modules["agent"](modules["qwen"](batch["features"])), batch["colour"])
""",
    "fp16_unscale.py": """\
modules = {"qwen": Qwen(QwenCfg()), "agent": nn.Linear(8, 10)}
batch = {"features": torch.randn(6, 15), "colour": torch.randint(0, 10, (6,))}
def loss_fn(batch):
    return F.cross_entropy(modules["agent"](modules["qwen"](batch["features"])), batch["colour"])
""",
}
OPTIMIZER = """\
every = [p for module in modules.values() for p in module.parameters()]
optimizers = {"optimizer": torch.optim.AdamW(every, lr=1e-3)}
"""


@dataclasses.dataclass(frozen=True)
class Trial:
    id: str
    recipe: str  # or "document"
    case: Any  # a Case or DocumentCase
    subject: Subject
    long: Subject  # with three times the steps
    lines: tuple[int, ...]


def make_trials(recipes: Sequence[str], folder: Path) -> tuple[list[Trial], dict[str, Trial]]:
    """The faulty scripts, and the clean recipes by name."""
    harness, case_of = import_module("doctor.harness"), import_module("doctor.case")
    judged = import_module("doctor.judged.injectors").JUDGED
    trials, clean = [], {}
    for recipe in recipes:
        bare = case_of.Case(0, "clean", recipe, ())
        clean[recipe] = _trial(bare, harness, case_of, folder)
    for case in judged:
        if case.recipe in recipes:
            trials.append(_trial(case, harness, case_of, folder))
    for case in import_module("doctor.documents.cases").DOCUMENTS:
        source = case.path.read_text()
        lines = harness.marked_lines(source)
        script = folder / f"document_{case.path.name}"
        script.write_text(source.replace(f"  {harness.MARK}", ""))
        whole = None
        if case.path.name in DOCUMENT_BATCH:
            tail = DOCUMENT_BATCH[case.path.name] + OPTIMIZER
            whole = folder / f"document_{case.path.stem}_batch.py"
            whole.write_text(script.read_text().replace(case_of.MAIN, tail))
        subject = Subject(script, whole, NO_LOSS)
        trials.append(Trial(case.id, "document", case, subject, subject, lines))
    return trials, clean


def _trial(case: Any, harness: Any, case_of: Any, folder: Path) -> Trial:
    preflight = (case_of.MAIN, case_of.PREFLIGHT.get(case.recipe, ""))
    looped = dataclasses.replace(case, edits=tuple(e for e in case.edits if e != preflight))
    source = harness.faulty_source(looped)
    lines = harness.marked_lines(source)
    source = source.replace(f"  {harness.MARK}", "")
    stem = f"{case.recipe}_{case.number:02d}_{case.name.replace('-', '_')}"
    script = folder / f"{stem}.py"
    script.write_text(source)
    longer = folder / f"{stem}_long.py"
    longer.write_text(re.sub(r"^(STEPS, .* = )4,", r"\g<1>12,", source, flags=re.MULTILINE))
    whole, why = None, ""
    if not preflight[1]:
        why = NO_LOSS
    elif lines and _functions(source, lines) <= LOOP:
        why = "the fault is in the training loop, which a one-batch tool does not run"
    else:
        whole = folder / f"{stem}_batch.py"
        whole.write_text(source.replace(*preflight))
    # The one-batch form has its own name but the same lines; linters read the whole script.
    return Trial(
        case.id, case.recipe, case, Subject(script, whole, why), Subject(longer, whole, why), lines
    )


def _functions(source: str, lines: Sequence[int]) -> set[str]:
    """The innermost function around each of the lines."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found.update({line: node.name for line in lines if line in inside})
    return {found.get(line, "") for line in lines}
