"""Class 4: parameters that should train, but whose requires_grad is False."""

from __future__ import annotations

import re

from torch import Tensor

from gradient_doctor.detectors.places import birth_site, by_site, count
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Session, StepRecord

# what libraries call the parts that exist only to be trained
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save|ia3_\w+|prompt_encoder)(\.|$)")


class Frozen(Detector):
    """Reads the contract, the names of adapters and what optimizers hold."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._received = 0
        self._said = 0

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind == "backward":
            self._received |= backward.received

    def step_ended(self, record: StepRecord) -> None:
        if record.checked and record.number + 1 >= self.session.trace_steps:
            self._judge()

    def finish(self, error: BaseException | None) -> None:
        self._judge()

    def _judge(self) -> None:
        self._contract()
        self._adapters()
        self._optimizers()

    def _new(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those of which nothing has been said yet; from now on something has."""
        registry = self.session.registry
        fresh = [t for t in tensors if not registry.bit(t) & self._said]
        self._said |= registry.bits(fresh)
        return fresh

    def _site(self, parameter: Tensor) -> Site | None:
        registry = self.session.registry
        return registry.frozen_at.get(parameter) or birth_site(registry, parameter)

    def _contract(self) -> None:
        registry, contract = self.session.registry, self.session.contract
        wanted = registry.matching(contract.get("trainable", ()))
        frozen = [p for p in registry.tensors(wanted) if _frozen(p)]
        total = len(list(registry.tensors(wanted)))
        for site, mask in by_site(registry, self._new(frozen), self._site).items():
            number = mask.bit_count()
            self.report(
                4,
                Severity.ERROR,
                f"{count(number, 'parameter')} should train by the contract, "
                "but requires_grad is False.",
                why=f"{len(frozen)} of the {total} parameters that the contract calls trainable "
                "are frozen: no backward gives them a gradient and no optimizer changes them.",
                fix="Set requires_grad_(True) on them after loading and before the optimizer is "
                "made, or take them out of the contract.",
                site=site,
                parameters=mask,
            )
        kept = registry.matching(contract.get("frozen", ())) & self._received
        training = self._new([p for p in registry.tensors(kept) if p.requires_grad])
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

    def _adapters(self) -> None:
        """Adapters that are all frozen, in a model that is meant to train."""
        registry = self.session.registry
        owned = registry.owned
        parameters = registry.parameters()
        nothing_trains = not any(p.requires_grad for p in parameters.values())
        for root in registry.roots:
            of_root = {n: p for n, p in parameters.items() if n.startswith(f"{root}.")}
            adapters = [p for n, p in of_root.items() if _ADAPTER.search(n)]
            if not adapters or not all(_frozen(p) for p in adapters):
                continue
            # a frozen reference model has frozen adapters too: nobody holds any of it
            held = any(registry.bit(p) & owned or p.requires_grad for p in of_root.values())
            if not (held or nothing_trains):
                continue
            fresh = self._new(adapters)
            for site, mask in by_site(registry, fresh, self._site).items():
                self.report(
                    4,
                    Severity.ERROR,
                    f"0 of the {len(adapters)} adapter tensors of {root} are trainable.",
                    why="Adapters exist only to be trained, but requires_grad is False for all of "
                    "them: that is how they come from a checkpoint that is loaded for inference.",
                    fix="Load them with is_trainable=True (PEFT), or call requires_grad_(True) on "
                    "them before the optimizer is made.",
                    site=site,
                    parameters=mask,
                )

    def _optimizers(self) -> None:
        registry = self.session.registry
        for name, optimizer in registry.optimizers.items():
            held = list(owned_by(optimizer))
            frozen = [p for p in held if _frozen(p)]
            if not frozen:
                continue
            if len(frozen) == len(held):
                fresh = self._new(frozen)
                for site, mask in by_site(registry, fresh, self._site).items():
                    self.report(
                        4,
                        Severity.ERROR,
                        f"The optimizer {name} holds only frozen parameters.",
                        why=f"requires_grad is False for all {len(held)} of them: "
                        "its step changes nothing.",
                        fix="Call requires_grad_(True) on what it should train, "
                        "or remove the optimizer.",
                        site=site,
                        parameters=mask,
                        related=(birth_site(registry, optimizer),),
                    )
            elif fresh := self._new(frozen):
                self.report(
                    4,
                    Severity.NOTE,
                    f"{count(len(fresh), 'parameter')} of the {len(held)} in the optimizer {name} "
                    "are frozen.",
                    why="requires_grad is False, so they get no gradient and do not change. That "
                    "is harmless if it is meant.",
                    fix="Give the optimizer only parameters with requires_grad.",
                    site=birth_site(registry, optimizer) or self._site(fresh[0]),
                    parameters=registry.bits(fresh),
                )


def _frozen(parameter: Tensor) -> bool:
    """Quantised weights of integers cannot need a gradient: they are not frozen by mistake."""
    return not parameter.requires_grad and parameter.is_floating_point()
