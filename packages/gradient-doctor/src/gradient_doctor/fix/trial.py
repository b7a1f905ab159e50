"""One version of the script, run under the doctor for a few steps in a process of its own.

Both versions start with the same random numbers, arguments and files. The child writes down each
loss that backward starts from, how far each parameter has moved since it was first seen, and what
the doctor reports. It ends at the first backward after the last step that was asked for.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradient_doctor.findings import Finding, Severity, Site
from gradient_doctor.fix import folders

SEED = 0
GRACE = 20.0  # seconds after the time limit in which the child ends by itself
_SAMPLE = 8192  # elements of a parameter that are compared
_TAIL = 2000  # characters of the script's own output that are kept


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run, and for how long."""

    program: tuple[str, ...]  # script.py args..., or -m module args...
    steps: int
    timeout: float
    roots: tuple[str, ...]
    link: bool = False


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one version did.

    `losses` holds one list for each line that calls backward; `moved` the distance of each
    parameter from its first value, relative to its size.
    """

    steps: int = 0
    losses: Mapping[str, list[float]] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    error: str | None = None  # the exception that ended the script, or why there is no result
    timed_out: bool = False
    output: str = ""  # the end of what the script printed

    @property
    def serious(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity >= Severity.WARNING and f.number)

    @property
    def main_loss(self) -> list[float]:
        """The losses of the line that calls backward most often, the first of equals."""
        return list(max(self.losses.values(), key=len, default=[]))


def run(plan: Plan, changed: Mapping[str, bytes]) -> Trial:
    """Run the script with these files changed, in a copy of its folders."""
    with tempfile.TemporaryDirectory(prefix="gradient-doctor-") as name:
        base = Path(os.path.realpath(name))
        copied = folders.copy(plan.roots, base / "run", changed, link=plan.link)
        out, log = base / "trial.json", base / "output.txt"
        context: Any = multiprocessing.get_context(_method())
        if _method() == "forkserver":
            context.set_forkserver_preload(["gradient_doctor.fix.trial", "gradient_doctor.script"])
        job = {
            "program": list(plan.program),
            "cwd": copied.there(os.path.realpath(os.getcwd())),
            "pairs": [list(pair) for pair in copied.pairs],
            "steps": plan.steps,
            "timeout": plan.timeout,
            "out": str(out),
            "log": str(log),
            "path": list(sys.path),
        }
        process = context.Process(target=_child, args=(job,))
        process.start()
        try:
            process.join(plan.timeout + GRACE)
            hung = process.is_alive()
        finally:
            _end(process)
        printed = log.read_text("utf-8", errors="replace")[-_TAIL:] if log.is_file() else ""
        printed = _back(copied, printed)
        if not out.is_file():
            why = (
                f"did not end within {plan.timeout + GRACE:.0f} s"
                if hung
                else f"ended without a result (exit code {process.exitcode})"
            )
            return Trial(error=why, timed_out=hung, output=printed)
        return _read(json.loads(out.read_text("utf-8")), copied, printed)


def _method() -> str:
    """A server that has imported torch once, where there is one; else a fresh interpreter."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _end(process: Any) -> None:
    """The child and what it has started: it leads a group of its own."""
    if process.is_alive() and process.pid is not None:
        try:
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has no group yet, or has just ended
            process.kill()
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def _back(copied: folders.Copied, text: str) -> str:
    for real, there in copied.pairs:
        text = text.replace(there, real)
    return text


def _read(stored: dict[str, Any], copied: folders.Copied, printed: str) -> Trial:
    findings = []
    for value in stored["findings"]:
        finding = Finding.from_dict(value)

        def real(site: Site | None) -> Site | None:
            return None if site is None else replace(site, file=copied.back(site.file))

        findings.append(
            replace(
                finding,
                what=_back(copied, finding.what),
                why=_back(copied, finding.why),
                fix=_back(copied, finding.fix),
                site=real(finding.site),
                related=tuple(s for s in map(real, finding.related) if s is not None),
                parameters=tuple(_back(copied, name) for name in finding.parameters),
            )
        )
    return Trial(
        steps=stored["steps"],
        losses={_back(copied, where): values for where, values in stored["losses"].items()},
        moved={_back(copied, name): value for name, value in stored["moved"].items()},
        findings=tuple(findings),
        error=None if stored["error"] is None else _back(copied, stored["error"]),
        timed_out=stored["timed_out"],
        output=printed,
    )


# in the child


class _Enough(BaseException):
    """Raised in the script after its last step; no `except Exception` keeps it."""


def _child(job: dict[str, Any]) -> None:
    if hasattr(os, "setsid"):
        os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    stdin = os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    os.chdir(job["cwd"])
    copied = folders.Copied(pairs=tuple((a, b) for a, b in job["pairs"]))
    sys.path[:] = [copied.there(os.path.realpath(p)) if p else p for p in job["path"]]
    sys.dont_write_bytecode = True
    result = _examined(job, copied)
    Path(job["out"]).write_text(json.dumps(result), "utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and exit handlers of a script that was stopped halfway are not waited for


def _examined(job: dict[str, Any], copied: folders.Copied) -> dict[str, Any]:
    from gradient_doctor import program
    from gradient_doctor.program import Program
    from gradient_doctor.script import script_doctor

    words = job["program"]
    if words[0] == "-m":
        what, argv = Program(words[1], is_module=True), words[2:]
    else:
        what, argv = Program(copied.there(os.path.realpath(words[0]))), words[1:]
    _seed()
    doctor = script_doctor()
    record = Record(doctor, job["steps"], time.monotonic() + job["timeout"])
    error: BaseException | None = None
    with program.as_main(what, argv):
        try:
            with doctor, record:
                program.run(what)
        except _Enough:
            error = None
        except BaseException as ended:
            error = None if isinstance(ended, SystemExit) and not ended.code else ended
            if error is not None:
                traceback.print_exception(error)
    return {
        "steps": record.steps,
        "losses": record.losses,
        "moved": record.moved,
        "findings": [finding.to_dict() for finding in doctor.findings],
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "timed_out": record.timed_out,
    }


def _seed() -> None:
    import torch

    random.seed(SEED)
    torch.manual_seed(SEED)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(SEED)


class Record:
    """The losses of every backward, and the parameters as they were when first seen."""

    def __init__(self, doctor: Any, steps: int, deadline: float) -> None:
        from gradient_doctor.patches import Patches

        self.losses: dict[str, list[float]] = {}
        self.moved: dict[str, float] = {}
        self.steps = 0
        self.timed_out = False
        self._doctor = doctor
        self._limit = steps
        self._deadline = deadline
        self._first: dict[int, tuple[Any, Any]] = {}  # id -> tensor (kept alive) and its sample
        self._patches = Patches()
        self._inside = False
        self._scaled: tuple[Any, float] | None = None

    def __enter__(self) -> Record:
        import torch

        self._patches.replace(torch.Tensor, "backward", self._backward)
        self._patches.replace(torch.autograd, "backward", self._backward)
        self._patches.replace(torch.amp.GradScaler, "scale", self._scale)
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.restore()
        self.steps = self._doctor.session.step
        self._look()
        self._compare()

    def _backward(self, original: Any) -> Any:
        def backward(root: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(root, *args, **kwargs)
            late = time.monotonic() > self._deadline
            if late or self._doctor.session.step >= self._limit:
                self.timed_out = late
                raise _Enough
            self._look()
            self._note(root)
            self._inside = True
            try:
                return original(root, *args, **kwargs)
            finally:
                self._inside = False

        return backward

    def _scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            value = _number(outputs)
            self._scaled = None if value is None else (scaled, value)
            return scaled

        return scale

    def _note(self, root: Any) -> None:
        from gradient_doctor.sites import here

        roots = [root] if not isinstance(root, (list, tuple)) else list(root)
        values = [
            self._scaled[1] if self._scaled and one is self._scaled[0] else _number(one)
            for one in roots
        ]
        self._scaled = None
        if values and None not in values:
            site = here()
            where = "?" if site is None else f"{site.file}:{site.line}"
            self.losses.setdefault(where, []).append(math.fsum(v for v in values if v is not None))

    def _look(self) -> None:
        """Sample what has come into sight since the last backward."""
        for _, tensor in self._parameters():
            if id(tensor) not in self._first:
                sample = _sample(tensor)
                if sample is not None:
                    self._first[id(tensor)] = (tensor, sample)

    def _parameters(self) -> list[tuple[str, Any]]:
        registry = self._doctor.session.registry
        registry.flush()
        named = dict(registry.parameters())
        known = {id(tensor) for tensor in named.values()}
        pairs = list(named.items())
        for name, optimizer in registry.optimizers.items():
            count = 0
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    if id(tensor) not in known:
                        known.add(id(tensor))
                        pairs.append((f"{name}.params[{count}]", tensor))
                    count += 1
        return pairs

    def _compare(self) -> None:
        for name, tensor in self._parameters():
            first = self._first.get(id(tensor))
            now = None if first is None else _sample(tensor)
            if first is None or now is None or now.shape != first[1].shape:
                continue
            size = float(first[1].norm())
            distance = float((now - first[1]).norm())
            self.moved[name] = distance / size if size > 0 else distance


def _number(value: Any) -> float | None:
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta":
        with torch._C.DisableTorchFunction():
            return float(value.detach())
    return None


def _sample(tensor: Any) -> Any:
    import torch

    if tensor.device.type == "meta" or torch.nn.parameter.is_lazy(tensor):
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
        flat = tensor.detach().reshape(-1)
        return flat[:: max(1, flat.numel() // _SAMPLE)].double().cpu().clone()
