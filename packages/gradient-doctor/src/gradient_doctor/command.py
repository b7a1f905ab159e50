"""The command line: `gradient-doctor [options] script.py [args...]`.

Everything after the script is the script's. `python -m gradient_doctor` and, where that package is
installed, `entropy-probe doctor` are the same command.

Exit codes: 0 nothing of warning or above; 3 findings of warning or above; 1 the script crashed;
2 bad usage; 130 interrupted. The script's own sys.exit(n) is kept where none of these applies.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gradient_doctor.callers import is_stand_in
from gradient_doctor.program import Program, ProgramError

if TYPE_CHECKING:
    from gradient_doctor.doctor import Doctor

FINE, CRASHED, BAD_USAGE, FOUND, INTERRUPTED = 0, 1, 2, 3, 130
STDOUT = "-"
FIX = "fix"  # the command that repairs; a script of that name is `./fix`
MODES = ("auto", "trace", "light", "off")
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WITH_VALUE = {"--contract", "--json", "--mode", "--trace-steps", "--every", "--entropy"}
PROG = "gradient-doctor"
EPILOG = """\
Examples:
  {prog} train.py --lr 1e-3
  {prog} --json doctor.json --contract contract.json train.py
  {prog} -m my_package.train --lr 1e-3
  {prog} --entropy my_module:token_entropy
  torchrun --nproc-per-node 2 -m gradient_doctor train.py
  {prog} fix train.py            try repairs; see its --help

Exit codes: 0 nothing of warning or above, 3 findings of warning or above,
1 the script crashed, 2 bad usage, 130 interrupted; otherwise the script's own."""


class UsageError(ValueError):
    """What was asked for cannot be done; nothing was run."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """`program` is `script.py args...` or `-m module args...`."""

    program: tuple[str, ...] = ()
    contract: str | None = None
    json: str | None = None
    mode: str = "auto"
    trace_steps: int = 3
    every: int = 50
    quiet: bool = False
    entropy: str | None = None


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the program with everything that is its own."""
    return split_options(argv, _WITH_VALUE)


def split_options(argv: Sequence[str], with_value: set[str]) -> tuple[list[str], list[str]]:
    """The same for the options of another command, some of which take a value."""
    words = list(argv)
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return words[:at], words[at + 1 :]
        if word.startswith("-m"):
            rest = [word[2:]] if len(word) > 2 else []
            return words[:at], ["-m", *rest, *words[at + 1 :]]
        if not word.startswith("-"):
            return words[:at], words[at:]
        at += 2 if word in with_value else 1
    return words, []


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] (script.py | -m module) [its arguments]",
        description="Run a training script and say where its gradients stop, and why.",
        epilog=EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = Options()
    parser.add_argument("--contract", metavar="FILE", help="JSON: what must train, what must not")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; -: on stdout")
    parser.add_argument("--mode", choices=MODES, default=default.mode, help="default: auto")
    for name, value, what in (
        ("--trace-steps", default.trace_steps, "steps to trace fully at the start"),
        ("--every", default.every, "afterwards, look at every N-th step"),
    ):
        help_ = f"{what}; default: {value}"
        parser.add_argument(name, type=int, default=value, metavar="N", help=help_)
    parser.add_argument("--quiet", action="store_true", help="no report on the screen")
    parser.add_argument(
        "--entropy",
        metavar="MODULE:FUNCTION",
        help="check an entropy or log-prob function on golden cases instead of running a script",
    )
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = PROG) -> int:
    """Run the command with these arguments, or with the process's own; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == [FIX]:
        from gradient_doctor.fix.command import main as fix

        return fix(words[1:], prog=f"{prog} {FIX}")
    parser = _parser(prog)
    ours, program = split(words)
    options = Options(program=tuple(program), **vars(parser.parse_args(ours)))
    try:
        return _run_with_json_on_stdout(options) if options.json == STDOUT else run(options)
    except UsageError as wrong:
        parser.error(str(wrong))


def script() -> None:
    """The entry point `gradient-doctor`."""
    sys.exit(main())


def _run_with_json_on_stdout(options: Options) -> int:
    """stdout carries JSON and nothing else, whatever the script prints."""
    folder = Path(mkdtemp())
    try:
        file = folder / "doctor.json"
        with redirect_stdout(sys.stderr):
            code = run(replace(options, json=str(file)))
        if file.is_file():  # of several ranks the first one's
            sys.stdout.write(file.read_text("utf-8"))
        return code
    finally:
        rmtree(folder, ignore_errors=True)


def run(options: Options) -> int:
    """Do it, and give the exit code."""
    if options.entropy is not None:
        return _entropy(options)
    program, argv = _program(options.program)
    contract = None if options.contract is None else _contract(options.contract)
    json_path = None if options.json is None else _json_path(options.json)

    from gradient_doctor.script import run_under, script_doctor

    try:
        doctor = script_doctor(
            contract, mode=options.mode, trace_steps=options.trace_steps, every=options.every
        )
    except (ValueError, TypeError) as wrong:
        raise UsageError(str(wrong)) from None
    error = run_under(doctor, program, argv, instead=True)
    if isinstance(error, ProgramError):
        raise UsageError(str(error))
    return _finish(options, doctor, error, json_path)


def _finish(
    options: Options, doctor: Doctor, error: BaseException | None, json_path: Path | None
) -> int:
    from gradient_doctor.findings import Severity
    from gradient_doctor.output import report_text, to_json, write_text

    sys.stdout.flush()
    code = _ended(error)
    serious = doctor.worst is not None and doctor.worst >= Severity.WARNING
    # one rank speaks for all: a rank that leaves with 3 would have torchrun kill the others
    if serious and _rank() == 0 and code not in (CRASHED, INTERRUPTED):
        code = FOUND
    if not options.quiet and _rank() == 0 and options.mode != "off":
        text = report_text(doctor.findings, doctor.session.step, error)
        print(f"\n{text}", file=sys.stderr)
    if json_path is not None:
        about = {"program": list(options.program), "mode": options.mode, "exit_code": code}
        if error is not None and not isinstance(error, SystemExit):
            about["error"] = f"{type(error).__name__}: {error}"
        try:
            write_text(json_path, to_json(doctor.findings, doctor.session.step, **about) + "\n")
        except OSError as failure:
            print(f"gradient_doctor: cannot write {json_path}: {failure}", file=sys.stderr)
            code = code or CRASHED
    return code


def _ended(error: BaseException | None) -> int:
    """The exit code that the interpreter would give; and what it would print."""
    if error is None:
        return FINE
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or FINE
        print(error.code, file=sys.stderr)
        return CRASHED
    _forget_our_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else CRASHED


def _forget_our_frames(error: BaseException) -> None:
    """The script's own traceback: without the lines of the doctor that ran and watched it."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_ours(one.__traceback__) or one.__traceback__
        chain += [one.__cause__, one.__context__]


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not (code.co_filename.startswith(_HERE) or is_stand_in(code)):
            kept.append(traceback)
        traceback = traceback.tb_next
    for one, following in zip(kept, [*kept[1:], None]):
        one.tb_next = following
    return kept[0] if kept else None


# what was asked for


def _program(words: tuple[str, ...]) -> tuple[Program, tuple[str, ...]]:
    if not words:
        raise UsageError("no script given: name a Python file, or -m and a module")
    try:
        if words[0] != "-m":
            return Program(words[0]), words[1:]
        if len(words) < 2:
            raise UsageError("-m needs the name of a module")
        return Program(words[1], is_module=True), words[2:]
    except ProgramError as wrong:
        raise UsageError(str(wrong)) from None


def _contract(path: str) -> dict[str, Any]:
    try:
        contract = json.loads(Path(path).read_text())
    except OSError as failure:
        raise UsageError(f"--contract {path}: {failure.strerror or failure}") from None
    except ValueError as wrong:
        raise UsageError(f"--contract {path} is not JSON: {wrong}") from None
    if not isinstance(contract, dict):
        raise UsageError(
            f"--contract {path} holds a {type(contract).__name__}, expected an object such as "
            '{"trainable": ["policy.*"]}'
        )
    return contract


def _json_path(path: str) -> Path:
    """Known to be writable before hours of training; each rank but the first adds its number."""
    target = Path(path).absolute()  # the script may change the folder
    taken = target.exists() and not target.is_file()  # a device would be replaced by the report
    if taken or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise UsageError(f"--json {path}: expected a file in a folder that exists, and is writable")
    return target.with_suffix(f".rank{_rank()}{target.suffix}") if _rank() else target


def _rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def _entropy(options: Options) -> int:
    if options.program or options.contract is not None:
        raise UsageError("--entropy checks a function: it takes no script and no contract")
    assert options.entropy is not None
    if _rank():
        return FINE  # a function, not a training: one rank speaks for all
    if options.json is not None:
        _json_path(options.json)

    from gradient_doctor.conformance import main_entropy

    return main_entropy(options.entropy, options.json)
