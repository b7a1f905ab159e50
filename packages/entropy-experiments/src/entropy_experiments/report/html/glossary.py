"""Every term of a report in one line, for those who point at it; and all of them at its end."""

from __future__ import annotations

import re
from typing import Any

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
}
"""In the order of the page's own glossary."""

_FIND = re.compile(
    "|".join(rf"(?<!\w){re.escape(term)}(?!\w)" for term in sorted(TERMS, key=len, reverse=True)),
    re.IGNORECASE,
)
_KEY = {term.lower(): term for term in TERMS}


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
