"""Makes the faulty script of a case, has it examined, and judges the report."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from doctor.case import Case

HERE = Path(__file__).parent
LIGHT = ("mlp_loop", "actor_critic", "amp_scaler", "dqn", "gan", "rnn_bptt")
RECIPES = (*LIGHT, "hf_trainer", "peft_checkpointing", "trl_grpo")
MARK = "# FAULT"
WARNING = 2


def recipe_path(recipe: str) -> Path:
    return HERE / "recipes" / f"{recipe}.py"


def faulty_source(case: Case) -> str:
    source = recipe_path(case.recipe).read_text()
    for old, new in case.edits:
        found = source.count(old)
        if found != 1:
            raise ValueError(f"{case.id}: {found} places instead of one for the edit of {old!r}")
        source = source.replace(old, new)
    return source


def marked_lines(source: str) -> tuple[int, ...]:
    return tuple(i for i, line in enumerate(source.splitlines(), 1) if MARK in line)


def write_case(case: Case, folder: Path) -> tuple[Path, tuple[int, ...]]:
    """The faulty script, without the mark that tells where its fault is; and where that is."""
    source = faulty_source(case)
    lines = marked_lines(source)
    path = Path(folder) / f"{case.recipe}_{case.number:02d}_{case.name.replace('-', '_')}.py"
    return without_marks(source, path), lines


def without_marks(source: str, path: Path) -> Path:
    """Whoever greps the source for the mark has found nothing out about gradients."""
    path.write_text(source.replace(f"  {MARK}", ""))
    return path


def examine_script(path: Path, argv: Sequence[str] = (), contract: Any = None) -> Any:
    from gradient_doctor.script import examine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scripts' libraries warn as they please
        return examine(path, argv=tuple(argv), contract=contract)


@dataclass(frozen=True)
class Looked:
    """What was found, whichever entry point found it."""

    findings: tuple[Any, ...]
    error: BaseException | None
    path: Path
    lines: tuple[int, ...]


def examine_case(case: Case, folder: Path) -> Looked:
    path, lines = write_case(case, folder)
    if case.kind == "preflight":
        return Looked(tuple(preflight_script(path, case.contract, case.pad_id)), None, path, lines)
    examination = examine_script(path, case.argv, case.contract)
    return Looked(tuple(examination.findings), examination.error, path, lines)


def preflight_script(path: Path, contract: Any = None, pad_id: int | None = None) -> list[Any]:
    from gradient_doctor import preflight

    space: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(path.read_text(), str(path), "exec"), space)
        return list(
            preflight(
                space["loss_fn"],
                modules=space["modules"],
                optimizers=space["optimizers"],
                contract=contract,
                batch=space["batch"],
                pad_id=pad_id,
            )
        )


@dataclass(frozen=True)
class Verdict:
    class_right: bool
    line_right: bool
    parameters_right: bool
    severity: int  # of the best matching finding, 0 without one
    error_right: bool
    collateral: tuple[int, ...]  # classes of the other findings of warning or above
    why: str = ""

    @property
    def right(self) -> bool:
        return self.class_right and self.line_right and self.parameters_right and self.error_right


def named(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name, or any dotted suffix of it, matches one of the patterns."""
    parts = name.split(".")
    suffixes = [".".join(parts[i:]) for i in range(len(parts))]
    return any(fnmatchcase(suffix, pattern) for suffix in suffixes for pattern in patterns)


def serious(findings: Sequence[Any]) -> list[Any]:
    return [f for f in findings if int(f.severity) >= WARNING and f.number != 0]


def verdict(case: Case, looked: Looked) -> Verdict:
    found = serious(looked.findings)
    ours = [f for f in found if f.number in (case.number, *case.also)]
    collateral = tuple(f.number for f in found if f not in ours)
    error_right = (
        looked.error is None if case.raises is None else isinstance(looked.error, case.raises)
    )
    best: tuple[bool, bool, int] = (False, False, 0)
    for finding in ours:
        line = _line_right(finding, looked.path, looked.lines)
        best = max(best, (line, _parameters_right(finding, case), int(finding.severity)))
    line_right, parameters_right, severity = best
    why = f"{case.id}: expected class {case.number} at {looked.path.name}:{looked.lines}"
    why += f" naming {case.parameters}; error {looked.error!r}\n"
    why += "\n".join(str(f) for f in looked.findings)
    return Verdict(bool(ours), line_right, parameters_right, severity, error_right, collateral, why)


def _line_right(finding: Any, path: Path, lines: tuple[int, ...]) -> bool:
    if not lines:
        return True
    if finding.site is None:
        return False
    return Path(finding.site.file).name == path.name and finding.site.line in lines


def _parameters_right(finding: Any, case: Case) -> bool:
    names = finding.parameters
    missing = [p for p in case.parameters if not any(named(name, (p,)) for name in names)]
    allowed = (*case.parameters, *case.affected)
    foreign = [name for name in names if allowed and not named(name, allowed)]
    return not missing and not foreign
