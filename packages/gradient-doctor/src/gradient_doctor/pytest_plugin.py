"""A pytest fixture that fails a test when the training in it has a fault.

    def test_training(gradient_doctor):
        train(steps=3)  # models, optimizers and steps are found

    @pytest.mark.gradient_doctor(contract={"trainable": ["policy.*"]}, fail_on="error")
    def test_policy_trains(gradient_doctor): ...

    def test_my_loop(gradient_doctor):
        with gradient_doctor(modules={"policy": policy}, optimizers={"adam": adam}) as doctor:
            train_on(batch)
            doctor.step()

torch is imported by the fixture, not by the plugin: suites without it start as fast as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradient_doctor.doctor import Doctor

_DOCTOR = "gradient_doctor"
_FAIL_ON = ("note", "warning", "error", None)
_MARK = (
    "gradient_doctor(fail_on='warning', allow=(), **options): options of the fixture of that name; "
    "see gradient_doctor.Doctor. `allow` lists classes that may be found, by number or name."
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)


class Examining:
    """The fixture's value: examines the whole test, or the block that it is called for."""

    def __init__(self, **options: Any) -> None:
        self._options = {"discover": True, "find_steps": True, "mode": "trace", **options}
        self._fail_on, self._allow = _taken(self._options)
        self._doctor: Doctor | None = None
        self._shown: Doctor | None = None

    @contextlib.contextmanager
    def __call__(
        self, *, fail_on: str | None = "warning", allow: tuple[int | str, ...] = (), **options: Any
    ) -> Iterator[Doctor]:
        """`with gradient_doctor(modules=..., optimizers=...) as doctor:` instead of the test."""
        from gradient_doctor.doctor import Doctor

        _check(fail_on)
        if self._doctor is not None:
            self._doctor.remove()
            self._doctor = None
        if not (options.get("modules") or options.get("optimizers")):
            options = {"discover": True, "find_steps": True, **options}
        self._shown = Doctor(**{"mode": "trace", **options})
        with self._shown as doctor:
            yield doctor
        _judge(doctor, fail_on, allow)

    @property
    def findings(self) -> list[Any]:
        return [] if self._shown is None else self._shown.findings

    def report(self, error: BaseException | None = None) -> str:
        """The findings as text; at length only those that are not noted on `error`."""
        from gradient_doctor.output import report_text

        shown = self._shown
        return "" if shown is None else report_text(shown.findings, shown.session.step, error)

    # by the plugin

    def start(self) -> None:
        from gradient_doctor.doctor import Doctor

        self._doctor = self._shown = Doctor(**self._options)
        self._doctor.__enter__()

    def stop(self, error: BaseException | None = None) -> None:
        doctor, self._doctor = self._doctor, None
        if doctor is not None:
            doctor.__exit__(type(error) if error else None, error, None)
            if error is None:
                _judge(doctor, self._fail_on, self._allow)


def _taken(options: dict[str, Any]) -> tuple[str | None, tuple[int | str, ...]]:
    fail_on = options.pop("fail_on", "warning")
    _check(fail_on)
    return fail_on, tuple(options.pop("allow", ()))


def _check(fail_on: str | None) -> None:
    if fail_on not in _FAIL_ON:
        raise ValueError(f"fail_on is {fail_on!r}; expected one of {_FAIL_ON}")


def _judge(doctor: Doctor, fail_on: str | None, allow: tuple[int | str, ...]) -> None:
    from gradient_doctor.findings import Severity
    from gradient_doctor.output import report_text

    if fail_on is None:
        return
    worst = Severity[fail_on.upper()]
    findings = [f for f in doctor.findings if f.number not in allow and f.slug not in allow]
    if any(f.severity >= worst for f in findings):
        pytest.fail(report_text(findings, doctor.session.step), pytrace=False)


@pytest.fixture
def gradient_doctor(request: pytest.FixtureRequest) -> Iterator[Examining]:
    """Fails the test on a finding of warning or above; see gradient_doctor.pytest_plugin."""
    mark = request.node.get_closest_marker(_DOCTOR)
    examining = Examining(**({} if mark is None else mark.kwargs))
    examining.start()
    try:
        yield examining
    finally:
        # usually stopped already, at the end of the test's own code; a test that was never called
        # because another fixture failed has nothing to be judged by
        if examining._doctor is not None:
            examining._doctor.remove()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """The verdict belongs to the test, not to its teardown: it makes a failure, not an error."""
    examining = pyfuncitem.funcargs.get(_DOCTOR)
    if not isinstance(examining, Examining):
        return (yield)
    try:
        result = yield
    except BaseException as error:
        examining.stop(error)
        if examining.findings and not isinstance(error, pytest.fail.Exception):
            pyfuncitem.add_report_section("call", _DOCTOR, examining.report(error))
        raise
    examining.stop()
    return result
