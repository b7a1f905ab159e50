"""A batch's prompt embedding, from the text and the numbers of its demonstrations.

    text = LN(W_t h),  h = mean of the language model's last states over real tokens
    ctrl = MLP(f15),   e = (1 - w) text + w ctrl

What may be cached: a frozen model's h, keyed by text and weights; of a model in training only the
tokens, since its h is stale after every step and its graph is gone. A frozen model reads each text
alone, so a cached h does not depend on which batch it came in: a resumed run, whose cache is empty,
gets the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from arc_refine.batch import BatchInputs
from arc_refine.features import FEATURE_NAMES
from arc_refine.language import Language, fingerprint, pooled_states, token_ids


class PromptEncoder(nn.Module):
    """`lm` is the one language model; without one, or with fuse = 1, e is ctrl alone."""

    def __init__(
        self,
        language: Language | None,
        prompt_width: int = 64,
        fuse: float = 0.3,
        *,
        feature_dim: int = len(FEATURE_NAMES),
        hidden: int = 64,
    ) -> None:
        super().__init__()
        if not 0 <= fuse <= 1:
            raise ValueError(f"fuse is {fuse}; expected the share of the numbers, 0 to 1. Use 0.3.")
        self.prompt_width: int = prompt_width
        self.fuse: float = float(fuse) if language is not None else 1.0
        # A part that does not enter e is not built: its parameters would never get a gradient.
        reads_text = language is not None and self.fuse < 1
        self.lm: nn.Module | None = language.model if language is not None and reads_text else None
        self.tokenizer: Any = language.tokenizer if language is not None else None
        self.text: nn.Linear | None = (
            nn.Linear(language.width, prompt_width, bias=False)
            if language is not None and reads_text
            else None
        )
        self.text_norm: nn.LayerNorm | None = nn.LayerNorm(prompt_width) if reads_text else None
        self.ctrl: nn.Sequential | None = (
            nn.Sequential(
                nn.Linear(feature_dim, hidden), nn.GELU(), nn.Linear(hidden, prompt_width)
            )
            if self.fuse > 0
            else None
        )
        self._tokens: dict[str, list[int]] = {}
        self._pooled: dict[tuple[str, str], Tensor] = {}
        self._seen_weights: tuple[tuple[int, int], ...] = ()
        self._weights_hash = ""

    def forward(self, inputs: BatchInputs) -> Tensor:
        parts: list[Tensor] = []
        if self.text is not None and self.text_norm is not None:
            h_BW = self.pooled(inputs.texts).to(self.text.weight)
            parts.append((1 - self.fuse) * self.text_norm(self.text(h_BW)))
        if self.ctrl is not None:
            weight = next(self.ctrl.parameters())
            parts.append(self.fuse * self.ctrl(inputs.features_BF.to(weight)))
        return torch.stack(parts).sum(0)

    def pooled(self, texts: tuple[str, ...]) -> Tensor:
        """h of each text, [B, LM width]; every different text is read once."""
        if self.lm is None:
            raise ValueError("this encoder has no language model; expected one. Pass a Language.")
        distinct = list(dict.fromkeys(texts))
        if self.lm_trains:
            h_NW = pooled_states(self.lm, [self._ids(text) for text in distinct])
        else:
            h_NW = torch.stack([self._frozen(text) for text in distinct])
        where = {text: n for n, text in enumerate(distinct)}
        index_B = torch.tensor([where[text] for text in texts], device=h_NW.device)
        return h_NW.index_select(0, index_B)

    @property
    def lm_trains(self) -> bool:
        return self.lm is not None and any(p.requires_grad for p in self.lm.parameters())

    def clear_cache(self) -> None:
        self._pooled.clear()

    def _ids(self, text: str) -> list[int]:
        if text not in self._tokens:
            self._tokens[text] = token_ids(self.tokenizer, text)
        return self._tokens[text]

    @torch.no_grad()
    def _frozen(self, text: str) -> Tensor:
        key = (text, self._lm_hash())
        if key not in self._pooled:
            self._pooled[key] = pooled_states(self.lm, [self._ids(text)])[0]  # type: ignore[arg-type]
        return self._pooled[key]

    def _lm_hash(self) -> str:
        """The weights' hash, computed anew only after a tensor was replaced or written to."""
        assert self.lm is not None
        seen = tuple((p.data_ptr(), p._version) for p in self.lm.parameters())
        if seen != self._seen_weights:
            self._weights_hash, self._seen_weights = fingerprint(self.lm), seen
            self._pooled.clear()
        return self._weights_hash
