"""Is the change along each update rollout a straight line in the step size?

For every update rollout i that a study measured, with d_n its change at step size eta_n:

    line            d = intercept + slope eta, least squares, with R2
    through zero    d = slope eta, weighted by 1 / sigma_n^2, with chi2 per degree of freedom
    bend            d = a eta + b eta^2;  bend = |b| eta_max / |a|: what curvature adds at eta_max
    first order     column i of the delta matrix, summed, over its eta: the slope that was predicted

All step sizes reweight the *same* evaluation rollouts, so their errors move together: chi2 far
below 1 is normal for a straight line, and a bend too small for chi2 is still real. That is why a
rollout is called bent above 10 % of bend as well, the range in which a line is a line
(docs/theory.md), whatever its error bar.

`analyze_grad_linearity` reads the files and nothing else. Where there is a manifest, these are the
files that it lists, with the hashes it has; without one, any folder with their layout will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

import numpy as np
from scipy.special import chdtrc

from entropy_experiments.study_files import Files, files_of

Flavour = Literal["grad", "baseline_plus_grad"]
"""Along v_i alone; along v_baseline + v_i, minus what the baseline alone does."""

MAX_BEND = 0.1
MAX_CHI2_CHANCE = 1e-3
"""A straight line exceeds its chi2 this often, if errors of the step sizes were independent."""
SAME_NUMBER = 1e-6
"""Two files that hold the same change agree to this, relative to the largest."""


@dataclass(frozen=True, kw_only=True)
class LineFit:
    """The fits of one update rollout's measured change over the step size."""

    evaluation: str
    """Which evaluation batch: eval_00, ..."""
    flavour: Flavour
    rollout: int
    etas: tuple[float, ...]
    changes: tuple[float, ...]
    """Measured, in nats, one per eta."""
    stderrs: tuple[float, ...] | None
    """None where the study has none (fewer than two prompts)."""
    slope: float
    intercept: float
    r2: float | None
    """None with two step sizes: a line goes through any two points."""
    origin_slope: float
    origin_stderr: float | None
    chi2_per_dof: float | None
    bend: float
    first_order: float | None
    """Slope of the first-order matrix; None where the matrix was not computed for this rollout."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Why this is not a line that can be believed; empty if it is one."""
        flags = []
        if not self.bend <= MAX_BEND:
            flags.append("bent")
        dof = len(self.etas) - 1
        if self.chi2_per_dof is not None and chdtrc(dof, dof * self.chi2_per_dof) < MAX_CHI2_CHANCE:
            flags.append("chi2")
        if self.origin_stderr is not None and abs(self.origin_slope) < 2 * self.origin_stderr:
            flags.append("noise")
        return tuple(flags)

    @property
    def linear(self) -> bool:
        """Straight; possibly lost in noise, which is another question."""
        return not {"bent", "chi2"} & set(self.flags)


def analyze_grad_linearity(
    run_dir: str | Path,
    *,
    flavours: Iterable[Flavour] = ("grad", "baseline_plus_grad"),
    reference_eta: float | None = None,
    show: Callable[[str], None] | None = print,
) -> tuple[LineFit, ...]:
    """Fits for every evaluation batch, flavour and measured rollout of a study's folder.

    `reference_eta` is the step size of the delta matrix; summary.json names it. `show` gets the
    lines of a table; None: no table.
    """
    run = files_of(run_dir)
    fits = [
        fitted(deltas)
        for evaluation in evaluations(run)
        for flavour in flavours
        for deltas in measured_deltas(run, evaluation, flavour, reference_eta=reference_eta)
    ]
    if show is not None:
        for line in linearity_table(fits):
            show(line)
    return tuple(fits)


@dataclass(frozen=True, kw_only=True)
class Deltas:
    """What was measured along one update rollout."""

    evaluation: str
    flavour: Flavour
    rollout: int
    etas: tuple[float, ...]
    changes: tuple[float, ...]
    stderrs: tuple[float, ...] | None
    first_order: float | None


def fitted(deltas: Deltas) -> LineFit:
    """The three fits of the module docstring."""
    eta, change = np.array(deltas.etas), np.array(deltas.changes)
    if len(eta) < 2:
        raise ValueError(
            f"Rollout {deltas.rollout} of {deltas.evaluation} was measured at one step size "
            f"({eta[0]:g}); a line needs two or more. Run the study with several "
            "influence.rollout_learning_rates."
        )
    slope, intercept = (float(x) for x in np.polyfit(eta, change, 1))
    residual = change - (intercept + slope * eta)
    spread = float(((change - change.mean()) ** 2).sum())
    r2 = None
    if len(eta) > 2:
        # A change that is the same at every step size is a line of slope 0, perfectly fitted.
        r2 = 1 - float((residual**2).sum()) / spread if spread else 1.0
    weight = np.ones_like(eta)
    weighted = deltas.stderrs is not None and all(s > 0 for s in deltas.stderrs)
    if weighted:
        weight = 1 / np.array(deltas.stderrs) ** 2
    origin = float((weight * eta * change).sum() / (weight * eta**2).sum())
    chi2 = float((weight * (change - origin * eta) ** 2).sum()) / (len(eta) - 1)
    # The errors of all step sizes are one sample's: averaging over them makes none smaller.
    stderr = min(s / abs(e) for s, e in zip(deltas.stderrs or (), eta)) if weighted else None
    return LineFit(
        evaluation=deltas.evaluation,
        flavour=deltas.flavour,
        rollout=deltas.rollout,
        etas=deltas.etas,
        changes=deltas.changes,
        stderrs=deltas.stderrs,
        slope=slope,
        intercept=intercept,
        r2=r2,
        origin_slope=origin,
        origin_stderr=stderr,
        chi2_per_dof=chi2 if weighted else None,
        bend=_bend(eta, change),
        first_order=deltas.first_order,
    )


def _bend(eta: np.ndarray, change: np.ndarray) -> float:
    if not change.any():
        return 0.0
    scaled = eta / np.abs(eta).max()
    a, b = np.linalg.lstsq(np.stack([scaled, scaled**2], 1), change, rcond=None)[0]
    return abs(float(b / a)) if a else math.inf


def linearity_table(fits: Iterable[LineFit]) -> list[str]:
    """One row per fit, and how many are straight."""
    fits, lines, last = list(fits), [], None
    for fit in fits:
        if (fit.evaluation, fit.flavour) != last:
            last = (fit.evaluation, fit.flavour)
            etas = ", ".join(f"{eta:g}" for eta in fit.etas)
            lines += [
                f"{fit.evaluation}, {fit.flavour}, etas {etas}; slopes in nats per unit eta",
                f"{'rollout':>7}  {'first order':>11}  {'through 0':>11}  {'chi2/dof':>8}  "
                f"{'slope':>11}  {'intercept':>10}  {'R2':>8}  {'bend':>6}",
            ]
        lines.append(
            f"{fit.rollout:>7}  {_cell(fit.first_order, 11)}  {_cell(fit.origin_slope, 11)}  "
            f"{_cell(fit.chi2_per_dof, 8, '.2g')}  {_cell(fit.slope, 11)}  "
            f"{_cell(fit.intercept, 10, '+.2e')}  {_cell(fit.r2, 8, '.5f')}  {fit.bend:>6.1%}"
            f"  {', '.join(fit.flags)}".rstrip()
        )
    straight = sum(fit.linear for fit in fits)
    noisy = sum("noise" in fit.flags for fit in fits)
    lines.append(
        f"{straight} of {len(fits)} are straight within {MAX_BEND:.0%}; {noisy} are less than two "
        "standard errors from 0."
    )
    return lines


def _cell(value: float | None, width: int, form: str = "+.4e") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


# The files.


def evaluations(run: Files) -> list[str]:
    """eval_00, eval_01, ...: the evaluation batches a folder has measurements for."""
    suffix = "_per_sequence"
    tops = {name.partition("/")[0] for name in run.names if "/" in name}
    names = sorted(
        top.removesuffix(suffix) for top in tops if top.startswith("eval_") and top.endswith(suffix)
    )
    if not names:
        raise FileNotFoundError(
            f"{run.folder} has no folder eval_XX{suffix}; expected one per evaluation batch. It is "
            "no run directory of `entropy-probe influence`, or the study has not got that far: run "
            "the same command again."
        )
    return names


def measured_deltas(
    run: Files, evaluation: str, flavour: Flavour, *, reference_eta: float | None = None
) -> list[Deltas]:
    """Changes of every measured rollout at every step size, with error bars and predicted slope."""
    if flavour not in get_args(Flavour):
        raise ValueError(f"flavour={flavour!r}; expected one of {get_args(Flavour)}.")
    folder, grad_eta = f"{evaluation}_per_sequence", f"{evaluation}_grad_eta"
    by_eta = {
        eta: _column_sums(run, name)
        for eta, name in _by_eta(run, f"{folder}/{flavour}", "npy").items()
    }
    slope_U = _first_order(run, evaluation, reference_eta)
    rollouts = _measured_rollouts(run, folder, by_eta, len(slope_U))
    totals, facts = _by_eta(run, grad_eta, "npy"), _by_eta(run, grad_eta, "json")
    stderr: dict[float, dict[int, float | None]] = {}
    for eta, changes in by_eta.items():
        if eta not in facts or eta not in totals:
            raise FileNotFoundError(
                f"{run.folder / grad_eta} has no eta_{eta:g}.npy and .json, which "
                f"{folder}/{flavour} has; expected the same step sizes in both."
            )
        stderr[eta] = _stderrs(run, facts[eta])
        if flavour == "grad":
            _refuse_other(run, totals[eta], rollouts, changes)
    out = []
    for column, rollout in enumerate(rollouts):
        changes = tuple(float(by_eta[eta][column]) for eta in by_eta)
        if any(math.isnan(change) for change in changes):
            continue  # not measured
        errors = [stderr[eta].get(rollout) for eta in by_eta]
        stderrs = [error for error in errors if error is not None]
        slope = float(slope_U[rollout])
        out.append(
            Deltas(
                evaluation=evaluation,
                flavour=flavour,
                rollout=rollout,
                etas=tuple(by_eta),
                changes=changes,
                stderrs=tuple(stderrs) if len(stderrs) == len(errors) else None,
                first_order=None if math.isnan(slope) else slope,
            )
        )
    return out


def _by_eta(run: Files, folder: str, kind: str) -> dict[float, str]:
    """Files eta_<eta>.<kind> of a folder, smallest step first."""
    by_eta = {}
    for name in run.names:
        path = PurePosixPath(name)
        if str(path.parent) != folder or not path.match(f"eta_*.{kind}"):
            continue
        try:
            by_eta[float(path.stem.removeprefix("eta_"))] = name
        except ValueError:
            raise ValueError(
                f"{run.folder / name} does not name a step size; expected eta_<number>.{kind}, as "
                f"in eta_0.004.{kind}."
            ) from None
    if not by_eta:
        raise FileNotFoundError(
            f"No file eta_*.{kind} in {run.folder / folder}; expected one per step size. Run the "
            "study again: it continues where it stopped."
        )
    return dict(sorted(by_eta.items()))


def _column_sums(run: Files, name: str) -> np.ndarray:
    """Total change per column of [N_E, n]: rollouts of E add up."""
    changes = run.array(name)
    if changes.ndim != 2:
        raise ValueError(
            f"{run.folder / name} has shape {changes.shape}; expected [evaluation rollouts, update "
            "rollouts]."
        )
    return changes.astype(np.float64).sum(0)


def _first_order(run: Files, evaluation: str, reference_eta: float | None) -> np.ndarray:
    """Predicted slope of every update rollout."""
    name = f"{evaluation}_delta_matrix.npy"
    if name not in run and _without_matrix(run):
        summed_U = run.array(f"{evaluation}_rollout_influence.npy").astype(np.float64)
        return summed_U / run.summary()["lr"]
    if name not in run:
        raise FileNotFoundError(
            f"No {name} in {run.folder}; expected the [N_E, N_U] matrix of the study."
        )
    changes_U = _column_sums(run, name)
    if _is_measured(run, name):  # influence.measured_matrix: true
        return np.full_like(changes_U, np.nan)
    return changes_U / (reference_eta or _reference_eta(run))


def _without_matrix(run: Files) -> bool:
    """A study of a model cut over ranks: it has the matrix's column sums alone."""
    return "summary.json" in run and "matrix" in (run.summary().get("absent") or {})


def _is_measured(run: Files, name: str) -> bool:
    """The manifest says what a matrix holds; without one it is first order."""
    return run.arrays.get(name, {}).get("description", "").startswith("measured")


def _reference_eta(run: Files) -> float:
    eta = None
    if "summary.json" in run:
        summary = run.summary()
        eta = summary.get("reference_eta") or next(
            iter(summary.get("plan", {}).get("etas") or ()), None
        )
    if eta is None:
        raise ValueError(
            f"{run.folder / 'summary.json'} does not name the step size of the delta matrix "
            "(reference_eta, or plan.etas); give it as reference_eta."
        )
    return float(eta)


def _measured_rollouts(
    run: Files, folder: str, by_eta: dict[float, np.ndarray], in_batch: int
) -> list[int]:
    """Which update rollout each column is: rollouts.npy, or all of them in order."""
    widths, name = sorted({len(changes) for changes in by_eta.values()}), f"{folder}/rollouts.npy"
    rollouts = [int(i) for i in run.array(name)] if name in run else list(range(in_batch))
    if widths != [len(rollouts)] or any(not 0 <= i < in_batch for i in rollouts):
        raise ValueError(
            f"{run.folder / folder} has {widths} columns for {len(rollouts)} measured rollouts of "
            f"{in_batch} (rollouts.npy "
            f"{'says' if name in run else 'is missing, so all are expected'}). The files belong to "
            "different studies."
        )
    return rollouts


def _stderrs(run: Files, name: str) -> dict[int, float | None]:
    facts = run.json(name)
    rows = facts["rollouts"] if isinstance(facts, dict) else facts
    return {int(row["rollout"]): row.get("stderr") for row in rows}


def _refuse_other(run: Files, name: str, rollouts: list[int], changes: np.ndarray) -> None:
    """Totals and their parts are written by one stage; apart, they are from different runs."""
    total = run.array(name)[rollouts]
    both = ~(np.isnan(total) | np.isnan(changes))
    gap = np.abs(total - changes)[both].max(initial=0.0)
    if gap > SAME_NUMBER * np.abs(total[both]).max(initial=0.0):
        raise ValueError(
            f"{run.folder / name} differs by {gap:.3g} nats from the sums over evaluation rollouts "
            "in per_sequence/grad; expected the same. The files belong to different studies."
        )
