"""Classes 4 and 16: a pattern of the contract that no parameter is called by.

A contract guards a training; with a spelling mistake in it, it guards nothing and looks green. It
is judged at the end, when every module that the program uses has its name.
"""

from __future__ import annotations

from gradient_doctor.findings import Severity
from gradient_doctor.session import Detector

_CLASSES = {"trainable": 4, "frozen": 4, "dtype": 16}
_SHOWN = 6


class ContractNames(Detector):
    def finish(self, error: BaseException | None) -> None:
        registry = self.session.registry
        names = sorted(registry.aliases())
        if error is not None or not names:
            return  # a program that broke may not have come to that module
        for key, number in _CLASSES.items():
            unknown = [
                p for p in self.session.contract.get(key) or () if not registry.matching([p])
            ]
            if not unknown:
                continue
            quoted = " and ".join(f"`{pattern}`" for pattern in unknown)
            many = len(unknown) > 1
            self.report(
                number,
                Severity.WARNING,
                f"{quoted} of the contract's {key!r} {'match' if many else 'matches'} no "
                "parameter, so nothing was checked for it.",
                why="There are " + ", ".join(names[:_SHOWN]) + (", ..." if names[_SHOWN:] else "."),
                fix="Write the names as they are listed here; `*` stands for any part.",
            )
