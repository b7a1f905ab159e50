"""Where the time of a pass, a prediction and a measurement goes, operator by operator.

    python -m benchmarks.profile [--models smollm2 random] [--json FILE]

Rollouts and ways as in benchmarks.estimators, one thread, each way once after a warm run. `share`
is an operator's own CPU time, without the operators that it calls, over that of all. The profiler
itself slows small operators down: read the large ones. Besides matrix products (`mm`, `addmm_`) a
share is what a target of benchmarks.scoring or benchmarks.estimators is missed by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.estimators import Work
from benchmarks.models import PROMPTS, problem
from benchmarks.tables import conditions, options, write
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.types import Rollouts

MOST = 12


def profiled(run: Callable[[], Any]) -> dict[str, dict[str, Any]]:
    """The largest operators of a call, by their own time, the largest first."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    spent, calls = Counter[str](), Counter[str]()
    for row in seen.key_averages():  # a name may have several rows
        name = row.key.removeprefix("aten::")
        spent[name] += row.self_cpu_time_total
        calls[name] += row.count
    return {
        name: {"share": time / spent.total(), "seconds": time / 1e6, "calls": calls[name]}
        for name, time in spent.most_common(MOST)
    }


def examine(policy: SequenceProcessor, rollouts: Rollouts) -> dict[str, Any]:
    work = Work(policy, rollouts)
    ways = {"pass": work.forward, "prediction": work.predict, "measurement": work.measure}
    return {name: profiled(way) for name, way in ways.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "profile", rounds=None)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of 8 rollouts each")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = {**conditions(1), "models": {}}
    for name in asked.models:
        found["models"][name] = examine(*problem(name, asked.prompts))
        for way, rows in found["models"][name].items():
            print(f"{name}, {way}")
            for operator, row in rows.items():
                print(
                    f"  {operator[:44]:44} {row['share']:6.1%} {row['seconds']:8.3f} s "
                    f"{row['calls']:6} calls"
                )
        write(asked.json, found)


if __name__ == "__main__":
    main()
