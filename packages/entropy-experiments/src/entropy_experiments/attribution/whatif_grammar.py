"""What a what-if may say: one row per form, for `--help`, for errors and for the tutorial's table.

No import: a command's help answers without torch. `whatif_text` reads the forms; a test holds the
two, and the table in docs/tutorial_influence.md, together.
"""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    text: str
    """Capitals stand for what is filled in, brackets for what may be left out."""
    meaning: str

    @property
    def key(self) -> str:
        return self.text.partition("=")[0]


FORMS = (
    Form("drop=SELECTOR", "without tokens: drop=negative, drop=p<0.1&A<0"),
    Form("reweight=SELECTOR:FACTOR", "their loss times FACTOR: reweight=negative:0.5"),
    Form("drop_rollouts=N,N", "without rollouts: drop_rollouts=3,7"),
    Form("reweight_rollouts=N:FACTOR", "times FACTOR: reweight_rollouts=3:0.5,7:2"),
    Form("drop_tokens=N.K", "token K of rollout N: drop_tokens=3.0,3.5"),
    Form("reweight_tokens=N.K:FACTOR", "times FACTOR: reweight_tokens=3.5:0.5"),
    Form("clip_low=X", "clips ratios below 1 - X: clip_low=0.1, or none"),
    Form("clip_high=X", "clips ratios above 1 + X: clip_high=0.28, or none"),
    Form("beta=X", "of the KL penalty: beta=0.04"),
    Form("entropy_coef=X", "of the entropy bonus: entropy_coef=0.01"),
    Form("lr=X", "another learning rate: lr=1e-3"),
    Form("clip_cov=RATIO[:LOW:HIGH[:SEED]]", "Clip-Cov: clip_cov=0.002 is clip_cov=0.002:1:5:0"),
    Form("kl_cov=RATIO[:COEF]", "KL-Cov: kl_cov=0.002 is kl_cov=0.002:1"),
)
JOINED = "Joined by ';' they are applied in order: 'drop=negative; lr=1e-3'. N and K from 0."
SELECTORS = (
    "SELECTOR: positive, negative (advantage), correct, wrong (the highest reward, if",
    "  that is 1 or more; or less), or comparisons joined by &, such as 'k>=20&h>1', of",
    "  A (advantage), p (probability), h (entropy), logprob, reward, k (place in the",
    "  response), position, rollout, prompt, influence.",
)
CLIP_COV = (
    "RATIO: the share of all tokens taken. Clip-Cov draws them at random (SEED, 0)",
    "  among those whose covariance of advantage and log-prob is between LOW (1) and HIGH",
    "  (5); KL-Cov takes the largest. COEF (1): weight of KL-Cov's penalty.",
)
GRAMMAR = "; ".join(form.text for form in FORMS)


def help_lines() -> list[str]:
    """For a terminal: a form, its meaning, and what the capitals stand for."""
    width = max(len(form.text) for form in FORMS)
    rows = [f"{form.text:{width}}  {form.meaning}" for form in FORMS]
    return [*rows, JOINED, *SELECTORS, *CLIP_COV]
