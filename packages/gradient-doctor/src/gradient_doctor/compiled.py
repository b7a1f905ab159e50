"""torch.compile: inside what it compiles we step aside, or it would compile the doctor as well."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch

from gradient_doctor.patches import Patches

_DYNAMO = "torch._dynamo.eval_frame"
_SWITCH = "_maybe_set_eval_frame"  # called with the compiler before a compiled call, without after


class Compiled:
    """`aside(True)` before a compiled call, `aside(False)` after it."""

    def __init__(self, aside: Callable[[bool], None]) -> None:
        self._aside = aside
        self._patches: Patches | None = None
        self._installed = False
        self._call: FrameType | None = None  # of the compiled call that is running

    def install(self, patches: Patches) -> None:
        self._patches, self._installed = patches, False
        patches.replace(torch, "compile", self._compile)
        self._watch()

    def _watch(self) -> None:
        """Importing the compiler takes seconds: it is watched as soon as somebody else has."""
        dynamo = sys.modules.get(_DYNAMO)
        if self._installed or self._patches is None or not hasattr(dynamo, _SWITCH):
            return
        if not self._patches.active:
            return  # the examination is over: only our `compile` is left, under somebody else's
        self._installed = True
        self._patches.replace(dynamo, _SWITCH, self._switch)
        # a compiled module looks for hooks before it comes to that
        self._patches.replace(cast(Any, dynamo).OptimizedModule, "__call__", self._module)

    def _compile(self, original: Any) -> Any:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._watch()
            return result

        return compile

    def _module(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._call is not None:
                return original(module, *args, **kwargs)
            self._call = sys._getframe()
            self._aside(True)
            try:
                return original(module, *args, **kwargs)
            finally:
                self._call = None
                self._aside(False)

        return call

    def _switch(self, original: Any) -> Any:
        def switch(callback: Any) -> Any:
            caller = sys._getframe(1)
            if self._call is None and callback is not None and callback is not False:
                self._call = caller
                self._aside(True)
            elif self._call is caller:  # calls from within, while it compiles, are not the end
                self._call = None
                self._aside(False)
            return original(callback)

        return switch
