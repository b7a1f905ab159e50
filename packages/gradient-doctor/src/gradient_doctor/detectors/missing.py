"""Parameters that no gradient reaches: constant losses, cuts, idle parts (1, 2, 3, 5, 11)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradient_doctor.detectors.late import Claim
from gradient_doctor.explain import CutFact, Ledger, bits_of, how_to_mend, what_cuts
from gradient_doctor.findings import Finding, Severity, Site, listed
from gradient_doctor.lengths_behind import find_empty_lengths, find_floored_difference
from gradient_doctor.python_numbers import Running
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.sites import is_user_code, user_frame
from gradient_doctor.taint import Taint

_NO_GRAD_FN = "does not require grad and does not have a grad_fn"
_INFERENCE = "Inference tensors cannot be saved for backward"

_COUNT_TOKENS = (
    "Check this arithmetic on one sample by hand: count the tokens of the response itself, not a "
    "difference with the padded width."
)


class Missing(Detector):
    """Gives each parameter without gradient its one explanation."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._patched: set[Site | None] = set()  # backwards that start from a leaf, said once

    @property
    def ledger(self) -> Ledger:
        return self.session.ledger

    # a loss that is a constant

    def backward_starts(self, backward: Backward) -> None:
        if backward.kind != "backward":
            return
        registry = self.session.registry
        for root in backward.roots if backward.site not in self._patched else ():
            patched = root.requires_grad and root.grad_fn is None and root.numel() == 1
            is_parameter = isinstance(root, nn.Parameter) or registry.bit(root) & registry.owned
            if patched and not is_parameter and self.ledger.should_train():
                self._patched.add(backward.site)
                self._constant(backward, root)

    def backward_failed(self, backward: Backward, error: BaseException) -> None:
        if _NO_GRAD_FN in str(error):
            for root in backward.roots:
                if not root.requires_grad:
                    self._constant(backward, root)
                    return

    def finish(self, error: BaseException | None) -> None:
        if isinstance(error, AttributeError) and error.name == "backward":
            self.session.registry.flush()  # it may have come before the first backward
            self._number(error)
        self._verdicts(True, error)

    def _constant(self, backward: Backward, root: Tensor) -> None:
        ledger = self.ledger
        # a leaf that was made to need gradient has no taint but its own: its term knows better
        taint = ledger.terms.behind(root).taint if backward.taint is not None else None
        mask = taint.depends & ledger.should_train() if taint is not None else 0
        fate = (
            "backward() runs, but from a leaf: no parameter receives anything"
            if root.requires_grad
            else "backward() has nothing to start from"
        )
        if taint is not None and mask:
            self._cut_loss(backward.site, taint, mask, fate)
        else:
            self._made_constant(backward, root, fate)

    def _cut_loss(self, site: Site | None, taint: Taint, mask: int, fate: str) -> None:
        ledger = self.ledger
        for fact, hidden in ledger.culprits(mask, ledger.facts(taint)):
            ledger.explained |= hidden
            number = fact.number
            if number == 3 and fact.size == 1 and not mask & ~hidden:
                number = 1  # it is the loss itself that is cut, not something on its way
            many = self.session.registry.many(hidden)
            self.report(
                number,
                Severity.ERROR,
                f"The loss has no grad_fn: it is cut off from all of the {many} it depends on."
                if number == 1
                else f"A cut on the way makes the whole loss a constant for {many}.",
                why=f"{_upper(what_cuts(fact))}. So {fate}.",
                fix=how_to_mend(fact),
                site=fact.site or site,
                parameters=hidden,
                related=(site, taint.site),
            )

    def _switched_off(self, backward: Backward, fate: str) -> bool:
        """Gradients are off everywhere, since a line that was not traced."""
        session = self.session
        inference = torch.is_inference_mode_enabled()
        site = session.inference_at if inference else session.grad_off_at
        region = "inference_mode" if inference else session.grad_off_by
        if torch.is_grad_enabled() or site is None:
            return False
        wanted = self.ledger.should_train()
        self.ledger.explained |= wanted
        if region:
            self._inside(region, site, backward, wanted, fate)
            return True
        self.report(
            2,
            Severity.ERROR,
            "Gradients are switched off for the whole program.",
            why=f"torch.set_grad_enabled(False) was called here and nothing has switched them on "
            f"again, so {fate}.",
            fix="Use `with torch.no_grad():` around the evaluation: it ends by itself.",
            site=site,
            parameters=wanted,
            related=(backward.site,),
        )
        return True

    def _inside(self, region: str, site: Site, backward: Backward, wanted: int, fate: str) -> None:
        within = " (enable_grad() inside of it is not enough)" if region != "no_grad" else ""
        self.report(
            2,
            Severity.ERROR,
            f"A derivative is asked for inside of {region}.",
            why=f"The region begins here; nothing that runs inside of it has a graph, so {fate}.",
            fix=f"Run this part outside of the {region}{within}.",
            site=site,
            parameters=wanted,
            related=(backward.site,),
        )

    def _made_constant(self, backward: Backward, root: Tensor, fate: str) -> None:
        ledger = self.ledger
        if self._switched_off(backward, fate):
            return
        wanted = ledger.should_train()
        before = ledger.by_site.get(backward.site, 0) & wanted
        mask = before or wanted & ~ledger.received
        ledger.explained |= mask
        origin = ledger.made_at(root) if backward.taint is not None else None
        site = origin.site if origin is not None and origin.site is not None else backward.site
        if origin is not None and origin.site is not None:
            why = f"It was made by `{origin.op}` at {origin.site}, from no parameter at all"
        else:
            unseen = "it was made out of sight" if backward.taint is not None else "not traced"
            why = f"It depends on no parameter (where it was made is not known: {unseen})"
        why += f", so {fate}."
        if before:
            many = self.session.registry.many(before)
            why += (
                f" In earlier steps the same loss reached {many}: nothing of this"
                " batch was added to it."
            )
        empty = [e for e in ledger.empty if e[0] == self.session.step]
        related: list[Site | None] = [backward.site]
        if empty:
            why += f" `{empty[-1][1]}` at {empty[-1][2]} gave an empty tensor in this step."
            related.append(empty[-1][2])
        fix = (
            "Skip a batch that has nothing to learn from, or start the sum from a term that"
            " depends on the parameters."
        )
        lengths = find_empty_lengths(user_frame())
        floored = find_floored_difference(reversed(ledger.counted)) if before else None
        if lengths is not None:
            # to skip the batch would hide the mistake
            related.append(site)
            site = lengths.site
            why += f" `{lengths.name}` is 0 for every sample, so all of them were left out."
            fix = _COUNT_TOKENS
        elif floored is not None:
            related.append(site)
            site = floored
            why += (
                f" The difference at {floored} is cut off at 0: samples for which it is negative"
                " were left out, here all of them."
            )
            fix = _COUNT_TOKENS
        self.report(
            1,
            Severity.ERROR,
            "The loss has no grad_fn: it is a constant that no parameter took part in."
            if backward.taint is not None
            else "The loss has no grad_fn: nothing leads from it to a parameter.",
            why=why,
            fix=fix,
            site=site,
            parameters=mask,
            related=tuple(related),
        )

    def _number(self, error: AttributeError) -> None:
        """`.backward` of a Python number: the loss left torch altogether."""
        value = error.obj
        if not isinstance(value, (int, float)):
            return
        site = _raised_at(error)
        taint = self.session.numbers.behind(float(value), _running(error))
        mask = 0 if taint is None else taint.depends & self.ledger.should_train()
        if taint is not None and mask:
            self._cut_loss(site, taint, mask, "a number has no backward()")
            return
        mask = self.ledger.by_site.get(site, 0)
        self.report(
            1,
            Severity.ERROR,
            f"The loss is a Python {type(value).__name__}, not a tensor.",
            why=f"backward() was called on the number {value!r}: the sum of an empty list, or a"
            " value that was taken out of torch.",
            fix="Keep the loss a tensor, and skip a batch that adds nothing to it.",
            site=site,
            parameters=mask,
        )

    # inference tensors: torch refuses them later, far from the cause

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        if _INFERENCE not in str(error):
            return
        ledger = self.ledger
        self.session.registry.flush()  # there may have been no backward yet
        for tensor in call.inputs:
            if not tensor.is_inference():
                continue
            taint = self.session.taint_of(tensor)
            mask = 0 if taint is None else taint.depends & ~taint.live & ledger.should_train()
            culprits = ledger.culprits(mask, ledger.facts(taint)) if taint is not None else []
            fact = culprits[0][0] if culprits else None
            origin = taint.site if taint is not None else None
            made = "it was made out of sight" if origin is None else f"it was made at {origin}"
            source = made if fact is None else what_cuts(fact)
            ledger.explained |= mask
            self.report(
                2,
                Severity.ERROR,
                "A tensor made in inference_mode is used where gradients are needed.",
                why=f"{_upper(source)}; `{call.short}` at {call.site} would have to keep it for"
                " backward, which torch forbids.",
                fix="Remove inference_mode there if its parameters should learn, else use no_grad.",
                site=fact.site if fact is not None else origin,
                parameters=mask,
                related=(call.site, origin),
            )
            return

    # verdicts

    def step_ended(self, record: StepRecord) -> None:
        if record.checked and record.backwards:
            self._verdicts(False, None)

    def _verdicts(self, at_end: bool, error: BaseException | None) -> None:
        ledger, registry = self.ledger, self.session.registry
        missing = ledger.missing(at_end, error) | (0 if error else ledger.zeroed())
        if not missing:
            return
        strangers = 0
        for bit in bits_of(missing & ledger.lost & ~ledger.reached):
            if ledger.orphan(bit) is not None:
                strangers |= bit  # a loss of its own is alive, but nobody called its backward
        cut = missing & ledger.lost & ~ledger.reached & ~strangers
        for fact, mask in ledger.culprits(cut, ledger.cuts.values()):
            ledger.explained |= mask
            self._cut_off(fact, mask)
        # experts take turns, heads wait for their batch: look at all traced steps first
        if at_end or self.session.age + 1 >= self.session.trace_steps:
            self._through_numpy(missing & ~ledger.reached & ~ledger.explained)
            idle = missing & ~ledger.reached & ~ledger.explained
            turns = self._turns(idle)
            if not at_end:
                idle &= ~turns
            lines: dict[Any, tuple[list[str], int]] = {}
            for name, mask in self._modules(idle).items():
                ledger.explained |= mask
                site = self._birth(name, list(registry.tensors(mask)))
                # modules that one line made are idle together
                key = name if site is None else (site.place, bool(mask & turns))
                names, count = lines.get(key, ([], 0))
                lines[key] = ([*names, name], count | mask)
            for names, mask in lines.values():
                self._idle(names, mask, bool(mask & turns))

    def _through_numpy(self, idle: int) -> None:
        """Values that left for numpy, and an array that came back: most likely made of them."""
        for site, mask in self.ledger.numpy.items():
            lost = mask & idle & ~self.ledger.explained
            if not lost:
                continue
            self.ledger.explained |= lost
            finding = self.report(
                3,
                Severity.ERROR,
                f"{self._without(lost)}: their values went through numpy.",
                why="They leave torch here, and an array of numpy comes back in the same step; no "
                "other path leads from them to a loss. numpy keeps no graph.",
                fix="Compute it in torch (torch.sort, torch.where and the like have derivatives).",
                site=site,
                parameters=lost,
            )
            self._claim(finding, lost)

    def _claim(self, finding: Finding, mask: int) -> None:
        """A gradient that comes later takes this back; zeros that came are no such claim."""
        if not mask & self.ledger.received:
            self.session.awaited |= mask
            self.ledger.claims.append(Claim(finding=finding, mask=mask, forget=self._forget))

    def _forget(self, mask: int) -> None:
        self.ledger.explained &= ~mask

    def _cut_off(self, fact: CutFact, mask: int) -> None:
        zero = " but zeros" if fact.kind == "zero" else ""
        finding = self.report(
            fact.number,
            Severity.ERROR,
            f"{self._without(mask)}{zero}.",
            why=f"A loss depends on them, but {what_cuts(fact)}.",
            fix=how_to_mend(fact),
            site=fact.site,
            parameters=mask,
        )
        self._claim(finding, mask)

    def _without(self, mask: int) -> str:
        many = self.session.registry.many(mask)
        verb = "receives" if many.startswith("1 ") else "receive"
        return f"{many} that should train {verb} no gradient"

    def _idle(self, names: list[str], mask: int, turns: bool) -> None:
        ledger, registry = self.ledger, self.session.registry
        tensors = list(registry.tensors(mask))
        size = sum(t.numel() for t in tensors)
        bytes_ = sum(t.numel() * t.element_size() for t in tensors)
        use = next((ledger.uses[b] for b in bits_of(mask) if b in ledger.uses), None)
        orphan = next(filter(None, map(ledger.orphan, bits_of(mask))), None)
        if orphan is not None:
            how = f"they take part in the value made at {orphan}, but no backward starts from it"
        elif use is not None:
            how = f"they are used at {use}, but the result takes part in no loss"
        elif ledger.traced:
            how = "no operation of the traced steps uses them"
        else:
            how = "why is not known, because no step was traced"
        wanted = registry.matching(self.session.contract.get("trainable", ()))
        whole = any(
            not registry.bits(module.parameters()) & ~mask for module in registry.roots.values()
        )
        severity = Severity.NOTE if turns or self._is_tapped(mask) else Severity.WARNING
        if (whole and not self._is_tapped(mask)) or mask & wanted:
            severity = Severity.ERROR
        born = self._birth(names[0], tensors)
        used = use if any(bit in ledger.loads for bit in bits_of(mask)) else None
        if used is not None:
            used = self._lost_inside(names[0], mask) or self._called(names[0]) or used
        # a trainer's one line does everything: it says less than the line that made the part
        trainers = {site.place for site in ledger.by_site if site is not None}
        dead = ledger.dead_end(mask) if orphan is None else None
        lines = [s for s in (orphan, dead, used) if s is not None and s.place not in trainers]
        finding = self.report(
            5,
            severity,
            f"{listed(names, 3)} is trainable and in an optimizer, but no loss reaches it."
            if len(names) == 1
            else f"{listed(names, 3)} are trainable and in an optimizer, but no loss reaches them.",
            why=f"{registry.many(mask)} with {size:,} numbers ({bytes_ / 1024:,.1f} KiB of"
            f" weights) never received a gradient: {how}."
            + (" Others of the same list are chosen by the data: their turn may come." * turns),
            fix="Let the loss depend on it, or freeze it, or delete it.",
            site=lines[0] if lines else born,
            parameters=mask,
            related=(orphan, use, used, born),
        )
        self._claim(finding, mask)

    def _is_tapped(self, idle: int) -> bool:
        """Used, and what comes before it is taken by a hook: features without their head."""
        ledger, registry = self.ledger, self.session.registry
        if any(bit not in ledger.loads for bit in bits_of(idle)):
            return False
        for root in registry.roots.values():
            parts = list(root.modules())
            own = registry.bits(root.parameters())
            if idle & own and any(part._forward_hooks for part in parts):
                return True
        return False

    def _turns(self, idle: int) -> int:
        """Idle members of a list whose other members take turns, or that the data choose from."""
        ledger, registry = self.ledger, self.session.registry
        waiting = 0
        for module in _all_modules(registry):
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                continue
            members = {child: registry.bits(child.parameters()) for child in module.children()}
            used = {child: own & ledger.received for child, own in members.items()}
            # as a whole, not only some part inside of it
            turns = any(own and not own & ~ledger.sometimes for own in used.values())
            if turns or self._routed([child for child, own in used.items() if own]):
                for own in members.values():
                    waiting |= own if own and not own & ~idle else 0
        return waiting

    def _routed(self, members: list[nn.Module]) -> bool:
        """Whether members of one make get different amounts of data, as experts do."""
        makes: dict[Any, list[dict[int, list[int]]]] = {}
        for member in members:
            named = [(n, tuple(p.shape), p) for n, p in member.named_parameters()]
            make = (type(member), *((name, shape) for name, shape, _ in named))
            bits = [self.session.registry.bit(p) for _, _, p in named]
            makes.setdefault(make, []).append(self.ledger.loads.get(bits[0], {}) if bits else {})
        for loads in makes.values():
            steps = sorted({step for load in loads for step in load})
            if any(len({max(load[s]) for load in loads if s in load}) > 1 for s in steps):
                return True
            calls = {tuple(len(load.get(s, ())) for load in loads) for s in steps}
            if len(calls) > 1:
                return True
        return False

    def _birth(self, where: str, tensors: list[Tensor]) -> Site | None:
        registry = self.session.registry
        births = [b.site for b in map(registry.birth, tensors) if b is not None]
        if len({(s.file, s.line) for s in births if s is not None}) > 1:
            # many lines inside a module: the line that made the module itself says more
            module = next(
                (m for m in _all_modules(registry) if registry.module_name(m) == where), 0
            )
            birth = registry.birth(module) if module else None
            if birth is not None and birth.site is not None:
                return birth.site
        return next(iter(births), None)

    def _called(self, where: str) -> Site | None:
        """The line that calls a module that is idle as a whole: there its result is lost."""
        registry = self.session.registry
        for module in _all_modules(registry):
            if registry.module_name(module) == where:
                return self.session.called.get(module)
        return None

    def _lost_inside(self, where: str, mask: int) -> Site | None:
        """The line of the value that a module computed and did not return."""
        registry, ends = self.session.registry, self.ledger.ends
        for module in _all_modules(registry):
            if registry.module_name(module) == where:
                own = registry.bits(module.parameters())
                return ends.of(mask) if ends.keeps_to_itself(module, own) else None
        return None

    def _modules(self, mask: int) -> dict[str, int]:
        """The largest modules that are idle as a whole; else the parameters themselves.

        Parameters of an optimizer that no module has are copies or leftovers: class 8.
        """
        registry = self.session.registry
        counts: dict[str, int] = {}
        left = registry.bits(t for t in registry.tensors(mask) if registry.is_registered(t))
        for module in _all_modules(registry):
            own = registry.bits(p for p in module.parameters() if p.requires_grad)
            if own & left and not own & ~mask:
                counts[registry.module_name(module)] = own & left
                left &= ~own
        for tensor in registry.tensors(left):
            counts[registry.name(tensor)] = registry.bit(tensor)
        return counts


def _all_modules(registry: Any) -> list[nn.Module]:
    """Every module of the roots, parents before children."""
    return [module for root in registry.roots.values() for module in root.modules()]


def _raised_at(error: BaseException) -> Site | None:
    place = _running(error)
    if place is None:
        return None
    code = place.frame.f_code
    return Site(code.co_filename, place.line, code.co_name)


def _running(error: BaseException) -> Running | None:
    """The user's innermost expression that the error came out of."""
    place = None
    trail = error.__traceback__
    while trail is not None:
        if is_user_code(trail.tb_frame.f_code):
            place = Running(trail.tb_frame, trail.tb_lasti, trail.tb_lineno)
        trail = trail.tb_next
    return place


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
