"""autograd.grad, and backward(inputs=...), that give None (class 10)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gradient_doctor.explain import Ledger, what_cuts
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import is_opaque, node_of, nodes_of, origin_of
from gradient_doctor.session import Backward, Detector, Session, StepRecord

_UNUSED = "appears to not have been used in the graph"
_REENTRANT = "use_reentrant=True, torch.utils.checkpoint is incompatible"
_CHECKPOINT = "CheckpointFunctionBackward"


@dataclass
class Asked:
    """The inputs of one line that came back empty, over all its calls."""

    kind: str
    inputs: int = 0
    none: int = 0
    mask: int = 0
    hidden: set[Site | None] = field(default_factory=set)  # reentrant checkpoints on the path
    opaque: bool = False
    steps: set[int] = field(default_factory=set)
    made: list[Site | None] = field(default_factory=list)  # where inputs that are no leaves began


class GradCalls(Detector):
    """What was asked for and not given."""

    @property
    def ledger(self) -> Ledger:
        return self.session.ledger

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._asked: dict[Site | None, Asked] = {}

    def backward_failed(self, backward: Backward, error: BaseException) -> None:
        text = str(error)
        if backward.inputs is None or not (_UNUSED in text or _REENTRANT in text):
            return
        inputs = backward.inputs
        if _UNUSED in text:
            nodes = {n for root in backward.roots for n in nodes_of(node_of(root))}
            leaves = {id(getattr(n, "variable", None)) for n in nodes}
            inputs = [t for t in inputs if id(t) not in leaves and node_of(t) not in nodes]
        self._report(backward.site, self._entry(Asked(backward.kind), backward, inputs))

    def backward_ended(self, backward: Backward) -> None:
        if backward.inputs is None:
            return
        if backward.kind == "grad":
            pairs = zip(backward.inputs, backward.results)
            empty = [t for t, gradient in pairs if gradient is None]
        else:
            bit = self.session.registry.bit
            empty = [t for t in backward.inputs if t.is_leaf and not backward.received & bit(t)]
        if not empty or (backward.kind == "backward" and not self.session.record.checked):
            return
        request = self._asked.setdefault(backward.site, Asked(backward.kind))
        self._entry(request, backward, empty)
        copies = any(not t.is_leaf for t in empty)
        request.steps.add(backward.step)
        often = len(empty) > 1 or copies or len(request.steps) > 1
        if len(empty) == len(backward.inputs) and often:
            self._report(backward.site, request)

    def _entry(self, request: Asked, backward: Backward, empty: list[Tensor]) -> Asked:
        session = self.session
        request.inputs = max(request.inputs, len(backward.inputs or ()))
        request.none = max(request.none, len(empty))
        for tensor in empty:
            taint = session.taint_of(tensor)
            if tensor.is_leaf:
                request.mask |= session.registry.bit(tensor)
            elif taint is not None:
                request.mask |= taint.depends
                if taint.site not in request.made:
                    request.made.append(taint.site)
        for root in backward.roots:
            for node in nodes_of(node_of(root)):
                if is_opaque(node):
                    request.opaque = True
                    if node.name() == _CHECKPOINT:
                        origin = origin_of(node)
                        request.hidden.add(origin.site if origin is not None else None)
        return request

    # parameters that no other backward serves either

    def step_ended(self, record: StepRecord) -> None:
        if self.session.started and record.checked:
            self._verdicts(self.ledger.missing(False))

    def finish(self, error: BaseException | None) -> None:
        if self.session.started:
            self._verdicts(self.ledger.missing(True, error))

    def _verdicts(self, missing: int) -> None:
        for site, request in self._asked.items():
            if request.mask & missing:
                request.mask &= missing
                self._report(site, request)

    def _report(self, site: Site | None, request: Asked) -> None:
        ledger = self.ledger
        mask, request.mask = request.mask & ~ledger.explained, 0
        names = set(self.session.registry.names(mask))
        reported = [
            f for f in self.session.findings if f.number == 25 and names & set(f.parameters)
        ]
        ledger.explained |= mask
        if not mask or reported:
            return  # what was put in place of the Nones has been found already
        call = "autograd.grad" if request.kind == "grad" else "backward(inputs=...)"
        cuts = ledger.culprits(mask & ledger.lost & ~ledger.reached, ledger.cuts.values())
        related: list[Site | None] = []
        if request.hidden and not cuts:
            why = (
                "The path is hidden by reentrant checkpointing: parameters inside such a"
                " checkpoint exist for autograd only while a plain backward() runs."
            )
            fix = "Use checkpoint(..., use_reentrant=False), or loss.backward() and read .grad."
            related.extend(request.hidden)
        elif request.made:
            why = (
                f"They were made at {request.made[0]} and are no part of what the loss was computed"
                " from: a copy of a parameter is another tensor."
            )
            fix = "Pass the tensors that the forward used, such as the parameters themselves."
            related.extend(request.made)
        elif cuts:
            why = f"The loss depends on them, but {what_cuts(cuts[0][0])}."
            fix = "Mend the cut, or do not request these."
            related.extend(fact.site for fact, _ in cuts)
        elif request.opaque:
            why = "A custom Function on the path may hide them; no other path leads to them."
            fix = "Pass them to the Function as arguments, or do not request them."
        else:
            uses = [ledger.uses.get(bit) for bit in ledger.uses if bit & mask]
            why = "The loss was computed without them."
            if uses:
                why = f"They are used at {uses[0]}, but not for this loss."
                related.append(uses[0])
            fix = "Let the loss depend on them, or do not request them."
        self.report(
            10,
            Severity.ERROR,
            f"{call} gives None for {request.none} of {request.inputs} inputs.",
            why=f"{request.none}/{request.inputs} None. {why}",
            fix=fix,
            site=site,
            parameters=mask,
            related=tuple(related),
        )
