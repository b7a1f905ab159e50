"""The function on two ranks with 8 and 3 tokens: real processes, torch.distributed over gloo.

A rank's mean of its own tokens is not the mean over all tokens, and neither is the average of the
ranks' means. Ranks run only if the function, or one it calls, has the name of a collective in its
code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

from gradient_doctor.conformance.golden import sharded
from gradient_doctor.conformance.outputs import pieces
from gradient_doctor.conformance.signatures import forms_of, load_target

WORLD = 2
TIMEOUT = 120.0
_RANK = (
    "import sys; from gradient_doctor.conformance.ranks import one_rank; "
    "one_rank(sys.argv[1], int(sys.argv[2]))"
)
COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter"}
    | {"is_initialized", "get_world_size"}
)


@dataclass(frozen=True)
class RankRun:
    values: tuple[float, ...] = ()
    error: str = ""


def communicates(function: Callable[..., Any]) -> bool:
    """Does the function's code, or that of functions it names, mention a collective?"""
    todo, seen = [(function, 0)], set()
    while todo:
        current, depth = todo.pop()
        current = getattr(current, "__func__", current)
        if not isinstance(current, FunctionType) or current in seen or depth > 5:
            continue
        seen.add(current)
        names = _names(current.__code__)
        if names & COLLECTIVES:
            return True
        inner = [getattr(current, "__wrapped__", None)]
        inner += [current.__globals__.get(name) for name in names]
        for cell in current.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # an empty cell: a name not yet bound
                continue
        # torch's own functions mention collectives everywhere; they are not the user's.
        todo += [(f, depth + 1) for f in inner if not _of_torch(f)]
    return False


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == "torch"


def importable(function: Callable[..., Any]) -> str:
    """`module:name` under which another process finds this very function; empty if none."""
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    if name.startswith("__main__") or "<" in name:
        return ""
    try:
        return name if load_target(name) is function else ""
    except ValueError:
        return ""


def run_ranks(
    target: str, reading: int, key: int | str | None, roles: Mapping[str, str] | None
) -> RankRun:
    """What each rank gets back; `reading` is the index of the form in `forms_of`."""
    with tempfile.TemporaryDirectory() as folder:
        order = json.dumps([target, reading, key, dict(roles or {}), folder])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", _RANK, order]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for rank in range(WORLD)
        ]
        try:
            errors = [rank.communicate(timeout=TIMEOUT)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return RankRun(error=f"the ranks did not finish within {TIMEOUT:.0f} s")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        answers = [Path(folder) / f"rank{rank}.json" for rank in range(WORLD)]
        if not all(answer.exists() for answer in answers):
            last = next((e for r, e in zip(ranks, errors) if r.returncode), b"no answer")
            return RankRun(error=last.decode(errors="replace").strip().splitlines()[-1])
        return RankRun(tuple(json.loads(answer.read_text()) for answer in answers))


def one_rank(order: str, rank: int) -> None:
    target, reading, key, roles, folder = json.loads(order)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    dist.barrier()  # a rank that leaves while another is still connecting fails the other's start
    function = load_target(target)
    form = forms_of(function, roles)[reading]
    args, kwargs = form.arguments(sharded().shards[rank])
    with torch.no_grad():
        outputs = pieces(function(*args, **kwargs))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(float(outputs[key].double())))
    dist.destroy_process_group()
