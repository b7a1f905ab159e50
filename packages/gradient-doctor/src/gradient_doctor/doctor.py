"""The doctor around a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gradient_doctor import modes
from gradient_doctor.boundaries import Boundaries
from gradient_doctor.detectors import all_detectors
from gradient_doctor.detectors.precision import as_dtype
from gradient_doctor.findings import Finding, Severity, ordered
from gradient_doctor.forks import forget_forks, watch_forks
from gradient_doctor.output import SCHEMA, report_text, to_json
from gradient_doctor.registry import Registry
from gradient_doctor.session import Session, StepRecord
from gradient_doctor.trace import Trace
from gradient_doctor.watch import Watch

MODES = ("auto", "trace", "light", "off")
_BY_HAND = 6  # backwards without an optimizer after which each of them is a step
_MICRO_BATCHES = 32  # backwards of one step that are traced
_CONTRACT = {"trainable", "frozen", "dtype", "phase"}


class Doctor:
    """Examines the steps of any PyTorch loop and says where gradients stop.

    Weights come out bit for bit as without it.

    Args:
        modules: By name, so that findings can name parameters; None: found as they are called.
        optimizers: By name.
        scaler: A gradient scaler, if the loop has one.
        contract: What is meant: patterns of `trainable` and `frozen` parameters, `dtype` by
            pattern, `phase`.
        mode: "auto" traces the first `trace_steps` steps fully, then looks every `every` steps, and
            traces again after a look that found something; "trace" always traces; "light" only
            looks; "off" does nothing.
        trace_steps: Steps traced at the beginning.
        every: Steps between two looks.
        discover: Also find modules that are not named.
        find_steps: Tell steps apart by the optimizer's, without `step()`.

    Raises:
        TypeError: If `modules` or `optimizers` is no mapping of such.
        ValueError: If an option has an unknown value.

    Examples:
        >>> import torch
        >>> policy = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(policy.parameters())
        >>> with Doctor(modules={"policy": policy}, optimizers={"adam": adam}) as doctor:
        ...     for _ in range(2):
        ...         policy(torch.ones(3, 2)).detach().requires_grad_().mean().backward()
        ...         adam.step()
        ...         doctor.step()
        >>> doctor.worst.name
        'ERROR'
        >>> doctor.findings[0].slug
        'explicit-cut'
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
        scaler: Any = None,
        contract: Mapping[str, Any] | None = None,
        *,
        mode: str = "auto",
        trace_steps: int = 3,
        every: int = 50,
        discover: bool = False,
        find_steps: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        if trace_steps < 1 or every < 1:
            raise ValueError(f"trace_steps ({trace_steps}) and every ({every}) must be at least 1")
        self.mode = mode
        self.every = every
        registry = Registry(
            _mapping(modules, nn.Module, "modules"),
            _mapping(optimizers, torch.optim.Optimizer, "optimizers"),
            # without modules there is nothing to name: find them as they are called
            discover=discover or not modules,
        )
        self.session: Session = Session(registry, scaler, _checked_contract(contract), trace_steps)
        self._trace = Trace(self.session)
        self._watch = Watch(
            self.session, self._trace, stepped=self._stepped, went_back=self._went_back
        )
        self._watch.light = mode == "light"
        self._find_steps = find_steps
        self._boundaries = Boundaries(registry)
        self._look_closer = False
        self._pushed = False
        self._by_hand = False  # every backward is a step: weights are moved without an optimizer
        self._in_phase = False  # of moved inputs, with a closer look at it
        self._depth = 0  # our place among function modes of the user's

    # life

    def __enter__(self) -> Doctor:
        if self.mode == "off":
            return self
        self.session.listen(all_detectors(self.session))
        self._depth = modes.depth()
        watch_forks(self)
        try:
            self._watch.start()
            self._begin()
            if not self.session.registry.discover:
                self.session.start()
            return self
        except BaseException:
            self.remove()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:  # first of all: Ctrl-C may come at any line
            if self.mode != "off":
                self._last_words(error)
        finally:
            self.remove()

    def _last_words(self, error: BaseException | None) -> None:
        self._end()
        if not isinstance(error, Exception):
            # also at sys.exit() and Ctrl-C: the run was ended, it did not break
            self.session.tell("finish", None)
        else:
            self.session.fail("finish", error)

    def remove(self) -> None:
        """Put everything back as it was, without a last word; harmless a second time."""
        try:
            self._put_back()
        finally:  # once more, for what Ctrl-C has interrupted
            self._put_back()
            self.session.let_go()

    def _put_back(self) -> None:
        forget_forks(self)
        self._switch_trace(False)
        self._watch.stop()

    def leave(self) -> None:
        """In a forked child: nothing is watched, and nothing is said at the end."""
        self.mode = "off"
        self.remove()

    def step(self) -> None:
        """Call at the end of each training step."""
        if self.mode == "off":
            return
        self._end()
        self.session.step += 1
        self._begin()

    def _begin(self) -> None:
        session = self.session
        step = session.step
        first = session.age < session.trace_steps
        closer = self._look_closer or session.look_again
        first &= not self._by_hand  # there the traced steps are one
        traced = self.mode == "trace" or (self.mode == "auto" and (first or closer))
        checked = traced or (self.mode == "light" and first) or step % self.every == 0
        checked = checked or session.look_again
        self._look_closer = session.look_again = False
        session.record = StepRecord(step, traced, checked)
        session.paused = 0
        if checked:  # other steps give no bits
            session.registry.sweep()
        session.cuts.clear()
        session.heard.clear()
        session.arrays.clear()
        session.numbers.clear()
        session.returned.clear()
        self._switch_trace(traced)

    def _end(self) -> None:
        session = self.session
        record = session.record
        count = len(session.findings)
        session.registry.refresh()
        session.tell("step_ended", record)
        if not record.traced and any(
            f.severity >= Severity.WARNING for f in session.findings[count:]
        ):
            self._look_closer = True
        session.remember(record)

    def _switch_trace(self, on: bool) -> None:
        self._watch.modules(on or (self.session.registry.discover and self.session.age == 0))
        if on and not self._pushed:
            modes.insert(self._trace, self._depth)
            self._pushed = True
        elif not on and self._pushed and modes.is_active(self._trace):
            modes.remove(self._trace)
            self._pushed = False
        # inside a torch call (an optimizer that steps in backward) torch has taken it off the stack
        # and will put it back: there it stays, asleep
        self._trace.on = on

    # steps of scripts

    def _stepped(self, optimizer: Any) -> None:
        self._in_phase = False
        if self._find_steps and self._boundaries.stepped(optimizer, self.session.step):
            self.step()

    def _went_back(self) -> None:
        """A loop that moves its weights by hand has no steps that we see: its backwards are ones.

        The first few are one traced step, because what belongs together is not known; so are many
        micro batches of one optimizer's step, of which the first few are traced.
        """
        if not self._find_steps or self.mode != "auto":
            return
        record, registry = self.session.record, self.session.registry
        by_hand = not registry.optimizers and not registry.unnamed and not self.session.age
        if self.session.new_phase:
            # the first of its backwards are one step, and the next are another, which is traced
            self.session.new_phase = False
            self.session.look_again = self._in_phase = True
            self.step()
            return
        if self._in_phase and len(record.backwards) >= _BY_HAND:
            self._in_phase = False
            self.step()
            return
        if record.traced and len(record.backwards) < (_BY_HAND if by_hand else _MICRO_BATCHES):
            return
        if by_hand or self._by_hand:
            self._by_hand = not registry.optimizers
            self.step()
        elif record.traced:
            record.traced = False
            self._switch_trace(False)

    # over a resume

    def memory(self) -> dict[str, Any]:
        """The steps and findings so far, for `recall` in the process that resumes training."""
        return {"schema": SCHEMA, "steps": self.session.step, "findings": self.session.memory()}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Begin with what an earlier part of this training has shown; before the first step.

        Steps are counted on. Each part is examined like a training of its own, because its code may
        be another: counts inside a finding ("in all 3 examined steps") are of one part.
        """
        if not isinstance(memory, Mapping):
            raise ValueError(f"got {type(memory).__name__}, expected an object")
        schema, steps = memory.get("schema"), memory.get("steps")
        if schema != SCHEMA or not isinstance(steps, int) or steps < 0:
            raise ValueError(
                f"schema is {schema!r} and steps {steps!r}; expected {SCHEMA} and a whole number"
            )
        try:
            self.session.recall(memory["findings"], step=steps)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not stored findings: {type(error).__name__}: {error}") from None

    # what it found

    @property
    def findings(self) -> list[Finding]:
        """All findings, the worst first."""
        return ordered(self.session.findings)

    @property
    def worst(self) -> Severity | None:
        return max((f.severity for f in self.session.findings), default=None)

    def report(self) -> str:
        """The findings as text."""
        return report_text(self.findings, self.session.step)

    def to_json(self) -> str:
        return to_json(self.findings, self.session.step)


def _mapping(argument: Any, kind: type, what: str) -> dict[str, Any]:
    if argument is None:
        return {}
    if isinstance(argument, kind):
        raise TypeError(
            f"{what} is a {type(argument).__name__}; expected a dict of {kind.__name__}s: "
            f'{what}={{"model": ...}}, so that findings can name parameters'
        )
    for name, value in dict(argument).items():
        if not isinstance(value, kind):
            raise TypeError(
                f"{what}[{name!r}] is a {type(value).__name__}, expected a {kind.__name__}"
            )
    return dict(argument)


def _checked_contract(contract: Mapping[str, Any] | None) -> dict[str, Any]:
    if contract is not None and not isinstance(contract, Mapping):
        raise ValueError(
            f"contract is {contract!r}; expected a mapping such as {{'trainable': ['policy.*']}}"
        )
    requirements = dict(contract or {})
    unknown = set(requirements) - _CONTRACT
    if unknown:
        raise ValueError(
            f"contract has unknown keys {sorted(unknown)}; known are {sorted(_CONTRACT)}"
        )
    for key in ("trainable", "frozen"):
        value = requirements.get(key, [])
        if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in value):
            raise ValueError(
                f'contract[{key!r}] is {value!r}; expected a list such as ["policy.*"]'
            )
    if not isinstance(requirements.get("dtype", {}), Mapping):
        raise ValueError(
            f"contract['dtype'] is {requirements['dtype']!r}; expected names and dtypes such as "
            '{"lm.*": "float32"}'
        )
    for pattern, value in requirements.get("dtype", {}).items():
        if as_dtype(value) is None:
            raise ValueError(
                f"contract['dtype'][{pattern!r}] is {value!r}; expected a dtype such as 'float32'"
            )
    if requirements.get("phase", "train") not in ("train", "eval"):
        raise ValueError(
            f"contract['phase'] is {requirements['phase']!r}; expected 'train' or 'eval'"
        )
    return requirements
