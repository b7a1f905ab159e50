"""One self-contained HTML file: styles, scripts, data and plotly inside, nothing from elsewhere.

Rollouts are hostile text. They reach the page in two ways only: through the template, escaped, or
as packed JSON (`packed`: it holds no `<`), from which report.js makes text nodes. The page's own
Content-Security-Policy allows two scripts, by their hashes, and no request: report.js, and plotly,
which that one unpacks.

Large texts are deflated, seven bits of them in each character. plotly.js is 4.8 MB and deflates to
1.5. HTML holds text, of which UTF-8 makes one byte only for the 128 characters of ASCII: seven bits
are the most that a byte of a page can carry (base64: six). Three characters would not come through:
NUL and CR, which a parser changes, and `<`, which could end the element. They are written as the
character 256 further on, with the same low seven bits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from entropy_experiments.artifacts import write_whole
from entropy_experiments.report import words
from entropy_experiments.report.html.charts import figures
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.marks import Figure
from entropy_experiments.report.html.token_views import MOST_TOKENS
from entropy_experiments.report.sections import ReportData
from entropy_experiments.results.run_ledger import is_run_ledger
from entropy_experiments.study_files import PAGE

DIGITS = 6
"""Significant digits of numbers in drawings."""
SECTIONS = (
    ("trajectory", "trajectory", "Entropy over the run"),
    ("steps", "probed", "Every probed step"),
    ("curve", "curve", "Over the step size"),
    ("ledger", "ledger", "The ledger"),
    ("momentum", "momentum", "Momentum by batches"),
    ("by-rollout", "rollouts", "By rollout"),
    ("texts", "texts", "The update rollouts"),
    ("covariance", "covariance", "Probability and advantage"),
    ("what-if", "what_if", "What if"),
    ("weights", "weights", "How far to believe it"),
    ("matrix", "matrix", "Whom each rollout moved"),
    ("others", "others", "Other evaluation batches"),
    ("assumed", "assumed", "What was assumed"),
    ("environment", "environment", "Environment"),
    ("glossary", None, "Glossary"),
    ("absent", "absent", "Not in this report"),
)
"""Anchor, the key of the data that it shows, title in the contents."""
INSTALL = "pip install 'entropy-experiments[report]'"
_MOVED = {code: chr(256 + code) for code in (0, 13, ord("<"))}
TERMS = {
    "entropy": "How undecided the policy is about its next token, in nats; 0: always the same one.",
    "nats": "Units of entropy with the natural logarithm; 1 nat is 1.44 bits.",
    "predicted": "Learning rate times the slope of the entropy along the step, before it is made.",
    "second order": "The prediction with the curvature's term: right for larger steps.",
    "measured": "Entropy after the step less before it, on the same rollouts, reweighted.",
    "fresh": "Measured on new rollouts of each policy, which prediction and measurement never saw.",
    "95 %": "Interval that holds the true value in 95 of 100 repetitions; by prompt.",
    "s.e.": "Standard error: the interval's half width over about two.",
    "trusted": "No check found a reason for doubt: weights, noise floor, prompts, the step itself.",
    "not trusted": "A check found a reason for doubt; it is written beside the number.",
    "momentum": "What earlier batches still do to this step, through Adam's first moment.",
    "weight decay": "The pull of every parameter towards zero.",
    "decay": "The pull of every parameter towards zero.",
    "curvature": "How the slope itself changes along the step: the second-order term.",
    "unexplained": "Measured less all lines: higher orders and noise.",
    "eventual": "With the momentum that this batch leaves to later steps.",
    "influence": "A share of the predicted change: what one token or rollout adds to it.",
    "advantage": "How much better than its group a response was; its sign is the push's.",
    "reward": "The mean reward of a step's rollouts.",
    "noise floor": "Change that repacking the same rollouts shows; what is smaller is not real.",
    "η": "Step size: the learning rate that the direction is multiplied by.",
    "effective rollouts": "How many equally weighted rollouts the weighted ones are worth (ESS).",
    "ESS": "How many equally weighted rollouts the weighted ones are worth.",
    "k-hat": "Tail of the importance weights; above 0.7 a few rollouts decide everything.",
    "KL": "How far the policy after the step is from the one before, in nats per response.",
    "clipped": "Share of the weights that were cut at their bound.",
    "importance weights": "How much likelier the new policy makes each rollout than the old one.",
    "hypothetical": "A step on rollouts drawn here; training made another one.",
    "certificate": "The rebuilt step compared with the weights that training really saved.",
    "ledger": "The change as a sum of lines, each with its cause.",
    "evaluation rollouts": "Rollouts that the step is measured on; it does not learn from them.",
    "update rollouts": "Rollouts that the step learns from.",
    "reliability": "Correlation of single tokens' influence between two halves of the prompts.",
    "cancellation": "Sum of |parts| over |total|: how far the parts cancel.",
    "along the path": "Each step times the mean of the slopes at its two ends; all steps added.",
    "exchange rate": "Nats of entropy per unit of expected reward: what the reward cost.",
    "momentum from before the window": "What batches before the window's first one still did.",
    "not covered by the rebuilt steps": "Steps that training made less the same steps rebuilt.",
    "recorded batches": "What every token of every batch did, at once and later through momentum.",
    "unfinished": "What the last batches will still do after the window; no part of the sum.",
}
"""In the order of the page's own glossary."""
_FIND = re.compile(
    "|".join(rf"(?<!\w){re.escape(term)}(?!\w)" for term in sorted(TERMS, key=len, reverse=True)),
    re.IGNORECASE,
)
_KEY = {term.lower(): term for term in TERMS}


def write_report(
    run: str | Path,
    path: str | Path | None = None,
    *,
    trajectory: str | Path | None = None,
    evaluation: str | None = None,
    most_tokens: int = MOST_TOKENS,
    refresh: int | None = None,
) -> Path:
    """Write the report of a run and return its path: without `path`, beside the data.

    `refresh`: the page loads itself again after so many seconds, for a run that goes on.
    """
    checked()
    run = Path(run)
    path = default_path(run) if path is None else Path(path)
    if is_run_ledger(run):
        # It draws with this module.
        from entropy_experiments.report.html.run_ledger import write_run_ledger_page

        refuse_for_ledger(run, trajectory=trajectory, evaluation=evaluation)
        return write_run_ledger_page(run, path)
    data = gather(run, trajectory=trajectory, evaluation=evaluation, most_tokens=most_tokens)
    place_links(data, run if run.is_dir() else run.parent, path.parent)
    return written(render(data, refresh=refresh), path)


def refuse_for_ledger(run: Path, **options: object) -> None:
    """Options that are about one step, beside the ledger of a whole run."""
    wrong = [f"--{name}" for name, value in options.items() if value]
    if wrong:
        raise ValueError(
            f"{run} is the ledger of a whole run (entropy-probe explain), and {', '.join(wrong)} "
            f"{'is' if len(wrong) == 1 else 'are'} about one step. Leave "
            f"{'it' if len(wrong) == 1 else 'them'} out."
        )


def place_links(data: ReportData, run: Path, page: Path) -> None:
    """Where the ledgers of single steps are, as seen from the page."""
    for ledger in (data.get("trajectory") or {}).get("ledgers") or ():
        ledger["path"] = str(run / ledger["folder"])
        target = run / ledger["folder"] / ledger["page"]
        ledger["href"] = quote(Path(os.path.relpath(target, page)).as_posix())


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


def render(data: ReportData, *, refresh: int | None = None) -> str:
    views = packed(embedded(slim(data["texts"]))) if data.get("texts") else None
    return drawn(
        "templates/report.html.j2",
        figures(data),
        data=data,
        views=views,
        refresh=refresh,
        contents=contents_of(data),
    )


def contents_of(data: ReportData) -> list[tuple[str, str]]:
    """(anchor, title) of every section that this report has, in their order."""
    probed = bool((data.get("trajectory") or {}).get("probed"))
    return [
        (anchor, title)
        for anchor, key, title in SECTIONS
        if key is None or (probed if key == "probed" else data.get(key))
    ]


def drawn(name: str, charts: Mapping[str, Figure], **context: Any) -> str:
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
        "explained": explained,
    }
    script, plotly = _own("report.js"), _plotly()
    return environment.from_string(_own(name)).render(
        css=_own("report.css"),
        policy=policy(script, plotly),
        script=script,
        plotly=_packed_plotly(),
        figures=packed(embedded(slim(charts))),
        figure_names=list(charts),
        term=term,
        glossary=TERMS,
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
    return path.read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def _packed_plotly() -> Packed:
    return packed(_plotly())


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


class Packed(NamedTuple):
    size: int
    """Bytes of the deflated text; what follows them in the last character is nothing."""
    text: str


def packed(text: str) -> Packed:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = squeeze.compress(text.encode("utf-8", errors="replace")) + squeeze.flush()
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))
    bits = np.append(bits, np.zeros(-len(bits) % 7, dtype=np.uint8)).reshape(-1, 7)
    codes = np.packbits(np.pad(bits, ((0, 0), (1, 0))), axis=1).tobytes()
    return Packed(len(data), codes.decode("ascii").translate(_MOVED))


def unpacked(text: str, size: int) -> str:
    """As report.js reads it."""
    codes = np.array([ord(character) & 127 for character in text], dtype=np.uint8)
    bits = np.unpackbits(codes[:, None], axis=1)[:, 1:].reshape(-1)
    data = np.packbits(bits).tobytes()[:size]
    return zlib.decompress(data, -15).decode("utf-8")


def explained(text: Any) -> Any:
    """A sentence, escaped, with each term's first occurrence marked for pointing at."""
    from markupsafe import Markup, escape

    out, at, seen = Markup(""), 0, set()
    plain = str(text)
    for match in _FIND.finditer(plain):
        key = _KEY[match[0].lower()]
        if key in seen:
            continue
        seen.add(key)
        out += escape(plain[at : match.start()]) + term(key, match[0])
        at = match.end()
    return out + escape(plain[at:])


def term(key: str, shown: str | None = None) -> Any:
    """One term, to be pointed at."""
    from markupsafe import Markup

    element = Markup('<span class="term" tabindex="0" title="{}">{}</span>')
    return element.format(TERMS[key], shown or key)
