"""Class 25: an autograd failure that was caught, or papered over with zeros or noise."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from gradient_doctor.detectors.common import live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.interruptions import is_the_programs
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.sites import is_user_file

_FILLERS = {
    *("zeros_like", "randn_like", "rand_like", "ones_like", "zeros", "randn", "new_zeros"),
    *("empty_like", "full_like"),
}
_MOVING_ON = {"step_starts", "step", "scaler_step", "zero_grad", "backward"}


@dataclass
class Failure:
    """An error on its way: nobody knows yet whether it will end the run."""

    error: int  # its identity: the error itself holds frames, and so tensors
    told: str
    call: str
    site: Site | None
    affected: int
    handled: Site | None = None


@dataclass
class Missing:
    """None results of autograd.grad, and what was put in their place."""

    site: Site | None
    bits: dict[int, tuple[int, ...]]  # parameter -> shape
    filled: int = 0
    by: str = ""
    at: list[Site] = field(default_factory=list)


class Swallowed(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._failure: Failure | None = None
        self._missing: Missing | None = None

    # errors

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        live = live_in(self.session, call.inputs)
        # libraries try what a tensor can do; that is their business
        if live and call.site is not None and _raised_by_user(call.site):
            self._fail(error, call.short, call.site, live)

    def backward_failed(self, backward: Backward, error: BaseException) -> None:
        affected = backward.taint.live if backward.taint is not None else 0
        name = "backward" if backward.kind == "backward" else "autograd.grad"
        self._fail(error, name, backward.site, affected)

    def event_failed(self, event: Event, error: BaseException) -> None:
        self._fail(error, event.kind, event.site, 0)

    def _fail(self, error: BaseException, call: str, site: Site | None, affected: int) -> None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return  # a smaller batch is tried next, as it should be
        if is_the_programs(error):
            return  # a timeout of the program's, which came just now
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._failure = Failure(id(error), message, call, site, affected)

    def event(self, event: Event) -> None:
        failure = self._failure
        if failure is None or event.kind not in _MOVING_ON:
            return
        if _leads_to(failure.error, sys.exception()):
            # still inside of `except` or `finally`: it may be raised again
            failure.handled = failure.handled or event.site
            return
        self._caught(failure)

    def step_ended(self, record: StepRecord) -> None:
        failure = self._failure
        if failure is not None and not _leads_to(failure.error, sys.exception()):
            self._caught(failure)
        self._settle()

    def finish(self, error: BaseException | None) -> None:
        failure = self._failure
        if failure is not None and not _leads_to(failure.error, error):
            self._caught(failure)
        self._settle()

    def _caught(self, failure: Failure) -> None:
        self._failure = None
        self.report(
            25,
            Severity.ERROR,
            f"{failure.call} failed, the error was caught, and training went on.",
            why=f"{failure.told} What this call should have computed is missing in the step, or "
            "older values are used in its place.",
            fix="Let the error through, or catch only what you can repair; then mend its cause.",
            site=failure.site,
            parameters=failure.affected,
            related=(failure.handled,),
        )

    # None, papered over

    def backward_ended(self, backward: Backward) -> None:
        self._settle()
        if backward.kind != "grad" or backward.results is None:
            return
        registry = self.session.registry
        bits = {
            registry.bit(tensor): tuple(tensor.shape)
            for tensor, result in zip(backward.inputs or [], backward.results)
            if result is None
        }
        if bits:
            self._missing = Missing(backward.site, bits)

    def op(self, call: OpCall) -> None:
        missing = self._missing
        if missing is None or call.short not in _FILLERS or not call.outputs:
            return
        if call.site is None or missing.site is None or call.site.file != missing.site.file:
            return
        like = self.session.registry.known_bit(call.inputs[0]) if call.inputs else 0
        if like:
            bit = like if like in missing.bits else 0
        else:
            size = tuple(call.outputs[0].shape)
            open_ones = [b for b, s in missing.bits.items() if s == size and not b & missing.filled]
            bit = open_ones[0] if open_ones else 0
        if bit:
            missing.filled |= bit
            missing.by = call.short
            if call.site not in missing.at:
                missing.at.append(call.site)

    def _settle(self) -> None:
        missing, self._missing = self._missing, None
        if missing is None or not missing.filled:
            return
        self.report(
            25,
            Severity.ERROR,
            f"autograd.grad gave None for {missing.filled.bit_count()} of its inputs, and "
            f"{missing.by} was put in their place.",
            why="None means that the loss does not reach these parameters. Replaced by "
            f"{'noise' if 'rand' in missing.by else 'zeros'}, the break is no longer visible.",
            fix="Find out why the loss does not reach them; without allow_unused=True torch says "
            "so itself.",
            site=missing.site,
            parameters=missing.filled,
            related=tuple(missing.at),
        )


def _raised_by_user(site: Site) -> bool:
    return is_user_file(site.file)


def _leads_to(cause: int, end: BaseException | None) -> bool:
    """Whether the run ended by this error, or by one that was raised while handling it."""
    while end is not None:
        if id(end) == cause:
            return True
        end = end.__cause__ or end.__context__
    return False
