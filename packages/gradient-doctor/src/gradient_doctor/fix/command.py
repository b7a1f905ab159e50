"""The command line: `gradient-doctor fix [options] script.py [args...]`.

Exit codes: 0 the script, as it now stands on disk, has no finding of warning or above; 3 it has
some, with a proven fix (shown, not written) or without; 1 the script could not be examined, or it
crashes and no finding says why; 2 bad usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from gradient_doctor.fix.search import Outcome

FINE, CRASHED, BAD_USAGE, FOUND, INTERRUPTED = 0, 1, 2, 3, 130
STEPS, TIMEOUT = 40, 300.0
STDOUT = "-"
_WITH_VALUE = {"--steps", "--timeout", "--json"}
DESCRIPTION = """\
Find what stops gradients in a training script, change the script where the change is mechanical,
run both versions, and show the change as a diff if it helps.

The script is run several times: once as it is, and once for each change that is tried, for a few
steps each, with the same arguments and random seed. Each run takes place in a temporary copy of
this folder and of the script's own, so that files which it writes there are thrown away. What it
does elsewhere (absolute paths, downloads, services such as loggers) it does every time.

A fix that does not help is not offered: the finding must be gone, no other may come, and what the
finding is about must have changed (parameters move, the loss falls, the script runs)."""
EPILOG = """\
Examples:
  {prog} train.py --lr 1e-3
  {prog} --steps 100 --timeout 600 train.py
  {prog} --write train.py
  {prog} --json fix.json -m my_package.train
  {prog} train.py > fix.patch; git apply fix.patch

Exit codes: 0 no finding of warning or above is left in the script (nothing to fix, or --write
has fixed everything), 3 findings, whether a fix is shown or not, 1 the script could not be
examined or crashes for another reason, 2 bad usage, 130 interrupted."""


class UsageError(ValueError):
    """What was asked for cannot be done; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Options:
    program: tuple[str, ...] = ()
    steps: int = STEPS
    timeout: float = TIMEOUT
    write: bool = False
    link: bool = False
    json: str | None = None
    quiet: bool = False


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] (script.py | -m module) [its arguments]",
        description=DESCRIPTION,
        epilog=EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N",
        help=f"training steps of each run; default: {STEPS}",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="SECONDS",
        help=f"time limit of each run; default: {TIMEOUT:.0f}",
    )  # fmt: skip
    parser.add_argument(
        "--write", action="store_true",
        help="write the proven fix; the file as it was is kept beside it as NAME.bak",
    )  # fmt: skip
    parser.add_argument(
        "--link", action="store_true",
        help="link files above 1 MiB into the copies instead of copying them (large data); "
        "a script that writes to one of them changes it",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; -: on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def main(argv: Sequence[str], *, prog: str) -> int:
    """Run the command with these arguments; returns its exit code."""
    from gradient_doctor.command import split_options

    parser = _parser(prog)
    ours, program = split_options(argv, _WITH_VALUE)
    options = Options(program=tuple(program), **vars(parser.parse_args(ours)))
    try:
        return run(options)
    except UsageError as wrong:
        _bad_usage(parser, wrong)
    except KeyboardInterrupt:
        print("gradient_doctor fix: interrupted; nothing was written.", file=sys.stderr)
        return INTERRUPTED


def _bad_usage(parser: argparse.ArgumentParser, wrong: UsageError) -> NoReturn:
    parser.error(str(wrong))


def run(options: Options) -> int:
    """Do it, and give the exit code."""
    from gradient_doctor.fix import folders, text, trial
    from gradient_doctor.fix.search import Search

    roots = _checked(options)
    try:
        folders.check_size(roots, link=options.link)
    except folders.TooLargeError as large:
        raise UsageError(str(large)) from None
    plan = trial.Plan(
        program=options.program,
        steps=options.steps,
        timeout=options.timeout,
        roots=roots,
        link=options.link,
    )

    def say(line: str) -> None:
        if not options.quiet:
            print(f"gradient_doctor fix: {line}", file=sys.stderr, flush=True)

    say(
        f"the script is run once as it is and once for each change, {options.steps} steps each, "
        "in copies of its folder"
    )
    outcome = Search(plan, trial.run, say).outcome()
    written = _write(outcome) if options.write and outcome.whole is not None else []
    code = _code(outcome, bool(written))
    if options.json != STDOUT:
        print(text.report(outcome, options.steps))
        if outcome.whole is not None:
            print(f"\n{_last_words(outcome, written)}")
    if options.json is not None:
        about = {"program": list(options.program), "exit_code": code, "written": written}
        whole = json.dumps(text.as_json(outcome, **about), indent=2) + "\n"
        if options.json == STDOUT:
            sys.stdout.write(whole)
        else:
            from gradient_doctor.output import write_text

            write_text(options.json, whole)
    return code


def _last_words(outcome: Outcome, written: list[tuple[str, str]]) -> str:
    if written:
        return "\n".join(
            f"# written: {path}; the file as it was: {backup}" for path, backup in written
        )
    rest = sum(attempt.fix is None for attempt in outcome.attempts)
    more = f" {rest} of {len(outcome.attempts)} findings have no proven fix." if rest else ""
    return f"# Nothing was written.{more} --write before the script's name writes the fix."


def _code(outcome: Outcome, written: bool) -> int:
    before = outcome.before
    if not before.serious:
        return CRASHED if before.error is not None or not before.steps else FINE
    remaining = outcome.whole.after.serious if written and outcome.whole else before.serious
    return FOUND if remaining else FINE


def _checked(options: Options) -> tuple[str, ...]:
    """The folders that are copied for a run; `UsageError` before anything runs."""
    from gradient_doctor.fix import folders
    from gradient_doctor.program import Program, ProgramError

    words = options.program
    if not words:
        raise UsageError("no script given: name a Python file, or -m and a module")
    if options.steps < 1:
        raise UsageError(f"--steps is {options.steps}; expected at least 1")
    if not options.timeout > 0:
        raise UsageError(f"--timeout is {options.timeout:g}; expected more than 0 seconds")
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        raise UsageError("fix runs the script in one process: start it without torchrun")
    if options.json not in (None, STDOUT):
        target = Path(options.json or "")
        if (target.exists() and not target.is_file()) or not target.parent.is_dir():
            raise UsageError(f"--json {options.json}: expected a file in a folder that exists")
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("-m needs the name of a module")
        return folders.roots(None)
    try:
        Program(words[0])
    except ProgramError as wrong:
        raise UsageError(str(wrong)) from None
    return folders.roots(words[0])


def _write(outcome: Outcome) -> list[tuple[str, str]]:
    """All files or none: each must still be as it was read."""
    from gradient_doctor.fix.writing import Change, ChangedError, replace_all

    assert outcome.whole is not None
    sources = [(outcome.sources[path], edits) for path, edits in outcome.whole.edits.items()]
    changes = [
        Change(path=source.path, old=source.content, new=source.encoded(source.edited(edits)))
        for source, edits in sources
    ]
    try:
        return replace_all(changes)
    except ChangedError as changed:
        raise UsageError(
            f"{changed} was changed while the fix was tried; nothing was written. "
            "Run the command again"
        ) from None
    except OSError as failure:
        raise UsageError(
            f"{failure.filename or 'a file'} could not be written "
            f"({failure.strerror or failure}); nothing was written"
        ) from None
