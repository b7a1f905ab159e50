"""The backward walk through the checkpoints of a window (`attribution.run_ledger`).

A visit of checkpoint t draws its evaluation rollouts, takes g_H and g_R there, and accounts for
batch t with the costate of the visit before. Each visit leaves two stages on disk,

    step_t      token rows, numbers and influence values: all that the files are made of
    costate_t   gradients at t and rho A_t: all that the next visit needs; the one before is deleted

so a run that is killed goes on after its last finished visit, with the same bits, and memory holds
one step's states whatever the length of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from entropy_experiments.attribution.run_ledger import (
    Columns,
    LedgerStep,
    columns_of,
    slopes_at,
    step_shares,
)
from entropy_experiments.pipelines.influence.packing import pack_params, unpacked
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.pipelines.run_ledger.evaluation import Evaluations
from entropy_experiments.pipelines.run_ledger.files import StoredStep
from entropy_experiments.pipelines.run_ledger.rows import layer_columns, step_facts, token_rows
from entropy_experiments.pipelines.run_ledger.stages import LedgerStages, Say
from entropy_experiments.pipelines.run_ledger.states import RunStates
from entropy_experiments.pipelines.run_ledger.stored_estimates import pack
from entropy_experiments.pipelines.run_ledger.window import ExplainOptions, Window
from entropy_experiments.results import JSONObject
from entropy_experiments.results.run_ledger import Arrival
from entropy_experiments.types import Params


@dataclass(kw_only=True, eq=False)
class Walk:
    """The visits of one window; what they leave is on disk."""

    window: Window
    options: ExplainOptions
    states: RunStates
    evaluations: Evaluations
    stages: LedgerStages
    say: Say | None

    def go(self) -> None:
        """Every visit that is not on disk yet."""
        first, last = self.window.start, self.window.end
        done = self._resumed_from()
        for step in range(last, last if done is None else done, -1):
            self._forget(step)  # killed before it could
        visits, started, made = list(range(last, first - 1, -1)), time.perf_counter(), 0
        for step in visits:
            if done is not None and step >= done:
                continue
            facts = self._visit(step)
            made += 1
            left = step - first
            if self.say is not None:
                spent = (time.perf_counter() - started) / made
                rest = f", about {_minutes(left * spent)} left" if left else ""
                entropy = cast(JSONObject, facts["level"])["value"]
                self.say(
                    f"checkpoint {step}: entropy {entropy:.4f}"
                    + (f", batch {facts['batch_dH']:+.4g}" if step < last else "")
                    + f" ({spent:.1f} s a step{rest})"
                )

    def _resumed_from(self) -> int | None:
        """The lowest checkpoint whose visit is finished, all after it included."""
        done = None
        for step in range(self.window.end, self.window.start - 1, -1):
            if not self.stages.holds(f"step_{step}"):
                break
            done = step
        if done is None or self.stages.holds(f"costate_{done}"):
            return done
        # Killed between the two stages of a visit: it is made again.
        return None if done == self.window.end else done + 1

    def facts(self, step: int) -> JSONObject:
        """What a finished visit kept, without what the tables alone need."""
        tables = ("by_parameter", "prompts", "solved", "special")
        facts = self.stages.get(f"step_{step}").facts
        return {name: value for name, value in facts.items() if name not in tables}

    def _costate(self, step: int) -> tuple[Columns, Columns | None]:
        """(gradients at a checkpoint, rho A there; None at the window's end)."""
        stage = self.stages.get(f"costate_{step}")
        names = stage.facts["columns"]
        device = next(iter(self.states.at(step - 1).params.values())).device
        groups = unpacked(stage.tensors, [f"{kind}.{name}" for kind in "gA" for name in names])

        def of(kind: str) -> dict[str, dict[str, Tensor]]:
            return {
                name: {key: value.to(device) for key, value in groups[f"{kind}.{name}"].items()}
                for name in names
                if groups[f"{kind}.{name}"]
            }

        return of("g"), of("A") or None

    def _visit(self, step: int) -> JSONObject:
        first, last = self.window.start, self.window.end
        after = None if step == last else _cloned(self.states.at(step + 1).params)
        later = None if step == last else self.states.at(step + 1).optimizer
        state = self.states.at(step)
        self.states.close(step + 1)  # two models at a time, not three
        before = None if step == first else _cloned(self.states.at(step - 1).params)
        estimator = self.evaluations.estimator(state)
        sampler = self.evaluations.sampler(state)
        evaluation = self.evaluations.draw(sampler, f"evaluation-{step}", self.options.responses)
        reward_N = self.evaluations.rewards(state, evaluation, self.options.responses)
        slopes = slopes_at(
            state.probed.policy,
            evaluation,
            reward_N,
            before,
            after,
            estimator,
            tangent=self.options.tangent,
        )
        facts: JSONObject = {
            **{
                name: pack(getattr(slopes, name))
                for name in ("level", "reward", "path", "tangent", "reward_path")
            },
            "evaluation": {
                "prompts": len(evaluation.prompt_N.unique()),
                "rollouts": len(evaluation),
                "tokens": int(evaluation.tokens_N.sum()),
            },
            "evaluation_notes": list(self.evaluations.notes),
        }
        if step in (first, last):
            facts["fresh"] = self.evaluations.fresh(state, sampler, estimator)
        columns = columns_of(slopes, tangent=self.options.tangent)
        groups: dict[str, Params] = {f"g.{name}": g for name, g in slopes.gradients.items()}
        tokens = None
        if after is not None:
            there, carried = self._costate(step + 1)
            batch, own, trained = self.states.batch(state)
            shares = step_shares(
                LedgerStep(
                    trained=trained,
                    after=after,
                    batch=batch,
                    objective=own.objective,
                    optimizer=state.optimizer,
                    max_grad_norm=own["max_grad_norm"] or None,
                    later=later if later is not None and later.state else None,
                ),
                columns,
                there,
                carried,
                mode=estimator.mode,
                microbatch=estimator.microbatch,
            )
            groups |= {f"A.{name}": value for name, value in shares.carried.items()}
            facts |= step_facts(state, batch, shares, own, self.states.run.made(step))
            tokens = token_rows(state, batch, shares)
        stage = Stage(
            facts=facts,
            tensors={} if tokens is None else {"tokens": _as_tensor(tokens)},
        )
        costate = Stage(facts={"columns": list(columns)}, tensors=pack_params(groups))
        self.stages.put(f"step_{step}", stage)
        self.stages.put(f"costate_{step}", costate)
        self._forget(step + 1)
        return facts

    def _forget(self, step: int) -> None:
        """What no later visit needs: the costate and the replayed state one checkpoint on."""
        self.stages.remove(f"costate_{step}", f"state_{step}")

    def stored_steps(self) -> Iterator[StoredStep]:
        """Every step's rows, one at a time."""
        for step in self.window.steps:
            stage = self.stages.get(f"step_{step}")
            facts = stage.facts
            yield StoredStep(
                tokens=stage.tensors["tokens"].numpy().tobytes(),
                prompts=facts["prompts"],
                solved=facts["solved"],
                layers=layer_columns(step, facts["by_parameter"]),
                special=facts["special"],
            )

    def replays(self) -> list[Arrival]:
        """Where the replays between sparse checkpoints arrived."""
        anchors = self.window.anchors
        return [
            cast(Arrival, self.stages.get(f"replay_{b}").facts)
            for a, b in pairwise(anchors)
            if b > a + 1
        ]


def _cloned(params: Params) -> dict[str, Tensor]:
    return {name: theta.detach().clone() for name, theta in params.items()}


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
