"""The doctor inside transformers' Trainer, and TRL's, which are made of it.

    trainer = Trainer(model, ..., callbacks=[DoctorCallback()])

A Trainer tells its callbacks when training begins and ends, but not that it broke. What the doctor
has put in place must come out then, too, so making a first callback wraps `Trainer.train` in a
`try`; for trainers without a DoctorCallback that wrapper does nothing.

Findings so far are kept in `trainer_state.json` of every checkpoint, which the Trainer writes last:
a training that was killed and resumed reports the findings of all its parts.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradient_doctor.doctor import Doctor
from gradient_doctor.findings import Finding, Severity
from gradient_doctor.output import report_text, write_text

try:
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise ImportError(
        "gradient_doctor.hf is for transformers' Trainer, and transformers cannot be imported "
        f"({missing}). Install it, or use gradient_doctor.Doctor around your own loop."
    ) from missing

_GUARDED = "_gradient_doctor"
KEPT = "gradient_doctor"
"""Under `stateful_callbacks` of trainer_state.json."""
_LOG = logging.getLogger("gradient_doctor")


class GradientError(RuntimeError):
    """Raised by `DoctorCallback(raise_on=...)`; the message is the report."""


class DoctorCallback(TrainerCallback):
    """Examines a Trainer's steps; reports when training ends.

    `contract`, `mode`, `trace_steps` and `every` are those of `Doctor`. `raise_on` ("error" or
    "warning") ends training by a `GradientError` in the step that shows such a finding; by default
    nothing is raised. `report` prints to stderr, `json` names a file besides. Findings so far are
    in `findings`. An error inside the doctor is logged, and the doctor leaves.
    """

    def __init__(
        self,
        *,
        contract: Mapping[str, Any] | None = None,
        mode: str = "auto",
        trace_steps: int = 3,
        every: int = 50,
        raise_on: str | None = None,
        report: bool = True,
        json: str | os.PathLike[str] | None = None,
    ) -> None:
        if raise_on not in (None, "error", "warning"):
            raise ValueError(f"raise_on is {raise_on!r}; expected 'error', 'warning' or None")
        self._make = functools.partial(
            Doctor, contract=contract, mode=mode, trace_steps=trace_steps, every=every
        )
        self._make()  # bad options are refused here, not hours later inside the trainer
        self._raise_on = None if raise_on is None else Severity[raise_on.upper()]
        self._show, self._json = report, json
        self._speaks = True
        self.doctor: Doctor | None = None
        self._recalled: list[Finding] = []  # of the training's part before a resume
        self._running = False
        _guard_train()

    @property
    def findings(self) -> list[Finding]:
        """All findings, the worst first."""
        return [] if self.doctor is None else self.doctor.findings

    def report(self) -> str:
        return report_text(self.findings, 0 if self.doctor is None else self.doctor.session.step)

    # what the trainer calls

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        # a second beginning without an end: the trainer tries again with a smaller batch
        self._safely(self._leave)
        self._speaks = getattr(state, "is_world_process_zero", True)
        memory = state.stateful_callbacks.get(KEPT) if state.global_step else None
        self._safely(lambda: self._enter(model, optimizer, memory))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._running and self.doctor is not None:
            self._safely(lambda: self._step(state))
            self._judge()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._running:
            self.close()
            self._judge()

    def close(self, error: BaseException | None = None) -> None:
        """Put everything back as it was, and report; done already when training has ended."""
        if self._running:
            fault = isinstance(error, GradientError)  # our own word, which is the report
            self._safely(lambda: self._leave(None if fault else error))
            self._safely(lambda: self._tell(screen=not fault))

    # inside

    def _enter(self, model: Any, optimizer: Any, memory: Any) -> None:
        inner, scaler = unwrapped(optimizer)
        if inner is None:  # made elsewhere (DeepSpeed): found when it steps
            doctor = self._make({"model": model}, scaler=scaler, discover=True)
        else:
            doctor = self._make({"model": model}, {"optimizer": inner}, scaler)
        self._recalled = []
        if memory is not None:
            self._recall(doctor, memory)
        self.doctor = doctor
        self._running = True
        doctor.__enter__()

    def _recall(self, doctor: Doctor, memory: Any) -> None:
        try:
            doctor.recall(memory)
        except ValueError as error:
            _LOG.warning(
                "what the doctor found before the resume cannot be read from trainer_state.json "
                "(%s); it begins anew",
                error,
            )
        self._recalled = doctor.findings

    def _step(self, state: Any) -> None:
        assert self.doctor is not None
        self.doctor.step()
        if self.doctor.mode != "off":
            state.stateful_callbacks[KEPT] = self.doctor.memory()

    def _leave(self, error: BaseException | None = None) -> None:
        if self._running and self.doctor is not None:
            self._running = False
            self.doctor.__exit__(type(error) if error else None, error, None)

    def _judge(self) -> None:
        if self._raise_on is None:
            return
        new = (finding for finding in self.findings if finding not in self._recalled)
        if any(finding.severity >= self._raise_on for finding in new):
            raise GradientError(self.report())

    def _tell(self, screen: bool) -> None:
        if not self._speaks or self.doctor is None or self.doctor.mode == "off":
            return
        if self._show and screen:
            print(f"\n{self.report()}", file=sys.stderr)
        if self._json is not None:
            write_text(self._json, self.doctor.to_json() + "\n")

    def _safely(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception:
            _LOG.warning("the doctor failed and leaves; training goes on", exc_info=True)
            running, self._running = self._running, False
            if running and self.doctor is not None:
                self.doctor.remove()


def unwrapped(optimizer: Any) -> tuple[torch.optim.Optimizer | None, Any]:
    """The optimizer inside accelerate's wrappers, and their gradient scaler."""
    scaler = None
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        scaler = scaler or getattr(optimizer, "scaler", None)
        optimizer = optimizer.optimizer
    return (optimizer if isinstance(optimizer, torch.optim.Optimizer) else None), scaler


def _guard_train() -> None:
    original = Trainer.train
    if hasattr(original, _GUARDED):
        return

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            _close_all(self, error)
            raise
        finally:
            _close_all(self, None)

    setattr(train, _GUARDED, True)
    Trainer.train = train


def _close_all(trainer: Any, error: BaseException | None) -> None:
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, DoctorCallback):
            callback.close(error)
