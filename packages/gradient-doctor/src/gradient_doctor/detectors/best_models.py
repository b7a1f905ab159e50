"""Class 21: the best model, kept by reference, is the last one.

The source shows the statement (see kept_models.py); that the name is a model which an optimizer
trains, and whose weights have moved since, is seen in the run.
"""

from __future__ import annotations

from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.kept_models import Kept, kept_by_reference
from gradient_doctor.session import Backward, Detector, Session

_ENOUGH = 6  # backwards


class BestModels(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._files: dict[str, None] = {}  # with a backward
        self._received = self._backwards = 0

    def backward_ended(self, backward: Backward) -> None:
        self._backwards += 1
        self._received |= backward.received
        if backward.site is not None:
            self._files[backward.site.file] = None

    def finish(self, error: BaseException | None) -> None:
        registry = self.session.registry
        if error is not None or self._backwards < _ENOUGH:
            return
        trained = {
            name.split(".")[-1]: registry.bits(root.parameters()) & self._received & registry.owned
            for name, root in registry.roots.items()
        }
        births = [birth_site(registry, o) for o in registry.optimizers.values()]
        files = dict.fromkeys([*self._files, *(s.file for s in births if s is not None)])
        for file in files:
            for kept in kept_by_reference(file):
                if trained.get(kept.model):
                    self._say(file, kept, trained[kept.model])

    def _say(self, file: str, kept: Kept, mask: int) -> None:
        what = f"{kept.model}.state_dict()" if kept.is_state else kept.model
        self.report(
            21,
            Severity.WARNING,
            f"`{kept.name} = {what}` keeps no copy: it is the model of the last step.",
            why="The name means the same tensors as the model, which is trained on: when the best "
            "is used after the loop, its weights are those of the end.",
            fix=f"Keep copy.deepcopy({what}), or save it to a file there.",
            site=Site(file, kept.line),
            parameters=mask,
        )
