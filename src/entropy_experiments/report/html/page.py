"""One self-contained HTML file: styles, scripts, data and plotly inside, nothing from elsewhere.

Rollouts are hostile text. They reach the page in two ways only: through the template, escaped, or
as JSON in which `<` is written \\u003c, from which report.js makes text nodes. The page's own
Content-Security-Policy allows the two scripts written here, by their hashes, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from entropy_experiments.report.html import words
from entropy_experiments.report.html.charts import figures
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.token_views import MOST_TOKENS
from entropy_experiments.report.run_files import PAGE
from entropy_experiments.rollouts.whole_files import write_whole

DIGITS = 6
"""Significant digits of numbers in drawings."""
INSTALL = "pip install 'entropy-experiments[report]'"


def write_report(
    run: str | Path,
    path: str | Path | None = None,
    *,
    trajectory: str | Path | None = None,
    evaluation: str | None = None,
    most_tokens: int = MOST_TOKENS,
) -> Path:
    """Write the report of a run and return its path: without `path`, beside the data."""
    checked()
    run = Path(run)
    path = default_path(run) if path is None else Path(path)
    data = gather(run, trajectory=trajectory, evaluation=evaluation, most_tokens=most_tokens)
    return written(render(data), path)


def checked() -> None:
    """Refuse where a page cannot be made."""
    lacking = missing()
    if lacking is not None:
        raise ValueError(lacking)


def written(page: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate is no character: a policy may have written one, a file cannot hold it.
    write_whole(path, page.encode("utf-8", errors="replace"))
    return path


def default_path(run: Path) -> Path:
    """RUN/report.html of a folder; beside a file, under its own name."""
    if run.is_dir():
        return run / PAGE
    stem = run.name.removesuffix(".gz").removesuffix(".json")
    return run.with_name(f"{stem}_{PAGE}")


def missing() -> str | None:
    """What is not installed, in words; None: all is there."""
    names = [name for name in ("jinja2", "plotly") if find_spec(name) is None]
    if not names:
        return None
    return f"the HTML report needs {' and '.join(names)}, not installed here: {INSTALL}"


def render(data: Mapping[str, Any]) -> str:
    views = embedded(slim(data["texts"])) if data.get("texts") else None
    return drawn("templates/report.html.j2", figures(data), data=data, views=views)


def drawn(name: str, charts: Mapping[str, Any], **context: Any) -> str:
    """A page from a template of this folder, with its drawings and all that draws them inside."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": words.number,
        "plain": words.plain,
        "fixed": words.fixed,
        "ends": words.ends,
        "scaled": words.scaled,
        "unit_of": words.unit_of,
    }
    script, plotly = _own("report.js"), _plotly()
    return environment.from_string(_own(name)).render(
        css=_own("report.css"),
        policy=policy(script, plotly),
        script=script,
        plotly=plotly,
        figures=embedded(slim(charts)),
        figure_names=list(charts),
        **context,
    )


def policy(*scripts: str) -> str:
    """Nothing is loaded; of scripts, these alone run."""
    allowed = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def embedded(value: Any) -> str:
    """JSON that is safe inside a script element, whatever texts it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def slim(value: Any) -> Any:
    """The same with fewer digits; what is no number is null."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: slim(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        # Long lists of whole numbers are most of a large report.
        whole = all(type(inner) is int for inner in value)
        return value if whole else [slim(inner) for inner in value]
    return value


def _own(name: str) -> str:
    return (files("entropy_experiments.report.html") / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """plotly.js as its Python package carries it. The package itself is not imported: slow."""
    found = find_spec("plotly")
    assert found is not None
    assert found.submodule_search_locations
    path = Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    if not path.is_file():
        raise FileNotFoundError(f"No {path}; expected plotly.js in the package. {INSTALL}")
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    if any(mark in text.lower() for mark in ("</script", "<!--")):
        raise ValueError(f"{path} holds a mark that would end the report's own script element.")
    return text


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
