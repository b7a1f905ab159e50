"""A reader finds the answer to each task from the first page in two clicks.

The first click is a link of docs/index.md, or an entry of the navigation, whose own words name the
task: a link that leads there under another name does not count. The second click is a heading of
that page (the sidebar lists them), or a link on it.
"""

import re
from functools import cache
from typing import NamedTuple

import pytest
import yaml
from markdown import Markdown

from checkout import DOCS, ROOT

LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^)\s]+)\)")


class Task(NamedTuple):
    question: str
    signpost: str
    """A pattern in the words of the first click."""
    answer: str
    """page#heading."""


TASKS = (
    Task("analyse a checkpoint of my TRL run", "my TRL run", "howto_checkpoint.md#what-is-read"),
    Task(
        "put the probe into my trainer",
        "into my trainer",
        "howto_online.md#trls-grpotrainer-and-rlootrainer",
    ),
    Task("what does trusted mean?", "trust", "howto_trust.md#what-to-do"),
    Task("it runs out of memory", "memory", "howto_scale.md#when-memory-runs-out"),
    Task("which tokens did it?", "which tokens", "tutorial_influence.md#1-a-study-from-the-shell"),
    Task("read results.json", r"results\.json", "file_formats.md#resultsjson-of-run"),
    Task("install only the doctor", "install", "install.md#three-distributions"),
    Task("is a mixture of experts supported?", "model supported", "architectures.md#the-table"),
    Task("find the formula of the slope", "formula", "theory.md#one-ratio-three-uses"),
    Task("which fields of my NeMo-RL dump are used?", "dumps", "rollout_dumps.md#formats"),
    Task("ask all my runs at once", "SQL", "howto_query.md#tables"),
    Task("resume after a kill", "after a kill", "howto_checkpoint.md#resume-after-a-kill"),
    Task("what is k-hat?", "what does this word mean", "glossary.md#how-sure-it-is"),
    Task("where would a new loss go?", "code", "architecture.md#where-a-new-part-goes"),
    Task("what does exit code 2 mean?", "exit codes", "reference/commands.md#exit-codes"),
    Task(
        "what does momentum 90 % mean?",
        "share",
        "tutorial_influence.md#why-momentum-is-often-90-percent",
    ),
    Task("how large a batch?", "batch size", "howto_online.md#how-large-a-batch-do-i-need"),
    Task(
        "a real language model on a laptop",
        "real language model",
        "tutorial_first.md#5-a-real-language-model-on-a-laptop",
    ),
)


def links(page):
    """(the words around a link, its target) of a page; a table's row is the words of its links."""
    folder = (DOCS / page).parent
    for line in (DOCS / page).read_text("utf-8").splitlines():
        for _, target in LINK.findall(line):
            if "//" in target:
                continue
            file, hash_, anchor = target.partition("#")
            path = (folder / file).resolve() if file else DOCS / page
            if path.is_relative_to(DOCS):
                yield line, f"{path.relative_to(DOCS)}{hash_}{anchor}"


def navigation(entries):
    """(title, page) of the site's navigation, which every page shows."""
    for entry in entries:
        for title, below in entry.items():
            if isinstance(below, str):
                yield title, below
            else:
                yield from navigation(below)


@cache
def headings(page):
    """The anchors that mkdocs gives to a page's headings, as deep as its sidebar shows them."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    depth = site["theme"]["navigation_depth"]
    reader = Markdown(extensions=["toc", "tables", "fenced_code"])
    reader.convert((DOCS / page).read_text("utf-8"))

    def walk(tokens):
        for token in tokens:
            if token["level"] <= depth:
                yield token["id"]
                yield from walk(token["children"])

    return set(walk(reader.toc_tokens))


def shown_everywhere():
    return navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])


def first_clicks():
    yield from links("index.md")
    yield from shown_everywhere()


def clicks(task):
    """How many clicks lead to the answer; None: more than two, or no signpost says so."""
    page, _, heading = task.answer.partition("#")
    if heading not in headings(page):
        return None
    named = [to for words, to in first_clicks() if re.search(task.signpost, words, re.IGNORECASE)]
    if task.answer in named:
        return 1
    for target in named:
        opened = target.partition("#")[0]
        if opened == page or task.answer in (to for _, to in links(opened)):
            return 2
    return None


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.question)
def test_the_answer_is_two_clicks_from_the_first_page(task):
    assert clicks(task) is not None


def test_it_has_teeth():
    (known,) = (task for task in TASKS if task.signpost == "memory")
    assert clicks(known._replace(answer="howto_scale.md#no-such-heading")) is None
    assert clicks(known._replace(signpost="no such words")) is None
    assert clicks(known._replace(answer="theory.md#trust")) is None


def test_the_navigation_has_every_page_once():
    pages = [page for _, page in shown_everywhere()]
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert len([page for page in pages if not page.startswith("api/")]) <= 32
