"""Gradient contracts G1 to G6 and G14: what must hold inside every training step.

Each is a function that gives `Breach`es, empty when the contract holds; `probes` has G7 to G13,
which need forwards of their own, and `live` runs all of them in the first steps of a training.

    G1  after L_main.backward(): every trainable parameter but the policy's gets a finite gradient,
        non-zero within the first steps; the policy's gradients are None (refine=rl)
    G2  after L_pi.backward(): the policy's are non-zero when rewards differ; all others None
    G3  every trainable parameter is in exactly one optimizer, and nothing else is
    G4  after a step: 1e-8 <= |d theta| / |theta| <= 0.1 per group, and bits have changed
    G5  no parameter came, went or was replaced since the optimizers were made
    G6  parameters have the configured dtype
    G14 two steps in a row succeed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

RATIO = (1e-8, 1e-1)
"""Of an update to its parameters: below, nothing is learnt; above, it is overwritten."""


@dataclass(frozen=True)
class Breach:
    """A contract that does not hold: which, what was seen, on which parameters, what to do.

    Args:
        contract: Its name, G1 to G14.
        what: What was seen.
        fix: What to do.
        parameters: On which.

    Examples:
        >>> print(Breach("G5", "lm.embed was replaced.", "Make the optimizers last."))
        G5: lm.embed was replaced.
          fix: Make the optimizers last.
    """

    contract: str
    what: str
    fix: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(self.parameters[:6])
        more = f" and {len(self.parameters) - 6} more" if len(self.parameters) > 6 else ""
        where = f"\n  parameters ({len(self.parameters)}): {shown}{more}" if shown else ""
        return f"{self.contract}: {self.what}{where}\n  fix: {self.fix}"


class ContractError(RuntimeError):
    """Training was stopped: gradients do not do what they should.

    Args:
        breaches: The contracts that do not hold.
        report: What the gradient doctor says beside them.

    Examples:
        >>> breach = Breach("G5", "lm.embed was replaced.", "Make the optimizers last.")
        >>> str(ContractError([breach])).splitlines()[0]
        'Training stopped, broken: G5.'
    """

    def __init__(self, breaches: Iterable[Breach], report: str = "") -> None:
        self.breaches: tuple[Breach, ...] = tuple(breaches)
        self.report: str = report
        names = ", ".join(dict.fromkeys(b.contract for b in self.breaches))
        text = "\n".join(map(str, self.breaches))
        super().__init__(
            f"Training stopped, broken: {names}.\n{text}" + (f"\n{report}" * bool(report))
        )


@dataclass
class GradientWindow:
    """G1 and G2 over the first steps: has every parameter had a gradient other than zero?

    A zero in one step is no fault: LoRA's A waits for its B, a zero-initialised head for itself.
    """

    contract: str
    steps: int = 0
    had: dict[str, bool] = field(default_factory=dict)

    def see(self, named: Mapping[str, nn.Parameter]) -> list[Breach]:
        """Call after a backward; no gradient at all, or not a finite one, is a breach at once."""
        self.steps += 1
        cut = tuple(name for name, p in named.items() if p.grad is None)
        grads = {name: p.grad for name, p in named.items() if p.grad is not None}
        broken = tuple(name for name, grad in grads.items() if not bool(grad.isfinite().all()))
        for name, grad in grads.items():
            self.had[name] = self.had.get(name, False) or bool((grad != 0).any())
        problems = []
        if cut:
            what = f"{len(cut)} parameters that should train got no gradient (None)."
            fix = "Look for detach, no_grad or an unused layer between them and the loss."
            problems.append(Breach(self.contract, what, fix, cut))
        if broken:
            what = f"the gradients of {len(broken)} parameters are not finite."
            fix = "Look for a division, root or logarithm without a floor in their loss."
            problems.append(Breach(self.contract, what, fix, broken))
        return problems

    def verdict(self) -> list[Breach]:
        """At the end of the window; one step alone does not tell."""
        zero = tuple(name for name, had in self.had.items() if not had)
        if not zero or self.steps < 2:
            return []
        what = f"the gradients of {len(zero)} parameters were zero in all {self.steps} steps."
        fix = "Look for saturation, a zero factor, or a constant in place of the loss."
        return [Breach(self.contract, what, fix, zero)]


def no_gradient(contract: str, named: Mapping[str, nn.Parameter], loss: str) -> list[Breach]:
    """The other half of G1 and G2: this loss must not reach these parameters."""
    reached = tuple(name for name, p in named.items() if p.grad is not None)
    if not reached:
        return []
    what = f"{loss} reaches {len(reached)} parameters that it must not train."
    fix = "Detach what the other loss may only read: e + sg(a); log pi(sg u | sg s)."
    return [Breach(contract, what, fix, reached)]


def owners(
    named: Mapping[str, nn.Parameter], optimizers: Mapping[str, torch.optim.Optimizer]
) -> list[Breach]:
    """G3."""
    held: dict[int, list[str]] = {}
    for which, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for p in group["params"]:
                held.setdefault(id(p), []).append(which)
    names = []
    orphans = tuple(n for n, p in named.items() if p.requires_grad and id(p) not in held)
    if orphans:
        what = f"{len(orphans)} trainable parameters are in no optimizer."
        fix = "Make optimizers last, from all modules; or freeze these parameters."
        names.append(Breach("G3", what, fix, orphans))
    twice = tuple(n for n, p in named.items() if len(held.get(id(p), [])) > 1)
    if twice:
        what = f"{len(twice)} parameters are in more than one optimizer: two steps on one gradient."
        names.append(Breach("G3", what, "Give each to one optimizer.", twice))
    frozen = tuple(n for n, p in named.items() if not p.requires_grad and id(p) in held)
    if frozen:
        what = f"{len(frozen)} parameters are in an optimizer but need no gradient."
        names.append(Breach("G3", what, "Unfreeze them before making optimizers.", frozen))
    strangers = len(set(held) - {id(p) for p in named.values()})
    if strangers:
        what = f"optimizers hold {strangers} parameters that no network has."
        fix = "Make optimizers after the last replacement or copy of a module."
        names.append(Breach("G3", what, fix))
    return names


def moved(group: str, named: Mapping[str, nn.Parameter], before: list[Tensor]) -> list[Breach]:
    """G4 for one group: by how much the step changed it, and whether any bit did."""
    names = tuple(named)
    after = [p.detach() for p in named.values()]
    size = sum(float(b.double().square().sum()) for b in before) ** 0.5
    pairs = zip(after, before, strict=True)
    change = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs) ** 0.5
    if change == 0:
        what = f"the step changed not one bit of group {group!r} ({len(names)} parameters)."
        fix = "Steps below half an ulp vanish in half precision: keep float32 weights; check lr."
        return [Breach("G4", what, fix, names)]
    ratio = change / size if size else float("inf")
    if not RATIO[0] <= ratio <= RATIO[1]:
        what = (
            f"the step changed group {group!r} by {ratio:.1e} of its norm, expected "
            f"{RATIO[0]:.0e} to {RATIO[1]:.0e}."
        )
        return [Breach("G4", what, "Set the learning rate of this group.", names)]
    return []


def stuck(
    named: Mapping[str, nn.Parameter], first: Mapping[str, Tensor], graded: Mapping[str, bool]
) -> list[Breach]:
    """G4 for single parameters: gradient in the window, and yet the bits of its beginning."""
    still = tuple(
        n for n, p in named.items() if graded.get(n) and n in first and torch.equal(p, first[n])
    )
    if not still:
        return []
    what = f"{len(still)} parameters had gradient but have the bits that they began with."
    fix = "Is the step below half an ulp of their dtype? Keep float32 weights; check the lr."
    return [Breach("G4", what, fix, still)]


def same_parameters(
    named: Mapping[str, nn.Parameter], recorded: Mapping[str, nn.Parameter]
) -> list[Breach]:
    """G5: `known` is from when the optimizers were made."""
    late = tuple(sorted(set(named) - set(recorded)))
    lost = tuple(sorted(set(recorded) - set(named)))
    replaced = tuple(n for n in named if n in recorded and named[n] is not recorded[n])
    problems = []
    for names, what in (
        (late, "were registered after the optimizers were made"),
        (lost, "are gone since the optimizers were made"),
        (replaced, "were replaced by others since the optimizers were made"),
    ):
        if names:
            fix = "Create every layer in __init__, before the optimizers."
            problems.append(Breach("G5", f"{len(names)} parameters {what}.", fix, names))
    return problems


def right_dtype(
    named: Mapping[str, nn.Parameter], expected: torch.dtype = torch.float32
) -> list[Breach]:
    """G6."""
    wrong = {name: p.dtype for name, p in named.items() if p.dtype != expected}
    if not wrong:
        return []
    kinds = ", ".join(sorted({str(d).removeprefix("torch.") for d in wrong.values()}))
    what = f"{len(wrong)} parameters are {kinds}, expected {str(expected).removeprefix('torch.')}."
    fix = "Keep float32 weights; --dtype chooses what autocast computes in."
    return [Breach("G6", what, fix, tuple(wrong))]


def two_steps(step: Callable[[], object]) -> list[Breach]:
    """G14: what a first step leaves behind must not break the second."""
    for number in (1, 2):
        try:
            step()
        except RuntimeError as failure:
            return [broken_step(failure, number)]
    return []


def broken_step(failure: RuntimeError, number: int) -> Breach:
    """A step that torch refused, as a breach."""
    text = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    what = f"step {number} of this training failed in torch: {text}"
    fix = (
        "Two losses may not share a graph, and no tensor with a graph may be kept between steps: "
        "compute again what both need."
    )
    return Breach("G14", what, fix)
