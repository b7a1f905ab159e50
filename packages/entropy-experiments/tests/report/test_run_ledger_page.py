"""The page and the figures of a run's ledger: sums that add up, texts escaped, words that fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.cli.explain import text_lines
from entropy_experiments.pipelines.run_ledger.files import StoredStep, table_bytes, write_run_ledger
from entropy_experiments.report.figures.run_ledger import run_ledger_figures as paper_figures
from entropy_experiments.report.figures.style import paper_style
from entropy_experiments.report.figures.write import write_figures
from entropy_experiments.report.html.data import found_at
from entropy_experiments.report.html.page import TERMS, unpacked, write_report
from entropy_experiments.report.html.run_ledger import (
    line_rows,
    luck,
    percent,
    points,
    render_run_ledger,
    run_ledger_figures,
    run_ledger_lines,
    sentence,
    short,
    token_views,
)
from entropy_experiments.report.run_ledger import (
    GROUPINGS,
    difficulty,
    exchange_rate,
    position_label,
    run_ledger_view,
    selection,
    step_bins,
)
from entropy_experiments.results.run_ledger import (
    LAYER_TABLE,
    MANIFEST_FILE,
    TOKEN_TABLE,
    read_ledger_table,
    read_run_ledger,
)
from oracles.run_ledger_example import PROMPTS, example_run_ledger

pytestmark = pytest.mark.contract

HOSTILE = "</script><script>alert(1)</script><b onclick='x'>&%{x}\u202e"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return example_run_ledger(tmp_path_factory.mktemp("ledger") / "run")


@pytest.fixture(scope="module")
def view(folder):
    return run_ledger_view(folder)


@pytest.fixture(scope="module")
def page(view):
    return render_run_ledger(view)


@pytest.fixture(scope="module")
def unrewarded(tmp_path_factory):
    return example_run_ledger(tmp_path_factory.mktemp("none") / "run", rewards=False)


# The sums.


def test_every_grouping_adds_up_to_the_line_of_the_batches(view):
    """Teeth: leave a group out and the sum is another."""
    assert [one["key"] for one in view["groupings"]] == list(GROUPINGS)
    batches = view["summary"]["lines"]["batches"]
    for grouping in view["groupings"]:
        for name in ("dH", "dR"):
            total = sum(group[name] for group in grouping["groups"])
            assert total == pytest.approx(batches[name], abs=1e-12), grouping["key"]
        missing = sum(group["dH"] for group in grouping["groups"][1:])
        assert missing != pytest.approx(batches["dH"], abs=1e-12)


def test_every_grouping_adds_up_step_by_step(view):
    steps = view["summary"]["steps"]
    for grouping in view["groupings"]:
        by_step = np.sum([group["dH_by_bin"] for group in grouping["groups"]], axis=0)
        np.testing.assert_allclose(by_step, [s["dH_batches"] for s in steps], atol=1e-12)


def test_groups_are_the_slow_sum_over_the_rows(view, folder):
    """Row by row, as one would write it first."""
    rows = read_ledger_table(folder, TOKEN_TABLE).to_pylist()
    label = {
        "sign": lambda row: "above 0" if row["advantage"] > 0 else "below 0",
        "position": lambda row: position_label(row["position"]),
        "prompt": lambda row: row["prompt"],
    }
    for grouping in view["groupings"]:
        if grouping["key"] not in label:
            continue
        for group in grouping["groups"]:
            mine = [row for row in rows if label[grouping["key"]](row) == group["name"]]
            a, b = (sum(row[name] for row in mine) for name in ("dH_a", "dH_b"))
            assert group["tokens"] == len(mine)
            assert group["dH"] == pytest.approx(a + b, abs=1e-14)
            assert group["dH_stderr"] == pytest.approx(abs(a - b), abs=1e-14)


def test_layers_are_those_of_their_table(view, folder):
    rows = read_ledger_table(folder, LAYER_TABLE).to_pylist()
    layers = next(one for one in view["groupings"] if one["key"] == "layer")["groups"]
    assert [one["name"] for one in layers] == ["model.layers.0", "model.layers.1"]
    for one in layers:
        mine = [row for row in rows if row["layer"] == one["name"]]
        assert one["dH"] == pytest.approx(sum(row["dH"] for row in mine))
        assert one["dH_stderr"] == pytest.approx(sum(row["dH_stderr"] for row in mine))
        assert one["tokens"] is None


@pytest.mark.parametrize(
    ("solved", "name"),
    [
        (None, "not known"),
        (0.0, "never solved"),
        (0.125, "solved up to 1/3"),
        (0.5, "solved 1/3 to 2/3"),
        (0.75, "solved above 2/3"),
        (1.0, "always solved"),
    ],
)
def test_difficulty_is_the_share_solved(solved, name):
    assert difficulty(solved) == name


def test_positions_are_powers_of_two():
    names = [position_label(k) for k in (0, 1, 2, 3, 4, 7, 8, 1000)]
    assert names == ["0", "1", "2 to 3", "2 to 3", "4 to 7", "4 to 7", "8 to 15", "512 to 1023"]


def test_a_long_run_has_no_more_bars_than_fit():
    bins = step_bins(range(5, 1005), most=120)
    assert len(bins) == 112
    assert bins[0] == (5, 13)
    assert bins[-1][1] == 1004
    assert step_bins([3, 4]) == [(3, 3), (4, 4)]


def test_an_exchange_rate_follows_both_halves():
    """Halves in which entropy and reward move together do not make the rate unsure."""
    together = exchange_rate(-0.4, 2.0, -0.04, 0.2, signed=True)
    assert together == {"value": -0.2, "stderr": pytest.approx(0.0, abs=1e-15)}
    against = exchange_rate(-0.4, 2.0, 0.04, 0.2, signed=True)
    assert against is not None
    assert against["stderr"] == pytest.approx(0.04)
    widest = exchange_rate(-0.4, 2.0, 0.04, 0.2, signed=False)
    assert widest == against


@pytest.mark.parametrize(("dR", "apart"), [(None, None), (0.0, 0.0), (0.1, 0.06), (-0.1, -0.05)])
def test_no_rate_where_the_reward_is_not_sure(dR, apart):
    assert exchange_rate(-0.4, dR, 0.1, apart, signed=True) is None


def test_the_luck_of_the_choice_is_told_apart():
    """Pure noise: chosen in sample it looks dear, cross-fitted it is nothing. A signal stays."""
    noise = np.random.default_rng(0).normal(0, 1, (2000, 2))
    lucky = selection(noise, 20)
    assert lucky["in_sample"] < -50
    assert abs(lucky["cross_fitted"]) < 20
    assert abs(lucky["correlation"] or 0) < 0.1
    signal = np.zeros((2000, 2))
    signal[:20] = -1.0
    sure = selection(signal, 20)
    assert sure["cross_fitted"] == sure["in_sample"] == pytest.approx(-40.0)
    assert sure["correlation"] == pytest.approx(1.0)
    assert selection(np.zeros((1, 2)), 1)["correlation"] is None
    assert "The rest is luck of the choice; over all 2000, the halves" in luck(lucky)


def test_the_dearest_come_first_with_their_rollouts(view, folder):
    rows = read_ledger_table(folder, TOKEN_TABLE).to_pylist()
    costs = [row["dH"] for row in view["prompts"]]
    assert costs == sorted(costs)
    assert all(cost < 0 for cost in costs)
    kept = {rollout["uid"] for rollout in view["rollouts"]}
    for row in view["prompts"]:
        sums = {}
        for token in rows:
            if token["prompt"] == row["prompt"]:
                sums[token["uid"]] = sums.get(token["uid"], 0.0) + token["dH"]
        assert row["uids"] == sorted(sums, key=sums.__getitem__)[:6]
        assert set(row["uids"]) <= kept
    for row in view["texts"]:
        mine = sorted((t["dH"], t["uid"], t["position"]) for t in rows if t["text"] == row["text"])
        assert row["places"] == [(uid, k) for _, uid, k in mine[:3]]


# The page.


def test_the_page_has_its_sections_and_is_small(page):
    for name in ("run", "account", "lines", "prompts", "words", "texts", "glossary"):
        assert f'<section id="{name}">' in page
    assert len(page.encode()) < 3_000_000
    assert "http" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).replace(
        "http-equiv", ""
    )


def test_every_drawing_that_the_page_can_choose_is_there(view, page):
    names = set(run_ledger_figures(view))
    for grouping in GROUPINGS:
        for quantity in ("dH", "dR"):
            for manner in ("sum", "each"):
                assert f"account_{quantity}_{grouping}_{manner}" in names
    body = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert set(re.findall(r'data-figure="(\w+)"', body)) <= names


def test_stacked_bars_end_where_the_line_is(view):
    figure = run_ledger_figures(view)["account_dH_class_sum"]
    *bars, line = figure["data"]
    np.testing.assert_allclose(np.sum([bar["y"] for bar in bars], axis=0), line["y"], atol=1e-15)
    total = view["summary"]["lines"]["batches"]["dH"]
    assert line["y"][-1] == pytest.approx(total)


def test_lines_memo_and_trust_are_on_the_page(view, page):
    rows = line_rows(view["summary"])
    assert [row["name"] for row in rows][-3:] == ["sum: along the path", "measured", "unexplained"]
    assert sum(row["dH"] for row in rows if row["kind"] == "line") == pytest.approx(rows[4]["dH"])
    assert "Unfinished, not in the sum" in points(view)[0]
    assert "Attribution is not removal" in " ".join(points(view))
    assert 'class="trust yes"' in page
    for name in ("exchange rate", "along the path", "unfinished", "recorded batches"):
        assert TERMS[name].replace("'", "&#39;") in page


def test_the_sentence_says_what_how_sure_and_what_next(view):
    text = sentence(view)
    assert text.startswith("Entropy fell by ")
    assert "(95 % " in text
    assert "the ledger closes" in text
    assert "no single step's change is measured" in text
    assert "Next: " in text


def test_a_ledger_that_is_not_trusted_says_so_first(view):
    doubted = {**view, "summary": {**view["summary"], "trusted": False, "why_not": ["one <b>"]}}
    assert sentence(doubted).startswith("Not trusted, for the reasons below: ")
    text = render_run_ledger(doubted)
    assert 'class="trust no"' in text
    assert "one &lt;b&gt;" in text
    assert "<b>Next:</b> remove the reason" in text


def test_a_change_within_its_noise_is_said_to_be_that(view):
    summary = view["summary"]
    small = {**summary["measured"], "value": -0.001, "interval": [-0.01, 0.008]}
    none = {**summary["total"]["path"], "interval": [-0.01, 0.01]}
    total = {**summary["total"], "path": none}
    text = sentence({**view, "summary": {**summary, "measured": small, "total": total}})
    assert "too little to tell from nothing" in text
    assert "Next: explain a longer window" in text


def advised(view, stderr: float, cross_fitted: float) -> str:
    """The advice where every group lost 0.01 nats with this standard error."""
    groupings = [
        {**one, "groups": [{**g, "dH": -0.01, "dH_stderr": stderr} for g in one["groups"]]}
        for one in view["groupings"]
    ]
    chosen = {"chosen": 20, "of": 90, "in_sample": -0.1, "cross_fitted": cross_fitted}
    selection = {**chosen, "correlation": 0.1}
    return sentence({**view, "groupings": groupings, "prompt_selection": selection})


def test_no_group_is_singled_out_within_its_interval(view):
    """Two halves have one degree of freedom: 3 standard errors are no more than noise."""
    assert "look first at" in advised(view, 0.01 / 13, -0.09)
    for ratio in (3, 12):
        assert "look first at" not in advised(view, 0.01 / ratio, -0.09)
    assert "the other half of the evaluation prompts confirms 90 %" in advised(view, 0.003, -0.09)
    for cross_fitted in (-0.04, 0.02):
        assert "draw more evaluation prompts" in advised(view, 0.003, cross_fitted)


def test_the_two_kinds_of_standard_errors_are_told_apart(view, page):
    assert "of the lines from two halves of the evaluation prompts" in page
    assert "over all evaluation prompts" in page
    lines = text_lines(view["summary"])
    (trust,) = (line for line in lines if line.startswith("trusted"))
    assert "no single step's change is measured" in trust
    (first,) = [at for at, line in enumerate(lines) if line.rstrip().endswith("+- (1)      reward")]
    (second,) = [at for at, line in enumerate(lines) if line.endswith("+- (2)")]
    (path,) = [at for at, line in enumerate(lines) if line.startswith("along the path")]
    assert first < second == path - 1
    assert any(line.startswith("(1) standard error from two halves") for line in lines)
    assert any(line.startswith("(2) standard error over all") for line in lines)


def test_notes_are_on_the_page_and_in_the_terminal(view):
    noted = {**view["summary"], "notes": ["the run has 5 prompts for the evaluation batch"]}
    assert "The run has 5 prompts" in render_run_ledger({**view, "summary": noted})
    assert "note: the run has 5 prompts for the evaluation batch" in text_lines(noted)


def test_without_rewards_there_are_no_rates(unrewarded):
    view = run_ledger_view(unrewarded)
    assert all(g["rate"] is None for one in view["groupings"] for g in one["groups"])
    assert "difficulty" in view["absent"]
    assert [one["key"] for one in view["groupings"]] == [n for n in GROUPINGS if n != "difficulty"]
    text = render_run_ledger(view)
    assert '<th class="num">reward' not in text
    assert "account_dR" not in text
    assert "Not grouped by difficulty" in text
    assert any("by token class" in line for line in run_ledger_lines(view))


def test_hostile_texts_are_text(tmp_path):
    """A prompt and a token that would be markup; in tables, drawings and rollouts."""
    folder = hostile_ledger(tmp_path / "run")
    text = write_report(folder).read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert "<script>alert" not in text
    figures = json.loads(packed_text(text, "figures"))
    labels = json.dumps(figures)
    assert "<script" not in labels
    views = json.loads(packed_text(text, "views"))
    assert HOSTILE in views["vocabulary"]


def packed_text(page: str, name: str) -> str:
    match = re.search(rf'id="{name}" data-bytes="(\d+)">(.*?)</script>', page, flags=re.DOTALL)
    assert match is not None
    return unpacked(match[2], int(match[1]))


def hostile_ledger(folder: Path) -> Path:
    """The example with one prompt and one token replaced."""
    example = example_run_ledger(folder.parent / "example")
    rows = read_ledger_table(example, TOKEN_TABLE)
    layers = read_ledger_table(example, LAYER_TABLE)
    steps = []
    for step in sorted(set(rows.column("step").to_pylist())):
        mine = [row for row in rows.to_pylist() if row["step"] == step]
        for row in mine:
            row["text"] = HOSTILE if row["text"] == "7" else row["text"]
        columns = {name: [row[name] for row in mine] for name in rows.column_names}
        layer = [row for row in layers.to_pylist() if row["step"] == step]
        steps.append(
            StoredStep(
                tokens=table_bytes(TOKEN_TABLE, columns),
                prompts=dict.fromkeys(PROMPTS, HOSTILE),
                solved=None,
                layers={name: [row[name] for row in layer] for name in layers.column_names},
            )
        )
    write_run_ledger(folder, "hostile", read_run_ledger(example), steps)
    return folder


def test_rollouts_beyond_the_limit_are_counted(view):
    few = token_views(view, most=12)
    assert len(few["rollouts"]) == 2
    assert few["left_out"] == len(view["rollouts"]) - 2
    every = token_views(view)
    assert every["left_out"] == 0
    row = every["rollouts"][0]
    assert sum(row["v"]) * every["units"]["influence"] == pytest.approx(row["influence"], rel=1e-3)


@pytest.mark.parametrize(("share", "text"), [(0.724, "72 %"), (-0.07, "−7 %"), (-0.001, "0 %")])
def test_shares_are_whole(share, text):
    assert percent(share) == text


def test_a_long_text_is_cut_on_one_line():
    assert short("a\nb\x07", 9) == "a⏎b·"
    assert short("x" * 50, 10) == "x" * 9 + "…"


# The command.


@pytest.mark.slow  # two dozen files of matplotlib
def test_report_writes_page_words_and_figures(folder, tmp_path):
    words = ["report", str(folder), "--html", str(tmp_path / "a.html")]
    result = CliRunner().invoke(app, [*words, "--figures", str(tmp_path / "figures")])
    assert result.exit_code == 0, result.output
    assert "Entropy fell by" in result.output
    assert (tmp_path / "a.html").is_file()
    assert {"account_class.pdf", "account_layer.png", "rates_sign.pdf"} <= {
        path.name for path in (tmp_path / "figures").iterdir()
    }


def test_report_as_json_has_the_groups(folder):
    result = CliRunner().invoke(app, ["report", str(folder), "--json", "--no-html"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert {one["key"] for one in content["groupings"]} == set(GROUPINGS)


@pytest.mark.parametrize("option", [["--samples"], ["--linearity"], ["--evaluation", "x"]])
def test_options_of_one_step_are_refused(folder, option):
    result = CliRunner().invoke(app, ["report", str(folder), *option])
    assert result.exit_code == 2
    assert "is the ledger of a whole run" in result.output


def test_a_ledger_does_not_stand_beside_single_steps(folder):
    with pytest.raises(ValueError, match=r"Report it alone: entropy-probe report"):
        found_at(folder)
    result = CliRunner().invoke(app, ["report", str(folder), str(folder)])
    assert result.exit_code == 2


def test_figures_for_one_step_options_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"--evaluation is about one step"):
        write_figures(folder, tmp_path / "figures", evaluation="x")
    with pytest.raises(ValueError, match=r"--trajectory is about one step"):
        write_report(folder, tmp_path / "a.html", trajectory="x.json")


def test_a_damaged_table_is_refused(tmp_path):
    folder = example_run_ledger(tmp_path / "run", steps=1)
    path = folder / TOKEN_TABLE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"run_ledger\.parquet is damaged or was changed"):
        run_ledger_view(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"run_ledger\.parquet; expected it in a finished"):
        run_ledger_view(folder)


def test_rollouts_out_of_order_are_refused(tmp_path):
    folder = hostile_ledger(tmp_path / "run")
    rows = read_ledger_table(folder, TOKEN_TABLE).to_pylist()[::-1]
    columns = {name: [row[name] for row in rows if row["step"] == 0] for name in rows[0]}
    layers = read_ledger_table(folder, LAYER_TABLE).to_pylist()
    step = StoredStep(
        tokens=table_bytes(TOKEN_TABLE, columns),
        prompts={},
        solved=None,
        layers={name: [row[name] for row in layers[:3]] for name in layers[0]},
    )
    write_run_ledger(folder, "x", read_run_ledger(folder), [step])
    with pytest.raises(ValueError, match=r"has a step whose rollouts are not in order"):
        run_ledger_view(folder)


def test_an_unfinished_folder_is_no_ledger(tmp_path):
    folder = example_run_ledger(tmp_path / "run", steps=1)
    (folder / MANIFEST_FILE).unlink()
    with pytest.raises(FileNotFoundError):
        run_ledger_view(folder)


def test_paper_figures_show_the_same_sums(view):
    with paper_style():
        made = paper_figures(view, columns=2)
    axes = made["account_class"].axes[0]
    line = next(one for one in axes.lines if one.get_label() == "all batches")
    assert line.get_ydata()[-1] == pytest.approx(view["summary"]["lines"]["batches"]["dH"])
    groups = next(one for one in view["groupings"] if one["key"] == "sign")["groups"]
    rates = made["rates_sign"].axes[0]
    (bars,) = rates.containers
    sure = [group["rate"]["value"] for group in groups if group["rate"]]
    assert list(bars.lines[0].get_xdata()) == pytest.approx(sure)
