"""Class 32: a divergence, or a likelihood, that enters the loss with the wrong sign.

The divergence of a Gaussian from the standard one is (exp(v) + mu^2 - 1 - v) / 2, with v the
logarithm of the variance; other closed forms have x - log(x) in the same way. Both are bounded from
below, and their negatives are not: where exp(v) enters a loss with a minus beside v itself, the
steps drive it to infinity. Where the log-likelihood of data is added beside it, all is turned:
an evidence bound that is minimised.

The line is that where the sign is turned, or the formula's own.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in, maximised
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.terms import Path, Term, paths_down

_ENOUGH = 2  # steps


class Divergences(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        # terms of this step; kept, so that no other takes their ids
        self._curved: list[tuple[Term, Term]] = []  # (exp(v), v) and (x, log(x))
        self._likelihoods: list[Term] = []
        self._drawn = WeakIdKeyDictionary()
        self._noise = WeakIdKeyDictionary()  # plain draws
        self._exponentials = WeakIdKeyDictionary()  # exp(v) -> (v, its line)
        # of this step: v, whose exp scales noise, and the line of that exp
        self._spreads: list[tuple[Term, Site | None]] = []
        self._steps: dict[tuple[str, Site | None], set[int]] = {}

    def sampled(self, distribution: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        if isinstance(value, Tensor):
            self._drawn[value] = True
            scale = getattr(distribution, "scale", None)
            base = scale._base if isinstance(scale, Tensor) else None
            for tensor in (scale, base):
                known = self._exponentials.get(tensor) if isinstance(tensor, Tensor) else None
                if known is not None and pathwise:
                    self._spreads.append(known)

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        if not isinstance(value, Tensor) or not isinstance(result, Tensor):
            return
        taint = self.session.taint_of(value)
        data = value not in self._drawn and (taint is None or not taint.depends)
        if data and value.is_floating_point() and live_in(self.session, [result]):
            self._likelihoods.append(self.session.ledger.terms.of(result))

    def _spread(self, call: OpCall) -> None:
        """exp(v) beside noise: the width of a draw."""
        if call.short in ("randn", "randn_like", "normal_"):
            self._noise[call.outputs[0]] = True
        elif call.short == "mul" and any(t in self._noise for t in call.inputs):
            for tensor in call.inputs:
                known = self._exponentials.get(tensor)
                if known is not None:
                    self._spreads.append(known)

    def op(self, call: OpCall) -> None:
        if call.outputs:
            self._spread(call)
        if call.short == "exp" and call.outputs and call.outputs[0].requires_grad:
            v = self.session.ledger.terms.of(call.inputs[0])
            self._exponentials[call.outputs[0]] = (v, call.site)
        if call.short in ("exp", "log") and call.outputs and call.outputs[0].requires_grad:
            terms = self.session.ledger.terms
            made, source = terms.of(call.outputs[0]), terms.of(call.inputs[0])
            self._curved.append((made, source) if call.short == "exp" else (source, made))

    def step_ended(self, record: StepRecord) -> None:
        self._curved.clear()
        self._likelihoods.clear()
        self._spreads.clear()

    def backward_starts(self, backward: Backward) -> None:
        if (
            backward.taint is None
            or backward.kind != "backward"
            or maximised(self.session, backward)
        ):
            return
        if not (self._curved or self._likelihoods):
            return
        whole = {id(t) for pair in self._curved for t in pair} | {id(t) for t in self._likelihoods}
        for root in backward.roots:
            term = self.session.ledger.terms.of(root)
            paths: dict[int, list[Path]] = {}
            for path in paths_down(term, whole):
                paths.setdefault(id(path.term), []).append(path)
            if not self._likelihood(paths, backward):  # then it is the whole that is turned
                self._divergence(paths, backward)
            if self._spreads:
                self._widths(paths, backward)

    def _widths(self, paths: dict[int, list[Path]], backward: Backward) -> None:
        """exp(v) - v is the divergence of a variance exp(v); its draw has the width exp(v / 2)."""
        for curved, flat in self._curved:
            ours, theirs = paths.get(id(curved), []), paths.get(id(flat), [])
            spread = next((site for v, site in self._spreads if v is flat), None)
            if spread is None or len(ours) != 1 or len(theirs) != 1:
                continue
            up, down = ours[0].factor, theirs[0].factor
            if not (up > 0 and abs(up + down) < 1e-3 * up) or not self._again("width", spread):
                continue
            self.report(
                24,
                Severity.WARNING,
                "The draw takes for a standard deviation what its divergence takes for a variance.",
                why=f"Noise is scaled by exp(v), made here; the divergence has exp(v) - v "
                f"({curved.site}), which is that of a Gaussian whose variance is exp(v). The "
                "divergence is not that of the distribution that is drawn from.",
                fix="std = torch.exp(0.5 * logvar).",
                site=spread,
                parameters=curved.live,
                related=(curved.site, backward.site),
            )

    def _again(self, kind: str, site: Site | None) -> bool:
        steps = self._steps.setdefault((kind, site), set())
        steps.add(self.session.step)
        return len(steps) == _ENOUGH

    def _divergence(self, paths: dict[int, list[Path]], backward: Backward) -> None:
        for curved, flat in self._curved:
            if not (id(curved) in paths and id(flat) in paths):
                continue
            factor = sum(path.factor for path in paths[id(curved)])
            if math.isnan(factor) or factor >= 0 or len(paths[id(curved)]) > 1:
                continue
            path = paths[id(curved)][0]
            # the sum in which the two meet is the formula; what comes before it may turn the sign
            meeting = {id(term) for term, _ in paths[id(flat)][0].steps}
            above = [k for k, (term, _) in enumerate(path.steps) if id(term) in meeting]
            formula = path.steps[above[-1]][0].site if above else curved.site
            own, turned = 1.0, None
            for term, weight in path.steps:
                if term.site is not None and formula is not None and term.site.line == formula.line:
                    own *= weight
                elif weight < 0:
                    turned = term.site
            site = turned if own > 0 and turned is not None else formula
            self._say("divergence", site, curved, backward, (formula,))

    def _likelihood(self, paths: dict[int, list[Path]], backward: Backward) -> bool:
        if len(self._likelihoods) != 1 or len(self.session.record.backwards) > 1:
            return False
        [term] = self._likelihoods
        found = paths.get(id(term), [])
        if len(found) != 1 or not found[0].factor > 0:
            return False
        path = found[0]
        # beside a divergence that is turned as well: an entropy may be estimated by densities
        divergences = [p for curved, _ in self._curved for p in paths.get(id(curved), [])]
        if not any(p.factor < 0 for p in divergences):
            return False
        turned = [t.site for t, weight in path.steps if weight < 0]
        self._say("likelihood", turned[0] if turned else path.steps[0][0].site, term, backward, ())
        return True

    def _say(
        self,
        kind: str,
        site: Site | None,
        term: Term,
        backward: Backward,
        related: tuple[Site | None, ...],
    ) -> None:
        steps = self._steps.setdefault((kind, site), set())
        steps.add(backward.step)
        if len(steps) != _ENOUGH:
            return
        divergence = kind == "divergence"
        self.report(
            32,
            Severity.WARNING,
            "A divergence enters the loss with a minus: the steps make it large."
            if divergence
            else "The log-likelihood of the data is added to the loss: the steps make it small.",
            why="It has exp(v) beside v, or x beside log(x), as divergences in closed form have; "
            f"the part that grows faster (made at {term.site}) has a negative factor in the loss, "
            "which so has no lower bound."
            if divergence
            else "Minimising it makes what was seen less likely; nothing bounds it from below.",
            fix="KL = -0.5 * (1 + logvar - mu^2 - exp(logvar)), added to the loss."
            if divergence
            else "Minimise minus the log-likelihood (minus the ELBO).",
            site=site,
            parameters=term.live,
            related=(*related, term.site, backward.site),
        )
