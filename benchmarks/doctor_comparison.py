"""The judged faults of the doctor's tests through gradient_doctor and through the tools of others.

    python -m benchmarks.doctor_comparison [--recipes light|all|NAME...] [--tools NAME...]
                                           [--json FILE] [--markdown FILE]

Runs the tools that are installed and lists those that are not; none is a dependency of the
project. With `--tools`, the rows of the other tools are kept from the JSON file, if its cases are
the same. They go into an environment of their own that also sees the project's packages:

    python -m venv tools
    site='import site; print(site.getsitepackages()[0])'
    .venv/bin/python -c "$site" > "$(tools/bin/python -c "$site")/project.pth"
    tools/bin/python -m pip install --no-deps torch-audit torchtest2 torcheck tinytorchtest \\
        torch-preflight torchfix neuraldbg preflight-ml gradtracer
    tools/bin/python -m pip install 'libcst<1.6' flake8 seaborn psutil
    tools/bin/python -m benchmarks.doctor_comparison

Every case runs in a process of its own (forked, one at a time, with a time limit).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.doctor_tables import markdown
from benchmarks.doctor_tools import TOOLS
from benchmarks.doctor_tools.base import Message, NotApplicableError, Subject, Tool
from benchmarks.doctor_trials import Trial, make_trials

ROOT = Path(__file__).parents[1]
DOCTOR_PACKAGE = ROOT / "packages" / "gradient-doctor"
sys.path[:0] = [str(DOCTOR_PACKAGE / "tests"), str(DOCTOR_PACKAGE / "src")]
LIGHT = ("mlp_loop", "actor_critic", "amp_scaler")
HEAVY = ("hf_trainer", "peft_checkpointing", "trl_grpo")
DOCTOR = "gradient_doctor"

# Found on PyPI, looked at, and not run: why.
NOT_RUN = {
    "torchtest": "its tests are those of tinytorchtest, which is its maintained fork",
    "traincheck": "compares with invariants learned from a reference run, so every script needs "
    "its clean twin, and takes minutes for each. Tried by hand on the plain loop: of 1142 "
    "invariants learned from the clean recipe, the clean recipe with another seed, the dead ReLU "
    "and the scaler in fp32 all break the same 60",
    "torchlens": "records what a forward and backward pass did; gives no verdict",
    "cockpit-for-pytorch": "draws instruments (norms, histograms, curvature); gives no verdict; "
    "needs per-sample losses and BackPACK's layers",
    "torchviz": "draws the graph; gives no verdict",
    "torchexplorer": "shows histograms per module; gives no verdict",
    "torchguard": "error flags inside compiled regions, which the cases do not have",
    "mlcheck": "checks tables of data, not training",
    "neuralint": "for TensorFlow 1.15",
}


# --- running -----------------------------------------------------------------------------------


def in_child(work: Callable[[], Any], folder: Path, seconds: float) -> dict[str, Any]:
    """The result of `work` in a forked process, or what ended it."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                result = {"value": work()}
            except NotApplicableError as error:
                result = {"not applicable": str(error)}
            except BaseException as error:
                result = {"failed": pathless(f"{type(error).__name__}: {error}")[:300]}
            answer.write_text(json.dumps(result))
        os._exit(0)
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"failed": f"not done after {seconds:g} s"}
        time.sleep(0.02)
    return json.loads(answer.read_text()) if answer.exists() else {"failed": "process died"}


def pathless(text: str) -> str:
    """On one line, and of a file only its name: folders differ from machine to machine."""
    return re.sub(r"(/[\w.+-]+)+/", "", " ".join(text.split()))


def messages(tool: Tool, subject: Subject) -> list[dict[str, Any]]:
    return [dataclasses.asdict(message) for message in tool.run(subject)]


def examined(trial: Trial, folder: Path) -> dict[str, Any]:
    """gradient_doctor's verdict, by the harness of its own tests."""
    harness = import_module("doctor.harness")
    if trial.recipe == "document":
        report = harness.examine_script(trial.subject.script)
        looked = harness.Looked(
            tuple(report.findings), report.error, trial.subject.script, trial.lines
        )
    else:
        looked = harness.examine_case(trial.case, folder)
    found = harness.serious(looked.findings)
    result: dict[str, Any] = {"alarms": sorted({f.slug for f in found})}
    if trial.case.number:
        told = harness.verdict(trial.case, looked)
        result |= {
            "notices": bool(found), "kind": told.class_right, "line": told.line_right,
            "parameters": told.parameters_right,
        }  # fmt: skip
    return result


def judge(trial: Trial, told: Sequence[Message], known: set[Any]) -> dict[str, Any]:
    """What the messages say that are not also given about the clean script."""
    harness = import_module("doctor.harness")
    new = []
    for message in told:
        # A rule about no kind of fault that speaks about any part of the clean script says nothing.
        noise = not message.kinds and message.rule in {rule for rule, _ in known}
        fresh = [key for key in message.keys if key not in known]
        if fresh and not noise:
            names = tuple(name for _, name in fresh if name)
            new.append(dataclasses.replace(message, names=names))
    wanted = (trial.case.number, *trial.case.also)
    by_rule: dict[str, set[str]] = {}
    for message in new:
        by_rule.setdefault(message.rule, set()).update(message.names)
    right = any(
        harness._parameters_right(SimpleNamespace(parameters=sorted(names)), trial.case)
        for names in by_rule.values()
        if names
    )
    return {
        "notices": bool(new),
        "kind": any(set(message.kinds) & set(wanted) for message in new),
        "line": any(message.line in trial.lines for message in new),
        "parameters": right,
        "messages": sorted({pathless(f"{m.rule}: {m.text}")[:160] for m in new})[:4],
    }


def compare(
    tools: Sequence[Tool], trials: Sequence[Trial], clean: dict[str, Trial], folder: Path,
    seconds: float, doctor: bool,
) -> dict[str, Any]:  # fmt: skip
    table: dict[str, Any] = {}
    for tool in tools:
        known: dict[str, set[Any]] = {}
        alarms: dict[str, list[str] | None] = {}
        for recipe, trial in clean.items():
            subject = trial.long if tool.long else trial.subject
            answer = in_child(lambda: messages(tool, subject), folder, seconds)
            told = [_message(row) for row in answer.get("value", ())]
            known[recipe] = {key for message in told for key in message.keys}
            alarms[recipe] = sorted({message.rule for message in told if message.alarm})
            if "value" not in answer:
                alarms[recipe] = None if "not applicable" in answer else ["failed"]
        # A document has no clean twin: only the rules are known that speak about any recipe.
        known["document"] = {(rule, None) for keys in known.values() for rule, _ in keys}
        rows = {}
        for trial in trials:
            subject = trial.long if tool.long else trial.subject
            answer = in_child(lambda: messages(tool, subject), folder, seconds)
            if "value" in answer:
                told = [_message(row) for row in answer["value"]]
                rows[trial.id] = judge(trial, told, known[trial.recipe])
            else:
                rows[trial.id] = answer
            print(f"{tool.name:16} {trial.id:52} {_short(rows[trial.id])}", flush=True)
        table[tool.name] = {"form": tool.form, "cases": rows, "clean": alarms}
    if doctor:
        rows, alarms = {}, {}
        for recipe, trial in clean.items():
            answer = in_child(lambda: examined(trial, folder), folder, seconds)
            alarms[recipe] = answer.get("value", {}).get("alarms", [])
            if "value" not in answer:
                alarms[recipe] = None if "not applicable" in answer else ["failed"]
        for trial in trials:
            answer = in_child(lambda: examined(trial, folder), folder, seconds)
            rows[trial.id] = answer.get("value", answer)
            print(f"{DOCTOR:16} {trial.id:52} {_short(rows[trial.id])}", flush=True)
        form = "the script under it; `preflight` where the fault has no line"
        table[DOCTOR] = {"form": form, "cases": rows, "clean": alarms}
    for entry in table.values():
        for trial in trials:  # what the case does not ask for is not counted
            row = entry["cases"][trial.id]
            if not trial.lines:
                row.pop("line", None)
            if not trial.case.parameters:
                row.pop("parameters", None)
    return table


def _message(row: dict[str, Any]) -> Message:
    return Message(**{**row, "kinds": tuple(row["kinds"]), "names": tuple(row["names"])})


def _short(row: dict[str, Any]) -> str:
    if "kind" not in row:
        return str(row)[:90]
    return " ".join(k for k in ("notices", "kind", "line", "parameters") if row[k]) or "."


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package or "torch")
    except metadata.PackageNotFoundError:
        return None


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new rows in the place of the old ones, in the order of TOOLS."""
    if old["cases"] != new["cases"]:
        return new
    tools = old["tools"] | new["tools"]
    order = [name for name in (*(tool.name for tool in TOOLS), DOCTOR) if name in tools]
    versions = old["environment"]["versions"] | new["environment"]["versions"]
    return {
        **new,
        "environment": {**new["environment"], "versions": versions},
        "tools": {name: tools[name] for name in order},
        "not_installed": [name for name, version in versions.items() if version is None],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=["light"], help="light, all, or names")
    parser.add_argument("--tools", nargs="+", help="only these; gradient_doctor is one")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit for a case")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "docs/benchmarks/doctor_comparison.json"
    )
    parser.add_argument(
        "--markdown", type=Path, default=ROOT / "docs/benchmarks/doctor_comparison.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipes = {"light": LIGHT, "all": LIGHT + HEAVY}.get(arguments.recipes[0], arguments.recipes)
    wanted = [tool for tool in TOOLS if not arguments.tools or tool.name in arguments.tools]
    versions = {tool.name: version_of(tool.package) for tool in wanted}
    missing = [tool.name for tool in wanted if versions[tool.name] is None]
    print(f"not installed: {', '.join(missing) or 'none'}")
    # Imported once here, not in every child; the document of 392 adapters needs peft too.
    import_module("peft")
    for tool in wanted:
        with contextlib.suppress(ImportError):
            import_module(tool.run.__name__)
    if "trl_grpo" in recipes:
        import_module("trl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trials, clean = make_trials(recipes, folder)
        present = [tool for tool in wanted if versions[tool.name]]
        doctor = not arguments.tools or DOCTOR in arguments.tools
        table = compare(present, trials, clean, folder, arguments.seconds, doctor)
    result = {
        "environment": {
            "python": platform.python_version(), "torch": torch.__version__, "versions": versions
        },
        "recipes": list(recipes),
        "cases": [{"id": t.id, "class": t.case.number, "recipe": t.recipe} for t in trials],
        "tools": table,
        "not_installed": missing,
        "not_run": NOT_RUN,
    }  # fmt: skip
    if arguments.tools and arguments.json.exists():
        result = merged(json.loads(arguments.json.read_text()), result)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    arguments.markdown.write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
