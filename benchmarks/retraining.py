"""Is what the ledger blames also what removal changes? Training again without the blamed prompts.

    python -m benchmarks.retraining [--pairs 10] [--steps 56] [--work FOLDER] [--json FILE]

For each seed: train the preset `tiny`, explain the run, then train it twice more from the same
seed, once without the 5 % of prompts that the ledger says lowered the entropy most, once without
5 % chosen at random. *Without* means that all responses to the prompt get the same reward: their
advantages are 0 and they have no gradient. The prompt keeps its place, so both trainings draw the
same random numbers as the first one until the policies differ.

    in sample    minus (blamed - random) of the ledger's sums. The blamed are the lowest of noisy
                 numbers, so most of it may be luck of the choice
    predicted    the same without that luck: prompts chosen by one half of the evaluation prompts,
                 their sum from the other half, both ways; random ones at their expectation
    difference   entropy at the end without the blamed prompts minus without the random ones, fresh
                 responses to the same prompts, 95 % interval by prompt
    sign test    pairs whose difference is positive, and the chance of so many or more if the sign
                 were a coin's

The ledger has the *direct* effect of a prompt; without it, later batches are others. So this is an
experiment and no check: nothing here has to come out. Finished pairs stay in WORK/pairs and are not
computed again; every command inside resumes, too. 10 pairs of 56 steps are 30 trainings and 10
ledgers: many hours on two cores. `--steps`, `--prompts` and `--evaluation` make it smaller.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.tables import STORED, conditions, write
from entropy_experiments.artifacts import read_json_object, write_json
from entropy_experiments.config import parse_config
from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.config.training_batch import batch_plan
from entropy_experiments.config.training_reading import load_preset, parse_training
from entropy_experiments.online.train.folder import last_whole_checkpoint
from entropy_experiments.online.train.run import train
from entropy_experiments.online.train.trainer import Task, load_policy, load_task
from entropy_experiments.pipelines.evaluate import evaluate_checkpoints
from entropy_experiments.pipelines.evaluation_request import EvaluationRequest
from entropy_experiments.pipelines.explain import explain
from entropy_experiments.results import JSONObject
from entropy_experiments.results.run_ledger import PROMPT_TABLE, TOKEN_TABLE, read_ledger_table

SHARE = 0.05
OUT_OF_REACH = 10**9
"""A target that no three numbers make: every response gets the reward 0."""
ARMS = ("blamed", "random")


def blamed_prompts(sums: Mapping[str, float], share: float = SHARE) -> list[str]:
    """The prompts that lowered the entropy most: this share of all, at least one."""
    count = max(1, round(share * len(sums)))
    return sorted(sums, key=lambda prompt: (sums[prompt], prompt))[:count]


def cross_fitted(halves: Mapping[str, tuple[float, float]], share: float = SHARE) -> float:
    """What the most blamed did, from evaluation prompts that did not choose them.

    sum_{lowest by a} b + sum_{lowest by b} a: the mean of twice each half, as dH = a + b
    """
    first = blamed_prompts({prompt: a for prompt, (a, _) in halves.items()}, share)
    second = blamed_prompts({prompt: b for prompt, (_, b) in halves.items()}, share)
    return sum(halves[p][1] for p in first) + sum(halves[p][0] for p in second)


def halves_by_prompt(folder: Path) -> dict[str, tuple[float, float]]:
    """(sum of dH_a, sum of dH_b) of every prompt of a ledger."""
    table = read_ledger_table(folder, TOKEN_TABLE, columns=["prompt", "dH_a", "dH_b"])
    sums: dict[str, tuple[float, float]] = {}
    columns = (table.column(name).to_pylist() for name in ("prompt", "dH_a", "dH_b"))
    for prompt, a, b in zip(*columns, strict=True):
        before = sums.get(prompt, (0.0, 0.0))
        sums[prompt] = (before[0] + a, before[1] + b)
    return sums


def random_prompts(
    sums: Mapping[str, float], seed: int, *, besides: Collection[str], share: float = SHARE
) -> list[str]:
    """As many at random, none of those blamed."""
    count = max(1, round(share * len(sums)))
    rest = sorted(set(sums) - set(besides))
    return sorted(random.Random(f"retraining {seed}").sample(rest, count))


def sign_test(differences: Sequence[float]) -> float:
    """Chance of so many positive signs, or more, if either sign were as likely; zeros are left out.

    sum_{k >= positive} C(n, k) / 2^n
    """
    signs = [x > 0 for x in differences if x]
    positive, n = sum(signs), len(signs)
    return sum(math.comb(n, k) for k in range(positive, n + 1)) / 2**n


def without(task: Task, places: Collection[int]) -> Task:
    """The same task, whose problems at these places have a target that nobody reaches."""
    chosen = set(places)
    training = tuple(
        replace(problem, facts={**problem.facts, "target": OUT_OF_REACH})
        if place in chosen
        else problem
        for place, problem in enumerate(task.training)
    )
    return replace(task, training=training)


def places_of(prompts: Collection[str], texts: Sequence[str]) -> list[int]:
    """Where in the task the ledger's prompts are, by their decoded text."""
    by_text: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        by_text.setdefault(text, []).append(place)
    missing = [text for text in prompts if text not in by_text]
    if missing:
        raise ValueError(
            f"{len(missing)} prompts of the ledger are none of the task's (the first is "
            f"{missing[0]!r}); expected the prompts of the very training that was explained."
        )
    return sorted(place for text in prompts for place in by_text[text])


def settings(seed: int, out: Path, *, steps: int, prompts: int, explained: bool) -> TrainingConfig:
    """The preset, with every step kept where it is explained afterwards."""
    preset = load_preset("tiny").dump()
    changes: dict[str, Any] = {
        "seed": seed,
        "max_steps": steps,
        "buffer_size": prompts,
        "microbatch_size": prompts,
        "save_steps": 1 if explained else steps,
        "save_first": explained,
        "output_dir": str(out),
    }
    probe = {**preset["probe"], "every": steps, "prompts": 5, "enabled": explained}
    doctor = {**preset["doctor"], "enabled": False}
    return parse_training({**preset, **changes, "probe": probe, "doctor": doctor})


def trained(config: TrainingConfig, task: Task | None = None) -> Path:
    """Train, or go on with it; the last checkpoint."""
    out = Path(config.output_dir)
    train(config, resume=out.exists(), quiet=True, task=task)
    checkpoint, _ = last_whole_checkpoint(out)
    if checkpoint is None:
        raise ValueError(f"{out} has no whole checkpoint; expected one after {config.max_steps}.")
    return checkpoint


def one_pair(seed: int, work: Path, *, steps: int, prompts: int, evaluation: int) -> JSONObject:
    """Three trainings, a ledger, and the entropy at both ends."""
    folder = work / f"seed_{seed}"
    own = settings(seed, folder / "full", steps=steps, prompts=prompts, explained=True)
    last = {"full": trained(own)}
    config = parse_config({"data": {"evaluation_prompts": evaluation}})
    summary = explain(config, own.output_dir, out=folder / "ledger")
    rows = read_ledger_table(folder / "ledger", PROMPT_TABLE).to_pylist()
    sums = {row["prompt"]: row["dH"] for row in rows}
    halves = halves_by_prompt(folder / "ledger")
    decoded = {row["prompt"]: row["prompt_text"] for row in rows}
    blamed = blamed_prompts(sums)
    chosen = {"blamed": blamed, "random": random_prompts(sums, seed, besides=blamed)}
    _, tokenizer = load_policy(own)
    task = load_task(own, batch_plan(own, ranks=1), tokenizer=tokenizer)
    texts = [
        tokenizer.decode(tokenizer(problem.prompt, add_special_tokens=False)["input_ids"])
        for problem in task.training
    ]
    for arm in ARMS:
        places = places_of([decoded[prompt] for prompt in chosen[arm]], texts)
        arm_config = settings(seed, folder / arm, steps=steps, prompts=prompts, explained=False)
        last[arm] = trained(arm_config, without(task, places))
    result = evaluate_checkpoints(
        [last["random"], last["blamed"], last["full"]],
        config,
        request=EvaluationRequest(prompts=4 * evaluation, samples=4),
        out=folder / "evaluation",
        quiet=True,
    )
    labels = [one["label"] for one in result["checkpoints"]]
    levels = {
        arm: one["measures"]
        for arm, one in zip(("random", "blamed", "full"), result["checkpoints"], strict=True)
    }
    (change,) = [one for one in result["differences"] if one["label"] == labels[1]]
    return {
        "seed": seed,
        "prompts": len(sums),
        "removed": len(blamed),
        "ledger": {
            "path": summary["total"]["path"],
            "measured": summary["measured"],
            "unexplained": summary["unexplained"],
            "trusted": summary["trusted"],
            "why_not": summary["why_not"],
        },
        "blamed_dH": sum(sums[prompt] for prompt in blamed),
        "random_dH": sum(sums[prompt] for prompt in chosen["random"]),
        "in_sample": sum(sums[p] for p in chosen["random"]) - sum(sums[p] for p in blamed),
        "predicted": len(blamed) / len(sums) * sum(sums.values()) - cross_fitted(halves),
        "correlation_of_halves": statistics.correlation(*zip(*halves.values(), strict=True)),
        "entropy": {arm: measures["entropy"] for arm, measures in levels.items()},
        "pass_rate": {arm: measures["pass_rate"] for arm, measures in levels.items()},
        "difference": change["measures"]["entropy"],
    }


def table(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per pair, and the sign test."""
    lines = [
        f"{'seed':>4}{'removed':>9}{'in sample':>11}{'predicted':>11}{'difference':>12}{'95 %':>22}"
        f"{'H full':>9}{'blamed':>9}{'random':>9}"
    ]
    for pair in pairs:
        low, high = pair["difference"]["interval"] or (math.nan, math.nan)
        level = {arm: one["value"] for arm, one in pair["entropy"].items()}
        lines.append(
            f"{pair['seed']:>4}{pair['removed']:>9}{pair['in_sample']:>+11.4f}"
            f"{pair['predicted']:>+11.4f}"
            f"{pair['difference']['value']:>+12.4f}{f'{low:+.4f} to {high:+.4f}':>22}"
            f"{level['full']:>9.4f}{level['blamed']:>9.4f}{level['random']:>9.4f}"
        )
    differences = [pair["difference"]["value"] for pair in pairs]
    lines.append(
        f"{sum(x > 0 for x in differences)} of {len(differences)} pairs have more entropy without "
        f"the blamed prompts (sign test, one-sided: p = {sign_test(differences):.3f})"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=56)
    parser.add_argument("--prompts", type=int, default=48, help="prompts of a step")
    parser.add_argument("--evaluation", type=int, default=64, help="evaluation prompts of a ledger")
    parser.add_argument("--work", type=Path, default=Path("build") / "retraining")
    parser.add_argument("--json", type=Path, default=STORED / "retraining.json")
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("steps", "prompts", "evaluation")}
    pairs: list[JSONObject] = []
    for seed in range(options.pairs):
        path = options.work / "pairs" / f"{seed}.json"
        stored = read_json_object(path, advice="Delete it: the pair is then computed again.")
        if stored is not None and stored["sizes"] != sizes:
            raise SystemExit(f"{path} is of {stored['sizes']}; give another folder with --work.")
        if stored is None:
            pair = one_pair(seed, options.work, **sizes)
            stored = {"sizes": sizes, "pair": pair}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, stored)
        pairs.append(stored["pair"])
        print("\n".join(table(pairs)), flush=True)
        content = {"conditions": conditions(len(pairs), **sizes, share=SHARE), "pairs": pairs}
        differences = [pair["difference"]["value"] for pair in pairs]
        content["sign_test"] = {
            "positive": sum(x > 0 for x in differences),
            "pairs": len(differences),
            "p": sign_test(differences),
        }
        write(options.json, json.loads(json.dumps(content)))


if __name__ == "__main__":
    main()
