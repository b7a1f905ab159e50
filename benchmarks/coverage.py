"""How often the 95 % intervals of `entropy-probe run` hold the truth, on the embedded policy.

    python -m benchmarks.coverage [--rollouts 32000] [--json FILE]

One pool of rollouts of the embedded checkpoint is drawn and scored once (at theta, at theta + eta v
and theta - eta v, and along v). Probes are disjoint slices of it, each as a run of its own would
see it: level, predicted, measured, their paired difference, the second-order prediction and what it
misses, in both forms. The truth is the same number of the whole pool; `width` is the median
half-width over that of normal units, t(n - 1) times the spread of the value over the probes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from scipy.special import stdtrit

from entropy_experiments.config import load_config
from entropy_experiments.estimate.first_order import scores_along, slope_of_scores
from entropy_experiments.estimate.level import level_of_scores
from entropy_experiments.estimate.measured import change, even_part
from entropy_experiments.estimate.options import PAIRED_WITH, SlopeForm, slope_estimand
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.numerics.derivatives import shifted
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.pipelines.probe_sampling import Sampler, open_checkpoint
from entropy_experiments.sampling import countdown
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.types import Estimand, Estimate, Rollouts, Scores
from entropy_experiments.types.estimate import CONFIDENCE

SEED = 21
SIZES = (16, 32)
FORMS: tuple[SlopeForm, ...] = ("matched", "to_go")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Rollouts of one checkpoint, scored for one step."""

    rollouts: Rollouts
    base: Scores
    ahead: Scores
    behind: Scores
    slope: Scores
    lr: float
    estimands: dict[SlopeForm, Estimand]

    def take(self, rows_N: torch.Tensor) -> Pool:
        part = replace(
            self.rollouts.take(rows_N), weight_N=None, share=1.0, prompt_N=torch.arange(len(rows_N))
        )
        scores = {
            name: Scores(*(x_NS[rows_N] for x_NS in getattr(self, name)))
            for name in ("base", "ahead", "behind", "slope")
        }
        return replace(self, rollouts=part, **scores)

    def probes(self, size: int) -> Iterator[Pool]:
        for start in range(0, len(self.rollouts) - size + 1, size):
            yield self.take(torch.arange(start, start + size))

    def estimates(self, form: SlopeForm) -> dict[str, Estimate]:
        """What a run on these rollouts says."""
        estimand, rollouts = self.estimands[form], self.rollouts
        predicted = self.lr * slope_of_scores(self.base, self.slope, rollouts, estimand, mode="jvp")
        measured = change(self.base, self.ahead, rollouts, estimand)
        minus = change(self.base, self.behind, rollouts, estimand)
        second = predicted + even_part(predicted, minus)
        return {
            "level": level_of_scores(self.base, rollouts, estimand),
            "predicted": predicted,
            "measured": measured,
            "difference": predicted - measured,
            "second order": second,
            "second miss": second - measured,
        }


def draw_pool(count: int, seed: int, checkpoint: Path | None = None) -> Pool:
    """Problems as the task makes them, one response each; the checkpoint's recorded step."""
    with TemporaryDirectory() as folder:
        config = (
            load_config()
            .under(folder)
            .with_overrides(
                [
                    "data.evaluation_prompts=5",
                    "memory.microbatch_size=64",
                    "sampling.batch_size=256",
                    f"sampling.seed={seed}",
                    "data.update_rollouts=recorded",
                ]
            )
        )
        inputs = gather(config, checkpoint)
        sampler = Sampler(config, open_checkpoint(config, inputs.checkpoint.path))
        sampler.generator.store = None
        problems = [
            Problem(id=str(at), prompt=one.prompt, answer="", facts={})
            for at, one in enumerate(islice(countdown.problems(f"coverage {seed}"), count))
        ]
        rollouts = sampler.generator.generate(problems, group=1, name="coverage")
        rollouts = replace(rollouts, behaviour_logprob_NS=None)
        policy, (direction, _) = inputs.policy, inputs.step()
        v, lr = direction.total, inputs.lr
        base, (slope,) = scores_along(policy, rollouts, [v], mode="jvp", microbatch=64)
        ahead, behind = (
            score_all(policy, shifted(policy.params, v, eta), rollouts, microbatch=64)
            for eta in (lr, -lr)
        )
        estimands: dict[SlopeForm, Estimand] = {
            form: slope_estimand(policy, form=form, horizon=inputs.horizon) for form in FORMS
        }
    return Pool(
        rollouts=rollouts,
        base=base,
        ahead=ahead,
        behind=behind,
        slope=slope,
        lr=lr,
        estimands=estimands,
    )


def coverage(pool: Pool, size: int, form: SlopeForm) -> list[dict[str, Any]]:
    """One row for each number that a run prints."""
    truth = pool.estimates(form)
    seen: dict[str, list[Estimate]] = {name: [] for name in truth}
    for probe in pool.probes(size):
        for name, estimate in probe.estimates(form).items():
            seen[name].append(estimate)
    rows = []
    for name, many in seen.items():
        exact = truth[name].value
        value_P = torch.tensor([one.value for one in many], dtype=torch.float64)
        ends = [one.interval for one in many if one.interval is not None]
        assert len(ends) == len(many)
        below = sum(high < exact for _, high in ends) / len(many)
        above = sum(low > exact for low, _ in ends) / len(many)
        held = [one.covers(exact) for one in many if one.trusted]
        half_P = torch.tensor([high - low for low, high in ends], dtype=torch.float64) / 2
        usual = float(stdtrit(size - 1, 0.5 + CONFIDENCE / 2)) * float(value_P.std())
        rows.append(
            {
                "B_E": size,
                "form": PAIRED_WITH[form],
                "number": name,
                "probes": len(many),
                "coverage": 1 - below - above,
                "too_low": below,
                "too_high": above,
                "truth": exact,
                "bias_over_sd": float((value_P.mean() - exact) / value_P.std()),
                "jackknife_bias_over_sd": float(
                    torch.tensor([one.bias for one in many]).mean() / value_P.std()
                ),
                "sd": float(value_P.std()),
                "stderr": float(torch.tensor([one.stderr or 0.0 for one in many]).mean()),
                "width": float(half_P.median()) / usual,
                "trusted": len(held) / len(many),
                "coverage_trusted": sum(held) / len(held) if held else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=32_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--pool", type=Path, help="keep the scored pool here, or take it from here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.pool is not None and arguments.pool.exists():
        pool = torch.load(arguments.pool, weights_only=False)
    else:
        pool = draw_pool(arguments.rollouts, arguments.seed)
        if arguments.pool is not None:
            torch.save(pool, arguments.pool)
    rows = [row for size in SIZES for form in FORMS for row in coverage(pool, size, form)]
    print("B_E  form          number        probes  coverage  low/high, %  width  bias/sd  trusted")
    for row in rows:
        print(
            f"{row['B_E']:>3}  {row['form']:12}  {row['number']:12}  {row['probes']:>6}  "
            f"{row['coverage']:>7.1%}  {row['too_low']:>5.1%} {row['too_high']:>5.1%}  "
            f"{row['width']:>5.2f}  {row['bias_over_sd']:>+7.3f}  {row['trusted']:>6.1%}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
