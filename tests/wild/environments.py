"""Environments for code that nobody here wrote: one table, and a maker that makes each one once.

An environment is a layer over the one the tests run in: a virtual environment in build/wild whose
site-packages come first and that of the tests second. So only the packages that differ are
installed, torch among the shared ones. pip gets complete lists and `--no-deps`, hence the same
versions everywhere, and nothing pulls in CUDA. Our own packages come from packages/, by PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkout import ROOT

HOME = ROOT / "build" / "wild"
CONSTRAINTS = ROOT / "constraints.txt"
STAMP = "made_of"

HTTPX = ("httpx==0.28.1", "httpcore==1.0.9", "certifi==2026.10.18")
REQUESTS = ("requests==2.34.2", "urllib3==2.8.0", "charset-normalizer==3.5.2")
HUB_0 = ("huggingface_hub==0.36.2", "tokenizers==0.22.2", "fsspec==2026.6.0", *HTTPX, *REQUESTS)
HUB_1 = ("huggingface_hub==1.33.0", "tokenizers==0.22.2", *HTTPX, *REQUESTS)

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "trl-1.16": ("trl==1.16.0", "transformers==5.22.2"),
    "trl-1.9": ("trl==1.9.2", "transformers==5.12.1", *HUB_1),
    "trl-0.29": ("trl==0.29.1", "transformers==5.3.0", *HUB_1),
    "trl-0.24": ("trl==0.24.0", "transformers==4.57.6", "datasets==5.0.1", *HUB_0),
    "unsloth": (
        *("unsloth==2026.10.9", "unsloth_zoo==2026.10.9"),
        *("trl==1.9.2", "transformers==5.12.1", *HUB_1),
    ),
    "ms-swift": (
        *("ms_swift==4.6.0", "trl==0.29.1", "transformers==5.3.0", *HUB_1),
        *("modelscope==1.40.2", "modelscope_hub==0.5.1", "dacite==1.9.2", "einops==0.8.2"),
        *("json_repair==0.64.4", "simplejson==4.3.0", "pillow==13.0.0", "zstandard==0.25.0"),
        *("cryptography==50.0.2", "cffi==2.1.1", "pycparser==3.12", "msgspec==0.22.0"),
        *("aiohttp==3.14.5", "aiohappyeyeballs==2.7.1", "aiosignal==1.4.0", "frozenlist==1.8.0"),
        *("multidict==7.2.1", "propcache==0.5.4", "yarl==1.25.1", "attrs==26.1.0"),
    ),
    "verl": (
        *("verl==0.9.1", "transformers==5.10.4", *HUB_1),
        *("requests==2.34.2", "urllib3==2.8.0", "charset-normalizer==3.5.2", "certifi==2026.10.18"),
        *("tensordict==0.10.0", "pyvers==0.1.0", "orjson==3.13.0", "cloudpickle==3.1.2"),
        *("omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3", "codetiming==1.4.0"),
        *("ray==2.60.0", "msgpack==1.2.4", "protobuf==7.36.2", "jsonschema==4.26.0"),
        *("jsonschema-specifications==2025.9.1", "attrs==26.1.0"),
        *("referencing==0.37.0", "rpds-py==2026.9.1", "torchdata==0.11.0", "cachetools==8.0.0"),
    ),
    "bergson": (
        *("bergson==2.5.1", "jaxtyping==0.3.11", "wadler_lindig==0.1.8", "ml_dtypes==0.6.0"),
        *("simple-parsing==0.1.9", "docstring_parser==0.18.0", "natsort==8.4.0", "petname==2.9"),
        *("torchopt==0.7.3", "optree==0.20.0"),
    ),
    "loops": (
        *("stable_baselines3==2.9.2", "gymnasium==1.4.0", "Farama-Notifications==0.0.6"),
        *("lightning==2.6.6", "pytorch-lightning==2.6.6", "lightning-utilities==0.15.3"),
        *("torchmetrics==1.9.0", "pytorch-ignite==0.5.5", "pytorch-metric-learning==2.9.0"),
        *("skorch==1.4.0", "scikit-learn==1.9.1", "joblib==1.6.0", "threadpoolctl==3.8.0"),
        *("cloudpickle==3.1.2", "tabulate==0.9.0"),
        *("pyro-ppl==1.9.2", "pyro-api==0.1.2", "opt_einsum==3.4.0"),
    ),
}
"""name -> every package that differs from the environment below, or is not in it."""


def environment(name: str) -> Path:
    """The python of the environment `name`, which is made if it is missing or out of date."""
    folder, wanted = HOME / name, _fingerprint(name)
    python, stamp = folder / "bin" / "python", folder / STAMP
    HOME.mkdir(parents=True, exist_ok=True)
    with _lock(HOME / f"{name}.lock"):
        if not (stamp.is_file() and stamp.read_text() == wanted):
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, symlinks=True)
            layer = sysconfig.get_path("purelib", vars={"base": str(folder)})
            Path(layer, "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
            _install(python, REQUIREMENTS[name])
            stamp.write_text(wanted)  # last: what has no stamp is half-made
    return python


def _fingerprint(name: str) -> str:
    """Of everything an environment is made of: its list, and the environment below it."""
    below = (sys.version, sysconfig.get_path("purelib"), CONSTRAINTS.read_text())
    return hashlib.sha256("\n".join((*REQUIREMENTS[name], *below)).encode()).hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One maker at a time, over all processes; the others wait and find it made."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _install(python: Path, requirements: tuple[str, ...]) -> None:
    failure = _pip(python, "install", "--no-deps", *requirements)
    if failure is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        if _pip(python, "download", "--no-deps", "--no-cache-dir", "--dest", folder, "iniconfig"):
            pytest.skip(f"the package registry cannot be reached: {failure.splitlines()[-1]}")
    raise RuntimeError(f"pip could not install {' '.join(requirements)}:\n{failure}")


def _pip(python: Path, *arguments: str) -> str | None:
    """None, or the last lines of a pip that failed."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    said = (done.stdout + done.stderr).strip() or "(pip said nothing)"
    return "\n".join(said.splitlines()[-15:]) if done.returncode else None
