"""Class 4: parameters that should train, but whose requires_grad is False.

Some are frozen for a part of each step only: a discriminator while its generator learns. They have
their gradients in the other part, and nothing is said of them.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from gradient_doctor.detectors.late import Claim
from gradient_doctor.detectors.places import birth_site, by_site, called, count
from gradient_doctor.explain import has_elements
from gradient_doctor.findings import Finding, Severity, Site
from gradient_doctor.freezing import frozen_line
from gradient_doctor.handed_in import chooser_of_freezing
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord
from gradient_doctor.slips import assigned_attribute

# what libraries call the parts that exist only to be trained
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save|ia3_\w+|prompt_encoder)(\.|$)")
_MISSPELT = {
    *("require_grad", "requires_grads", "require_grads", "required_grad", "requires_gradient"),
    *("require_gradient", "requiers_grad", "require_grad_"),
}


class Frozen(Detector):
    """Reads the contract, the names of adapters and what optimizers hold."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._received = 0
        self._said = 0
        self._fresh = 0  # received since their optimizer's last step
        self._idle = 0  # frozen and without gradient when their optimizer stepped last
        self._depends = 0  # what some loss depends on
        self._off = 0  # of what optimizers hold, frozen at the last backward

    def backward_ended(self, backward: Backward) -> None:
        registry = self.session.registry
        if backward.taint is not None:
            self._depends |= backward.taint.depends
        if backward.kind == "backward":
            received = backward.received | backward.arrived
            self._received |= received
            self._fresh |= received
            self._idle &= ~received
            if self.session.record.checked:
                owned = (p for o in registry.optimizers.values() for p in owned_by(o))
                self._off = registry.bits(p for p in owned if _frozen(p))

    def event(self, event: Event) -> None:
        if event.kind == "grad_set" and not event.data["empty"]:
            # weights that an evolution strategy moves need no gradient: it writes one
            bit = self.session.registry.bit(event.data["parameter"])
            self._received |= bit
            self._fresh |= bit
        if event.kind != "step":
            return
        registry = self.session.registry
        owned = owned_by(event.data["optimizer"])
        # in every step, of all parameters: most are ruled out without a call
        frozen = [p for p in owned if not p.requires_grad and _frozen(p)]
        if self.session.record.checked:
            # thawed for the step alone, when backward is over
            late = [p for p in owned_by(event.data["optimizer"]) if p.grad is None]
            self._idle |= registry.bits(late) & self._off & ~self._fresh
            self._idle |= registry.bits(frozen) & ~self._fresh
            self._fresh &= ~registry.bits(owned_by(event.data["optimizer"]))
        else:  # nobody counts gradients between two looks
            self._idle |= registry.bits(p for p in frozen if p.grad is None)

    def step_ended(self, record: StepRecord) -> None:
        if record.checked and self.session.age + 1 >= self.session.trace_steps:
            self._judge(False)

    def finish(self, error: BaseException | None) -> None:
        self._judge(True)

    def _judge(self, at_end: bool) -> None:
        kept = self._kept_frozen(at_end)
        self._contract(kept)
        self._adapters(kept)
        groups = self._groups(kept, at_end)
        self._optimizers(kept & ~groups)
        self._misspelt()

    def _kept_frozen(self, at_end: bool) -> int:
        """Those that are frozen, and not only until it is their turn."""
        registry = self.session.registry
        frozen = registry.bits(p for p in registry.everything() if _frozen(p))
        kept = frozen & self._idle
        waiting = frozen & ~self._received & ~kept
        # what has an optimizer that has not stepped yet may be thawed for that step
        early = 0 if at_end else waiting & registry.owned
        self.session.awaited |= early
        return kept | waiting & ~early

    def _claim(self, finding: Finding, mask: int) -> None:
        """A gradient that comes later, to what has been thawed, takes this back."""
        self.session.awaited |= mask
        self.session.ledger.claims.append(Claim(finding=finding, mask=mask, forget=self._forget))

    def _forget(self, mask: int) -> None:
        self._said &= ~mask

    def _new(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those of which nothing has been said yet; from now on something has."""
        registry = self.session.registry
        fresh = [t for t in tensors if not registry.bit(t) & self._said]
        self._said |= registry.bits(fresh)
        return fresh

    def _site(self, parameter: Tensor) -> Site | None:
        registry = self.session.registry
        born = birth_site(registry, parameter)
        if registry.bit(parameter) & self._received:  # frozen since, perhaps between two looks
            return frozen_line(registry, parameter, []) or born
        chosen = chooser_of_freezing(registry.freezers.get(parameter) or ())
        return chosen or registry.frozen_at.get(parameter) or born

    def _contract(self, kept: int) -> None:
        registry, contract = self.session.registry, self.session.contract
        wanted = registry.matching(contract.get("trainable", ()))
        frozen = list(registry.tensors(wanted & kept))
        total = len(list(registry.tensors(wanted)))
        for site, mask in by_site(registry, self._new(frozen), self._site).items():
            finding = self.report(
                4,
                Severity.ERROR,
                f"{registry.many(mask)} should train by the contract, but requires_grad is False.",
                why=f"{len(frozen)} of the {total} parameters that the contract calls trainable "
                "are frozen: no backward gives them a gradient and no optimizer changes them.",
                fix="Set requires_grad_(True) on them after loading and before the optimizer is "
                "made, or take them out of the contract.",
                site=site,
                parameters=mask,
            )
            self._claim(finding, mask)
        fixed = registry.matching(contract.get("frozen", ())) & self._received
        training = self._new([p for p in registry.tensors(fixed) if p.requires_grad])
        if training:
            self.report(
                4,
                Severity.WARNING,
                f"{count(len(training), 'parameter')} must be frozen by the contract, "
                "but a backward gives them gradients.",
                why="requires_grad is True and a loss reaches them.",
                fix="Call requires_grad_(False) on them, or take them out of the contract.",
                site=birth_site(registry, training[0]),
                parameters=registry.bits(training),
            )

    def _misspelt(self) -> None:
        """`layer.requires_grad = False` on a module, `p.require_grad = False`: nothing is frozen.

        Both make a new attribute. Only said of parameters that have received a gradient since.
        """
        registry = self.session.registry
        owners = {
            **{id(m): m for root in registry.roots.values() for m in root.modules()},
            **{id(p): p for p in registry.parameters().values()},
        }
        names: set[str] = set()
        mask = 0
        for owner in owners.values():
            is_module = isinstance(owner, nn.Module)
            wrong = _MISSPELT | ({"requires_grad"} if is_module else set())
            off = {n for n in wrong & vars(owner).keys() if vars(owner)[n] is False}
            if off:
                names |= off
                parts = owner.parameters() if is_module else [owner]
                mask |= registry.bits(p for p in parts if p.requires_grad)
        mask &= self._received
        fresh = self._new(list(registry.tensors(mask)))
        if not fresh:
            return
        births = [birth_site(registry, thing) for thing in (*fresh, *registry.optimizers.values())]
        files = [site.file for site in births if site is not None]
        site = assigned_attribute(files, names)
        name = sorted(names)[0]
        self.report(
            4,
            Severity.WARNING,
            f"`{name} = False` froze nothing: {count(len(fresh), 'parameter')} behind it "
            f"{'gets' if len(fresh) == 1 else 'get'} gradients.",
            why="A module has no such switch, and Python makes a new attribute of any name: the "
            "parameters still have requires_grad=True."
            if name == "requires_grad"
            else f"A parameter has no `{name}`: Python makes a new attribute, and requires_grad is "
            "still True.",
            fix="Call requires_grad_(False) on the module, or on each of its parameters.",
            site=site or self._site(fresh[0]),
            parameters=registry.bits(fresh),
        )

    def _adapters(self, kept: int) -> None:
        """Adapters that are all frozen, in a model that is meant to train."""
        registry = self.session.registry
        owned = registry.owned
        parameters = registry.parameters()
        nothing_trains = not any(p.requires_grad for p in parameters.values())
        for root in registry.roots:
            of_root = {n: p for n, p in parameters.items() if n.startswith(f"{root}.")}
            adapters = [p for n, p in of_root.items() if _ADAPTER.search(n)]
            if not adapters or registry.bits(adapters) & ~kept:
                continue
            # a frozen reference model has frozen adapters too: nobody holds any of it
            held = any(registry.bit(p) & owned or p.requires_grad for p in of_root.values())
            if not (held or nothing_trains or self._are_new(adapters)):
                continue
            fresh = self._new(adapters)
            for site, mask in by_site(registry, fresh, self._site).items():
                finding = self.report(
                    4,
                    Severity.ERROR,
                    f"0 of the {len(adapters)} adapter parameters of {root} are trainable.",
                    why="Adapters exist only to be trained, but requires_grad is False for all of "
                    "them"
                    + (
                        ", and they are as new: some of them are still 0 everywhere. A freeze took "
                        "them too."
                        if self._are_new(adapters)
                        else ": that is how they come from a checkpoint that is loaded for "
                        "inference."
                    ),
                    fix="Load them with is_trainable=True (PEFT), or call requires_grad_(True) on "
                    "them before the optimizer is made.",
                    site=site,
                    parameters=mask,
                )
                self._claim(finding, mask)

    def _are_new(self, adapters: list[Tensor]) -> bool:
        """Half of the matrices that a loss depends on are all zeros: nobody has trained them."""
        registry = self.session.registry
        depends = registry.bits(adapters) & self._depends
        matrices = [p for p in registry.tensors(depends) if p.dim() > 1]
        values = [self.session.values(p) for p in matrices]
        zeros = [v is not None and not bool(v.any()) for v in values]
        return any(zeros) and 2 * sum(zeros) == len(zeros)

    def _optimizers(self, kept: int) -> None:
        registry = self.session.registry
        for name, optimizer in registry.optimizers.items():
            held = list(owned_by(optimizer))
            frozen = [p for p in held if registry.bit(p) & kept]
            if frozen and len(frozen) == len(held):
                self._all(name, optimizer, frozen)
            elif frozen:
                self._some(name, optimizer, frozen, len(held))

    def _groups(self, kept: int, at_end: bool) -> int:
        """Parameters of groups that are frozen as a whole: nobody makes such a group on purpose.

        They may wait for their turn, so nothing is said of them before the end.
        """
        registry = self.session.registry
        grouped = 0
        for name, optimizer in registry.optimizers.items():
            groups = [group["params"] for group in optimizer.param_groups]
            idle = [g for g in groups if g and not registry.bits(g) & ~kept]
            if len(idle) == len(groups):
                continue  # all of it: see _all
            members = [p for g in idle for p in g]
            grouped |= registry.bits(members)
            sites = by_site(registry, self._new(members) if at_end else [], self._site)
            for site, mask in sites.items():
                finding = self.report(
                    4,
                    Severity.WARNING,
                    f"A parameter group of the {called(name)} holds only frozen parameters.",
                    why="They have a group of their own beside others that train, and "
                    "requires_grad is False for all of them, to the end.",
                    fix="Call requires_grad_(True) on them (Embedding.from_pretrained: "
                    "freeze=False), or leave the group out.",
                    site=site,
                    parameters=mask,
                    related=(birth_site(registry, optimizer),),
                )
                self._claim(finding, mask)
        return grouped

    def _all(self, name: str, optimizer: Any, frozen: list[Tensor]) -> None:
        registry = self.session.registry
        if self._received & registry.registered & ~registry.owned:
            return  # what trains instead is in no optimizer: that is the fault (class 7)
        for site, mask in by_site(registry, self._new(frozen), self._site).items():
            finding = self.report(
                4,
                Severity.ERROR,
                f"The {called(name)} holds only frozen parameters.",
                why=f"requires_grad is False for all {len(frozen)} of them: "
                "its step changes nothing.",
                fix="Call requires_grad_(True) on what it should train, or remove the optimizer.",
                site=site,
                parameters=mask,
                related=(birth_site(registry, optimizer),),
            )
            self._claim(finding, mask)

    def _some(self, name: str, optimizer: Any, frozen: list[Tensor], total: int) -> None:
        registry = self.session.registry
        fresh = self._new(frozen)
        if fresh:
            finding = self.report(
                4,
                Severity.NOTE,
                f"{count(len(fresh), 'parameter')} of the {total} in the {called(name)} "
                f"{'is' if len(fresh) == 1 else 'are'} frozen.",
                why="requires_grad is False, so they get no gradient and do not change. That "
                "is harmless if it is meant.",
                fix="Give the optimizer only parameters with requires_grad.",
                site=birth_site(registry, optimizer) or self._site(fresh[0]),
                parameters=registry.bits(fresh),
            )
            self._claim(finding, registry.bits(fresh))


def _frozen(parameter: Tensor) -> bool:
    """Quantised weights of integers cannot need a gradient: they are not frozen by mistake."""
    if parameter.requires_grad:
        return False
    return parameter.is_floating_point() and has_elements(parameter)
