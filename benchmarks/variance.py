"""Which form has less variance, and how that grows with the length of responses.

    python -m benchmarks.variance [--replicates 1000] [--json FILE]

On the Markov policy with a tenth of the responses cut at the horizon T: variance of SNIS over
per-decision (measured change), of matched over to-go (slope), and of to-go without over with the
cross-fitted baseline. All from the same samples of 64 rollouts, 16 prompts x 4.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from entropy_experiments import first_order, measured_many
from entropy_experiments.estimate.ratio import score_all
from oracles.markov import MarkovPolicy

HORIZONS = (5, 10, 20, 50, 100, 200)
ETA, PROMPTS, PER_PROMPT = 0.01, 16, 4


def variances(horizon: int, replicates: int, policy_seed: int) -> dict[str, float]:
    policy = MarkovPolicy.random(policy_seed, horizon=horizon, stop=1 - 0.1 ** (1 / horizon))
    direction = policy.direction(10 + policy_seed)
    values: dict[str, list[float]] = {}
    for seed in range(replicates):
        rollouts = policy.draw(PROMPTS, PER_PROMPT, torch.Generator().manual_seed(seed))
        base = score_all(policy, policy.params, rollouts, microbatch=len(rollouts))
        common = {"microbatch": len(rollouts), "base": base, "repackings": 0}
        for form in ("matched", "to_go"):
            found = first_order(policy, rollouts, direction, form=form, **common)
            values.setdefault(form, []).append(found.value)
        found = first_order(policy, rollouts, direction, baseline=True, **common)
        values.setdefault("with_baseline", []).append(found.value)
        for form in ("snis", "per_decision"):
            (change,) = measured_many(
                policy, rollouts, {"v": direction}, [ETA], form=form, **common
            ).values()
            values.setdefault(form, []).append(change.value)
    return {name: float(torch.tensor(v).var()) for name, v in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicates", type=int, default=1000)
    parser.add_argument("--policies", type=int, default=3, help="policies to average over")
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("    T   snis/per_decision   matched/to_go   to_go/with_baseline   (geometric means)")
    for horizon in HORIZONS:
        logs = []
        for seed in range(arguments.policies):
            v = variances(horizon, arguments.replicates, seed)
            pairs = (
                v["snis"] / v["per_decision"],
                v["matched"] / v["to_go"],
                v["to_go"] / v["with_baseline"],
            )
            logs.append(torch.tensor(pairs).log())
        ratios = torch.stack(logs).mean(0).exp().tolist()
        rows.append({"T": horizon, "ratios": ratios})
        print(f"{horizon:5d}   {ratios[0]:17.2f}   {ratios[1]:13.2f}   {ratios[2]:19.2f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
