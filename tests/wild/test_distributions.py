"""The distributions as a stranger gets them: built, and installed where there was nothing.

torch comes first, in the pinned version: alone, pip would take the newest with all of CUDA.
"""

import re
import subprocess
import sys
import venv
import zipfile

import pytest

from checkout import ROOT
from wild.environments import CONSTRAINTS, _install, _pip

PACKAGES = {
    "arc-refine": "arc_refine",
    "entropy-experiments": "entropy_experiments",
    "gradient-doctor": "gradient_doctor",
}


def installed(python):
    listed = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "list", "--format", "freeze"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.partition("==")[0].lower() for line in listed.stdout.splitlines() if line}


def test_the_doctor_brings_torch_and_nothing_else(tmp_path):
    venv.create(tmp_path / "empty", symlinks=True, with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    (pinned,) = re.findall(r"^torch==.*$", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    _install(python, ("iniconfig",))  # skips where there is no registry
    assert _pip(python, "uninstall", "-y", "iniconfig") is None
    assert _pip(python, "install", "-c", str(CONSTRAINTS), pinned) is None
    with_torch = installed(python)
    assert _pip(python, "install", str(ROOT / "packages" / "gradient-doctor")) is None
    assert installed(python) - with_torch == {"gradient-doctor"}
    command = [str(python.with_name("gradient-doctor")), "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout.lower()
    script = tmp_path / "cut.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "adam = torch.optim.Adam(model.parameters())\n"
        "for _ in range(2):\n"
        "    model(torch.ones(3, 2)).detach().requires_grad_().mean().backward()\n"
        "    adam.step()\n"
    )
    found = subprocess.run([command[0], str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 3, found.stdout + found.stderr
    assert "explicit-cut" in found.stdout + found.stderr


@pytest.mark.parametrize("distribution", PACKAGES)
def test_the_wheel_holds_types_and_licence(distribution, tmp_path):
    failure = _pip(
        sys.executable,
        *("wheel", "--no-deps", "--wheel-dir", str(tmp_path)),
        str(ROOT / "packages" / distribution),
    )
    if failure is not None and "hatchling" in failure:
        pytest.skip(f"hatchling cannot be had: {failure.splitlines()[-1]}")
    assert failure is None, failure
    (wheel,) = tmp_path.glob("*.whl")
    package = PACKAGES[distribution]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"{package}/py.typed", f"{package}/__init__.pyi", f"{package}/__init__.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests/")]
