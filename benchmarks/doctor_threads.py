"""The faults of public threads through the tools of others.

    python -m benchmarks.doctor_threads [SET ...] [--tools NAME ...] [--seconds 120]
                                        [--json FILE] [--markdown FILE]

The same scripts and the same question as `packages/gradient-doctor/benchmarks/threads/score.py`,
for the tools of `benchmarks.doctor_comparison` (its docstring says how to make an environment with
them). A message counts if the tool does not give it about the clean twin as well. A fault is exact
if messages name its kind and its line, caught if they name one of the two; which message counts for
which class is in `benchmarks/doctor_tools`, read generously. The doctor's own rows are read from
the scores beside the sets: it must give the very class, as a warning or an error, in one finding.

Tools that want a model, a loss function and one batch are not applicable: the scripts are whole
programs, as people posted them. With `--tools`, rows of other tools are kept from the JSON file.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor_comparison import DOCTOR, DOCTOR_PACKAGE, in_child, messages, version_of
from benchmarks.doctor_tools import TOOLS
from benchmarks.doctor_tools.base import Subject, Tool

THREADS = DOCTOR_PACKAGE / "benchmarks" / "threads"
NO_BATCH = "a whole program, without a function from a batch to a loss that could be handed over"


def judge(case: Path, tool: Tool, folder: Path, seconds: float) -> dict[str, Any]:
    """What the tool says about the fault and not about its clean twin."""

    accepted_lines = import_module("score").accepted_lines
    from gradient_doctor.classes import CLASSES

    about = json.loads((case / "case.json").read_text())
    numbers = {c.slug: n for n, c in CLASSES.items()}
    wanted = {numbers.get(slug) for slug in (about["class"], *about["also_class"])}
    lines = accepted_lines((case / "fault.py").read_text(), [about["line"], *about["also"]])
    answers = {}
    for which in ("clean", "fault"):
        subject = Subject(case / f"{which}.py", None, NO_BATCH)
        answers[which] = in_child(lambda s=subject: messages(tool, s), folder, seconds)
    for answer in answers.values():
        if "value" not in answer:
            return answer
    known = {(m["rule"], tuple(m["names"])) for m in answers["clean"]["value"]}
    new = [m for m in answers["fault"]["value"] if (m["rule"], tuple(m["names"])) not in known]
    kind = any(set(m["kinds"]) & wanted for m in new)
    line = any(m["line"] in lines for m in new)
    return {
        "notices": bool(new),
        "kind": kind,
        "line": line,
        "verdict": "exact" if kind and line else "caught" if kind or line else "missed",
        "clean": sorted({m["rule"][:60] for m in answers["clean"]["value"] if m["alarm"]}),
        "messages": sorted({f"{m['rule']}"[:80] for m in new})[:4],
    }


def doctors_own(sets: list[str], file: str) -> dict[str, Any]:
    rows = {}
    for name in sets:
        for case in json.loads((THREADS / f"{file}_{name}.json").read_text())["cases"]:
            told = [s["slug"] for s in case["fault"]]
            rows[case["case"]] = {
                "notices": bool(told),
                "kind": any(slug in case["classes"] for slug in told),
                "line": any(s["line"] in case["lines"] for s in case["fault"]),
                "verdict": case["verdict"],
                "clean": [s["slug"] for s in case["clean"]],
            }
    return rows


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| tool | how it is applied | cases | notices | kind | line | exact | caught | clean twins "
        "with an alarm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in result["tools"].items():
        rows = [row for row in entry["cases"].values() if "verdict" in row]
        if not rows:
            reason = next(iter(entry["cases"].values()), {})
            why = reason.get("not applicable") or reason.get("failed", "")
            lines.append(f"| {name} | {entry['form']} | 0: {why} | | | | | | |")
            continue
        cells = [name, entry["form"], str(len(rows))]
        cells += [str(sum(row[column] for row in rows)) for column in ("notices", "kind", "line")]
        cells.append(str(sum(row["verdict"] == "exact" for row in rows)))
        cells.append(str(sum(row["verdict"] != "missed" for row in rows)))
        cells.append(str(sum(bool(row["clean"]) for row in rows)))
        lines.append("| " + " | ".join(cells) + " |")
    versions = [f"{n} {v}" for n, v in result["environment"]["versions"].items() if v]
    lines += ["", f"Versions: torch {result['environment']['torch']}; {', '.join(versions)}."]
    if result["not_installed"]:
        lines.append(f"Not installed: {', '.join(result['not_installed'])}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", default=["a", "b"])
    parser.add_argument("--tools", nargs="+", help="only these")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit for a script")
    parser.add_argument("--json", type=Path, default=THREADS / "tools.json")
    parser.add_argument("--markdown", type=Path, default=THREADS / "tools.md")
    options = parser.parse_args()
    sys.path.insert(0, str(THREADS))
    torch.set_num_threads(1)
    cases = sorted(p.parent for name in options.sets for p in (THREADS / name).glob("*/case.json"))
    chosen = [tool for tool in TOOLS if not options.tools or tool.name in options.tools]
    versions = {tool.name: version_of(tool.package) for tool in chosen if tool.package}
    table: dict[str, Any] = {}
    if options.tools and options.json.exists():
        earlier = json.loads(options.json.read_text())
        table, versions = earlier["tools"], earlier["environment"]["versions"] | versions
    with tempfile.TemporaryDirectory() as name:
        for tool in chosen:
            if tool.package and version_of(tool.package) is None:
                continue
            rows = {}
            for case in cases:
                key = f"{case.parent.name}/{case.name}"
                rows[key] = judge(case, tool, Path(name), options.seconds)
                print(f"{tool.name:16} {key:40} {str(rows[key])[:90]}", flush=True)
                if "not applicable" in rows[key]:
                    break
            table[tool.name] = {"form": tool.form, "cases": rows}
    blind = f"{DOCTOR}, each set unseen"
    table[blind] = {"form": "the script under it", "cases": doctors_own(options.sets, "baseline")}
    table[DOCTOR] = {
        "form": "the script under it, after rules that the sets taught",
        "cases": doctors_own(options.sets, "score"),
    }
    order = [n for n in (*(tool.name for tool in TOOLS), blind, DOCTOR) if n in table]
    result = {
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "versions": versions,
        },
        "sets": options.sets,
        "tools": {name: table[name] for name in order},
        "not_installed": [name for name, version in versions.items() if version is None],
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    options.markdown.write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
