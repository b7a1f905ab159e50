"""Stand-ins for CUDA libraries: a library that needs one is loaded, and is told of no device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from hollow_cuda import NO_DEVICE, without_cuda, write_stand_ins

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(
        not all(map(shutil.which, ("gcc", "nm", "readelf"))), reason="gcc and binutils are needed"
    ),
]


def _library(file, source, *options):
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{file.name}", "-x", "c", "-", "-x", "none"]
    command += ["-o", str(file), *map(str, options), "-Wl,-rpath,$ORIGIN"]
    subprocess.run(command, input=source, text=True, check=True)
    return file


@pytest.fixture
def orphan(tmp_path):
    """libtorch_of_test.so, whose libcufake.so.1 (with a version) is gone."""
    script = tmp_path / "fake.map"
    script.write_text("FAKE_1 { global: cuFake; };")
    fake = _library(
        tmp_path / "libcufake.so.1",
        "int cuFake(void) { return 7; }",
        f"-Wl,--version-script={script}",
    )
    asks = "int cuFake(void); int answer(void) { return cuFake(); }"
    torch = _library(tmp_path / "libtorch_of_test.so", asks, "-Wl,--no-as-needed", fake)
    fake.unlink()
    return torch


def test_what_is_missing_gets_a_stand_in(orphan):
    with pytest.raises(OSError, match=r"libcufake\.so\.1"):
        ctypes.CDLL(str(orphan))
    assert write_stand_ins(orphan.parent) == ["libcufake.so.1"]
    assert ctypes.CDLL(str(orphan)).answer() == NO_DEVICE


def test_a_torch_without_cuda_is_left_alone(tmp_path):
    metadata = tmp_path / "torch-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: torch\nRequires-Dist: filelock\n")
    assert not without_cuda(tmp_path)
    assert metadata.read_text() == "Name: torch\nRequires-Dist: filelock\n"


def test_what_pip_would_fetch_is_no_longer_required(orphan, tmp_path):
    site_packages = tmp_path / "site"
    shutil.copytree(orphan.parent, site_packages / "torch" / "lib", ignore=lambda *_: {"site"})
    metadata = site_packages / "torch-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    lines = ["filelock", "nvidia-cublas-cu12 (==12)", "cuda-toolkit[cudart]==13", "triton==3"]
    metadata.write_text("".join(f"Requires-Dist: {line}\n" for line in lines))
    assert without_cuda(site_packages)
    assert metadata.read_text() == "Requires-Dist: filelock\n"
    assert (site_packages / "torch" / "lib" / "libcufake.so.1").is_file()
