"""A real language model on a laptop: SmolLM2-135M, a fresh LoRA adapter, grade-school questions.

The adapter gets a few supervised steps first, so that its AdamW has momentum and there is a
checkpoint like any other: step_N/model/ and step_N/optimizer.pt. The probe is then pointed at it.
Nothing is downloaded: the model comes with `make smollm2`, the questions are your file, one
{"question": ..., "answer": "... #### 42"} per line as in GSM8K.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.checkpoints.base import (
    from_gguf,
    load_causal_lm,
    load_tokenizer,
    smollm2_gguf,
)
from entropy_experiments.config import Config, parse_config
from entropy_experiments.input_errors import read_jsonl
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.sampling.datasets import GSM8K_LINE, gsm8k_answer, r1_prompt

RANK, LEARNING_RATE, WEIGHT_DECAY, PER_STEP = 8, 1e-4, 0.01, 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MADE_WITH = "made_with.json"
EXAMPLE = (
    "example:\n"
    "  python examples/smollm2_gsm8k.py --questions path/to/train.jsonl --out build/smollm2\n\n"
    "the same command again reuses the adapter and all rollouts that are finished."
)


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A question as the probe puts it, and a response that would earn the reward."""

    prompt: str
    response: str


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    given = _parser().parse_args(arguments)
    started = time.perf_counter()
    checkpoint = made_checkpoint(given.out, given.questions, steps=given.steps)
    probe = OfflineEntropyProbe(probe_config(given, checkpoint))
    results = probe.run_mixed_probe()
    print("\n".join(["", *results["verdict"], ""]))
    phases = (f"{name} {seconds:.1f}" for name, seconds in results["timing"].items())
    print(f"Seconds: {', '.join(phases)}; everything {time.perf_counter() - started:.0f}.")
    print(f"Results: {given.out / 'results.json'}")
    print(f"Log:     {results['log_path']}")
    return results


def probe_config(given: argparse.Namespace, checkpoint: Path) -> Config:
    """What one would write into a YAML file."""
    return parse_config(
        {
            "checkpoint": {"path": str(checkpoint), "backbone": "smollm2"},
            "data": {
                "dataset": "gsm8k_r1_template",
                "file": str(given.questions),
                "evaluation_prompts": given.prompts,
                "update_prompts": given.update_prompts,
                "responses_per_prompt": given.group,
                "max_resamples": given.attempts,
            },
            "sampling": {"max_new_tokens": given.tokens, "batch_size": 16},
            "memory": {"microbatch_size": given.microbatch},
        }
    ).under(given.out)


def made_checkpoint(out: Path, questions: Path, *, steps: int) -> Path:
    """step_N below `out`; what an earlier call made from the same questions is used again."""
    folder = out / f"step_{steps}"
    wanted = {"questions": str(questions.resolve()), "steps": steps, "rank": RANK}
    note = folder / MADE_WITH
    if note.is_file() and json.loads(note.read_text()) == wanted:
        _say(f"adapter: {folder}, made earlier")
        return folder
    lessons = short_lessons(questions, steps * PER_STEP)
    started = time.perf_counter()
    base = from_gguf(smollm2_gguf())
    _say(f"base: SmolLM2-135M ({time.perf_counter() - started:.1f} s; converted once, then kept)")
    started = time.perf_counter()
    model, optimizer = _trained(base, lessons, steps)
    model.save_pretrained(folder / "model", save_embedding_layers=False)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    note.write_text(json.dumps(wanted))  # last: a folder without it is made anew
    _say(f"adapter: {folder}, {steps} supervised steps ({time.perf_counter() - started:.1f} s)")
    return folder


def _trained(base: Path, lessons: list[Lesson], steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """(model with adapter, its optimizer) after `steps` steps on the solutions."""
    from peft import LoraConfig, get_peft_model

    plain, _ = load_causal_lm(base, dtype=torch.float32)
    tokenizer = load_tokenizer([base], plain)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # LoRA's A is random
        lora = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=list(MODULES), task_type="CAUSAL_LM"
        )
        model = get_peft_model(plain, lora)
    # By name: the probe then needs no guess as to which moment is whose.
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(named, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    model.train()
    for step in range(steps):
        batch = [_tokens(tokenizer, x) for x in lessons[step * PER_STEP : (step + 1) * PER_STEP]]
        tokens, total = sum(count for _, count in batch), 0.0
        for ids, count in batch:
            loss = _loss(model, ids, count) / tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        _say(f"  step {step + 1} of {steps}: loss {total:.3f} per token")
    return model, optimizer


def short_lessons(questions: Path, count: int) -> list[Lesson]:
    """The `count` questions with the shortest solutions, in the probe's own template."""
    found = []
    for number, record in read_jsonl(questions, GSM8K_LINE):
        where = f"{questions}:{number}"
        if not {"question", "answer"} <= set(record) or "####" not in str(record["answer"]):
            raise ValueError(f"{where}: got {sorted(record)}; expected a line like {GSM8K_LINE}.")
        # GSM8K writes its sums twice: <<48/2=24>>24.
        steps = re.sub(r"<<.*?>>", "", record["answer"].rsplit("####", 1)[0]).strip()
        answer = gsm8k_answer(record["answer"], where)
        response = f"{steps}</think>\n<answer>{answer}</answer>"
        found.append(Lesson(prompt=r1_prompt(record["question"]), response=response))
    if len(found) < count:
        raise ValueError(
            f"{questions} has {len(found)} questions; expected at least {count} for the supervised "
            "steps. Give a longer file, or lower --steps."
        )
    return sorted(found, key=lambda lesson: len(lesson.response))[:count]


def _tokens(tokenizer: Any, lesson: Lesson) -> tuple[list[int], int]:
    """(prompt and response, how many of them are the response)."""
    prompt = tokenizer(lesson.prompt)["input_ids"]
    response = tokenizer(lesson.response, add_special_tokens=False)["input_ids"]
    return [*prompt, *response, tokenizer.eos_token_id], len(response) + 1


def _loss(model: Any, ids: list[int], response: int) -> Tensor:
    tokens_1S = torch.tensor([ids])
    logits_SV = model(input_ids=tokens_1S).logits[0, -response - 1 : -1]
    return torch.nn.functional.cross_entropy(logits_SV, tokens_1S[0, -response:], reduction="sum")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--questions", type=Path, required=True, metavar="FILE", help="JSONL in GSM8K's format"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/smollm2"), metavar="DIR", help="files go here"
    )
    for name, value, what in (
        ("prompts", 8, "evaluation prompts; intervals need 5, and more make them narrower"),
        ("update-prompts", 2, "prompts of the update batch"),
        ("group", 4, "responses to each of them"),
        ("tokens", 48, "longest response"),
        ("attempts", 1, "how often groups with equal rewards are replaced by other prompts"),
        ("microbatch", 4, "sequences per pass with gradient; memory only, never a number"),
        ("steps", 2, f"supervised steps of {PER_STEP} questions that make the adapter"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"{what} (default {value})"
        )
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
