"""How many faults of the threads get a proven fix, and is a clean twin ever offered one?

    python fixes.py [SET ...] [--cases NAME ...] [--steps 40] [--no-twins]
                    [--json FILE] [--markdown FILE]

Every script goes through `gradient-doctor fix` as a user would run it. A case is

- proven: a fix of an error or warning of the case's own class was tried and helps;
- other: a fix of another finding was proven;
- not offered: a recipe exists for the case's class, and no change that was tried helps;
- no recipe: the class has no mechanical fix, or the doctor reports nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from gradient_doctor.classes import CLASSES
from gradient_doctor.fix import trial
from gradient_doctor.fix.folders import roots
from gradient_doctor.fix.recipes import RECIPES
from gradient_doctor.fix.search import Outcome, Search

HERE = Path(__file__).parent
LIMIT = 120.0  # seconds for one run
MECHANICAL = {CLASSES[number].slug for number in RECIPES}


@dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    classes: list[str]
    verdict: str
    what: str  # the fix, or why there is none
    diff: str
    twin: str  # "silent", "offered" or what was reported


def outcome_of(script: Path, steps: int) -> Outcome:
    """What the command finds for a script in its own folder."""
    before = os.getcwd()
    os.chdir(script.parent)
    try:
        plan = trial.Plan(
            program=(script.name,), steps=steps, timeout=LIMIT, roots=roots(script.name)
        )
        return Search(plan, trial.run, lambda line: None).outcome()
    finally:
        os.chdir(before)


def judged(folder: Path, steps: int, twins: bool) -> Row:
    case = json.loads((folder / "case.json").read_text())
    classes = [case["class"], *case["also_class"]]
    fault = outcome_of(folder / "fault.py", steps)
    own = [a for a in fault.attempts if a.finding.slug in classes]
    proven = [a for a in own if a.fix is not None]
    others = [a for a in fault.attempts if a.fix is not None]
    if proven and fault.whole is not None:
        verdict, what = "proven", " ".join(fault.whole.what)
    elif others and fault.whole is not None:
        verdict, what = "other", " ".join(fault.whole.what)
    elif any(a.finding.number in RECIPES for a in own):
        verdict, what = "not offered", " ".join(r for a in own for r in a.reasons)
    else:
        said = ", ".join(a.finding.slug for a in fault.attempts)
        verdict, what = "no recipe", f"reported: {said}" if said else "nothing reported"
        if not said and fault.before.error is not None:
            what += f"; it ended with {fault.before.error}"
    twin = "not run"
    if twins:
        clean = outcome_of(folder / "clean.py", steps)
        twin = "offered" if clean.whole is not None else "silent"
        if clean.attempts and clean.whole is None:
            twin = ", ".join(a.finding.slug for a in clean.attempts)
    name = f"{folder.parent.name}/{folder.name}"
    diff = fault.whole.diff if fault.whole is not None else ""
    return Row(case=name, classes=classes, verdict=verdict, what=what, diff=diff, twin=twin)


def totals(rows: list[Row]) -> dict[str, int]:
    return {
        "cases": len(rows),
        "of a class with a recipe": sum(bool({*r.classes} & MECHANICAL) for r in rows),
        "proven": sum(r.verdict == "proven" for r in rows),
        "classes with a proven fix": len({r.classes[0] for r in rows if r.verdict == "proven"}),
        "other": sum(r.verdict == "other" for r in rows),
        "not offered": sum(r.verdict == "not offered" for r in rows),
        "no recipe": sum(r.verdict == "no recipe" for r in rows),
        "clean twins with a fix": sum(r.twin == "offered" for r in rows),
    }


def markdown(rows: list[Row]) -> str:
    count = totals(rows)
    lines = [
        f"{count['proven']} of {count['cases']} faults get a proven fix ({count['proven']} of the "
        f"{count['of a class with a recipe']} whose class has a recipe; "
        f"{count['classes with a proven fix']} classes); "
        f"{count['clean twins with a fix']} clean twins are offered one.",
        "",
        "| case | class | fix | what | clean twin |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r.case} | {r.classes[0]} | {r.verdict} | {_short(r)} | {r.twin} |" for r in rows]
    return "\n".join(lines) + "\n"


def _short(row: Row) -> str:
    text = row.what.replace(str(HERE), "").replace("|", "\\|").replace("\n", " ")
    return text if len(text) < 200 else text[:197] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description="Fixes for the faults of public threads.")
    parser.add_argument("sets", nargs="*", default=["a", "b"], help="folders of cases")
    parser.add_argument("--cases", nargs="*", default=(), help="beginnings of names: only these")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-twins", action="store_true", help="faults only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.sets:
        for folder in sorted(p.parent for p in (HERE / name).glob("*/case.json")):
            if options.cases and not folder.name.startswith(tuple(options.cases)):
                continue
            rows.append(judged(folder, options.steps, not options.no_twins))
            row = rows[-1]
            print(f"{row.case}: {row.verdict}: {row.what} (twin: {row.twin})", flush=True)
            print(row.diff, flush=True)
    text = markdown(rows)
    print(text)
    print(json.dumps(totals(rows), indent=1))
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.json is not None:
        table = {"totals": totals(rows), "cases": [asdict(r) for r in rows]}
        options.json.write_text(json.dumps(table, indent=1).replace(f"{HERE}{os.sep}", "") + "\n")


if __name__ == "__main__":
    sys.exit(main())
