"""The report of a probed training: from the rows that the callback writes, and nothing else."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.online.rows import read_rows
from entropy_experiments.report.compare import compare
from entropy_experiments.report.figures.write import write_figures
from entropy_experiments.report.html.charts import figures
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.page import render, write_report
from entropy_experiments.report.training import follow
from oracles.report_runs import read

pytestmark = pytest.mark.contract


def rows(steps, **changes):
    out = []
    for step in steps:
        doubts = ["few rollouts"] if step == 2 else []
        row = {"schema": 1, "step": step, "trusted": float(not doubts), "why_not": doubts}
        for name, value in (("entropy", 1.0 - step / 10), ("predicted", -0.09), ("measured", -0.1)):
            row |= {name: value, f"{name}_low": value - 0.03, f"{name}_high": value + 0.04}
        out.append(row | changes.get(f"step_{step}", {}))
    return out


def written(folder, some):
    folder.mkdir(exist_ok=True)
    path = folder / "entropy_probe.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def test_sums_and_levels_are_the_rows(tmp_path):
    data = gather(written(tmp_path / "run", rows(range(4))))
    found = data["trajectory"]
    assert data["kind"] == "training"
    assert [s["predicted_sum"]["value"] for s in found["steps"]] == pytest.approx(
        [-0.09, -0.18, -0.27]
    )
    assert found["total"]["measured"]["value"] == pytest.approx(-0.3)
    fresh = found["total"]["fresh"]
    assert fresh["value"] == pytest.approx(-0.3)  # the last row's entropy less the first's
    assert fresh["interval"] == pytest.approx([-0.35, -0.25])  # hypot(0.03, 0.04)
    assert "Training from step 0 to step 3 lowers" in data["verdict"]["sentence"]
    assert data["verdict"]["doubts"] == ["1 of 4 probed steps are not trusted: few rollouts."]
    sums = data["verdict"]["points"][0]
    assert sums.endswith("measured −0.300: not trusted, as some of these steps are not.")
    assert data["verdict"]["trusted"] is False  # beside the sums, at the head of the page
    drawn = figures(data)
    assert set(drawn) == {"trajectory", "steps"}
    assert drawn["trajectory"]["layout"]["xaxis"]["title"]["text"] == "optimizer step"
    assert [len(trace["x"]) for trace in drawn["trajectory"]["data"]] == [8, 4, 4, 4]
    assert all(trace["mode"] == "lines" for trace in drawn["trajectory"]["data"])
    assert "predicted −0.270" in render(data)


def test_the_report_names_a_distribution_that_training_did_not_sample_from(tmp_path):
    named = {"policy": "full softmax, temperature 1", "sampling": ["top_p = 0.9"]}
    some = [row | named for row in rows(range(4))]
    page = render(gather(written(tmp_path / "run", some)))
    assert "of the full softmax, temperature 1; training samples with top_p = 0.9." in page
    plain = [row | named | {"sampling": []} for row in rows(range(4))]
    assert "training samples with" not in render(gather(written(tmp_path / "plain", plain)))


def test_second_order_is_summed_where_every_row_has_it(tmp_path):
    both = rows(range(4))
    for row in both:
        row["second_order"] = -0.11
    data = gather(written(tmp_path / "run", both))
    total = data["trajectory"]["total"]
    assert total["second_order"]["value"] == pytest.approx(-0.33)
    assert data["predicted"] == total["second_order"]  # the better one stands for the run
    text = read(render(data))
    assert "predicted −0.330 to second order (−0.270 to first), measured −0.300" in text
    both[1]["second_order"] = None  # resumed with another order: no sum of some steps
    data = gather(written(tmp_path / "run", both))
    assert data["trajectory"]["total"]["second_order"] is None
    assert data["predicted"]["value"] == pytest.approx(-0.27)


def test_steps_that_were_left_out_are_not_summed(tmp_path):
    data = gather(written(tmp_path / "run", rows((0, 5, 10))))
    found = data["trajectory"]
    assert found["total"]["predicted"] is None
    assert "do not add up" in data["verdict"]["points"][0]
    (levels, _) = figures(data)["trajectory"]["data"]
    assert levels["x"] == [0, 5, 10, 10, 5, 0]
    text = read(render(data))
    assert "From first to last: fresh" in text
    assert "No sums of single steps: steps were left out" in text
    assert "summed from the first" not in text


def test_steps_without_a_row_are_named(tmp_path):
    """The first step of a warm-up has learning rate 0: it is not probed, and the page says so."""
    data = gather(written(tmp_path / "run", rows(range(1, 5))))
    (without,) = (text for text in data["verdict"]["points"] if "no row" in text)
    assert without.startswith("1 of 5 steps have no row (0). Not probed: steps at learning rate 0")
    every = gather(written(tmp_path / "every", rows(range(5))))
    assert not any("no row" in text for text in every["verdict"]["points"])


def test_a_run_that_lost_little_is_not_drawn_as_a_flat_line(tmp_path):
    def axis(name, **changes):
        data = gather(written(tmp_path / name, rows(range(4), **changes)))
        return figures(data)["trajectory"]["layout"]["yaxis"]["rangemode"]

    assert axis("steady") == "normal"
    assert axis("collapse", step_3={"entropy": 0.1, "entropy_low": 0.05}) == "tozero"


def test_a_step_made_again_after_a_resume_counts_once(tmp_path):
    again = [*rows(range(3)), *rows((2, 3), step_2={"measured": -0.5})]
    found = gather(written(tmp_path / "run", again))["trajectory"]
    assert found["total"]["measured"]["value"] == pytest.approx(-0.7)


def test_a_resume_that_stopped_early_has_one_branch(tmp_path):
    """Rows of the run before, beyond where the new one has come to, are not of this run."""
    some = [*rows(range(10)), *rows((5, 6), step_5={"entropy": 2.0})]
    folder = written(tmp_path / "run", some)
    found = gather(folder)["trajectory"]
    assert found["last_step"] == 6
    assert found["steps"][-1]["level"]["value"] == 2.0
    assert [row["step"] for row in read_rows(folder / "entropy_probe.jsonl")] == list(range(7))


def test_an_entropy_that_lacks_is_no_step_left_out(tmp_path):
    data = gather(written(tmp_path / "run", rows(range(4), step_2={"entropy": None})))
    assert data["trajectory"]["not_summed"] is None
    assert data["trajectory"]["total"]["measured"]["value"] == pytest.approx(-0.3)
    assert len(figures(data)["trajectory"]["data"][1]["x"]) == 3  # the levels that are known
    render(data)


def test_a_row_that_is_being_written_is_not_there_yet(tmp_path):
    folder = written(tmp_path / "run", rows(range(3)))
    path = folder / "entropy_probe.jsonl"
    path.write_text(path.read_text() + "\n" + '{"step": 3, "entro')
    assert gather(folder)["trajectory"]["last_step"] == 2


def test_a_number_that_lacks_ends_the_sums_and_not_the_report(tmp_path):
    some = rows(range(4), step_1={"measured": None}, step_3={"entropy": None})
    data = gather(written(tmp_path / "run", some))
    assert data["trajectory"]["last_step"] == 2
    assert "not known in every step" in data["verdict"]["points"][0]
    render(data)


def test_rewards_come_from_the_trainers_own_state(tmp_path):
    folder = written(tmp_path / "run", rows(range(3)))
    state = folder / "checkpoint-3" / "trainer_state.json"
    state.parent.mkdir()
    history = [{"step": k + 1, "reward": k / 2} for k in range(3)] + [{"step": 3, "runtime": 1.0}]
    state.write_text(json.dumps({"global_step": 3, "log_history": history}))
    older = folder / "checkpoint-1" / "trainer_state.json"
    older.parent.mkdir()
    older.write_text(json.dumps({"global_step": 1, "log_history": [{"step": 1, "reward": 9}]}))
    data = gather(folder)
    assert [s["reward"] for s in data["trajectory"]["steps"]] == [0.0, 0.5]
    assert set(figures(data)) == {"trajectory", "rewards", "steps"}
    assert len(write_figures(folder, tmp_path / "drawn")) == 2


def test_the_command_and_two_runs_side_by_side(tmp_path):
    one = written(tmp_path / "one", rows(range(4)))
    two = written(tmp_path / "two", rows(range(5)))
    done = CliRunner().invoke(app, ["report", str(one)])
    assert done.exit_code == 0, done.output
    assert (one / "report.html").is_file()
    found = compare([one, two])
    assert [row["fresh"]["value"] for row in found["runs"]] == pytest.approx([-0.3, -0.4])
    assert [row["measured"]["value"] for row in found["runs"]] == pytest.approx([-0.3, -0.4])


def test_what_is_no_probed_training_is_refused(tmp_path):
    folder = written(tmp_path / "run", rows((0,)))
    with pytest.raises(ValueError, match="has 1 steps whose entropy is known; expected two"):
        gather(folder)
    with pytest.raises(ValueError, match=r"Line 2 of .*entropy_probe\.jsonl is no row of a probed"):
        gather(written(folder, [*rows((0,)), {"loss": 1.0}]))
    torn = json.dumps(rows((0,))[0])
    (folder / "entropy_probe.jsonl").write_text(f'{torn}\n{{"step": 1, "ent\n{torn}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .* is not JSON .*it was cut short"):
        gather(folder)


def state(folder, step, history, **facts):
    path = folder / f"checkpoint-{step}" / "trainer_state.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"global_step": step, "log_history": history, **facts}))


def test_every_probed_step_is_drawn_with_its_intervals(tmp_path):
    """Also those before the first level and after the last, and those that nobody should trust."""
    data = gather(written(tmp_path / "run", rows((0, 2, 5, 9), step_9={"entropy": None})))
    drawn = figures(data)["steps"]["data"]
    assert [trace["name"] for trace in drawn] == [
        *("predicted", "predicted, not trusted", "measured", "measured, not trusted")
    ]
    predicted, doubted, measured, _ = drawn
    assert [step for step, _ in predicted["customdata"]] == [0, 5, 9]
    assert [step for step, _ in doubted["customdata"]] == [2]
    for left, step, right in zip(predicted["x"], (0, 5, 9), measured["x"], strict=True):
        assert step - 0.2 < left < step < right < step + 0.2
    assert predicted["y"] == [-0.09] * 3
    assert measured["error_y"]["array"] == pytest.approx([0.04] * 3)
    assert measured["error_y"]["arrayminus"] == pytest.approx([0.03] * 3)
    assert doubted["marker"]["color"] != predicted["marker"]["color"]
    text = read(render(data))
    assert "not trusted: few rollouts</td>" in text
    assert text.count('<tr class="untrusted">') == 1


def test_a_step_is_drawn_to_the_highest_order_known(tmp_path):
    some = rows(range(3), step_1={"second_order": -0.2, "second_order_low": -0.3})
    drawn = figures(gather(written(tmp_path / "run", some)))["steps"]["data"]
    assert drawn[0]["y"] == [-0.2]
    assert drawn[0]["error_y"]["array"] == [0.0]  # half an interval is none


def test_steps_that_were_not_probed_are_told_by_the_trainer(tmp_path):
    folder = written(tmp_path / "run", rows((0, 4)))
    history = [{"step": k + 1, "reward": k / 10, "entropy": 1.1 - k / 20} for k in range(9)]
    history.append({"step": 9, "reward": float("nan"), "entropy": None, "runtime": 3.0})
    state(folder, 9, history)
    data = gather(folder)
    assert data["trajectory"]["logged"]["entropy"][0] == (0, 1.1)
    drawn = figures(data)
    logged = next(t for t in drawn["trajectory"]["data"] if t.get("name", "").startswith("train"))
    assert logged["x"] == list(range(9))  # counted as the rows count
    assert logged["y"] == pytest.approx([1.1 - k / 20 for k in range(9)])
    assert drawn["rewards"]["data"][0]["y"] == pytest.approx([k / 10 for k in range(9)])
    assert drawn["rewards"]["layout"]["xaxis"]["range"] == [0, 8]
    assert "as the trainer logged it for every step" in read(render(data))


def test_ledgers_are_linked_from_wherever_the_page_is(tmp_path):
    folder = written(tmp_path / "run", rows(range(3)))
    estimate = {"value": -0.25, "interval": [-0.5, 0.0]}
    book = {"evaluations": [{"ledger": {"entropy": {"predicted": estimate, "measured": estimate}}}]}
    for step, finished in ((10, True), (2, True), (3, False)):
        place = folder / "entropy_probe_ledgers" / f"step_{step}"
        place.mkdir(parents=True)
        (place / "summary.json").write_text(json.dumps(book) if finished else '{"evalua')
    (folder / "entropy_probe_ledgers" / "step_2" / "report.html").write_text("a page")
    found = gather(folder)["trajectory"]["ledgers"]
    assert [(one["step"], one["page"]) for one in found] == [
        *((2, "report.html"), (10, "summary.json"))
    ]
    beside = write_report(folder).read_text()
    assert 'href="entropy_probe_ledgers/step_2/report.html"' in beside
    elsewhere = write_report(folder, tmp_path / "pages" / "my run.html").read_text()
    assert 'href="../run/entropy_probe_ledgers/step_10/summary.json"' in elsewhere
    assert "−0.500 to 0" in elsewhere or "−0.50 to 0" in elsewhere


def test_a_report_is_below_two_megabytes(tmp_path):
    path = write_report(written(tmp_path / "run", rows(range(200))))
    assert path.stat().st_size < 2e6


class Training:
    """Stands in for time: at each sleep the training goes on."""

    def __init__(self, folder, acts):
        self.folder, self.acts, self.slept = folder, list(acts), 0

    def __call__(self, seconds):
        self.slept += 1
        assert self.acts, "followed a training that has ended"
        self.acts.pop(0)()


def test_a_live_run_is_drawn_again_whenever_it_grows(tmp_path):
    folder, drawn, said = tmp_path / "run", [], []
    folder.mkdir()
    acts = [
        lambda: written(folder, rows(range(1))),
        lambda: written(folder, rows(range(2))),
        lambda: None,
        lambda: written(folder, rows(range(3))),
        lambda: state(folder, 2, [], max_steps=4),
        lambda: written(folder, rows(range(4))),
        lambda: state(folder, 4, [], max_steps=4),
    ]

    def draw(going_on):
        write_report(folder, refresh=5 if going_on else None)
        drawn.append((gather(folder)["trajectory"]["rows"], going_on))

    time = Training(folder, acts)
    assert follow(folder, draw, sleep=time, say=said.append) == 5
    assert drawn == [(2, True), (3, True), (3, True), (4, True), (4, False)]
    assert said == [f"waiting for the second probed step in {folder}"]
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
    assert 'http-equiv="refresh" content="5"' in render(gather(folder), refresh=5)


def test_following_by_the_command(tmp_path):
    folder = written(tmp_path / "run", rows(range(3)))
    state(folder, 3, [], max_steps=3)
    done = CliRunner().invoke(app, ["report", str(folder), "--follow"])
    assert done.exit_code == 0, done.output
    assert "Training has ended. Report:" in done.stdout
    assert (folder / "report.html").is_file()
    done = CliRunner().invoke(app, ["report", str(folder), "--follow", "--json", "--no-html"])
    assert done.exit_code == 2
    assert "--follow together with --no-html, --json" in done.output
    done = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere"), "--follow"])
    assert done.exit_code == 2
    assert "expected the output folder of a probed training" in done.output
