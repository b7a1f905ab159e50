"""Where a region without gradients was chosen: `context = inference_mode() if ... else ...`.

The `with` that enters such an object may stand far below, and serve both choices: the line to
change is the one that made it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from gradient_doctor.findings import Site
from gradient_doctor.guards import observed
from gradient_doctor.patches import Patches
from gradient_doctor.session import Session
from gradient_doctor.sites import is_user_file


class Contexts:
    """Tells the session, while a region is being entered, which line made it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._made: weakref.WeakKeyDictionary[Any, Site] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        for region in (torch.no_grad, torch.inference_mode):
            patches.replace(region, "__init__", observed(self.session, self, self._making))
            patches.replace(region, "__enter__", observed(self.session, self, self._entering))

    def _making(self, region: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield
        site = None if self.session.paused else self.session.here()
        if site is not None and is_user_file(site.file):
            self._made[region] = site

    def _entering(self, region: Any) -> Iterator[Any]:
        session = self.session
        session.entering = self._made.get(region) or session.here()
        try:
            yield
        finally:
            session.entering = None
