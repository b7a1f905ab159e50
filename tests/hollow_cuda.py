"""A torch that was built with CUDA, imported where no CUDA is, without its gigabytes of libraries.

The wheel of torch on the public registry needs a dozen CUDA libraries only so that it can be
loaded; on a CPU nothing in them is ever called. Here each gets a stand-in that holds the names
torch asks for, nearly all functions that answer `cudaErrorNoDevice`. So torch sees what it sees on
any machine without a GPU, and what it computes on the CPU is untouched.

For environments of tests only, on Linux, with gcc and binutils.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice: torch then counts no devices, and does not warn."""
OF_CUDA = re.compile(r"lib(cu|nccl|nv)")
OF_CUDA_NAMES = re.compile(r"_{0,2}(cu|nccl|nv)")
WITH_AN_ANSWER = {
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "cudaErrorNoDevice"; }',
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "no device here"; }',
    # transformers 5.0 asks on every machine whose torch has CUDA: nothing is being captured.
    "cudaStreamIsCapturing": "int cudaStreamIsCapturing(void *s, int *o) { *o = 0; return 0; }",
}
"""Functions whose result is read, or that are called without a device."""
ON_FIRST_USE = "nvrtc"
"""In the name of the library of torch that is opened when a GPU is used; its needs stay unmet."""
REQUIRED_ONLY_BY_CUDA = re.compile(r"Requires-Dist: (nvidia-|cuda-|triton)", re.IGNORECASE)


def without_cuda(site_packages: Path) -> bool:
    """Whether the torch installed there needed stand-ins; after this it needs none."""
    (metadata,) = site_packages.glob("torch-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not REQUIRED_ONLY_BY_CUDA.match(line)]
    if kept == lines:
        return False
    write_stand_ins(site_packages / "torch" / "lib")
    # pip would otherwise install the libraries with the first package that needs torch.
    metadata.write_text("".join(kept))
    return True


def write_stand_ins(folder: Path) -> list[str]:
    """A stand-in for every CUDA library that the libraries of `folder` need and do not find."""
    files = [file for file in sorted(folder.glob("*.so*")) if ON_FIRST_USE not in file.name]
    headers = "".join(_output("readelf", "-W", "-d", "-V", file) for file in files)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", headers)) - {file.name for file in files}
    missing = sorted(name for name in needed if OF_CUDA.match(name))
    library_of = _library_of_version(headers)
    # By library and version; symbols without a version may be in any library: the first.
    wanted = {library: defaultdict[str, list[str]](list) for library in missing}
    present = {symbol.partition("@")[0] for symbol in _symbols("--defined-only", files)}
    for symbol in sorted(_symbols("--undefined-only", files)):
        name, _, version = symbol.partition("@")
        if name not in present and OF_CUDA_NAMES.match(name):
            library = library_of[version.strip("@")] if version else missing[0]
            wanted[library][version.strip("@")].append(name)
    for library, names_of_version in wanted.items():
        _compile(folder / library, names_of_version)
    return missing


def _library_of_version(headers: str) -> dict[str, str]:
    """What `readelf -V` says of the versions that are needed: each belongs to one library."""
    libraries, library = {}, ""
    for line in headers.splitlines():
        if found := re.search(r"Version: \d+\s+File: (\S+)", line):
            library = found[1]
        elif found := re.search(r"Name: (\S+)\s+Flags:.*Version: \d+", line):
            libraries[found[1]] = library
    return libraries


def _compile(file: Path, names_of_version: Mapping[str, Sequence[str]]) -> None:
    names = [name for names in names_of_version.values() for name in names]
    functions = {name: f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in names}
    functions |= {name: text for name, text in WITH_AN_ANSWER.items() if name in functions}
    versions = [
        f"{version} {{ global:{''.join(f' {name};' for name in names)} }};"
        for version, names in names_of_version.items()
        if version
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".map") as script:
        script.write("\n".join(versions) or "{ global: *; };")
        script.flush()
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{file.name}"]
        options += [f"-Wl,--version-script={script.name}", "-x", "c", "-", "-o", str(file)]
        subprocess.run(
            ["gcc", *options], input="\n".join(functions.values()), text=True, check=True
        )


def _symbols(which: str, files: Iterable[Path]) -> set[str]:
    lines = (line for file in files for line in _output("nm", "-D", which, file).splitlines())
    return {line.split()[-1] for line in lines}


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
