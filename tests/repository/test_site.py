"""The documentation says what the code says, and builds into a site that needs no network."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
import yaml

from checkout import DISTRIBUTION, DOCS, PACKAGE, ROOT
from entropy_experiments.cli import app, job
from entropy_experiments.config import (
    every_key,
    known_fields,
    load_config,
    parse_config,
    template_names,
)
from entropy_experiments.config.documents import ALIASES, RETIRED, SECTIONS
from entropy_experiments.report.html.page import TERMS
from entropy_experiments.sampling.datasets import load_problems

DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUESTION = {"question": "Ann has 2 apples and buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"}
ANY_JSONL = {"prompt": QUESTION["question"], "answer": "5"}
"""A line of GSM8K's own format, and of data.dataset: jsonl."""


def blocks(language):
    for document in DOCUMENTS:
        for kind, body in BLOCK.findall(document.read_text("utf-8")):
            if kind == language:
                yield document, body


def made():
    """docs/make_reference.py as a module; docs is no package."""
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = made()


@pytest.mark.parametrize("path", REFERENCE.PAGES, ids=lambda path: path.name)
def test_generated_pages_are_what_the_code_says(path):
    again = "write it again: make docs, or python docs/make_reference.py"
    assert path.read_text("utf-8") == REFERENCE.PAGES[path](), again


def test_a_page_of_keys_that_lost_its_mark_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(REFERENCE, "DOCS", tmp_path)
    page = tmp_path / "config.md"
    page.write_text(f"# Keys\n\n{REFERENCE.BELOW}old rows\n", "utf-8")
    assert REFERENCE.explanation("config.md") == f"# Keys\n\n{REFERENCE.BELOW}"
    for text, count in (("# Keys\n", 0), (2 * REFERENCE.BELOW, 2)):
        page.write_text(text, "utf-8")
        with pytest.raises(ValueError, match=rf"config\.md: got {count} marks; expected one\. Put"):
            REFERENCE.explanation("config.md")


def test_the_reference_has_every_key_and_every_command():
    keys = (DOCS / "config.md").read_text("utf-8")
    for name, section in known_fields().items():
        part = keys.split(f"\n### {name}\n")[1].split("\n##")[0]
        for key in every_key(section):
            assert f"| `{key}` |" in part, f"{name}.{key}"
    said = (DOCS / "reference" / "commands.md").read_text("utf-8")
    for command in typer.main.get_command(app).commands:
        assert f"## entropy-probe {command}\n" in said


def test_bounds_of_the_schema_are_told():
    keys = (DOCS / "config.md").read_text("utf-8")
    for row in (
        "| `lr` | number, above 0 |",
        "| `clip_low` | number, at least 0, at most 1 |",
        "| `top_p` | number, above 0, at most 1 |",
        "| `evaluation_prompts` | whole number, at least 2 |",
        "| `weighting` | `snis`, `per_decision` | `per_decision` |",
        "| `learning_rates` | list of numbers, above 0 |",
    ):
        assert row in keys


class Resources(HTMLParser):
    """What a browser would fetch by itself: not the links that a reader may follow."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in {"script", "img", "iframe", "source"} and attrs.get("src"):
            self.found.append(attrs["src"])
        if tag == "link" and attrs.get("href") and attrs.get("rel") != "canonical":
            self.found.append(attrs["href"])


def test_the_site_builds_without_warnings_and_needs_no_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and 404.html
    for page in pages:
        text = page.read_text("utf-8")
        assert str(ROOT) not in text
        for resource in Resources(text).found:
            assert "//" not in resource, (page.name, resource)
    for sheet in tmp_path.rglob("*.css"):
        text = sheet.read_text("utf-8")
        outside = [url for url in re.findall(r"url\(\s*['\"]?([^'\")]+)", text) if "//" in url]
        assert all(url.startswith("data:") for url in outside), sheet.name
        assert not re.search(r"@import[^;]*//", text)
    assert not list(tmp_path.rglob("*.py"))


def test_keys_that_pages_name_exist():
    known = set(every_key(known_fields())) | {alias.spelling for alias in ALIASES} | set(RETIRED)
    named = re.compile(rf"`((?:{'|'.join([*known_fields(), *SECTIONS])})\.[\w.]+)(?:[:=][^`]*)?`")
    files = (".py", ".json", ".md", ".yaml", ".safetensors")
    count = 0
    for document in DOCUMENTS:
        for key in named.findall(document.read_text("utf-8")):
            if not key.endswith(files):
                assert key in known, f"{document.name}: {key}"
                count += 1
    assert count > 40


def test_defaults_of_the_memory_page():
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \|", (DOCS / "howto_scale.md").read_text(), re.M)
    assert len(rows) >= 6
    for key, said in rows:
        section, name = key.split(".")
        default = known_fields()[section][name]
        if default is not None:
            assert said == str(default).lower(), key


def test_reasons_of_the_trust_page_are_those_of_the_code():
    rows = re.findall(r"^\| `([^`]+)`", (DOCS / "howto_trust.md").read_text(), re.M)
    rows.remove("why_not")
    assert len(rows) >= 10
    source = "\n".join(p.read_text() for p in PACKAGE.rglob("*.py"))
    for reason in rows:
        assert reason in source, reason


def test_the_glossary_page_has_every_term_of_the_report():
    page = (DOCS / "glossary.md").read_text("utf-8").lower()
    for term in TERMS:
        assert f"**{term.lower()}**" in page, term


def test_paths_of_the_architecture_page_exist():
    page = (DOCS / "architecture.md").read_text("utf-8")
    paths = re.findall(r"`((?:\w+/)*(?:\w+/|\w+\.py))`", page)
    assert len(paths) >= 30
    for path in paths:
        assert (PACKAGE / path).exists(), path
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    for room in rooms - {"utils", "configs", "embedded"}:
        assert f"`{room}/`" in page, room


def test_extras_of_the_install_page_are_those_of_the_package():
    rows = re.findall(r"^\| `([\w-]+)` \|", (DOCS / "install.md").read_text(), re.M)
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    assert set(rows) == set(project["optional-dependencies"])


def test_exit_codes_of_the_page():
    rows = re.findall(r"^\| (\d+) \|", (DOCS / "reference" / "commands.md").read_text(), re.M)
    known = {0, 3, job.UNEXPECTED, job.BAD_INPUT, job.INTERRUPTED}
    known |= {job.TERMINATED, job.HUNG_UP, job.CLOSED_PIPE}
    assert set(map(int, rows)) == known


def test_json_blocks_are_json():
    found = [json.loads(body) for _, body in blocks("json")]
    assert found


def test_yaml_blocks_are_configurations():
    found = [parse_config(yaml.safe_load(body)) for _, body in blocks("yaml")]
    assert found


def console(start):
    """(document, words) of every command in a console block that begins with `start`."""
    for document, body in blocks("console"):
        for line in body.replace("\\\n", " ").splitlines():
            if line.startswith(start):
                yield pytest.param(document, line, id=f"{document.name}:{line[:50]}")


@pytest.mark.parametrize(("document", "line"), list(console("entropy-probe ")))
def test_commands_on_files_of_the_readers_own_are_valid(document, line, tmp_path, monkeypatch):
    """They cannot run here: their options are parsed, and their configuration is read."""
    monkeypatch.chdir(tmp_path)
    for file, body in blocks("yaml"):
        if file == document:
            Path("mine.yaml").write_text(body)
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    given = command.make_context(command.name, words).params
    if "overrides" in given:
        config = load_config(given.get("config") or given.get("file"))
        config = config.with_overrides(given["overrides"] or [])
        path = config.data.file
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            line = ANY_JSONL if config.data.dataset == "jsonl" else QUESTION
            Path(path).write_text(json.dumps(line) + "\n")
            (problem,) = load_problems(config.data.dataset, path=path)
            assert problem.answer.strip() == "5"


def test_other_commands_of_the_readers_own_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    extras = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    extras = set(extras["optional-dependencies"])
    for _, body in blocks("console"):
        for line in body.replace("\\\n", " ").splitlines():
            if not line.startswith(("make ", "pip ", "python ", ".venv/")):
                continue
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                assert set(words[1:]) <= targets, line
            if words[:2] == ["pip", "install"]:
                assert set(re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", line)))) <= extras
            if words and words[0].endswith("python") and words[1:2] and "/" in words[1]:
                script = (ROOT / words[1]).read_text()
                for option in (word for word in words[2:] if word.startswith("--")):
                    assert f'"{option}"' in script, line


def test_templates_of_the_configuration_page():
    said = (DOCS / "config.md").read_text()
    for name in template_names():
        assert f"`{name}`" in said


def test_no_page_names_a_machine_or_a_registry():
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        assert not re.search(r"/work/|/root/|/opt/|pypi\.org|index-url|localhost", text), (
            document.name
        )
