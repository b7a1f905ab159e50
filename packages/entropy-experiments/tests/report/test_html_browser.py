"""The HTML report in a real browser: no error, no request, sorting, filtering, hovering.

Chromium is driven without a window through playwright. Where either is missing (CI machines may
lack them) the tests are skipped: apt-get install chromium; pip install playwright.
"""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from entropy_experiments.report.html.compare import write_comparison
from entropy_experiments.report.html.page import write_report
from oracles.report_runs import HOSTILE, changed, hostile_run, large_run, rows_of
from oracles.run_ledger_example import example_run_ledger

pytestmark = [pytest.mark.contract, pytest.mark.slow]

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE = 120_000
"""Milliseconds; a busy machine draws slowly."""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        # Containers run as root, where chromium has no sandbox.
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=sandbox, timeout=PATIENCE)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def run(report_run):
    return report_run


class Opened:
    """A page, and everything that it complained of or asked for."""

    def __init__(self, browser, path, *, wait=".rollout", fragment="", **look):
        self.said, self.asked = [], []
        self.context = browser.new_context(**look)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.url = path.resolve().as_uri()
        started = time.perf_counter()
        self.page.goto(self.url + fragment)
        self.page.wait_for_selector(wait)
        self.seconds = time.perf_counter() - started

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        if failed is None:
            assert self.said == []
            assert self.asked == [self.url]
        self.context.close()

    def rollouts(self):
        return [
            int(i)
            for i in self.page.eval_on_selector_all(".rollout", "x => x.map(e => e.dataset.i)")
        ]


def influences(run):
    rows, total = rows_of(run), {}
    for i, value in zip(rows["rollout"], rows["influence"]):
        total[i] = total.get(i, 0.0) + value
    return total


@pytest.mark.parametrize("look", ["light", "dark", "narrow"])
def test_every_chart_is_drawn_and_nothing_sticks_out(browser, run, look):
    size = {"width": 390 if look == "narrow" else 1180, "height": 850}
    scheme = "dark" if look == "dark" else "light"
    with Opened(browser, write_report(run), viewport=size, color_scheme=scheme) as opened:
        page = opened.page
        charts = page.locator(".chart")
        assert charts.count() >= 8
        for at in range(charts.count()):
            assert charts.nth(at).locator("svg.main-svg").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        brightness = sum(int(x) for x in paper[4:-1].split(",")) / 3
        assert (brightness < 60) == (look == "dark")


def test_sorting_filtering_and_hovering(browser, run):
    total, rows = influences(run), rows_of(run)
    with Opened(browser, write_report(run)) as opened:
        page = opened.page
        assert opened.rollouts() == sorted(total, key=lambda i: total[i])
        page.select_option("#sort", "raises")
        assert opened.rollouts() == sorted(total, key=lambda i: -total[i])
        page.select_option("#sort", "given")
        page.select_option("#sign", "+")
        positive = {i for i, a in zip(rows["rollout"], rows["advantage"]) if a > 0}
        assert 0 < len(positive) < len(total)
        assert opened.rollouts() == sorted(positive)
        assert page.inner_text("#count") == f"{len(positive)} of {len(positive)} shown"
        page.select_option("#sign", "")
        texts = json.loads((run / "update_rollouts.json").read_text())
        wanted = texts[0]["prompt_text"]
        page.fill("#find", wanted.upper())
        assert opened.rollouts() == [t["rollout"] for t in texts if t["prompt_text"] == wanted]
        page.fill("#find", "")

        at = max(range(len(rows["k"])), key=lambda at: abs(rows["influence"][at]))
        i, k = rows["rollout"][at], rows["k"][at]
        token = page.locator(f"#rollout-{i} .t").nth(k)
        token.hover()
        tip = page.inner_text("#tip").replace("−", "-")
        said = dict(
            zip(
                page.locator("#tip dt").all_inner_texts(), page.locator("#tip dd").all_inner_texts()
            )
        )
        said = {name: text.replace("−", "-") for name, text in said.items()}
        assert float(said["influence"].split()[0]) == pytest.approx(rows["influence"][at], rel=0.01)
        assert float(said["log-prob"].split()[0]) == pytest.approx(rows["logprob"][at], abs=1e-4)
        assert float(said["entropy"].split()[0]) == pytest.approx(rows["entropy"][at], abs=1e-4)
        assert float(said["advantage"]) == pytest.approx(rows["advantage"][at], rel=0.01)
        low, high = (float(end) for end in said["95 %"].split(" to "))
        assert low < rows["influence"][at] < high
        assert rows["piece"][at].strip() in tip
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()


@pytest.mark.parametrize("look", ["wide", "narrow"])
def test_a_link_opens_its_rollout_and_marks_its_token(browser, run, look):
    rows, total = rows_of(run), influences(run)
    i = max(total, key=lambda i: total[i])  # the last one of the order at first
    k = max(k for k, row in zip(rows["k"], rows["rollout"]) if row == i) // 2
    size = {"width": 390 if look == "narrow" else 1180, "height": 700}
    link = f"#rollout={i}&token={k}"
    with Opened(browser, write_report(run), fragment=link, viewport=size) as opened:
        page = opened.page
        page.wait_for_selector(".t.cited")
        assert page.locator(".t.cited").count() == 1
        token = page.locator(f"#rollout-{i} .t").nth(k)
        assert "cited" in token.get_attribute("class")
        box = token.bounding_box()
        assert 0 <= box["y"] < size["height"]
        assert f"{k} of rollout {i}" in page.inner_text("#tip")
        assert page.locator("#fragment").is_hidden()
        assert "found" in page.locator(f"#rollout-{i}").get_attribute("class")
        # Another link of the same page, and a token that is clicked: the address bar cites it.
        other = min(total, key=lambda i: total[i])
        page.evaluate("link => { location.hash = link }", f"#rollout={other}")
        page.wait_for_selector(f"#rollout-{other}.found")
        assert page.locator(".t.cited").count() == 0
        page.locator(f"#rollout-{other} .t").nth(1).click()
        assert page.evaluate("location.hash") == f"#rollout={other}&token=1"
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


@pytest.mark.parametrize(
    ("fragment", "said"),
    [
        ("#rollout=99999", "there is no rollout 99999; this report has 8, from 0."),
        ("#rollout=0&token=99999", "rollout 0 has"),
        ("#rollout=abc", "expected #rollout=NUMBER"),
        ("#rollout=-1", "expected #rollout=NUMBER"),
        ("#rollout=1&token=", "expected #rollout=NUMBER"),
        ("#token=3", "expected #rollout=NUMBER"),
        ("#rollout=0&token=1&x=<img src=x onerror=alert(1)>", "expected #rollout=NUMBER"),
        ("#nothing-of-that-name", "expected #rollout=NUMBER"),
    ],
)
def test_a_link_that_fits_nothing_is_ignored_with_a_note(browser, run, fragment, said):
    with Opened(browser, write_report(run), fragment=fragment) as opened:
        page = opened.page
        page.wait_for_selector("#fragment:visible")
        assert said in page.inner_text("#fragment")
        assert page.locator(".t.cited").count() == 0
        assert page.locator("#fragment *").count() == 0  # text, whatever it says
        # A section's own link is none of ours, and takes the note away.
        page.evaluate("() => { location.hash = '#ledger' }")
        page.wait_for_selector("#fragment", state="hidden")


def test_colours_follow_the_sign(browser, run):
    rows = rows_of(run)
    with Opened(browser, write_report(run)) as opened:
        for at in range(len(rows["k"])):
            style = opened.page.locator(f"#rollout-{rows['rollout'][at]} .t").nth(rows["k"][at])
            found = style.get_attribute("class"), style.get_attribute("style") or ""
            if not rows["counted"][at]:
                assert found == ("t outside", "")
            elif not rows["stable"][at]:
                assert found == ("t unsure", "")
            elif abs(rows["influence"][at]) > 1e-9:
                assert ("destroy" if rows["influence"][at] < 0 else "create") in found[1]
            if at > 60:
                break


def test_hostile_texts_do_nothing_in_a_browser(browser, run, tmp_path):
    bad = hostile_run(run, tmp_path / "hostile")
    with Opened(browser, write_report(bad), viewport={"width": 390, "height": 850}) as opened:
        page = opened.page
        assert page.locator("#list img, #list script, main img").count() == 0
        shown = page.inner_text("#list")
        assert HOSTILE[0] in shown
        assert HOSTILE[5] in shown
        assert "\u202e" not in shown  # shown by name, not obeyed
        assert "⟨U+202E⟩" in shown
        assert "\x00" not in shown
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert "{{ 7 * 7 }}" in page.inner_text("#assumed")


def test_a_large_batch_opens(browser, run, tmp_path):
    with Opened(browser, write_report(large_run(run, tmp_path / "large"))) as opened:
        print(f"2,000 x 200 tokens opened in {opened.seconds:.1f} s")
        page = opened.page
        assert len(opened.rollouts()) == 12
        assert page.locator(".t").count() == 12 * 200
        page.click("#more")
        assert len(opened.rollouts()) == 24
        assert page.inner_text("#count") == "24 of 2,000 shown"
        page.fill("#find", "word123 ")
        assert 0 < len(opened.rollouts()) <= 12


def test_a_rollout_jumped_to_comes_once(browser, run, tmp_path):
    """From a point of the drawing to its text, though that was not shown yet."""
    wide = large_run(run, tmp_path / "wide", rollouts=30, length=4)
    with Opened(browser, write_report(wide)) as opened:
        last = max(influences(wide).items(), key=lambda pair: pair[1])[0]
        assert last not in opened.rollouts()
        place = "document.querySelector('[data-figure=\"rollouts\"]')"
        event = f"{{points: [{{customdata: [{last}]}}]}}"
        opened.page.evaluate(f"{place}.emit('plotly_click', {event})")
        assert opened.rollouts()[0] == last
        assert opened.page.inner_text("#count") == "13 of 30 shown"
        while opened.page.locator("#more").is_visible():
            opened.page.click("#more")
        assert sorted(opened.rollouts()) == list(range(30))


@pytest.mark.parametrize("look", ["light", "dark", "narrow"])
def test_the_comparison_page(browser, run, tmp_path, look):
    """Two studies, one as if of another checkpoint that a hostile mind named."""
    name = HOSTILE[1] + " step_99"
    summary = json.loads((run / "summary.json").read_text()) | {"checkpoint": name}
    other = changed(run, tmp_path / "other", {"summary.json": json.dumps(summary).encode()})
    path = write_comparison([run, other], tmp_path / "compared.html")
    size = {"width": 390 if look == "narrow" else 1180, "height": 850}
    scheme = "dark" if look == "dark" else "light"
    drawn = ".chart svg.main-svg"
    with Opened(browser, path, wait=drawn, viewport=size, color_scheme=scheme) as opened:
        page = opened.page
        charts = page.locator(".chart")
        assert charts.count() == 3  # changes, validation, weights: one batch size, no scaling
        for at in range(charts.count()):
            assert charts.nth(at).locator("svg.main-svg").count() > 0
        # Two runs, predicted and measured: four points with their bars.
        assert page.locator("[data-figure=changes] .scatterlayer .point").count() == 4
        assert page.locator("[data-figure=changes] .errorbar").count() == 4
        heads = page.locator("h2").all_inner_texts()
        assert heads[:3] == ["Entropy changes", "Changes", "Estimator validation"]
        found = summary["evaluations"][0]["ledger"]["entropy"]
        row = page.locator("section:has(h2:text-is('Changes')) tbody tr").nth(1)
        told = row.locator("td").all_inner_texts()[1].replace("−", "-")
        assert float(told.split()[0]) == pytest.approx(found["predicted"]["value"], rel=0.01)
        assert page.locator("main img, main script").count() == 0
        assert name in page.inner_text("h1")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(int(x) for x in paper[4:-1].split(",")) / 3 < 60) == (look == "dark")


def probed_training(folder):
    """Twenty steps, of which every second was probed and one is not trusted."""
    folder.mkdir()
    rows, history = [], []
    for step in range(20):
        level = 0.4 - 0.01 * step
        history.append({"step": step + 1, "entropy": level + 0.01, "reward": step / 40})
        if step % 2:
            continue
        doubts = ["few effective rollouts"] if step == 8 else []
        row = {"step": step, "trusted": float(not doubts), "why_not": doubts, "lr": 1e-3}
        for name, value in (("entropy", level), ("predicted", -0.009), ("measured", -0.01)):
            row |= {name: value, f"{name}_low": value - 0.003, f"{name}_high": value + 0.003}
        rows.append(row)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "entropy_probe.jsonl").write_text(lines)
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": 20, "max_steps": 20, "log_history": history})
    )
    return folder


@pytest.mark.parametrize("look", ["light", "dark", "narrow"])
def test_a_probed_training(browser, tmp_path, look):
    path = write_report(probed_training(tmp_path / "run"))
    size = {"width": 390 if look == "narrow" else 1180, "height": 850}
    scheme = "dark" if look == "dark" else "light"
    with Opened(
        browser, path, wait="[data-figure=steps] svg", viewport=size, color_scheme=scheme
    ) as opened:
        page = opened.page
        assert page.locator(".chart").count() == 3
        points = page.locator("[data-figure=steps] .scatterlayer .trace")
        assert [points.nth(at).locator(".point").count() for at in range(4)] == [9, 1, 9, 1]
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        page.click(".contents a[href='#steps']")
        box = page.locator("#steps h2").bounding_box()
        assert 0 <= box["y"] < size["height"] / 2


def test_a_term_is_explained_where_it_is_pointed_at_or_tapped(browser, tmp_path):
    path = write_report(probed_training(tmp_path / "run"))
    with Opened(browser, path, wait="[data-figure=steps] svg", has_touch=True) as opened:
        page = opened.page
        hint = page.locator("#hint")
        assert hint.is_hidden()
        page.hover("h1 .term >> nth=0")
        assert hint.inner_text().startswith("How undecided the policy is")
        page.mouse.move(2, 2)
        assert hint.is_hidden()
        page.tap("#steps .lead .term >> nth=0")
        assert hint.inner_text().startswith("Learning rate times the slope")
        page.keyboard.press("Escape")
        assert hint.is_hidden()


def test_tables_print_whole(browser, tmp_path):
    path = write_report(probed_training(tmp_path / "run"))
    with Opened(browser, path, wait="[data-figure=steps] svg", color_scheme="dark") as opened:
        page = opened.page
        assert page.locator("#steps table").is_visible()  # ten rows: open
        assert page.locator("#glossary dl").is_hidden()
        page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.locator("#glossary dl").is_visible()
        assert page.eval_on_selector(".scroll", "x => getComputedStyle(x).overflowX") == "visible"
        assert page.locator(".contents").is_hidden()
        paper = page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
        assert paper == "rgb(255, 255, 255)"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    return write_report(example_run_ledger(tmp_path_factory.mktemp("ledger") / "run"))


def test_a_runs_ledger_is_grouped_on_the_page(browser, ledger):
    with Opened(browser, ledger) as opened:
        page = opened.page
        assert page.is_visible('[data-grouping="difficulty"]')
        page.select_option("#grouping", "layer")
        page.select_option("#manner", "each")
        assert page.is_visible('[data-grouping="layer"]')
        assert page.is_hidden('[data-grouping="difficulty"]')
        figure = page.eval_on_selector('[data-chosen="account_dH"]', "e => e.dataset.figure")
        assert figure == "account_dH_layer_each"
        names = page.eval_on_selector(
            '[data-chosen="account_dH"]', "e => e.data.map(trace => trace.name)"
        )
        assert names == ["model.layers.0", "model.layers.1", "all batches"]


def test_links_into_a_runs_ledger(browser, ledger):
    with Opened(browser, ledger) as opened:
        page = opened.page
        href = page.eval_on_selector("#words td a", "e => e.getAttribute('href')")
        page.click("#words td a")
        page.wait_for_selector(".rollout.found")
        uid, k = href.removeprefix("#rollout=").split("&token=")
        assert f"{k} of rollout {uid}" in page.inner_text("#tip")
        page.click("#prompts th a")
        page.wait_for_function("() => document.getElementById('find').value !== ''")
        prompt = page.input_value("#find")
        page.wait_for_function("() => window.location.hash.startsWith('#prompt=')")
        assert page.evaluate("() => window.location.hash") == f"#prompt={prompt}"
        assert all(prompt in text for text in page.locator(".rollout .facts").all_inner_texts())
        page.evaluate("() => { window.location.hash = '#rollout=99-99' }")
        page.wait_for_selector("#fragment:visible")
        assert "rollout 99-99 is not on this page" in page.inner_text("#fragment")
