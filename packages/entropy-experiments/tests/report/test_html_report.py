"""The HTML report: its numbers are the run's own, its texts are harmless, what lacks is said."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.config import load_config
from entropy_experiments.pipelines.influence.files import pieces_of
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.pipelines.probe_log import read_log
from entropy_experiments.pipelines.trajectory import write_trajectory
from entropy_experiments.report.html import page
from entropy_experiments.report.html.charts import figures
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.page import (
    TERMS,
    embedded,
    explained,
    packed,
    render,
    slim,
    unpacked,
    write_report,
)
from entropy_experiments.results import read_trajectory
from entropy_experiments.types import Estimand, Estimate
from oracles.report_runs import HOSTILE, changed, hostile_run, large_run, read, rows_of

pytestmark = pytest.mark.contract

LARGEST_MB, LONGEST_S = 20, 60
"""Of a report of 2,000 rollouts x 200 tokens, and the processor's time it takes to write."""


@pytest.fixture(scope="module")
def run(report_run):
    return report_run


@pytest.fixture(scope="module")
def data(run):
    return gather(run)


@pytest.fixture(scope="module")
def summary(run):
    return json.loads((run / "summary.json").read_text())


class Page(HTMLParser):
    """Every element of a page, and what stands in its script elements."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self._open = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "script":
            self._open = dict(attrs)
            self.scripts.append((self._open, ""))

    def handle_endtag(self, tag):
        if tag == "script":
            self._open = None

    def handle_data(self, data):
        if self._open is not None:
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)

    def unpacked(self, name):
        kind, text = next(found for found in self.scripts if found[0].get("id") == name)
        return unpacked(text, int(kind["data-bytes"]))

    def json(self, name):
        return json.loads(self.unpacked(name))


# The numbers.


def test_changes_over_eta_are_the_studys(data, summary):
    found, ledger = summary["evaluations"][0], summary["ledger"]
    assert data["predicted"] == ledger["predicted"]
    assert data["measured"] == ledger["measured"]
    assert [point["eta"] for point in data["curve"]["points"]] == [0.001, 0.003]
    for point, row in zip(data["curve"]["points"], data["weights"]):
        measured = found["aggregate"][f"{point['eta']:g}"]["full"]
        assert point["value"] == measured["value"]
        assert point["interval"] == measured["interval"]
        assert (row["ESS"], row["k_hat"]) == (measured["ESS"], measured["k_hat"])
    # Within the linear range curvature is at most a tenth, also at its interval's worse end.
    reach = data["curve"]["linear_range"] / data["lr"]
    worst = max(map(abs, ledger["curvature"]["interval"])) * reach**2
    assert worst == pytest.approx(0.1 * abs(ledger["predicted"]["value"]) * reach)


def test_the_waterfall_closes(data, summary):
    for book in data["ledger"]["books"]:
        ledger, at = summary["evaluations"][0]["ledger"][book["name"]], 0.0
        rows = {row["name"]: row for row in book["rows"]}
        for row in book["rows"]:
            assert row["start"] == pytest.approx(0.0 if row["kind"] == "total" else at, abs=1e-12)
            at = row["start"] + row["value"]
        assert rows["predicted"]["value"] == ledger["predicted"]["value"]
        assert at == rows["measured"]["value"] == ledger["measured"]["value"]
        lines = [row["value"] for row in book["rows"] if row["kind"] == "line"]
        assert lines == [line["this_step"] for line in ledger["lines"].values()]
    assert [book["name"] for book in data["ledger"]["books"]] == ["entropy", "reward"]


def test_every_token_comes_back_from_its_whole_numbers(data, run):
    rows, views = rows_of(run), data["texts"]
    units, at = views["units"], 0
    for row in views["rollouts"]:
        for k, piece in enumerate(row["t"]):
            assert views["vocabulary"][piece] == rows["piece"][at]
            got = {"logprob": row["l"][k], "entropy": row["h"][k], "influence": row["v"][k]}
            got["advantage"] = row["a"] if isinstance(row["a"], int) else row["a"][k]
            for name, whole in got.items():
                assert abs(whole * units[name] - rows[name][at]) <= 0.5001 * units[name]
            assert abs(row["e"][k] * units["influence"] - rows["stderr"][at]) <= units["influence"]
            flag = "2" if not rows["counted"][at] else "0" if rows["stable"][at] else "1"
            assert row["s"][k] == flag
            at += 1
    assert at == len(rows["piece"])
    assert max(abs(v) for row in views["rollouts"] for v in row["v"]) >= 100_000  # six digits
    influence = np.load(run / "eval_00_rollout_influence.npy")
    np.testing.assert_allclose([row["influence"] for row in views["rollouts"]], influence)


def test_rollouts_cells_and_matrix_add_up(data, run):
    influence = np.load(run / "eval_00_rollout_influence.npy")
    rows = data["rollouts"]["rows"]
    assert [row["value"] for row in rows] == sorted(row["value"] for row in rows)
    for row in rows:
        assert row["value"] == pytest.approx(influence[row["rollout"]], abs=1e-12)
    assert np.sum(data["covariance"]["cells"]["influence"]) == pytest.approx(influence.sum())
    matrix = data["matrix"]
    np.testing.assert_allclose(
        np.sum(matrix["values"], axis=0), influence[matrix["columns"]], rtol=1e-3, atol=1e-8
    )


def test_prompts_and_pieces_are_the_rollouts_text(data, run):
    texts = json.loads((run / "update_rollouts.json").read_text())
    for row, text in zip(data["texts"]["rollouts"], texts):
        assert data["texts"]["prompts"][row["p"]] == text["prompt_text"]
        assert text["prompt_text"].startswith("numbers ")
        response = "".join(data["texts"]["vocabulary"][k] for k in row["t"])
        assert re.fullmatch(r"( [^ ]+)+", response)  # a space before every word of this tokenizer


def test_a_piece_is_what_a_token_adds():
    """Spaces between words; a character of two tokens belongs to the second."""
    words = {0: b"Q:", 1: b" a", 2: b"\xc3", 3: b"\xa9", 4: b"b", 5: b"\xf0"}

    def decode(ids):
        return b"".join(words[i] for i in ids).decode(errors="replace")

    assert pieces_of([0, 1, 2, 3, 4], 1, decode) == [" a", "", "é", "b"]
    assert pieces_of([0, 4, 5], 1, decode) == ["b", "\ufffd"]  # cut off in mid-character
    ids = [1, 2, 3, 4, 1, 2, 3]
    assert "".join(pieces_of(ids, 0, decode)) == decode(ids)
    assert "".join(decode([i]) for i in ids) != decode(ids)  # has teeth: tokens alone do not do


def test_the_verdict_is_in_words(data, summary):
    said = data["verdict"]["sentence"]
    assert said.startswith(f"A hypothetical update from {summary['checkpoint']} ")
    assert "nats per token" in said
    assert any("Expected reward" in point for point in data["verdict"]["points"])
    assert [one["name"] for one in data["others"]] == ["eval_01"]


def test_the_step_certificate_is_on_the_page(run, summary, tmp_path):
    update = {**summary["update"], "real": True}
    for place, certified, point in (
        (
            "checked",
            {"step_distance": 1e-6, "certificate": "the same"},
            "Step certificate: the same.",
        ),
        ("unchecked", {"unchecked": "no step follows"}, "No step certificate: no step follows."),
    ):
        told = {**summary, "update": {**update, "certified": certified}}
        page_of = changed(run, tmp_path / place, {"summary.json": json.dumps(told).encode()})
        assert point in gather(page_of)["verdict"]["points"]


def test_another_evaluation_batch_can_be_told(run, summary):
    other = gather(run, evaluation="eval_01")
    assert other["measured"] == summary["evaluations"][1]["ledger"]["entropy"]["measured"]
    with pytest.raises(ValueError, match=r"No evaluation batch 'eval_07' .*'eval_00', 'eval_01'"):
        gather(run, evaluation="eval_07")


# The page.


def test_a_page_asks_for_nothing_and_runs_two_scripts(run, tmp_path):
    path = write_report(run, tmp_path / "deep" / "r.html")
    text = path.read_text()
    found = Page(text)
    own = [*(script for kind, script in found.scripts if not kind), found.unpacked("plotly")]
    assert len(own) == 2
    assert own[1] == page._plotly()
    policy = next(v for t, k, v in found.attributes if (t, k) == ("meta", "content") and "src" in v)
    for script in own:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert not [a for a in found.attributes if a[1] == "src" or a[1].startswith("on")]
    links = [value for _, key, value in found.attributes if key == "href"]
    ids = {value for _, key, value in found.attributes if key == "id"}
    assert {link.removeprefix("#") for link in links} <= ids  # the contents, and no other place
    assert len(links) >= 8
    assert not {"link", "iframe", "img", "object", "base"} & set(found.tags)
    charts = {v for _, k, v in found.attributes if k == "data-figure"}
    assert charts == set(found.json("figures"))
    assert write_report(run, tmp_path / "again.html").read_text() == text
    assert not list(path.parent.glob("*.partial"))


def test_hostile_texts_stay_texts(run, tmp_path):
    bad = hostile_run(run, tmp_path / "hostile")
    text = write_report(bad).read_text()
    found = Page(text)
    assert len(found.scripts) == 4  # two of data, two of code
    assert not {"img", "b"} & set(found.tags)
    body = text.split('<script type="text/plain"')[0]
    assert "<script>alert" not in text
    assert "49" not in body.split('id="assumed"')[1].split("</section>")[0]  # {{ 7 * 7 }}
    views = found.json("views")
    assert set(views["vocabulary"]) == set(HOSTILE)
    assert views["rollouts"][0]["gaps"] == {"1": HOSTILE[1]}


def test_a_lone_surrogate_does_not_stop_the_report(run, tmp_path):
    texts = json.loads((run / "update_rollouts.json").read_text())
    texts[0]["prompt_text"] = "\ud800"
    files = {"update_rollouts.json": json.dumps(texts).encode()}
    path = write_report(changed(run, tmp_path / "surrogate", files))
    assert Page(path.read_text()).json("views")["prompts"][0] == "\ud800"


def test_the_contents_name_every_section_in_order(data):
    text = render(data)
    sections = re.findall(r'<section id="([a-z-]+)"', text)
    links = re.findall(r'<li><a href="#([a-z-]+)">', text)
    assert ["verdict", *links] == sections
    assert {"curve", "ledger", "matrix", "assumed", "glossary"} <= set(links)


def test_assumptions_stand_beside_the_headline(data):
    known = {**data["assumed"], "assumed": {"loss": "grpo", "max_grad_norm": 1.0}}
    data = {**data, "assumed": known}
    head = render(data).split('<section id="verdict">')[1].split("</section>")[0]
    at = head.index("Assumed, not read from any file:")
    assert head.index("<h1>") < at < head.index("<nav")
    for name in data["assumed"]["assumed"]:
        assert f"{name} = " in head
    nothing = {**data, "assumed": {**data["assumed"], "assumed": {}}}
    assert "Assumed, not read" not in render(nothing)


def test_terms_have_their_line_where_they_stand(data):
    text = render(data)
    pointed = dict(re.findall(r'<span class="term"[^>]* title="([^"]+)">([^<]+)</span>', text))
    assert len(pointed) >= 12
    for line in pointed:
        assert html.unescape(line) in TERMS.values()
    for name, line in TERMS.items():
        assert f"<dt>{escape(name)}</dt><dd>{escape(line)}</dd>" in text
        assert len(line) <= 100  # one line


def test_a_term_in_a_hostile_sentence_stays_text():
    said = explained('<b>entropy</b> & "Entropy", entropyx')
    line = escape(TERMS["entropy"])
    assert said == (
        f'&lt;b&gt;<span class="term" tabindex="0" title="{line}">entropy</span>'
        "&lt;/b&gt; &amp; &#34;Entropy&#34;, entropyx"
    )


def test_the_blank_part_of_the_matrix_is_explained(run, data, tmp_path):
    name = "eval_00_delta_matrix.npy"
    matrix = np.load(run / name)
    matrix[:, [1, 4]] = 0.0
    buffer = io.BytesIO()
    np.save(buffer, matrix)
    found = gather(changed(run, tmp_path / "blank", {name: buffer.getvalue()}))["matrix"]["blank"]
    assert f"2 of {matrix.shape[1]} update rollouts have none at all" in found
    assert re.search(r"Of the other cells \d+% are nearly blank", found)
    assert found in html.unescape(render(gather(tmp_path / "blank")))


@pytest.mark.parametrize("text", ["", "a", "</script><!--", "\x00\r\n<" * 40, "η–\U0001f600" * 9])
def test_packed_texts_come_back_and_hold_no_mark(text):
    size, seven = packed(text)
    assert not set("<\x00\r") & set(seven)
    assert unpacked(seven, size) == text


def test_a_packed_text_has_seven_bits_in_a_byte():
    text = "".join(chr(32 + (i * i * 7919) % 90) for i in range(20_000))
    size, seven = packed(text)
    assert size * 8 / 7 <= len(seven.encode()) <= 1.03 * size * 8 / 7 + 8


def test_json_in_a_page_has_no_marks_and_no_nan():
    text = embedded(slim({"a": ["</script>", "&", float("nan"), 0.123456789], "n": [1, 2]}))
    assert "<" not in text
    assert "&" not in text
    assert json.loads(text) == {"a": ["</script>", "&", None, 0.123457], "n": [1, 2]}


def test_what_a_run_lacks_is_left_out_with_a_reason(run, tmp_path, summary):
    cut = json.loads(json.dumps(summary))
    first = cut["evaluations"][0]
    first |= {"what_if": [], "entropy_budget": None, "leave_one_out": []}
    del first["ledger"]["reward"]
    matrix = np.load(run / "eval_00_delta_matrix.npy") * np.nan
    (tmp_path / "nan.npy").parent.mkdir(exist_ok=True)
    np.save(tmp_path / "nan.npy", matrix)
    files = {
        "summary.json": json.dumps(cut).encode(),
        "eval_00_delta_matrix.npy": (tmp_path / "nan.npy").read_bytes(),
        "update_rollouts.json": None,
    }
    data = gather(changed(run, tmp_path / "less", files))
    assert data["what_if"] is None
    assert data["matrix"] is None
    reasons = data["absent"]
    assert "--what-if" in reasons["what if"]
    assert "influence.measured_matrix" in reasons["the matrix"]
    assert "influence.reward" in reasons["the reward's ledger"]
    assert "earlier version" in reasons["prompts, and spaces between tokens"]
    assert "--trajectory" in reasons["entropy over the run"]
    drawn = figures(data)
    assert not {"what_if", "matrix", "ledger_reward", "trajectory"} & set(drawn)
    text = render(data)
    for name, reason in reasons.items():
        assert f"<dt>{escape(name)}</dt><dd>{escape(reason)}</dd>" in text
    assert {v for _, k, v in Page(text).attributes if k == "data-figure"} == set(drawn)


# Logs and trajectories.


@pytest.mark.parametrize(
    "level",
    [
        "standard",
        pytest.param("minimal", marks=pytest.mark.slow),
        pytest.param("detailed", marks=pytest.mark.slow),
    ],
)
def test_a_log_has_a_report_of_what_it_holds(tmp_path, level):
    changes = [
        "batch_config.B_E=6",
        "approx_delta_h.curvature=true",
        f"detailed_logging.level={level}",
    ]
    config = load_config("test_deltaH1").under(tmp_path).with_overrides(changes)
    results = OfflineEntropyProbe(config, quiet=True).run_mixed_probe()
    data, log = gather(results["log_path"]), read_log(results["log_path"])
    assert data["predicted"]["value"] == log["deltaH1"]
    assert data["measured"]["value"] == log["deltaH_true"]
    assert data["covariance"] is None
    assert "entropy-probe influence" in data["absent"]["the matrix"]
    if level == "minimal":
        assert data["curve"] is None
        assert data["assumed"] is None  # it does not say; "nothing" would be a claim
        assert "does not say" in data["absent"]["what was assumed"]
        assert "without an interval" in data["verdict"]["sentence"]
        assert "minimal log" in data["absent"]["step sizes, ledger and weights"]
    else:
        assert [p["value"] for p in data["curve"]["points"]] == [s["value"] for s in log["sweep"]]
        assert data["curve"]["linear_range"] == log["linear_range"]
        (book,) = data["ledger"]["books"]
        last = book["rows"][-2]
        assert last["start"] + last["value"] == pytest.approx(log["deltaH_true"])
    if level == "detailed":
        shown = [row["text"] for row in data["texts"]["rollouts"]]
        assert shown == [row["response"] for row in log["update_rollouts"]]
    else:
        assert "output.level: detailed" in data["absent"]["the update rollouts"]
    answer = CliRunner().invoke(app, ["report", results["log_path"]])
    assert answer.exit_code == 0, answer.output
    assert "predicted change" in answer.output
    path = re.search(r"Report: (.*_report\.html)", answer.output.replace("\n", ""))
    assert path is not None
    assert Page(Path(path[1]).read_text()).tags.count("html") == 1


class Steps:
    """Two steps of a run, without error bars."""

    def __init__(self):
        def one(value):
            return Estimate.build(value=value, estimand=Estimand())

        def step(at):
            level, change = one(0.3 - at / 10), one(-0.1)
            names = ("step", "level", "predicted", "second_order", "measured", "reward")
            values = (at, level, change, 0.9 * change, change, 0.5)
            return type("Step", (), dict(zip(names, values)))

        self.steps, self.last = [step(0), step(1)], one(0.1)
        self.predicted = self.measured = self.fresh = one(-0.2)
        self.second_order = one(-0.18)


def test_a_trajectory_is_told_alone_and_beside_a_study(run, tmp_path):
    path = write_trajectory(Steps(), tmp_path / "trajectory.json")
    found = read_trajectory(path)
    assert [s["predicted_sum"]["value"] for s in found["steps"]] == pytest.approx([-0.1, -0.2])
    alone, both = gather(path), gather(run, trajectory=path)
    assert alone["trajectory"] == both["trajectory"] == found
    line = figures(both)["trajectory"]["data"][2]
    assert line["y"] == pytest.approx([0.3, 0.2, 0.1])
    second = figures(both)["trajectory"]["data"][3]
    assert second["name"] == "predicted, second order, summed"
    assert second["y"] == pytest.approx([0.3, 0.21, 0.12])
    assert alone["predicted"] == found["total"]["second_order"]
    text = read(render(alone))
    assert "predicted −0.180 to second order (−0.200 to first), measured −0.200" in text
    assert "to first order, −0.180" in text
    assert "Training from step 0 to step 2" in render(alone)
    assert set(figures(alone)) == {"trajectory", "rewards"}
    (tmp_path / "trajectory.json").write_text("{}")
    with pytest.raises(ValueError, match="is no trajectory; expected format"):
        gather(path)


# The command.


def test_the_command_writes_beside_the_data_and_says_where(run, tmp_path):
    answer = CliRunner().invoke(app, ["report", str(run)])
    assert answer.exit_code == 0, answer.output
    assert "What changed it, to first order" in answer.output  # the words stay
    assert answer.output.splitlines()[-1] == f"Report: {run / 'report.html'}"
    text = (run / "report.html").read_text()
    (run / "report.html").unlink()
    elsewhere = tmp_path / "x.html"
    CliRunner().invoke(app, ["report", str(run), "--html", str(elsewhere)])
    assert elsewhere.read_text() == text
    answer = CliRunner().invoke(app, ["report", str(run), "--no-html"])
    assert "Report:" not in answer.output
    assert not (run / "report.html").exists()
    answer = CliRunner().invoke(app, ["report", str(run), "--no-html", "--html", "x"])
    assert answer.exit_code == 2
    answer = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert answer.exit_code == 2
    assert "nowhere" in answer.output


def test_without_plotly_there_are_words_and_a_reason(run, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "plotly" else name)
    with pytest.raises(ValueError, match=r"needs plotly, not installed here: pip install"):
        write_report(run, tmp_path / "x.html")
    answer = CliRunner().invoke(app, ["report", str(run)])
    assert answer.exit_code == 0
    assert "No HTML report: the HTML report needs plotly" in answer.output
    answer = CliRunner().invoke(app, ["report", str(run), "--html", str(tmp_path / "x.html")])
    assert answer.exit_code == 2
    assert not list(tmp_path.iterdir())


# Size.


@pytest.mark.slow
def test_two_thousand_rollouts_of_two_hundred_tokens(run, tmp_path, record_property):
    large = large_run(run, tmp_path / "large")
    started = time.process_time()  # other jobs' time is not the report's
    path = write_report(large)
    seconds, size = time.process_time() - started, path.stat().st_size / 1e6
    record_property("seconds", seconds)
    record_property("megabytes", size)
    print(f"{size:.1f} MB in {seconds:.1f} s")
    assert size < LARGEST_MB
    assert seconds < LONGEST_S
    found = Page(path.read_text())
    views = found.json("views")
    assert sum(len(row["t"]) for row in views["rollouts"]) == 400_000
    assert "article" not in found.tags  # rollouts are built while they are read
    assert len(found.json("figures")["points"]["data"][0]["x"]) <= 2_500


def test_beyond_the_cap_the_least_influential_come_without_tokens(run, tmp_path):
    large = large_run(run, tmp_path / "large", rollouts=50, length=20)
    data = gather(large, most_tokens=400)
    rows = data["texts"]["rollouts"]
    assert data["texts"]["without_tokens"] == 30
    whole = [abs(row["influence"]) for row in rows if "t" in row]
    assert len(whole) == 20
    assert min(whole) >= max(abs(row["influence"]) for row in rows if "t" not in row)
    assert "the 30 rollouts of least influence are listed without their text" in render(data)


def test_a_report_is_made_without_torch(report_run, tmp_path):
    """Reading files that are there takes a second, not the time that torch takes to load."""
    run = changed(report_run, tmp_path / "run", {})
    code = (
        "import sys\n"
        "from entropy_experiments.cli import app\n"
        "for words in ([], ['--linearity'], ['--json']):\n"
        "    app(['report', sys.argv[1], *words], standalone_mode=False)\n"
        "print([name for name in ('torch', 'transformers', 'scipy.stats') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert (run / "report.html").is_file()
