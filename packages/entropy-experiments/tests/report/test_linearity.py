"""Fits over the step size, on run directories written here with slopes that are known exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest

from entropy_experiments.artifacts import described
from entropy_experiments.report.figures.samples import plot_grad_delta_samples
from entropy_experiments.report.linearity import Deltas, analyze_grad_linearity, fitted
from entropy_experiments.results import INFLUENCE
from entropy_experiments.study_files import open_run

pytestmark = pytest.mark.naive

ETAS = (0.001, 0.002, 0.004)
N_E, N_U = 5, 4


def write_run(
    folder,
    *,
    slopes=(-3.0, 2.0, 0.5, 0.0),
    curvatures=(0.0, 0.0, 0.0, 0.0),
    etas=ETAS,
    stderr=1e-4,
    measured=(0, 1, 2, 3),
    offset=0.0,
):
    """d_i(eta) = slope_i eta + curvature_i eta^2, shared unevenly among the rows of E."""
    share_E = np.arange(1, N_E + 1) / sum(range(1, N_E + 1))
    slope_U, curvature_U = np.array(slopes), np.array(curvatures)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "eval_00_delta_matrix.npy", np.outer(share_E, slope_U * etas[0]))
    (folder / "summary.json").write_text(json.dumps({"plan": {"etas": list(etas)}}))
    per_sequence, totals = folder / "eval_00_per_sequence", folder / "eval_00_grad_eta"
    for name in ("grad", "baseline_plus_grad"):
        (per_sequence / name).mkdir(parents=True)
    totals.mkdir()
    np.save(per_sequence / "rollouts.npy", np.array(measured))
    for eta in etas:
        change_U = offset + slope_U * eta + curvature_U * eta**2
        for name, extra in (("grad", 0.0), ("baseline_plus_grad", 10 * eta**2)):
            columns = np.outer(share_E, (change_U + extra)[list(measured)])
            np.save(per_sequence / name / f"eta_{eta:g}.npy", columns)
        total_U = np.full(N_U, np.nan)
        total_U[list(measured)] = change_U[list(measured)]
        np.save(totals / f"eta_{eta:g}.npy", total_U)
        rows = [
            {"rollout": i, "value": float(change_U[i]), "stderr": stderr, "ESS": 4.9}
            for i in measured
        ]
        (totals / f"eta_{eta:g}.json").write_text(json.dumps(rows))
    return folder


def by_rollout(fits, flavour="grad"):
    return {fit.rollout: fit for fit in fits if fit.flavour == flavour}


def test_exact_lines_have_their_slopes(tmp_path):
    fits = by_rollout(analyze_grad_linearity(write_run(tmp_path), show=None))
    for rollout, slope in enumerate((-3.0, 2.0, 0.5, 0.0)):
        fit = fits[rollout]
        assert fit.etas == ETAS
        for got in (fit.slope, fit.origin_slope, fit.first_order):
            assert got == pytest.approx(slope, abs=1e-12)
        assert fit.intercept == pytest.approx(0, abs=1e-15)
        assert fit.r2 == pytest.approx(1)
        assert fit.chi2_per_dof == pytest.approx(0, abs=1e-20)
        assert fit.bend == pytest.approx(0, abs=1e-9)
        assert fit.linear
    # stderr 1e-4 at eta 0.004 is 0.025 on the slope, at every eta: only the flat one is lost in it.
    assert [fits[i].flags for i in range(4)] == [(), (), (), ("noise",)]


def test_a_quadratic_is_flagged(tmp_path):
    """d = -3 eta + 300 eta^2: at eta_max the square is 40 % of the line."""
    run = write_run(tmp_path, curvatures=(300.0, 0.0, 20.0, 0.0), stderr=1e-5)
    fits = by_rollout(analyze_grad_linearity(run, show=None))
    assert fits[0].bend == pytest.approx(300 * 0.004 / 3)
    assert fits[0].flags == ("bent", "chi2")
    assert fits[2].bend == pytest.approx(20 * 0.004 / 0.5)
    assert not fits[0].linear
    assert not fits[2].linear
    assert fits[1].linear
    # By hand, three equal sigmas: slope = sum(x y) / sum(x x), chi2 = sum((y - slope x)^2) / s^2.
    x = np.array(ETAS)
    y = -3 * x + 300 * x**2
    slope = (x @ y) / (x @ x)
    assert fits[0].origin_slope == pytest.approx(slope)
    assert fits[0].chi2_per_dof == pytest.approx(((y - slope * x) ** 2).sum() / 1e-10 / 2)
    assert fits[0].first_order == pytest.approx(-3)


def test_a_bend_inside_the_error_bars_is_still_a_bend(tmp_path):
    """All step sizes share their sample: chi2 alone would let this pass."""
    run = write_run(tmp_path, curvatures=(300.0, 0.0, 0.0, 0.0), stderr=1.0)
    fit = by_rollout(analyze_grad_linearity(run, show=None))[0]
    assert fit.chi2_per_dof < 1e-6
    assert fit.flags == ("bent", "noise")


def test_an_offset_is_seen_by_the_line_with_intercept_and_by_chi2(tmp_path):
    run = write_run(tmp_path, offset=0.01, stderr=1e-4)
    fit = by_rollout(analyze_grad_linearity(run, show=None))[0]
    assert fit.slope == pytest.approx(-3)
    assert fit.intercept == pytest.approx(0.01)
    assert "chi2" in fit.flags


def test_errors_weigh_the_fit_through_zero():
    deltas = Deltas(
        evaluation="eval_00",
        flavour="grad",
        rollout=0,
        etas=(1.0, 2.0),
        changes=(1.0, 4.0),
        stderrs=(1e-9, 1.0),
        first_order=None,
    )
    fit = fitted(deltas)
    assert fit.origin_slope == pytest.approx(1.0)
    assert fit.r2 is None  # two points
    assert fit.origin_stderr == pytest.approx(1e-9)  # the better of 1e-9 / 1 and 1 / 2
    assert fit.chi2_per_dof == pytest.approx(4.0)


def test_no_error_bars_no_chi2(tmp_path):
    fit = by_rollout(analyze_grad_linearity(write_run(tmp_path, stderr=None), show=None))[0]
    assert fit.chi2_per_dof is None
    assert fit.stderrs is None
    assert fit.slope == pytest.approx(-3)
    assert fit.linear


def test_the_other_flavour_is_read_from_its_own_files(tmp_path):
    """Beside the baseline there is a cross term, 10 eta^2 here."""
    fits = analyze_grad_linearity(write_run(tmp_path), show=None)
    assert len(fits) == 2 * N_U
    alone, company = by_rollout(fits), by_rollout(fits, "baseline_plus_grad")
    assert alone[2].bend == pytest.approx(0, abs=1e-9)
    assert company[2].bend == pytest.approx(10 * 0.004 / 0.5)


def test_rollouts_that_were_not_measured_are_left_out(tmp_path):
    run = write_run(tmp_path, measured=(2, 0))
    fits = by_rollout(analyze_grad_linearity(run, show=None))
    assert sorted(fits) == [0, 2]
    assert fits[0].slope == pytest.approx(-3)
    assert fits[2].first_order == pytest.approx(0.5)


def test_nan_columns_are_left_out(tmp_path):
    run = write_run(tmp_path)
    for name in ("grad", "baseline_plus_grad"):
        path = run / "eval_00_per_sequence" / name / "eta_0.002.npy"
        columns = np.load(path)
        columns[:, 1] = np.nan
        np.save(path, columns)
    assert sorted(by_rollout(analyze_grad_linearity(run, show=None))) == [0, 2, 3]


def test_the_table_has_a_row_each_and_a_count(tmp_path, capsys):
    run = write_run(tmp_path, curvatures=(300.0, 0.0, 0.0, 0.0))
    analyze_grad_linearity(run, flavours=["grad"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("eval_00, grad, etas 0.001, 0.002, 0.004")
    assert [line.split()[0] for line in out[2:6]] == ["0", "1", "2", "3"]
    assert out[2].endswith("bent, chi2")
    assert out[6].startswith("3 of 4 are straight")


def test_every_evaluation_batch_is_read(tmp_path):
    run = write_run(tmp_path)
    for path in list(run.glob("eval_00*")):
        path.rename(run / path.name.replace("eval_00", "eval_01"))
    other = write_run(tmp_path / "other", slopes=(1.0, 1.0, 1.0, 1.0))
    for path in list(other.glob("eval_00*")):
        path.rename(run / path.name)
    fits = analyze_grad_linearity(run, flavours=["grad"], show=None)
    assert [fit.evaluation for fit in fits] == ["eval_00"] * 4 + ["eval_01"] * 4
    assert fits[0].slope == pytest.approx(1)
    assert fits[4].slope == pytest.approx(-3)


def remove(path):
    if path.is_dir():
        for child in path.iterdir():
            remove(child)
        path.rmdir()
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("eval_00_per_sequence", "no folder eval_XX_per_sequence"),
        ("eval_00_per_sequence/grad", r"No file eta_\*.npy in .*grad; expected one per step size"),
        ("eval_00_delta_matrix.npy", "No eval_00_delta_matrix.npy"),
        ("eval_00_grad_eta/eta_0.002.json", "expected the same step sizes in both"),
        ("eval_00_grad_eta", r"No file eta_\*.npy in .*eval_00_grad_eta"),
        ("summary.json", r"does not name the step size of the delta matrix \(reference_eta"),
    ],
)
def test_missing_files_are_named(tmp_path, gone, message):
    run = write_run(tmp_path)
    remove(run / gone)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        analyze_grad_linearity(run, show=None)


def test_the_step_size_of_the_matrix_can_be_given(tmp_path):
    run = write_run(tmp_path)
    remove(run / "summary.json")
    fit = by_rollout(analyze_grad_linearity(run, reference_eta=ETAS[0], show=None))[1]
    assert fit.first_order == pytest.approx(2)


def test_the_summary_names_it_in_two_ways(tmp_path):
    run = write_run(tmp_path)
    told = {"reference_eta": ETAS[0], "plan": {"etas": None}}
    (run / "summary.json").write_text(json.dumps(told))
    fit = by_rollout(analyze_grad_linearity(run, show=None))[1]
    assert fit.first_order == pytest.approx(2)


def with_manifest(run, *, arrays=None, **changes):
    """As a finished study leaves it: every file of the folder with its hash."""
    files = {
        path.relative_to(run).as_posix(): described(path.read_bytes())
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }
    told = {**INFLUENCE.stamp, "key": "k", "files": files, "arrays": arrays or {}}
    (run / "manifest.json").write_text(json.dumps(told | changes))
    return run


def test_a_measured_matrix_is_no_prediction(tmp_path):
    told = {"eval_00_delta_matrix.npy": {"description": "measured change at eta 0.001 along"}}
    run = with_manifest(write_run(tmp_path), arrays=told)
    fits = by_rollout(analyze_grad_linearity(run, show=None))
    assert fits[1].first_order is None
    assert fits[1].slope == pytest.approx(2)


def test_what_the_manifest_does_not_list_is_not_read(tmp_path):
    """A step size and a batch of an earlier study that was replaced."""
    run = with_manifest(write_run(tmp_path))
    for name in ("eval_00_per_sequence/grad", "eval_00_grad_eta"):
        np.save(run / name / "eta_0.9.npy", np.ones((N_E, N_U)))
    (run / "eval_01_per_sequence").mkdir()
    (run / "eval_01_per_sequence" / "rollouts.npy").write_bytes(b"")
    fits = analyze_grad_linearity(run, flavours=["grad"], show=None)
    assert {fit.evaluation for fit in fits} == {"eval_00"}
    assert {fit.etas for fit in fits} == {ETAS}


@pytest.mark.parametrize(
    "name",
    ["summary.json", "eval_00_delta_matrix.npy", "eval_00_grad_eta/eta_0.002.json"],
)
def test_a_file_cut_short_is_named(tmp_path, name):
    run = with_manifest(write_run(tmp_path))
    path = run / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=rf"{name} is damaged or was changed.* command again"):
        analyze_grad_linearity(run, show=None)
    (run / "manifest.json").unlink()  # without hashes, the parsers see it
    with pytest.raises(ValueError, match=rf"{name} is not (JSON|a numpy array) \(.* command again"):
        analyze_grad_linearity(run, show=None)
    with_manifest(run)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"{name} is missing though manifest.json lists it"
    ):
        analyze_grad_linearity(run, show=None)


def test_an_unfinished_study_is_not_read(tmp_path):
    run = write_run(tmp_path)
    (run / "study.json").write_text("{}")
    for read in (analyze_grad_linearity, plot_grad_delta_samples, open_run):
        with pytest.raises(FileNotFoundError, match=r"the study is not finished. Run the same"):
            read(run)


def test_open_run_checks_the_manifest(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No folder .*; expected the run directory"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="expected the run directory of a finished study"):
        open_run(write_run(tmp_path))
    run = open_run(with_manifest(tmp_path))
    assert run.summary() == {"plan": {"etas": list(ETAS)}}
    assert "summary.json" in run
    with pytest.raises(FileNotFoundError, match="the study has no such file"):
        run.read("manifest.json")
    (tmp_path / "tokens.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"tokens.parquet is not a parquet table \(.*\)"):
        open_run(with_manifest(tmp_path)).table("tokens.parquet")
    with_manifest(tmp_path, schema=0)
    with pytest.raises(ValueError, match=r"schema 0; this version reads .*schema 2"):
        open_run(tmp_path)
    with_manifest(tmp_path, files=["a"])
    with pytest.raises(ValueError, match="does not list the study's files"):
        open_run(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"manifest.json is not JSON .* Delete it"):
        open_run(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the run directory of a study"):
        analyze_grad_linearity(tmp_path / "nowhere")


def test_one_step_size_is_no_line(tmp_path):
    with pytest.raises(ValueError, match=r"measured at one step size .* a line needs two or more"):
        analyze_grad_linearity(write_run(tmp_path, etas=(0.001,)), show=None)


def test_a_file_without_a_step_size(tmp_path):
    run = write_run(tmp_path)
    np.save(run / "eval_00_per_sequence" / "grad" / "eta_small.npy", np.zeros((N_E, N_U)))
    with pytest.raises(ValueError, match="does not name a step size"):
        analyze_grad_linearity(run, show=None)


def test_a_flat_array_is_refused(tmp_path):
    run = write_run(tmp_path)
    np.save(run / "eval_00_per_sequence" / "grad" / "eta_0.001.npy", np.zeros(N_E))
    with pytest.raises(ValueError, match=r"shape \(5,\); expected \[evaluation rollouts, update"):
        analyze_grad_linearity(run, show=None)


def test_columns_must_be_the_measured_rollouts(tmp_path):
    run = write_run(tmp_path, measured=(0, 1))
    remove(run / "eval_00_per_sequence" / "rollouts.npy")
    with pytest.raises(ValueError, match=r"\[2\] columns for 4 measured rollouts of 4"):
        analyze_grad_linearity(run, show=None)


def test_totals_of_another_study_are_refused(tmp_path):
    run = write_run(tmp_path)
    path = run / "eval_00_grad_eta" / "eta_0.004.npy"
    np.save(path, np.load(path) + 1e-4)
    with pytest.raises(ValueError, match="files belong to different studies"):
        analyze_grad_linearity(run, show=None)


def test_an_unknown_flavour(tmp_path):
    with pytest.raises(ValueError, match="flavour='gradient'; expected one of"):
        analyze_grad_linearity(write_run(tmp_path), flavours=["gradient"], show=None)


# The picture.


def test_the_plot_goes_below_the_folder_or_where_told(tmp_path):
    run = write_run(tmp_path / "run")
    path = plot_grad_delta_samples(run)
    assert path == run / "plots" / "eval_00_grad_delta_samples.png"
    assert path.stat().st_size > 10_000
    other = plot_grad_delta_samples(run, [3, 0], tmp_path / "new" / "two.png")
    assert other.stat().st_size > 5_000


def test_the_plot_shows_the_points_and_the_line(tmp_path, monkeypatch):
    from entropy_experiments.report.figures import samples

    figures, image = [], samples.image

    def keep(figure, *suffix):
        figures.append(figure)
        return image(figure, *suffix)

    monkeypatch.setattr(samples, "image", keep)
    run = write_run(tmp_path, curvatures=(300.0, 0.0, 0.0, 0.0))
    plot_grad_delta_samples(run, [0])
    (axes,) = figures[0].axes
    assert axes.get_title(loc="left") == "update rollout 0"
    shown = {line.get_label(): line for line in axes.lines}
    line = shown["first order"]
    assert line.get_ydata()[1] == pytest.approx(-3 * 0.004)
    (bars,) = axes.containers
    assert list(bars.lines[0].get_ydata()) == pytest.approx(
        [-3 * eta + 300 * eta**2 for eta in ETAS]
    )


def test_the_plot_takes_the_largest(tmp_path):
    from entropy_experiments.report.figures import samples

    deltas = {
        i: Deltas(
            evaluation="eval_00",
            flavour="grad",
            rollout=i,
            etas=(1.0,),
            changes=(float(i - 5),),
            stderrs=None,
            first_order=None,
        )
        for i in range(10)
    }
    assert samples._chosen(deltas, None, "eval_00") == [0, 1, 2, 3, 8, 9]


@pytest.mark.parametrize("rollouts", [[7], []])
def test_the_plot_refuses_what_was_not_measured(tmp_path, rollouts):
    with pytest.raises(ValueError, match=r"were not measured; expected one or more of \[0, 2\]"):
        plot_grad_delta_samples(write_run(tmp_path, measured=(0, 2)), rollouts)


def test_the_plot_needs_something_measured(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_grad_delta_samples(write_run(tmp_path, measured=()))


def test_the_plot_refuses_an_unknown_batch(tmp_path):
    with pytest.raises(ValueError, match=r"No evaluation batch 'eval_07' .* it has \['eval_00'\]"):
        plot_grad_delta_samples(write_run(tmp_path), evaluation="eval_07")
