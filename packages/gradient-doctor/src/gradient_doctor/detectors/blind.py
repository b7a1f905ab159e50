"""Number 0: places that the doctor cannot see into. Silence is not health, so it says so."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import checkpoint

from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import is_opaque, nodes_of, origin_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.taint import merged

_FLAT = "_flat_param"  # FSDP joins parameters into one
_RETURNS = {"tensor", "as_tensor", "asarray", "from_numpy"}
# torch's own Functions, whose derivatives are not in question
_KNOWN = {checkpoint.CheckpointFunction.__name__}
_COMPILED = "CompiledFunction"  # what torch.compile makes of a forward and its backward


class Blind(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._told: set[Any] = set()
        self._left: tuple[Site | None, int] | None = None

    def start(self) -> None:
        flat = tuple(n for n in self.session.registry.parameters() if n.endswith(_FLAT))
        if flat:
            self._say(
                "flat",
                "FSDP has joined parameters into flat ones.",
                "Findings name the flat parameter; which of the originals is meant is not visible.",
                "Examine one process without FSDP, or wrap with use_orig_params=True.",
                flat,
            )

    def op(self, call: OpCall) -> None:
        """An array that comes back after values have left for numpy may be made of them."""
        if call.short in ("numpy", "__array__"):
            taints = [t for t in map(self.session.taint_of, call.inputs) if t is not None]
            depends = merged(taints)[0]
            if depends and self.session.module_stack and torch.is_grad_enabled():
                # inside of a forward; constructors such as torch.FloatTensor(array) are not seen
                ledger = self.session.ledger
                ledger.numpy[call.site] = ledger.numpy.get(call.site, 0) | depends
            if depends:
                self._left = (call.site, depends | (self._left[1] if self._left else 0))
        elif call.short in _RETURNS and self._left is not None and call.args:
            differentiable = call.taint is not None and call.taint.depends
            key = ("numpy", call.site)
            if (
                hasattr(call.args[0], "__array_interface__")
                and not differentiable
                and key not in self._told
            ):
                site, depends = self._left
                self.session.ledger.numpy[site] = self.session.ledger.numpy.get(site, 0) | depends
                self._say(
                    key,
                    "An array of numpy comes back after values have left for numpy.",
                    f"They left at {site}. What numpy computes is not followed: whether this "
                    "depends on the parameters is not known, and no gradient passes.",
                    "Nothing to do if the array is data; else compute it in torch.",
                    depends,
                    call.site,
                )

    def backward_ended(self, backward: Backward) -> None:
        if backward.graph is None:
            return
        for node in backward.graph.opaque:
            name = type(node).__name__.removesuffix("Backward")
            if name in _KNOWN or name in self._told:
                continue
            if name == _COMPILED and self.session.compiled:
                continue  # said of the compiled call itself
            leaves = [getattr(n, "variable", None) for n in nodes_of(node) if not is_opaque(n)]
            behind = self.session.registry.bits(leaf for leaf in leaves if leaf is not None)
            origin = origin_of(node)
            self._say(
                name,
                f"{name} is a custom autograd Function: what its backward does is not visible.",
                "Whether the gradients behind it are right, zero by mistake, or leave something "
                "out cannot be told from outside.",
                "torch.autograd.gradcheck tests its backward against its forward.",
                behind & backward.taint.live if backward.taint is not None else behind,
                origin.site if origin is not None else None,
            )

    def step_ended(self, record: StepRecord) -> None:
        for site in self.session.compiled - self._told:
            self._told.add(site)
            bits = 0
            for backward in record.backwards:
                bits |= backward.received
            self._say(
                ("compiled", site),
                "A call compiled by torch.compile is not traced.",
                "Cuts, masks and lines inside of it are not visible; only which parameters the "
                "gradient reaches in the end.",
                "To look inside, run a few steps without torch.compile.",
                bits,
                site,
            )
        self._left = None

    def _say(
        self,
        key: Any,
        what: str,
        why: str,
        fix: str,
        parameters: int | tuple[str, ...],
        site: Site | None = None,
    ) -> None:
        self._told.add(key)
        self.report(0, Severity.NOTE, what, why=why, fix=fix, site=site, parameters=parameters)
