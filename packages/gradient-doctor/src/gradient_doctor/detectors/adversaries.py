"""Class 32: a generator that is taught to be found out.

The critic of a GAN is asked for one answer at made samples and another at real ones. The generator
is to get the other answer from it: a loss that gives made samples the critic's own label for them,
or minimises the very score that the critic minimises at them, makes the two work together, and the
samples worse.

Seen are the labels (0 or 1, near enough) that one network's scores are compared with, or the sign
with which they enter a loss, at values that a second network has made: with gradients for that
network or without. Which loss is the generator's is known from the optimizer that steps on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gradient_doctor.detectors.common import argument, maximised
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.terms import Term, paths_down

_ENOUGH = 2  # steps
_LABELS = {"binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"}
_SCORES = {"linear", "conv2d", "conv1d", "squeeze", "view", "reshape", "flatten"}


@dataclass(frozen=True)
class Answer:
    """What a loss asks of scores: 1 to be large, -1 to be small."""

    wanted: int
    depends: int
    live: int
    site: Site | None


@dataclass
class Round:
    """One backward, and what it asked for."""

    answers: list[Answer]
    live: int
    stepped: int = 0  # parameters of the optimizers that stepped on it


class Adversaries(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._labels: list[tuple[Term, Answer]] = []  # since the last backward
        self._rounds: list[Round] = []  # since the last time that all have stepped
        self._steps: dict[Site | None, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if call.short not in _LABELS:
            return
        scores, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not (isinstance(scores, Tensor) and isinstance(target, Tensor)):
            return
        taint = self.session.taint_of(scores)
        values = None if target.requires_grad else self.session.values(target)
        if taint is None or not taint.live or values is None or not values.numel():
            return
        label = float(values.float().mean())
        spread = float(values.float().max() - values.float().min())
        if spread > 0.4 or not (-0.1 <= label <= 0.35 or 0.65 <= label <= 1.3):
            return
        wanted = 1 if label > 0.5 else -1
        term = self.session.ledger.terms.of(call.outputs[0])
        self._labels.append((term, Answer(wanted, taint.depends, taint.live, call.site)))

    def backward_starts(self, backward: Backward) -> None:
        labels, self._labels = self._labels, []
        if backward.taint is None or backward.kind != "backward" or not backward.roots:
            return
        if maximised(self.session, backward):
            return
        answers = self._signed(labels, backward) if labels else []
        if not labels:
            answers = self._scores(backward)
        if answers:
            self._rounds.append(Round(answers, backward.taint.live))

    def _signed(self, labels: list[tuple[Term, Answer]], backward: Backward) -> list[Answer]:
        """With a minus before it, a loss asks for the other answer: the minimax form."""
        known = {id(term): answer for term, answer in labels}
        answers = []
        for path in paths_down(self.session.ledger.terms.of(backward.roots[0]), {*known}):
            answer = known.get(id(path.term))
            if answer is not None and path.factor:
                turned = path.factor < 0
                answers.append(replace(answer, wanted=-answer.wanted if turned else answer.wanted))
        return answers

    def _scores(self, backward: Backward) -> list[Answer]:
        """Plain scores that a loss is the sum of: a Wasserstein critic's."""
        answers = []
        for path in paths_down(self.session.ledger.terms.of(backward.roots[0]), set()):
            term = path.term
            if term.kind == "value" and term.op in _SCORES and path.factor:
                wanted = -1 if path.factor > 0 else 1
                site = path.steps[0][0].site if path.steps else term.site
                answers.append(Answer(wanted, term.depends, term.live, site))
        return answers

    def event(self, event: Event) -> None:
        if event.kind != "step" or not self._rounds:
            return
        optimizer = event.data.get("optimizer")
        if optimizer is None:
            return
        own = self.session.registry.bits(owned_by(optimizer))
        for one in self._rounds:
            if one.live & own and not one.stepped:
                one.stepped = own

    def step_ended(self, record: StepRecord) -> None:
        rounds, self._rounds = self._rounds, []
        for one in rounds:
            for answer in one.answers:
                maker = one.stepped  # whoever steps on this loss, and has made what is scored
                critic = answer.live & ~maker
                if maker and critic and answer.live & maker:
                    self._judge(answer, maker, critic, rounds)

    def _judge(self, answer: Answer, maker: int, critic: int, rounds: list[Round]) -> None:
        """The generator's loss, beside what the critic's own losses ask of made and real."""
        made, real = set[int](), set[int]()
        for other in rounds:
            if not other.stepped & critic or other.stepped & maker:
                continue
            for one in other.answers:
                if one.live & critic:
                    (made if one.depends & maker else real).add(one.wanted)
        if len(made) != 1 or len(real) != 1 or made == real or made != {answer.wanted}:
            return
        steps = self._steps.setdefault(answer.site, set())
        steps.add(self.session.step)
        if len(steps) != _ENOUGH:
            return
        self.report(
            32,
            Severity.WARNING,
            "The generator is trained to be found out: its loss asks the critic for the answer "
            "that the critic's own loss asks for.",
            why="At samples that are made, the critic's loss wants "
            f"{'large' if answer.wanted > 0 else 'small'} scores, and so does this loss, which "
            "the generator's optimizer steps on: both pull the same way, and the samples get "
            "easier to tell.",
            fix="Give made samples the label of real ones in the generator's loss (or minimise "
            "-critic(made).mean()).",
            site=answer.site,
            parameters=maker,
        )
