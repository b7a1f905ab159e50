"""The fixture, in test suites of others: run by pytester, in this process."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# pytester forgets what is imported inside it, and these stand no second import
import torch._dynamo  # noqa: F401

import gradient_doctor.script  # noqa: F401
from doctor.stub import Broken, Stub, use
from gradient_doctor.findings import Severity

pytest_plugins = ["pytester"]

TRAIN = """
import pytest
import torch

def train(steps=3):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """Run a test file with the plugin, and this stub as its only detector."""
    # named, not found by its entry point, which an older installation does not have
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(body, *arguments, severity=Severity.WARNING):
        use(monkeypatch, Stub, severity=severity)
        pytester.makepyfile(TRAIN + body)
        return pytester.runpytest_inprocess(
            "-p", "gradient_doctor.pytest_plugin", "--strict-markers", *arguments
        )

    return run


def test_naming_the_fixture_is_enough(suite):
    body = """
def test_training(gradient_doctor):
    train()
def test_other():
    train()
"""
    result = suite(body)
    # a failure of the test, with the report for a message, and no traceback
    result.assert_outcomes(passed=1, failed=1, errors=0)
    result.stdout.fnmatch_lines(
        [
            "gradient_doctor: 1 warning in 3 steps.",
            "WARNING [[]5 unreachable[]] Found by a stub.",
            "  fix:   None.",
            "FAILED *::test_training - *",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")
    suite(body, severity=None).assert_outcomes(passed=2)
    suite(body, severity=Severity.NOTE).assert_outcomes(passed=2)


def test_options_by_mark(suite):
    result = suite(
        """
@pytest.mark.gradient_doctor(fail_on="error")
def test_only_errors(gradient_doctor):
    train()
@pytest.mark.gradient_doctor(allow=["unreachable"])
def test_allowed_by_name(gradient_doctor):
    train()
@pytest.mark.gradient_doctor(allow=[5])
def test_allowed_by_number(gradient_doctor):
    train()
@pytest.mark.gradient_doctor(allow=[6])
def test_another_is_allowed(gradient_doctor):
    train()
@pytest.mark.gradient_doctor(fail_on="never")
def test_wrong_option(gradient_doctor):
    train()
"""
    )
    result.assert_outcomes(passed=3, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*ValueError: fail_on is 'never'; expected one of*"])


def test_as_a_context(suite):
    result = suite(
        """
def test_block(gradient_doctor):
    with gradient_doctor(trace_steps=2):
        train()
    assert False, "never reached"
def test_look_only(gradient_doctor):
    with gradient_doctor(fail_on=None) as doctor:
        train()
    assert [f.number for f in doctor.findings] == [5]
    train()
def test_named(gradient_doctor):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"modules": {"m": model}, "optimizers": {"o": optimizer}, "fail_on": "error"}
    with gradient_doctor(**options) as doctor:
        for _ in range(2):
            model(torch.ones(3, 2)).mean().backward()
            optimizer.step()
            doctor.step()
    assert doctor.session.step == 2
def test_nothing_of_ours_is_left(gradient_doctor):
    with gradient_doctor(fail_on=None):
        train()
    assert not torch.overrides._get_current_function_mode_stack()
"""
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.no_fnmatch_line("*never reached*")


def test_a_failing_test_fails_as_it_would_with_the_report_beside(suite):
    result = suite(
        """
def test_assertion(gradient_doctor):
    train()
    assert 1 == 2
def test_skipped(gradient_doctor):
    train()
    pytest.skip("not today")
def test_nothing_of_ours_is_left():
    assert not torch.overrides._get_current_function_mode_stack()
@pytest.fixture
def broken(gradient_doctor):
    raise RuntimeError("a fixture's mistake")
def test_never_called(broken):
    pass
def test_still_nothing_left():
    assert not torch.overrides._get_current_function_mode_stack()
"""
    )
    result.assert_outcomes(passed=2, failed=1, skipped=1, errors=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*", "*gradient_doctor*", "*1 warning in 3 steps*"])


def test_our_own_mistake_does_not_fail_a_test(suite, monkeypatch):
    monkeypatch.setattr(Stub, "step_ended", Broken.step_ended)
    monkeypatch.delenv("GRADIENT_DOCTOR_STRICT")
    suite("def test_training(gradient_doctor):\n    train()\n").assert_outcomes(passed=1)


def test_the_plugin_is_declared_and_imports_no_torch():
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    assert project["dependencies"] == ["torch>=2.6"]  # and nothing else
    plugins = project["entry-points"]["pytest11"]
    assert plugins == {"gradient_doctor": "gradient_doctor.pytest_plugin"}
    code = "import sys, gradient_doctor.pytest_plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
