"""The table of `docs/architectures.md`, from what the sweep saw."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oracles.every_causal_lm import NOT_BUILT, TYPES
from oracles.sweep import Row, fault

HEAD = """<!-- Written by docs/make_architectures.py from its own results: do not edit. -->

# Which models are supported?

Find the `model_type` of your `config.json` in [the table](#the-table): an empty last column means
supported.

Every causal-LM type of transformers {version}: {built} of {all} types are built with two or three
small layers and random weights, trained fully and with LoRA. Scores, both measured forms (`snis`,
`per_decision`), the slope in the mode that the estimator chooses and the slope by reverse mode are
held against a plain loop: the model's own call on one unpadded rollout at a time, `log_softmax`,
python loops, ordinary backward. {equal} types are equal to it, {refused} are refused with a message
that names the model and the reason.

- **slope by**: the mode of differentiation that was chosen, fully trained and with LoRA.
- **Mixture of experts** is supported: `mixtral`, `qwen3_moe`, `deepseek_v3`, `gpt_oss` and others
  are rows of the table. Where forward mode (`jvp`) is not implemented for the experts' layers, the
  next exact mode (`double_backward`) computes the slope.
- **shared prompts**: rollouts of one prompt go through the model together. Types that are not known
  to look at all that came before, and configs with windows, do without: the same numbers, slower.
- **logits by**: `head` applies the LM head at response positions only; `model` lets the model make
  its logits, where there is more to them (a soft cap, a scaling, a head of several layers).

A model is tried on a few tokens when it is loaded, also if its type is not in this table: later
tokens must not change earlier logits, a padded batch with positions must have the logits of the
model's own calls, and a head alone must make the logits even if they are large. RoBERTa-like
decoders count positions from their padding index; the loader detects and follows that. Models
whose rotary factors depend on the length of a call (longrope, dynamic NTK) never have rollouts with
different factors in one call; drawing across their original context is refused.

The slow test `tests/models/test_every_architecture.py` checks every row.

## The table

| type | class | slope by | shared prompts | logits by | refused, or not tried |
|---|---|---|---|---|---|
"""
NUMBER = re.compile(r"(changed earlier logits) by [0-9.e+-]+\.(?= |$)")


def page(rows: Mapping[str, Sequence[Row]]) -> str:
    """`rows`: what was seen of each type that can be built."""
    wrong = [text for of_kind in rows.values() for row in of_kind if (text := fault(row))]
    if wrong:
        raise ValueError("The page says that all of these are equal:\n" + "\n".join(wrong))
    equal = sum(not any(row.refused for row in of_kind) for of_kind in rows.values())
    head = HEAD.format(
        version=transformers.__version__,
        built=len(rows),
        all=len(TYPES),
        equal=equal,
        refused=len(rows) - equal,
    )
    return head + "".join(line(kind, rows.get(kind, ())) for kind in TYPES)


def line(kind: str, rows: Sequence[Row]) -> str:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    if not rows:
        return f"| {kind} | {name} | | | | not tried: {NOT_BUILT[kind]} |\n"
    scored = [row for row in rows if not row.refused]
    cells = [
        _both([str(row.mode) for row in scored]),
        _both(["yes" if row.shares else "no" for row in scored]),
        _both([str(row.logits) for row in scored]),
        "; ".join(dict.fromkeys(_reason(row, rows) for row in rows if row.refused)),
    ]
    return f"| {kind} | {name} | {' | '.join(cells)} |\n"


def _both(cells: Sequence[str]) -> str:
    """Once, where full and LoRA agree."""
    return " / ".join(dict.fromkeys(cells)) if len(set(cells)) < 2 else " / ".join(cells)


def _reason(row: Row, rows: Sequence[Row]) -> str:
    """Without the model's name, which is in the line, and what numbers differ by."""
    text = str(row.refused).partition(") ")[2]
    text = NUMBER.sub(r"\1.", text).partition(" Expected ")[0].replace("|", "\\|")
    return text if all(other.refused for other in rows) else f"{row.way}: {text}"
