"""The doctor's score on faults that people asked about in public threads.

    python score.py [SET ...] [--cases NAME ...] [--jobs 2] [--weights]
                    [--json FILE] [--markdown FILE]

A set is a folder beside this file (`a`) with a folder for each case: `fault.py`, its repaired twin
`clean.py`, and `case.json` with the thread's link, the line to change and the class of the cause.
Cases were written from the threads by someone who had not read the detectors.

Every script runs in a process of its own under the command `gradient-doctor --json`. A fault is

- exact: an error or warning names its class, at a line of the statement to change;
- caught: an error or warning names its class or its line;
- missed: neither.

With `--weights`, every script also runs without the doctor, and the bits of all parameters and of
the random number generator at the end, and everything that the script prints, are compared.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import parameters

HERE = Path(__file__).parent
SERIOUS = ("warning", "error")
LIMIT = 240.0  # seconds for one script

Run = Callable[[str, str], None]  # of a script; what is found goes into the file of that name

# forked from a process that has imported torch, and nothing else of its own
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["parameters", "gradient_doctor.script"])


@dataclass(frozen=True)
class Said:
    """One error or warning of the doctor about a script."""

    severity: str
    slug: str
    line: int | None  # None: no line of this script
    what: str


@dataclass
class Result:
    """What the doctor said about one case."""

    case: str
    link: str
    classes: list[str]
    lines: list[int]
    fault: list[Said] = field(default_factory=list)
    clean: list[Said] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # a script that could not be examined
    same_weights: bool | None = None  # None: not compared

    @property
    def exact(self) -> bool:
        return any(s.slug in self.classes and s.line in self.lines for s in self.fault)

    @property
    def caught(self) -> bool:
        return any(s.slug in self.classes or s.line in self.lines for s in self.fault)

    @property
    def verdict(self) -> str:
        return "exact" if self.exact else "caught" if self.caught else "missed"

    @property
    def first(self) -> bool:
        """Whether the exact finding is the first that a reader meets."""
        return (
            self.exact and self.fault[0].slug in self.classes and self.fault[0].line in self.lines
        )


def cases_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/case.json"))


def accepted_lines(source: str, lines: list[int]) -> list[int]:
    """The lines of the statements that these lines are part of."""
    accepted = set(lines)
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    for line in lines:
        around = [_extent(s) for s in statements if line in _extent(s)]
        if around:
            accepted |= set(min(around, key=len))
    return sorted(accepted)


def _extent(statement: ast.stmt) -> range:
    """The lines of a simple statement; of a compound one, those of its head."""
    body = getattr(statement, "body", None)
    last = statement.end_lineno or statement.lineno
    if isinstance(body, list) and body:
        last = max(statement.lineno, body[0].lineno - 1)
    return range(statement.lineno, last + 1)


def examine(script: Path) -> tuple[list[Said], str | None]:
    """The errors and warnings about a script, as a reader meets them; or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        problem = _in_a_process(_doctor, script, out)[1]
        if problem is not None:
            return [], problem
        if not out.is_file():
            return [], "no report"
        report = json.loads(out.read_text())
    said = []
    for finding in report["findings"]:
        if finding["severity"] in SERIOUS:
            site = finding["site"]
            line = None
            if site is not None and Path(site["file"]).name == script.name:
                line = site["line"]
            said.append(Said(finding["severity"], finding["class"], line, finding["what"]))
    return said, None


def same_weights(script: Path) -> bool:
    """Whether weights, random numbers and output are those of a run without the doctor."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for way in (_plain_parameters, _doctor_parameters):
            out = Path(folder) / way.__name__
            printed, problem = _in_a_process(way, script, out)
            digest = json.loads(out.read_text())["digest"] if out.is_file() else problem
            runs.append((digest, printed))
    return runs[0] == runs[1]


# what runs in a process of its own


def _doctor(script: str, out: str) -> None:
    from gradient_doctor.command import main as doctor

    sys.exit(doctor(["--quiet", "--json", out, script]))


def _plain_parameters(script: str, out: str) -> None:
    parameters.write_digest(script, out, with_doctor=False)


def _doctor_parameters(script: str, out: str) -> None:
    parameters.write_digest(script, out, with_doctor=True)


def _in_a_process(run: Run, script: Path, out: Path) -> tuple[str, str | None]:
    """What it printed on stdout; and why it could not be run to its end, if so."""
    printed = out.with_suffix(".stdout")
    process = _SERVER.Process(target=_child, args=(run, str(script), str(out), str(printed)))
    process.start()
    process.join(LIMIT)
    problem = None
    if process.is_alive():
        process.kill()
        process.join()
        problem = f"no end after {LIMIT:.0f} seconds"
    return printed.read_text() if printed.is_file() else "", problem


def _child(run: Run, script: str, out: str, printed: str) -> None:
    """The two streams are redirected as a shell would do it."""
    for path, stream in ((printed, 1), (os.devnull, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = [script]
    run(script, out)


def judge(case: Path, weights: bool) -> Result:
    about = json.loads((case / "case.json").read_text())
    lines = accepted_lines((case / "fault.py").read_text(), [about["line"], *about["also"]])
    name = f"{case.parent.name}/{case.name}"
    result = Result(name, about["link"], [about["class"], *about["also_class"]], lines)
    for which in ("fault", "clean"):
        said, problem = examine(case / f"{which}.py")
        setattr(result, which, said)
        if problem is not None:
            result.problems.append(f"{which}.py: {problem}")
    if weights:
        result.same_weights = all(same_weights(case / f"{w}.py") for w in ("fault", "clean"))
    return result


def totals(results: list[Result]) -> dict[str, Any]:
    compared = [r.same_weights for r in results if r.same_weights is not None]
    return {
        "cases": len(results),
        "exact": sum(r.exact for r in results),
        "exact_first": sum(r.first for r in results),
        "caught": sum(r.caught for r in results),
        "missed": [r.case for r in results if not r.caught],
        "clean_twins_with_warnings": [r.case for r in results if r.clean],
        "problems": [f"{r.case}: {p}" for r in results for p in r.problems],
        "weights_compared": len(compared),
        "weights_changed": [r.case for r in results if r.same_weights is False],
    }


def markdown(results: list[Result]) -> str:
    total = totals(results)
    count = total["cases"]
    lines = [
        f"{total['exact']} of {count} exact (class and line; {total['exact_first']} as the first "
        f"finding), {total['caught']} caught in some form, {len(total['missed'])} missed; "
        f"{len(total['clean_twins_with_warnings'])} clean twins with a warning.",
        "",
        "| case | cause | verdict | what the doctor says first | clean twin |",
        "|---|---|---|---|---|",
    ]
    for r in results:
        first = next((s for s in r.fault if s.slug in r.classes and s.line in r.lines), None)
        first = first or (r.fault[0] if r.fault else None)
        said = "nothing" if first is None else f"{first.slug}, line {first.line}"
        cause = f"{r.classes[0]}, line {r.lines[0]}" if len(r.lines) == 1 else r.classes[0]
        clean = "silent" if not r.clean else ", ".join(s.slug for s in r.clean)
        lines.append(f"| [{r.case}]({r.link}) | {cause} | {r.verdict} | {said} | {clean} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the doctor on faults of public threads.")
    parser.add_argument("sets", nargs="*", default=["a"], help="folders of cases; default: a")
    parser.add_argument("--cases", nargs="*", default=(), help="beginnings of names: only these")
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time; default: 2")
    parser.add_argument("--weights", action="store_true", help="compare weights bit for bit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    cases = [case for name in options.sets for case in cases_of(HERE / name)]
    if options.cases:
        cases = [case for case in cases if case.name.startswith(tuple(options.cases))]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda case: judge(case, options.weights), cases))
    text = markdown(results)
    print(text)
    print(json.dumps(totals(results), indent=1))
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.json is not None:
        rows = [{**asdict(r), "verdict": r.verdict} for r in results]
        options.json.write_text(
            json.dumps({"totals": totals(results), "cases": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
