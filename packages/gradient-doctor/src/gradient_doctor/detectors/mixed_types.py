"""Class 16: data of one floating dtype meet weights of another, and torch refuses.

numpy counts in float64, models are converted to half precision: the crash stands in a layer, and
what is to be changed is the line that gave the numbers their type. It is followed from there.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.places import dtype_site, most_common
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session

_REFUSED = re.compile(
    r"same dtype|expected scalar type|should be the same|have the same dtype|expected .* dtype"
)


class MixedTypes(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._latest: Site | None = None
        self._typed = WeakIdKeyDictionary()  # floats of a dtype that is not the default -> line

    def op(self, call: OpCall) -> None:
        usual = torch.get_default_dtype()
        for output in call.outputs[:1]:
            if not output.is_floating_point() or output.dtype == usual:
                continue
            sources = [t for t in call.inputs if t.dtype == output.dtype]
            known = next((t for t in sources if t in self._typed), None)
            self._typed[output] = call.site if known is None else self._typed[known]

            if not self.session.module_stack:
                self._latest = self._typed[output]

    def finish(self, error: BaseException | None) -> None:
        """Recurrent layers look at the dtype themselves, before any operation."""
        text = str(error)
        if isinstance(error, ValueError) and "does not match weight dtype" in text:
            self.report(
                16,
                Severity.ERROR,
                "A recurrent layer gets data of another dtype than its weights.",
                why=f"{text.splitlines()[0]} The last numbers of an unusual type were made at "
                f"{self._latest or 'a line that was not traced'}; numpy's are float64.",
                fix="Convert the data where they are made (.float()).",
                site=self._latest,
            )

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        if not isinstance(error, RuntimeError) or not _REFUSED.search(str(error)):
            return
        floats = [t for t in call.inputs if t.is_floating_point()]
        weights: list[Tensor] = [t for t in floats if isinstance(t, nn.Parameter)]
        data = [t for t in floats if not isinstance(t, nn.Parameter)]
        if not weights or not data or data[0].dtype == weights[0].dtype:
            return
        self._say(call, error, data[0], weights)

    def _say(self, call: OpCall, error: BaseException, data: Tensor, weights: list[Tensor]) -> None:
        registry = self.session.registry
        made: Site | None = self._typed.get(data) or registry.arrays_at.get(data)
        converted = most_common(dtype_site(registry, w) for w in weights)
        unusual = data.dtype != torch.get_default_dtype()
        kinds = [str(t.dtype).removeprefix("torch.") for t in (data, weights[0])]
        self.report(
            16,
            Severity.ERROR,
            f"{call.short} gets {kinds[0]} data for {kinds[1]} weights.",
            why=f"{str(error).splitlines()[0]}. "
            + (
                f"The data got their type at {made or call.site}; numpy's is float64."
                if unusual
                else f"The weights got theirs at {converted or call.site}."
            ),
            fix="Convert the data where they are made (.float(), or x.to(weight.dtype)); or the "
            "model, if this type is meant.",
            site=(made if unusual else converted) or call.site,
            parameters=registry.bits(weights),
            related=(call.site,),
        )
