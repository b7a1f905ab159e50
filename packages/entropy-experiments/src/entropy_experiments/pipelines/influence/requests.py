"""What a `BatchRequest` or a workspace may say, kind by kind.

    kind              as evaluation batch                       as update batch (workspace)
    update            U's own rollouts, or fresh answers        recorded in training, or drawn
    evaluation        drawn, prompts that U does not have       drawn, on the evaluation's split
    prompt_ids        problems of the dataset by their index    the same, with rewards
    custom_prompts    answers drawn to texts                    the same; answers make rewards
    custom_sequence   prompt and response, scored as given      with rewards or advantages
    from_file         rollouts saved here, or a dump            an update batch, or such a dump

Parameters are checked before a model is loaded: a mistake costs no minutes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from entropy_experiments.config import ConfigError
from entropy_experiments.config.fields import Count, Many, Path, Section, Some, Text
from entropy_experiments.config.problems import describe
from entropy_experiments.config.sections import BatchRequest, Index, Workspace

Group = Annotated[int, Field(ge=2)]
GROUP = 2
"""Answers per evaluation prompt: a reward's slope compares answers to one prompt."""


class Sequences(Section):
    """Prompt and response, as texts or as token ids."""

    sequences: Some[dict[str, Any]]
    append_eos: bool = True


class File(Section):
    """A folder of save_rollouts or save_update_batch, or a framework's dump (dumps/formats.py)."""

    path: Path
    step: int | None = None
    ranks: Count | None = None
    max_completion_length: Count | None = None
    append_eos: bool = True


class EvaluationUpdate(Section):
    fresh: bool = False
    group: Count = GROUP


class EvaluationDrawn(Section):
    prompts: Count | None = None
    group: Count = GROUP
    split: Text | None = None


class EvaluationIds(Section):
    ids: Some[Index]
    group: Count = GROUP
    split: Text | None = None


class EvaluationPrompts(Section):
    prompts: Some[Text]
    answers: Some[Text] | None = None
    facts: Many[dict[str, Any]] | None = None
    group: Count = GROUP


class WorkspaceUpdate(Section):
    batch: Literal["auto", "recorded", "drawn"] | None = None
    prompts: Count | None = None
    group: Group | None = None


class WorkspaceDrawn(Section):
    prompts: Count | None = None
    group: Group | None = None
    split: Text | None = None


class WorkspaceIds(Section):
    ids: Some[Index]
    group: Group | None = None
    split: Text | None = None


class WorkspacePrompts(Section):
    prompts: Some[Text]
    answers: Some[Text]
    facts: Many[dict[str, Any]] | None = None
    group: Group | None = None


EVALUATION: dict[str, type[Section]] = {
    "update": EvaluationUpdate,
    "evaluation": EvaluationDrawn,
    "prompt_ids": EvaluationIds,
    "custom_prompts": EvaluationPrompts,
    "custom_sequence": Sequences,
    "from_file": File,
}
WORKSPACE: dict[str, type[Section]] = {
    "update": WorkspaceUpdate,
    "evaluation": WorkspaceDrawn,
    "prompt_ids": WorkspaceIds,
    "custom_prompts": WorkspacePrompts,
    "custom_sequence": Sequences,
    "from_file": File,
}


def evaluation_params(request: BatchRequest, where: str) -> Any:
    """The request's parameters, checked; `where` is the dotted key for messages."""
    return _checked(EVALUATION[request.kind], request.kind, request.params, where)


def workspace_params(workspace: Workspace, where: str = "influence.update_batch") -> Any:
    return _checked(WORKSPACE[workspace.kind], workspace.kind, workspace.params, where)


def _checked(model: type[Section], kind: str, params: dict[str, Any], where: str) -> Section:
    try:
        checked = model.model_validate(params)
    except ValidationError as failure:
        lines = [_line(error, model, kind) for error in failure.errors()]
        raise ConfigError(f"{where}.params", lines) from None
    facts, texts = getattr(checked, "facts", None), getattr(checked, "prompts", ())
    for name in ("answers", "facts"):
        values = getattr(checked, name, None)
        if values is not None and len(values) != len(texts):
            raise ConfigError(
                f"{where}.params",
                [f"{name}: got {len(values)} for {len(texts)} prompts, expected one each."],
            )
    if facts is not None and getattr(checked, "answers", None) is None:
        raise ConfigError(f"{where}.params", ["facts: given without answers, which they serve."])
    for name in ("ids", "prompts"):
        values = getattr(checked, name, None)
        if isinstance(values, tuple) and len(set(values)) < len(values):
            raise ConfigError(
                f"{where}.params", [f"{name}: one is given twice; group says how many answers."]
            )
    return checked


def _line(error: Any, model: type[Section], kind: str) -> str:
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        keys = ", ".join(model.model_fields)
        return f"{key}: unknown key. Kind {kind!r} takes {keys}."
    if error["type"] == "missing":
        return f"{key}: is missing; kind {kind!r} needs it."
    name, what = describe(error, {}, {})
    return f"{name}: {what}"
