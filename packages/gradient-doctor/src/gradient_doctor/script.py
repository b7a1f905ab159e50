"""Run an unmodified script under the doctor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradient_doctor import program
from gradient_doctor.doctor import Doctor
from gradient_doctor.findings import Finding
from gradient_doctor.program import Program, ProgramError


@dataclass
class Examination:
    """What a script's run showed; `error` is the exception that ended it, if one did."""

    findings: list[Finding]
    error: BaseException | None
    steps: int


def examine(
    path: str | os.PathLike[str],
    argv: Sequence[str] = (),
    contract: Mapping[str, Any] | None = None,
    *,
    trace_steps: int = 3,
    every: int = 50,
    mode: str = "auto",
) -> Examination:
    """Run the script as `__main__` in this process; models, optimizers and steps are found."""
    try:
        script = Program(os.fspath(path))
    except ProgramError as missing:
        raise FileNotFoundError(str(missing)) from None
    doctor = script_doctor(contract, trace_steps=trace_steps, every=every, mode=mode)
    error = run_under(doctor, script, argv)
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, SystemExit) and error.code in (None, 0):
        error = None
    return Examination(doctor.findings, error, doctor.session.step)


def script_doctor(contract: Mapping[str, Any] | None = None, **options: Any) -> Doctor:
    """A doctor that finds models, optimizers and steps by itself."""
    return Doctor(contract=contract, discover=True, find_steps=True, **options)


def run_under(
    doctor: Doctor, what: Program, argv: Sequence[str], *, instead: bool = False
) -> BaseException | None:
    """Run to the end, whatever that is, and give the exception that was the end."""
    grad_enabled = torch.is_grad_enabled()
    with program.as_main(what, argv, instead=instead):
        try:
            with doctor:
                program.run(what)
        except BaseException as error:
            return error
        finally:
            # a script may leave gradients off for good; in this process it is not the last
            torch.set_grad_enabled(grad_enabled)
    return None
