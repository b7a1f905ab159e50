"""What every section of the configuration shares: strictness, and the kinds of value.

Strict means that text is never read as a number nor a number as text, with one exception: `8e-7`.
YAML 1.1 (PyYAML's `safe_load`, which users' own scripts call) reads it as text, so a number field
accepts text of exactly that form. The docstring under a field is its description in the JSON
schema and in config_template.yaml.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
T = TypeVar("T")
LONGEST_PATH = 4096


class Section(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def _exponent(value: Any) -> Any:
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _tuple(value)


def _path(value: str) -> str:
    if "\0" in value or len(value) > LONGEST_PATH:
        raise ValueError(
            f"got a text of {len(value)} characters{' with a zero byte' if chr(0) in value else ''}"
            "; expected a path."
        )
    return os.path.expanduser(value)


Number = Annotated[float, BeforeValidator(_exponent)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
LARGEST_COUNT = 2**31 - 1


def at_most(limit: int) -> AfterValidator:
    """Not a limit of the schema: it would stand at every count, and no count comes near it."""

    def check(value: int) -> int:
        if value > limit:
            raise ValueError(f"got {value}, expected at most {limit}.")
        return value

    return AfterValidator(check)


Countable = at_most(LARGEST_COUNT)
Count = Annotated[int, Field(ge=1), Countable]
Seed = Annotated[int, Field(ge=0), at_most(2**32 - 1)]
"""As numpy takes them."""
TorchSeed = Annotated[int, Field(ge=0), at_most(2**63 - 1)]
Text = Annotated[str, Field(min_length=1)]
Path = Annotated[Text, AfterValidator(_path)]
Many = Annotated[tuple[T, ...], BeforeValidator(_tuple)]
Some = Annotated[tuple[T, ...], BeforeValidator(_tuple), Field(min_length=1)]
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Names = Annotated[tuple[Text, ...], BeforeValidator(_names), WithJsonSchema(_TEXTS)]
"""A list of texts; a single text is a list of one."""
Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
