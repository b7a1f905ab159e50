"""Classes 30 and 32: the weight of a log-probability, and the sign of a loss.

A score-function loss is -log pi(a) * A, with A a constant. Where A has a gradient of its own, the
loss trains what A was computed by (30): the critic learns to make the policy's loss small. Where
the sign is missing and no weight is negative, every action that was taken becomes less likely,
whatever its reward (32). Loss functions of torch are made to be minimised: minus one of them, as
the whole loss of the only optimizer, is driven up (32); so is a plain log-probability of the data.

Two more mistakes with values that should be constants. A ratio of a log-probability to itself, with
both in the graph, is 1 and its gradient exactly 0 (20). A target reward + gamma * value whose value
has a gradient trains the network to please its own target (30).
"""

from __future__ import annotations

import functools
import linecache
import math
import re
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in
from gradient_doctor.detectors.places import birth_site, called
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import MARK, node_of, nodes_of
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, OpCall, Session
from gradient_doctor.slips import surroundings
from gradient_doctor.terms import Term

_SAME = {
    *("sum", "mean", "squeeze", "unsqueeze", "view", "reshape", "float", "stack", "cat", "flatten"),
    *("to", "clone", "contiguous", "expand"),
}
_TAKES = {"gather", "__getitem__", "index_select", "take_along_dim", "diag", "diagonal"}
_PRODUCT = {"mul", "multiply"}
_LOSSES = {
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss"),
}
_GAINS = {"cosine_similarity"}
# what makes a positive weight on purpose: a mixture's probability, a learnt precision
_POSITIVE = {"softmax", "sigmoid", "exp", "softplus", "relu", "square", "abs", "sigmoid_", "exp_"}
_REARRANGES = _SAME | _TAKES
_KEEPS_POSITIVE = _REARRANGES | _PRODUCT | {"div", "clamp"}
_KEEPS_CENTRED = _REARRANGES | _PRODUCT | {"div", "detach"}
# a distribution is often called dist: dist.log_prob(a) is no cost
_COST = re.compile(r"cost|length|loss_|penalt|dist(?!r|[.])|time|error|energy|regret|delay")
_GAIN = re.compile(r"advantage|\badvs?\b|\breturns\b|_returns?\b|reward|\b(gae|ret|rew)s?\b")
# a program that learns by its costs has advantages that are costs
_COSTS = re.compile(r"\bcosts?\b|_cost|tour|makespan|penalt|regret|\benergy|distance|travel")
_DIFFERENCES = {"sub", "__rsub__", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
_ENOUGH = 2  # steps


@dataclass(frozen=True)
class LogProb:
    """Of an action that was taken; `sign` as it stands now."""

    sign: int
    site: Site | None


@dataclass(frozen=True)
class Weighted:
    """A log-probability times weights without gradient, and everything linear in it."""

    sign: int
    least: float
    greatest: float
    site: Site | None
    centred: bool = False  # less a baseline: of both signs, and named after a gain


@dataclass(frozen=True)
class Chase:
    """A value and its target are compared, both with gradients of one network."""

    site: Site | None  # where the target was made
    at: Site | None
    shared: int


_CHASES = MARK + ".chases"


class PolicyLosses(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._tables = WeakIdKeyDictionary()  # probabilities ("p") or logarithms of them ("log")
        self._log_probs = WeakIdKeyDictionary()
        self._weighted = WeakIdKeyDictionary()
        self._positive = WeakIdKeyDictionary()  # made by one of _POSITIVE, and what is left of it
        self._centred = WeakIdKeyDictionary()  # something was subtracted: its sign may turn
        self._bootstraps = WeakIdKeyDictionary()  # data + number * a live value -> its line
        self._discounted = WeakIdKeyDictionary()
        self._elements = WeakIdKeyDictionary()  # one number of a series
        self._reduced = WeakIdKeyDictionary()  # a mean of log-probabilities -> how many, and where
        self._credits: dict[Site | None, set[int]] = {}
        self._own_ratios: dict[Site | None, set[int]] = {}
        self._compared = False  # a target that has a gradient, with what it is the target of
        self._chases: dict[Site | None, set[int]] = {}
        self._live_weights: dict[Site | None, set[int]] = {}
        self._rising: dict[Site | None, set[int]] = {}
        self._negated: dict[Site | None, set[int]] = {}

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        pathwise = isinstance(value, Tensor) and value.requires_grad  # an entropy, not a score
        if isinstance(result, Tensor) and not pathwise and live_in(self.session, [result]):
            self._log_probs[result] = LogProb(1, site)

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        self._make_log_probs(call)
        if call.short in _POSITIVE or (
            call.short in _KEEPS_POSITIVE
            and any(tensor in self._positive for tensor in call.inputs)
        ):
            self._positive[call.outputs[0]] = True
        if call.short in ("sub", "__rsub__") or (
            call.short in _KEEPS_CENTRED and any(tensor in self._centred for tensor in call.inputs)
        ):
            self._centred[call.outputs[0]] = True
        if call.short in _PRODUCT and len(call.inputs) == 2:
            self._multiply(call)
        if call.short in ("sub", "__rsub__") and len(call.inputs) == 2:
            self._subtract(call)
        self._bootstrap(call)
        source = call.inputs[0]
        if call.short in ("mean", "sum") and source in self._log_probs:
            if call.outputs[0].numel() == 1 < source.numel():
                self._reduced[call.outputs[0]] = (source.numel(), call.site)
        elif call.short in ("neg", "squeeze", "view", "reshape") and source in self._reduced:
            self._reduced[call.outputs[0]] = self._reduced[source]
        self._follow(call)

    def _make_log_probs(self, call: OpCall) -> None:
        result, source = call.outputs[0], call.inputs[0]
        table = self._tables.get(source)
        if call.short in ("softmax", "log_softmax"):
            self._tables[result] = "p" if call.short == "softmax" else "log"
        elif call.short == "log" and table in ("p", "taken"):
            if table == "p":
                self._tables[result] = "log"
            else:
                self._log_probs[result] = LogProb(1, call.site)
        elif call.short in _TAKES and table is not None and len(call.inputs) > 1:
            if table == "log":
                self._log_probs[result] = LogProb(1, call.site)
            else:
                self._tables[result] = "taken"
        elif call.short in ("squeeze", "view", "reshape") and table is not None:
            self._tables[result] = table

    def _follow(self, call: OpCall) -> None:
        """Signs through what is linear: the sum of several has the weights of all."""
        result = call.outputs[0]
        numbers = [a for a in call.args if type(a) in (int, float)]
        for known in (self._log_probs, self._weighted):
            parts = [known[t] for t in call.inputs if t in known]
            if not parts:
                continue
            first = parts[0]
            if call.short == "neg":
                known[result] = replace(first, sign=-first.sign)
            elif call.short in ("mul", "div", "true_divide") and numbers:
                turned = -first.sign if numbers[0] < 0 else first.sign
                known[result] = replace(first, sign=turned)
            elif (call.short in _REARRANGES and known.get(result) is None) or (
                call.short in ("add", "add_", "__radd__", "__iadd__")
                # of several actions together, or begun from a number
                and (known is self._weighted or len(parts) == len(call.inputs))
            ):
                known[result] = self._joined(parts)
            elif call.short in ("sub", "sub_", "__isub__") and known is self._weighted:
                second = call.inputs[-1] in known and call.inputs[0] not in known
                known[result] = replace(first, sign=-first.sign) if second else first

    def _joined(self, parts: list[Any]) -> Any:
        first = parts[0]
        if not isinstance(first, Weighted):
            return first
        # terms of both signs cannot be judged
        sign = first.sign if all(p.sign == first.sign for p in parts) else 0
        least, greatest = min(p.least for p in parts), max(p.greatest for p in parts)
        return replace(first, sign=sign, least=least, greatest=greatest)

    def _multiply(self, call: OpCall) -> None:
        left, right = call.inputs
        if (left in self._log_probs) == (right in self._log_probs):
            return
        log_prob, weight = (left, right) if left in self._log_probs else (right, left)
        values = self.session.values(weight)
        if values is None or not values.is_floating_point() or not values.numel():
            return
        self._lost_credit(call, log_prob, weight)
        live = live_in(self.session, [log_prob])
        foreign = live_in(self.session, [weight]) & ~live
        known: LogProb = self._log_probs[log_prob]
        if foreign:
            # a mixture's probability or a precision learns together with what it weighs
            advantage = bool((values < 0).any()) or weight not in self._positive
            if advantage and self._is_network(foreign):
                self._live_weight(call, weight, foreign)
        elif not live_in(self.session, [weight]) and weight not in self._centred:
            # costs are minimised by their log-probabilities as they stand; rewards are not
            if call.site is not None and _COST.search(surroundings(call.site).lower()):
                return
            least, greatest = float(values.min()), float(values.max())
            product = Weighted(known.sign, least, greatest, call.site)
            self._weighted[call.outputs[0]] = product
        elif not live_in(self.session, [weight]) and call.site is not None:
            line = surroundings(call.site).lower()
            gain = _GAIN.search(line) and not _COST.search(line)
            if gain and not _COSTS.search(_source(call.site.file)):
                product = Weighted(known.sign, 0.0, 1.0, call.site, True)
                self._weighted[call.outputs[0]] = product

    def _lost_credit(self, call: OpCall, log_prob: Tensor, weight: Tensor) -> None:
        """Log-probabilities of all actions become one number before each meets its own weight."""
        reduced: tuple[int, Site | None] | None = self._reduced.get(log_prob)
        if reduced is None or reduced[0] != weight.numel() or live_in(self.session, [weight]):
            return
        steps = self._credits.setdefault(reduced[1], set())
        steps.add(self.session.step)
        if len(steps) != _ENOUGH:
            return
        self.report(
            24,
            Severity.WARNING,
            f"{reduced[0]} log-probabilities are averaged before they meet their weights.",
            why=f"The one number that is left is multiplied at {call.site} by all "
            f"{reduced[0]} weights: every action is credited with the sum of them, none with its "
            "own return.",
            fix="Multiply first, then average: (log_prob * weight).mean().",
            site=reduced[1],
            parameters=live_in(self.session, [log_prob]),
            related=(call.site,),
        )

    def _is_network(self, mask: int) -> bool:
        """More than a temperature or a multiplier."""
        return any(p.numel() > 1 for p in self.session.registry.tensors(mask))

    def _live_weight(self, call: OpCall, weight: Tensor, foreign: int) -> None:
        taint = self.session.taint_of(weight)
        site = taint.site if taint is not None else call.site
        steps = self._live_weights.setdefault(site, set())
        steps.add(self.session.step)
        if len(steps) < _ENOUGH:
            return
        self.report(
            30,
            Severity.WARNING,
            "The policy's loss also trains what computes the advantage.",
            why=f"The log-probability is multiplied at {call.site} by a weight that has a gradient "
            "of its own: the critic is moved to make the policy's loss small, not to predict "
            "returns.",
            fix="Use the advantage as a number: advantage.detach() in the policy's loss; the "
            "critic has a loss of its own.",
            site=site,
            parameters=foreign,
            related=(call.site,),
        )

    # what should be a number, and has a gradient

    def _subtract(self, call: OpCall) -> None:
        """log pi - log pi_old, both alive and equal: the ratio's gradient cancels."""
        left, right = call.inputs
        if left is right or left not in self._log_probs or right not in self._log_probs:
            return
        live = live_in(self.session, [left])
        if not live or live != live_in(self.session, [right]):
            return
        values = self.session.values(left), self.session.values(right)
        if values[0] is None or values[1] is None or not torch.equal(values[0], values[1]):
            return
        sites = [taint.site for taint in map(self.session.taint_of, call.inputs) if taint]
        steps = self._own_ratios.setdefault(call.site, set())
        steps.add(self.session.step)
        if len(steps) < _ENOUGH:
            return
        self.report(
            20,
            Severity.ERROR,
            "The ratio of a log-probability to itself has a gradient of exactly 0.",
            why="Both sides of this difference come from the same parameters, have the same "
            "values, and are in the graph: what one gives, the other takes away.",
            fix="The old log-probability is a number: store it with detach(), or compute it "
            "under no_grad.",
            site=sites[-1] if sites else call.site,
            parameters=live,
            related=(call.site, *sites),
        )

    def _bootstrap(self, call: OpCall) -> None:
        """Targets of temporal differences: rewards (data) + gamma * value (alive)."""
        result = call.outputs[0]
        if call.short in _PRODUCT:
            numbers = [a for a in call.args if type(a) is float and 0.5 <= a < 1.0]
            inherited = any(t in self._discounted for t in call.inputs)
            # also gamma * (1 - done), before it meets the value; or step by step
            alone = any(t in self._elements or t in self._bootstraps for t in call.inputs)
            if (result.numel() > 1 or alone) and (numbers or inherited):
                self._discounted[result] = True
        elif call.short in ("add", "__radd__") and len(call.inputs) == 2:
            values = [t for t in call.inputs if t in self._discounted and t.requires_grad]
            rest = [
                t
                for t in call.inputs
                if not t.requires_grad and (_is_per_sample(t) or t in self._elements)
            ]
            if len(values) == 1 and len(rest) == 1:
                self._bootstraps[result] = call.site
        elif call.short in _REARRANGES and call.inputs[0] in self._bootstraps:
            self._bootstraps[result] = self._bootstraps[call.inputs[0]]
        elif call.short in ("__getitem__", "unbind") and call.inputs[0].dim() == 1:
            for output in call.outputs:
                if output.dim() == 0:
                    self._elements[output] = True
        elif call.short in _DIFFERENCES and len(call.inputs) == 2:
            self._chase(call)

    def _chase(self, call: OpCall) -> None:
        targets = [t for t in call.inputs if t in self._bootstraps]
        others = [t for t in call.inputs if t not in self._bootstraps]
        if len(targets) != 1 or len(others) != 1:
            return
        moved, mine = live_in(self.session, targets), live_in(self.session, others)
        shared = moved & mine
        if not shared and self._forms(moved) == self._forms(mine):
            # a target network that an optimizer holds learns to move the target, too
            shared = moved & self.session.registry.owned
        node = node_of(call.outputs[0])
        if node is None or not shared or not self._is_network(shared):
            return
        chase = Chase(self._bootstraps[targets[0]], call.site, shared)
        cast(dict[str, Any], node.metadata)[_CHASES] = chase
        self._compared = True

    def _chased(self, root: Tensor) -> None:
        """Of the comparisons those that are learnt from: an advantage may be detached later."""
        for node in nodes_of(node_of(root)):
            chase = node.metadata.get(_CHASES)
            if chase is not None:
                steps = self._chases.setdefault(chase.site, set())
                steps.add(self.session.step)
                if len(steps) >= _ENOUGH:
                    self._say_chase(chase)

    def _say_chase(self, chase: Chase) -> None:
        self.report(
            30,
            Severity.WARNING,
            "The target has a gradient: the network is also trained to change its own target.",
            why=f"Data plus a discounted value, made here, is compared at {chase.at} with another "
            "value, and both sides are in the graph: the loss falls as well when the value of the "
            "next state moves, which is no learning from the reward.",
            fix="Compute the target under no_grad, or detach() it.",
            site=chase.site,
            parameters=chase.shared,
            related=(chase.at,),
        )

    def _forms(self, mask: int) -> list[tuple[int, ...]]:
        return sorted(tuple(p.shape) for p in self.session.registry.tensors(mask))

    # the sign of the whole

    def backward_starts(self, backward: Backward) -> None:
        if backward.taint is None or backward.kind != "backward":
            return
        for root in backward.roots:
            if self._compared and root.requires_grad:
                self._chased(root)
            plain: LogProb | None = self._log_probs.get(root)
            if plain is not None and plain.sign > 0 and not self._maximised(backward):
                self._rises(Weighted(1, 1.0, 1.0, plain.site), backward)
            weighted: Weighted | None = self._weighted.get(root)
            if weighted is not None and weighted.sign > 0 and weighted.least >= 0:
                # one weight for all is a temperature: that loss is an entropy
                if weighted.greatest > weighted.least and not self._maximised(backward):
                    self._rises(weighted, backward)
            elif weighted is None:
                self._whole(self.session.ledger.terms.of(root), backward)

    def _rises(self, weighted: Weighted, backward: Backward) -> None:
        steps = self._rising.setdefault(weighted.site, set())
        steps.add(backward.step)
        if len(steps) < _ENOUGH:
            return
        plain = weighted.least == weighted.greatest
        self.report(
            32,
            Severity.WARNING,
            "The loss makes the actions with an advantage less likely."
            if weighted.centred
            else "The loss makes every outcome that was seen less likely."
            if plain
            else "The loss makes every action that was taken less likely.",
            why="It is a log-probability of the data without a minus: minimising it lowers them."
            if plain
            else "Log-probabilities times their advantages are summed up in it without a minus: "
            "minimising it makes rare what was better than expected."
            if weighted.centred
            else f"Log-probabilities enter it with weights between {weighted.least:.3g} and "
            f"{weighted.greatest:.3g}, none of them negative, and without a minus: minimising it "
            "lowers them all, those with the highest reward most.",
            fix="Minimise -log_prob." if plain else "Minimise -log_prob * weight.",
            site=weighted.site,
            parameters=backward.taint.live if backward.taint is not None else 0,
            related=(backward.site,),
        )

    def _whole(self, root: Term, backward: Backward) -> None:
        """Minus a loss function of torch, or such a function that is maximised."""
        factor, term, turned = 1.0, root, root.site
        while term.kind == "sum" and len(term.parts) == 1:
            part, weight = term.parts[0]
            if math.isnan(weight):
                return
            if weight < 0:
                turned = term.site
            factor, term = factor * weight, part
        maximised = self._maximised(backward)
        # a similarity is made to be maximised
        meant = (factor > 0) if term.op in _LOSSES else (factor < 0)
        if term.op not in _LOSSES | _GAINS or meant != maximised:
            return
        registry = self.session.registry
        if term.op in _GAINS and not any(map(registry.home, registry.tensors(root.live))):
            return  # an attack on an input
        own = registry.owned
        if len(registry.optimizers) != 1 or root.live & ~own or len(self._negated) > 1:
            return  # adversaries, attacks and reversed gradients mean it
        steps = self._negated.setdefault(turned, set())
        steps.add(backward.step)
        if len(steps) < _ENOUGH:
            return
        name = next(iter(registry.optimizers))
        how = f"the {called(name)} maximises it" if maximised else "it enters with a minus"
        self.report(
            32,
            Severity.WARNING,
            f"The only loss of the {called(name)} is {term.op}, and the steps drive it "
            + ("down." if term.op in _GAINS else "up."),
            why=f"{term.op} is 1 where both agree: every step pushes them apart."
            if term.op in _GAINS
            else f"{term.op} is made to be minimised, but {how}: every step along its gradient "
            "makes the predictions worse, without a bound.",
            fix=f"Minimise 1 - {term.op}."
            if term.op in _GAINS
            else "Minimise it: remove the minus, or maximize=True.",
            site=(birth_site(registry, registry.optimizers[name]) if maximised else None) or turned,
            parameters=root.live,
            related=(term.site, turned, backward.site),
        )

    def _maximised(self, backward: Backward) -> bool:
        live = backward.taint.live if backward.taint is not None else 0
        registry = self.session.registry
        groups = [
            group
            for optimizer in registry.optimizers.values()
            if registry.bits(owned_by(optimizer)) & live
            for group in optimizer.param_groups
        ]
        return bool(groups) and all(group.get("maximize") for group in groups)


@functools.lru_cache(maxsize=32)
def _source(file: str) -> str:
    return "".join(linecache.getlines(file)).lower()


def _is_per_sample(tensor: Tensor) -> bool:
    """One number for each of several samples, as rewards are."""
    return tensor.numel() > 1 and (tensor.dim() == 1 or tensor.shape[-1] == 1)
