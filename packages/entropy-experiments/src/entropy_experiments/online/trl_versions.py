"""Where each version of TRL keeps what the probe reads: one table, and the functions that use it.

A row holds from its version up to the next one's, for GRPOTrainer and RLOOTrainer alike; it was
read in the wheels of every minor version from 0.24 to 1.16. `tests/wild` holds 0.24, 0.29, 1.9 and
1.16 to their rows, in environments of their own.

Names that all of them share are in `SHARED`, and those of transformers' Trainer in `IN_TRAINING`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Literal

SHARED = ("_buffered_inputs", "_step", "_metrics")
"""Private names of every version, from the trainer's making on."""
IN_TRAINING = ("current_gradient_accumulation_steps",)
"""Of transformers' Trainer, once the first step has begun."""
GENERATE_METHOD, REWARD_METHOD = "_generate_and_score_completions", "_calculate_rewards"
"""Methods of every version whose results are kept (`trl_trainer.Captures`)."""
LENGTH_LIMIT = "max_prompt_length"


@dataclass(frozen=True, kw_only=True)
class Names:
    since: str
    tokenizer: str
    """A processor of images holds its tokenizer inside."""
    eos: str
    """Where the ids are that end a completion: a path of attributes, to one or to several."""
    prompts: Literal["_tokenize_prompts", "processing_class", "template_as_text"]
    """What makes tokens of a prompt: the trainer's method, or its processing class; in the latter
    case of a conversation at once, or of the text that the chat template makes of it."""
    truncates: tuple[str, ...] = ()
    """Trainers that cut prompts at `max_prompt_length`, and add no special tokens to them."""
    masks: tuple[str, ...] = ("get_high_entropy_mask", "get_off_policy_mask")
    """GRPOTrainer's methods that make factors of each token's policy loss."""
    last_entropy: str | None = None
    """Where an adaptive entropy bonus keeps the entropy that it compares with its target."""

    @property
    def read(self) -> tuple[str, ...]:
        """Attributes of a trainer that must be there, public ones included."""
        own = (self.tokenizer, self.eos.partition(".")[0])
        method = (self.prompts,) if self.prompts == "_tokenize_prompts" else ("processing_class",)
        limit = (LENGTH_LIMIT,) if self.truncates else ()
        return tuple(dict.fromkeys((*SHARED, *own, *method, *limit)))


BOTH = ("GRPOTrainer", "RLOOTrainer")
_1_14 = Names(
    since="1.14.2",
    tokenizer="_tokenizer",
    eos="eos_token_ids",
    prompts="_tokenize_prompts",
    last_entropy="_last_world_entropy",
)
_1_8 = replace(_1_14, since="1.8.0", eos="_tokenizer.eos_token_id")
_1_3 = replace(_1_8, since="1.3.0", last_entropy=None)
_0_29 = replace(_1_3, since="0.29.1", tokenizer="processing_class", eos="eos_token_id")
_0_27 = replace(_0_29, since="0.27.0", prompts="processing_class")
_0_26 = replace(_0_27, since="0.26.0", truncates=("RLOOTrainer",), masks=("get_high_entropy_mask",))
_0_25 = replace(_0_26, since="0.25.0", truncates=BOTH)
_0_24 = replace(_0_25, since="0.24.0", prompts="template_as_text")

VERSIONS = (_1_14, _1_8, _1_3, _0_29, _0_27, _0_26, _0_25, _0_24)
"""Newest first: each row is the one before it, but for what an older version called otherwise."""
OLDEST = VERSIONS[-1].since


def installed_trl() -> str:
    return version("trl")


def names_of(trl: str | None = None) -> Names:
    """The row of a version of TRL (None: the one installed)."""
    trl = installed_trl() if trl is None else trl
    for row in VERSIONS:
        if _release(trl) >= _release(row.since):
            return row
    raise ValueError(
        f"trl {trl} is installed; expected {OLDEST} or newer, whose trainers this program knows. "
        "Upgrade trl, or probe saved checkpoints offline: entropy-probe run."
    )


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers: a release candidate has the names of its release."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return () if numbers is None else tuple(int(part) for part in numbers[0].split("."))


def is_kind(trainer: Any, kinds: Sequence[str]) -> bool:
    """Whether the trainer is one of these classes, or a subclass of one."""
    return any(base.__name__ in kinds for base in type(trainer).__mro__)


def missing_names(trainer: Any) -> str:
    """What the installed version should have and this trainer has not, as a list in words."""
    names = names_of().read
    if not _truncates(trainer):
        names = tuple(name for name in names if name != LENGTH_LIMIT)
    return ", ".join(name for name in names if not hasattr(trainer, name))


def tokenizer_of(trainer: Any) -> Any:
    tokenizer = getattr(trainer, names_of().tokenizer)
    return getattr(tokenizer, "tokenizer", tokenizer)


def eos_of(trainer: Any) -> tuple[int, ...]:
    """Ids that end a completion."""
    ids = attrgetter(names_of().eos)(trainer)
    return tuple(ids) if isinstance(ids, Sequence) else (int(ids),)


def prompt_ids(trainer: Any, prompt: Any) -> tuple[int, ...]:
    """The tokens that this trainer makes of one prompt: a text, or a list of messages."""
    names = names_of()
    # One by one: a tokenizer's padding must not join the prompts.
    if names.prompts == "_tokenize_prompts":
        return tuple(trainer._tokenize_prompts([prompt])[0][0])
    limits = _limits(trainer)
    if isinstance(prompt, str):
        return _single(trainer.processing_class(text=[prompt], **limits))
    template: Mapping[str, Any] = getattr(trainer, "chat_template_kwargs", None) or {}
    if names.prompts == "template_as_text":
        from trl.data_utils import maybe_apply_chat_template

        text = maybe_apply_chat_template({"prompt": prompt}, trainer.processing_class)["prompt"]
        return _single(trainer.processing_class(text=[text], **limits))
    more = {
        key: getattr(trainer, key)
        for key in ("tools", "chat_template")  # of GRPOTrainer, from 0.26 on
        if getattr(trainer, key, None) is not None
    }
    return _single(
        trainer.processing_class.apply_chat_template(
            conversation=[prompt],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **limits,
            **more,
            **template,
        )
    )


def _truncates(trainer: Any) -> bool:
    return is_kind(trainer, names_of().truncates)


def _limits(trainer: Any) -> dict[str, Any]:
    if not _truncates(trainer):
        return {}
    length = getattr(trainer, LENGTH_LIMIT)
    return {"max_length": length, "truncation": True, "add_special_tokens": False}


def _single(encoded: Any) -> tuple[int, ...]:
    return tuple(int(token) for token in encoded["input_ids"][0])
