"""The contracts and the doctor, live in the first steps of every training.

Before the first step: G3, G5, G6, G9 to G13 on the first batch, modules in train() mode. In each of
the first N steps, under gradient_doctor: G1, G2, G4, G5, G14. After them: what those steps showed
together, G8, and G7 on the two smallest episodes. A breach stops the training. Nothing here moves
a weight or a random number: a run with `--doctor 0` has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arc_refine.batch import Batch
from arc_refine.contracts import (
    Breach,
    ContractError,
    GradientWindow,
    broken_step,
    moved,
    no_gradient,
    owners,
    right_dtype,
    same_parameters,
    stuck,
)
from arc_refine.data import Episode, episode_area
from arc_refine.evaluate import predict
from arc_refine.probes import (
    evaluation_is_gradless,
    finite_differences,
    leak,
    measured_in_fp64,
    same_embedding,
    score_is_zero,
    sensitivity,
    term_gradients,
)
from arc_refine.step import NonFiniteGradientError, Observer, Training
from gradient_doctor import Doctor, Finding, Severity

ORDER = tuple(f"G{n}" for n in range(1, 15))


class LiveContracts:
    """Make it right after the optimizers: G5 compares with the parameters of this moment."""

    def __init__(
        self, training: Training, steps: int, make_batch: Callable[[Sequence[Episode]], Batch]
    ) -> None:
        self.training, self.steps, self.make_batch = training, steps, make_batch
        self.known = dict(training.networks.named_parameters())
        self.first = {n: p.detach().clone() for n, p in self.known.items() if p.requires_grad}
        self.main, self.policy = GradientWindow("G1"), GradientWindow("G2")
        self.count = 0
        self.held: list[str] = []
        self.notes: list[str] = []
        self.term_norms: dict[str, float] = {}
        self.finished = steps == 0
        self._doctor: Doctor | None = None
        self.findings: list[Finding] = []

    # the three moments

    def before(self, episodes: Sequence[Episode]) -> None:
        """On the first batch, before the first step."""
        if not self.steps:
            return
        training = self.training
        inputs = self.make_batch(episodes).inputs
        with torch.random.fork_rng(devices=[]):
            self._check("G3", owners(self.known, training.optimizers))
            self._check("G6", right_dtype(self.known))
            self._check("G12", same_embedding(training, inputs))
            self._check("G9", leak(training, episodes, self.make_batch))
            self._check("G10", sensitivity(training, inputs))
            self._check("G11", score_is_zero(training, inputs))
            if training.networks.policy is None:
                self.notes.append("G11: there is no policy with refine=off")
            evaluated = evaluation_is_gradless(lambda x: predict(training, x), inputs)
            self._check("G13", evaluated)

    def run(self, step: Callable[[Observer | None], dict[str, Any]]) -> dict[str, Any]:
        """One training step, watched if it is among the first."""
        if self.count >= self.steps:
            return step(None)
        doctor = self._watch()
        try:
            row = step(self)
            doctor.step()
        except BaseException as failure:
            self._leave(failure)
            if isinstance(failure, RuntimeError) and not isinstance(failure, _OWN):
                breach = broken_step(failure, self.count + 1)
                raise ContractError([breach], self._report()) from failure
            raise
        self.count += 1
        # one by one: an error of the doctor stops the training in the step that shows it
        self._judge(doctor.findings)
        return row

    @property
    def due(self) -> bool:
        """Whether the first steps are over and `after` has not been called."""
        return not self.finished and self.count >= self.steps

    def after(self, episodes: Sequence[Episode]) -> None:
        """Once, when the first steps are over, or the training, if it was shorter."""
        if self.finished:
            return
        self.finished = True
        self._leave(None)
        training = self.training
        self._check("G1", self.main.verdict())
        if self.policy.steps:
            self._check("G2", self.policy.verdict())
        self._check("G4", stuck(self.known, self.first, {**self.main.had, **self.policy.had}))
        self.first.clear()
        if self.count > 1:
            self.held.append("G14")
        else:
            self.notes.append("G14: one step only, two are needed")
        with torch.random.fork_rng(devices=[]):
            self.term_norms, broken = term_gradients(training, self.make_batch(episodes))
            self._check("G8", broken)
            small = sorted(episodes, key=lambda e: episode_area(e.inputs))[:2]
            self._check("G7", finite_differences(training, self.make_batch(small)))
        lm = training.networks.encoder.lm
        if lm is not None and not measured_in_fp64(lm):
            self.notes.append("G7: without the language model, which is frozen or too large")

    def report(self) -> dict[str, Any]:
        """For contracts.json."""
        return {
            "steps": self.count,
            "held": [name for name in ORDER if name in self.held],
            "notes": self.notes,
            "term_grad_norms": self.term_norms,
            "doctor": [finding.to_dict() for finding in self.findings],
        }

    # what a step shows (Observer)

    def main_backward(self, training: Training) -> None:
        mine, policy = self._parts()
        self._check("G1", self.main.see(mine))
        if training.config.refine == "rl":
            self._check("G1", no_gradient("G1", policy, "The main loss"))

    def main_step(self, training: Training, before: dict[str, list[Tensor]]) -> None:
        self._moved(before)
        self._check("G5", same_parameters(dict(training.networks.named_parameters()), self.known))
        self._check("G3", owners(dict(training.networks.named_parameters()), training.optimizers))

    def policy_backward(self, training: Training, reward_KB: Tensor) -> None:
        mine, policy = self._parts()
        # equal rewards: no advantage, and rightly no gradient from it
        if float(reward_KB.std()) > 0:
            self._check("G2", self.policy.see(policy))
        self._check("G2", no_gradient("G2", mine, "The policy's loss"))

    def policy_step(self, training: Training, before: dict[str, list[Tensor]]) -> None:
        self._moved(before)

    # inside

    def _parts(self) -> tuple[dict, dict]:
        groups = self.training.networks.groups()
        apart = self.training.config.refine == "rl"
        policy = groups.pop("policy", {}) if apart else {}
        return {n: p for members in groups.values() for n, p in members.items()}, policy

    def _moved(self, before: dict[str, list[Tensor]]) -> None:
        groups = self.training.networks.groups()
        for name, old in before.items():
            self._check("G4", moved(name, groups[name], old))

    def _check(self, contract: str, breaches: list[Breach]) -> None:
        if breaches:
            raise ContractError(breaches)
        if contract not in self.held:
            self.held.append(contract)

    def _watch(self) -> Doctor:
        if self._doctor is None:
            training = self.training
            trainable = [n for n, p in self.known.items() if p.requires_grad]
            self._doctor = Doctor(
                training.networks.modules(),
                training.optimizers,
                training.precision.scaler,
                {"trainable": trainable, "phase": "train"},
                trace_steps=min(3, self.steps),
                every=1,
            )
            self._doctor.__enter__()
        return self._doctor

    def _leave(self, failure: BaseException | None) -> None:
        if self._doctor is None:
            return
        kind = None if failure is None else type(failure)
        self._doctor.__exit__(kind, failure, None if failure is None else failure.__traceback__)
        self.findings = [as_meant(f) for f in self._doctor.findings]
        self._doctor = None
        if failure is None:
            self._judge(self.findings)

    def _judge(self, findings: Sequence[Finding]) -> None:
        findings = [as_meant(f) for f in findings]
        worst = [f for f in findings if f.severity >= Severity.ERROR]
        if worst:
            self.findings = list(findings)
            raise ContractError(
                [
                    Breach(f"doctor {f.number} {f.slug}", f"{f.what} {f.why}", f.fix, f.parameters)
                    for f in worst
                ]
            )

    def _report(self) -> str:
        return "\n".join(map(str, self.findings))

    def close(self) -> None:
        """However the training ends, the doctor's hooks go."""
        if self._doctor is not None:
            self._doctor.remove()
            self._doctor = None


def as_meant(finding: Finding) -> Finding:
    """One finding is expected: in log pi(a) = log N(u) - log |da/du| the last part is a constant of
    the stored sample. It belongs to the density and has no gradient; G11 tests that it need not."""
    site = finding.site
    if site is None or finding.slug != "cosmetic-term" or finding.severity > Severity.WARNING:
        return finding
    expected = site.function == "log_prob" and Path(site.file).parent == HERE
    return finding.at(Severity.NOTE) if expected else finding


HERE = Path(__file__).parent
_OWN = (ContractError, NonFiniteGradientError)
