"""docs/benchmarks/doctor_comparison.md, from the result of `benchmarks.doctor_comparison`."""

from __future__ import annotations

from typing import Any

COLUMNS = ("notices", "kind", "line", "parameters")
TITLE = """\
# How does the doctor compare with other tools?

What each tool says about the same faulty training scripts, as counts of cases; what the columns
mean is [below](#how-it-was-done).
"""
METHOD = """\
## How it was done

Made by `python -m benchmarks.doctor_comparison{option}` (its docstring says how to make an
environment with the other tools); the messages behind every mark are in
[doctor_comparison.json](doctor_comparison.json).
Versions: {versions}.

The cases are the held-out faults of `packages/gradient-doctor/tests/doctor/judged` on
{recipes}, and the scripts of the documents in `packages/gradient-doctor/tests/doctor/documents`;
{count} in all.{left_out}

- **notices**: the tool gives a message that it does not also give about the clean recipe.
- **kind**: such a message names the kind of fault. Read generously for the other tools (which
  message counts for which class is in `benchmarks/doctor_tools`): "no gradient" counts for
  every class in which a gradient is missing, whatever took it away; "did not change" only for
  frozen and for unchanged weights, of the others it is a symptom. gradient_doctor must give the
  very class, as a warning or an error.
- **line**: the faulty line, as its own line number (of a traceback: the innermost line of the
  script). Counted where the case has a line.
- **parameters**: every parameter that the case asks for and no wrong one. Counted where the case
  asks for parameters. Naming a module counts as naming its parameters.
- **false alarms**: on how many of the clean recipes the tool gives a message of its own level
  "warning" or above.

What torch itself says (its errors and warnings) is a row of its own: the other rows, except
detect_anomaly, are what the tool adds to it. A one-batch tool is not applicable where the script
has no loss function to hand over or where the fault is in the loop; that is not counted as a miss.
The linters and the one-batch tools were given files and functions cut out for them, which their
user would have to do by hand. Only gradient_doctor gets the case's contract (`trainable`,
`dtype`, `phase`); torcheck is configured to expect that every parameter changes, the others have
no such option.
"""


def count(rows: list[dict[str, Any]], column: str) -> str:
    asked = [row[column] for row in rows if column in row]
    return f"{sum(asked)}/{len(asked)}" if asked else "-"


def mark(row: dict[str, Any]) -> str:
    if "not applicable" in row:
        return "n/a"
    if "kind" not in row:
        return "failed"
    letters = "".join(c[0].upper() for c in COLUMNS[1:] if row.get(c))
    return letters or ("!" if row["notices"] else "·")


def markdown(result: dict[str, Any]) -> str:
    tools, cases = result["tools"], result["cases"]
    versions = [f"torch {result['environment']['torch']}"]
    versions += [
        f"{name} {version}"
        for name, version in result["environment"]["versions"].items()
        if version and name not in ("torch alone", "detect_anomaly")
    ]
    heavy = [
        n for n in ("hf_trainer", "peft_checkpointing", "trl_grpo") if n not in result["recipes"]
    ]
    left_out = ""
    if heavy:
        left_out = (
            f" Left out for their running time: the cases on {', '.join(heavy)}\n"
            "(`--recipes all`); the doctor's own tests judge it on those too."
        )
    parts = [TITLE]
    parts.append("| tool | how it is applied | cases | notices | kind | line | parameters |"
                 " false alarms |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name, entry in tools.items():
        rows = [row for row in entry["cases"].values() if "kind" in row]
        clean = [alarms for alarms in entry["clean"].values() if alarms is not None]
        false = f"{sum(map(bool, clean))}/{len(clean)}"
        cells = [name, entry["form"], str(len(rows))]
        cells += [count(rows, column) for column in COLUMNS] + [false]
        parts.append("| " + " | ".join(cells) + " |")
    parts.append(
        "\n"
        + METHOD.format(
            option="" if heavy else " --recipes all",
            versions=", ".join(versions),
            recipes=", ".join(result["recipes"]),
            count=len(cases),
            left_out=left_out,
        ).rstrip()
    )
    parts.append(
        "\n## Case by case\n\nK kind, L line, P parameters; `!` says something, but none of these;"
        " `·` silent; n/a not applicable.\n"
    )
    parts.append("| case | " + " | ".join(tools) + " |\n|---|" + "---|" * len(tools))
    for case in cases:
        marks = [mark(entry["cases"][case["id"]]) for entry in tools.values()]
        parts.append(f"| {case['id']} | " + " | ".join(marks) + " |")
    parts.append("\n## False alarms on the clean recipes\n")
    for name, entry in tools.items():
        said = [f"{r}: {', '.join(a)}" for r, a in entry["clean"].items() if a]
        parts.append(f"- {name}: {_short('; '.join(said)) or 'none'}")
    failed = [
        f"- {name}, {case}: {row['failed']}"
        for name, entry in tools.items()
        for case, row in entry["cases"].items()
        if "failed" in row
    ]
    if failed:
        parts.append("\n## Runs that failed\n")
        parts += failed
    parts.append("\n## Found and not run\n")
    parts += [f"- {name}: not installed" for name in result["not_installed"]]
    parts += [f"- {name}: {why}" for name, why in result["not_run"].items()]
    return "\n".join(parts) + "\n"


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit].rsplit(",", 1)[0] + ", ..."
