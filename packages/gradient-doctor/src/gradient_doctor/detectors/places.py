"""Lines that several detectors ask for: where a parameter, or an optimizer, got what it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from gradient_doctor.findings import Site, count
from gradient_doctor.registry import Registry

__all__ = ["birth_site", "by_site", "called", "count", "dtype_site", "most_common"]


def birth_site(registry: Registry, thing: Any) -> Site | None:
    birth = registry.birth(thing)
    return None if birth is None else birth.site


def dtype_site(registry: Registry, parameter: Tensor) -> Site | None:
    """The line that gave a parameter its dtype: a conversion that was seen, else its birth."""
    return registry.converted_at.get(parameter) or birth_site(registry, parameter)


def by_site(
    registry: Registry, parameters: Iterable[Tensor], where: Callable[[Tensor], Site | None]
) -> dict[Site | None, int]:
    """Sets of parameters by the line that they share."""
    groups: dict[Site | None, int] = {}
    for parameter in parameters:
        site = where(parameter)
        groups[site] = groups.get(site, 0) | registry.bit(parameter)
    return groups


def most_common(sites: Iterable[Site | None]) -> Site | None:
    counts = Counter(site for site in sites if site is not None)
    return counts.most_common(1)[0][0] if counts else None


def called(optimizer: str) -> str:
    """To follow `the`: `optimizer adam`, but not `optimizer optimizer`."""
    return optimizer if "optim" in optimizer.lower() else f"optimizer {optimizer}"
