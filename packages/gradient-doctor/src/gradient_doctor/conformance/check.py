"""Run a function on the golden cases, compare with the exact values, name the mistakes.

A value is *right* within the tolerance of its case, else *wrong*; if it equals what a known
mistaken formula gives, the mistake is named. A case that the function's form cannot express is *not
applicable*, with the reason, and counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.conformance import ranks, trl
from gradient_doctor.conformance.cases import (
    CASES,
    RANKS,
    ROUNDING_AT_MOST,
    STRICT,
    Golden,
    known,
    plain,
    varying,
)
from gradient_doctor.conformance.golden import Scene, sharded
from gradient_doctor.conformance.mistakes import Mistake, View
from gradient_doctor.conformance.outputs import Layout, layouts
from gradient_doctor.conformance.signatures import (
    QUANTITIES,
    Form,
    TargetError,
    forms_of,
    load_target,
)
from gradient_doctor.conformance.text import Case, Conformance

MEAN_OF_MEANS = (
    "mean of means",
    "each rank averages its own tokens and the averages are averaged: ranks with few tokens weigh "
    "too much",
    "all_reduce [sum of entropies, number of tokens], then divide",
)


@dataclass(frozen=True)
class _Subject:
    """The function and how it is called."""

    function: Callable[..., Any]
    name: str
    form: Form

    def __call__(self, scene: Scene) -> Any:
        args, kwargs = self.form.arguments(scene)
        with torch.no_grad():
            return self.function(*args, **kwargs)


@dataclass(frozen=True)
class _Measured:
    """One scene: got against truth. `raised` if there was no number."""

    view: View
    truth: Tensor
    got: Tensor | None
    raised: str = ""

    @property
    def error(self) -> float:
        if self.got is None:
            return math.inf
        return float((self.got - self.truth).abs().nan_to_num(nan=math.inf).max())

    @property
    def worst(self) -> int:
        if self.got is None:
            return 0
        return int((self.got - self.truth).abs().nan_to_num(nan=math.inf).argmax())


def check_entropy(
    target: str | Callable[..., Any],
    *,
    roles: Mapping[str, str] | None = None,
    returns: str | None = None,
) -> Conformance:
    """Check an entropy or log-prob function on the golden cases.

    Args:
        target: The function, or where it is: "module:function".
        roles: What a parameter is where its name does not say it ({"x": "logits"}).
        returns: That a single result is "entropy", "logprob" or "surprisal" (-log-prob).

    Returns:
        A verdict for each case; `passed` is that of all of them, `text()` explains.

    Raises:
        TargetError: If the function cannot be found or called at all.

    Examples:
        >>> import torch
        >>> def entropy(logits):
        ...     p = logits.softmax(-1)
        ...     return -(p * p.log()).sum(-1)
        >>> check_entropy(entropy).passed  # 0 * log 0 is NaN where a logit is -inf
        False
    """
    if returns is not None and returns not in QUANTITIES:
        raise TargetError(f"returns={returns!r}, expected one of {', '.join(QUANTITIES)}.")
    function_or_pair = load_target(target) if isinstance(target, str) else target
    function = trl.adapted(function_or_pair)
    name = (
        target
        if isinstance(target, str)
        else getattr(function_or_pair, "__qualname__", repr(function_or_pair))
    )
    reading, subject, candidates = _understand(function, name, roles, returns)
    address = target if isinstance(target, str) else ranks.importable(function)
    cases: list[Case] = []
    for layout in candidates:
        rounding = _measure(subject, layout, CASES[1].scenes(subject.form, layout)[0]).error
        for golden in CASES:
            cases.append(_judge(subject, layout, golden, rounding))
            if golden.name == "token mean":
                at = (address if function is function_or_pair else "", reading, roles)
                cases.append(_judge_ranks(subject, layout, at))
    return Conformance(
        target=name,
        called=str(subject.form),
        convention="sequence" if subject.form.sequence else "aligned",
        returns=tuple(map(str, candidates)),
        cases=tuple(cases),
    )


def _understand(
    function: Callable[..., Any],
    name: str,
    roles: Mapping[str, str] | None,
    returns: str | None,
) -> tuple[int, _Subject, list[Layout]]:
    """The reading under which the plainest case is right, or else the first that runs."""
    ran: list[tuple[float, int, _Subject, list[Layout]]] = []
    failed: Exception | None = None
    for reading, form in enumerate(forms_of(function, roles)):
        subject = _Subject(function, name, form)
        scene = plain()
        try:
            result = subject(scene)
            short = name.rpartition(":")[2].rpartition(".")[2]
            candidates = layouts(result, scene, form, name=short, returns=returns)
            candidates = [_settled(subject, layout, returns) for layout in candidates]
        except Exception as error:  # the user's function: anything may come out of it
            failed = failed or error
            continue
        error = max(_measure(subject, layout, scene).error for layout in candidates)
        ran.append((error, reading, subject, candidates))
    if ran:
        # The likeliest reading among those that are right; if none is, the likeliest of all.
        least = min(error for error, *_ in ran)
        near = max(STRICT, 2 * least) if least < ROUNDING_AT_MOST else math.inf
        return next(
            (i, subject, candidates) for error, i, subject, candidates in ran if error <= near
        )
    if isinstance(failed, TargetError):
        raise failed
    raise TargetError(
        f"{name} could not be called as {name.rpartition(':')[2]}({forms_of(function, roles)[0]}): "
        f"{type(failed).__name__}: {failed}. Check that the parameters mean what their names say, "
        "or write an adapter."
    ) from failed


def _settled(subject: _Subject, layout: Layout, returns: str | None) -> Layout:
    """Sum or mean, and about which token a column is: whatever makes the plainest case right."""
    options = [layout]
    scene = plain()
    if layout.kind == "token":
        options += [replace(layout, row=True)]
        scene = varying()
    elif layout.kind == "sequence":
        options += [replace(layout, reduction="sum")]
    else:
        options += [replace(layout, reduction=r) for r in ("sum", "sum per sequence")]
    errors = [_measure(subject, option, scene).error for option in options]
    if returns is None and layout.quantity == "entropy" and "entrop" not in subject.name.lower():
        # Positive and not called an entropy: it may be the loss. In one scene that may be chance.
        for option in options[:] if subject.form.has(*_IDS) else ():
            options.append(replace(option, quantity="surprisal"))
            both = [_measure(subject, options[-1], s).error for s in (plain(), varying())]
            errors.append(max(both))
    return options[errors.index(min(errors))] if min(errors) < ROUNDING_AT_MOST else layout


_IDS = ("input_ids", "index", "labels", "model", "batch", "shards")


def _measure(subject: _Subject, layout: Layout, scene: Scene) -> _Measured:
    view = View(scene, subject.form, layout)
    try:
        got = layout.read(subject(scene), scene)
    except Exception as error:  # the user's function: anything may come out of it
        return _Measured(view, view.truth, None, f"{type(error).__name__}: {error}")
    return _Measured(view, view.truth, got)


def _judge(subject: _Subject, layout: Layout, golden: Golden, rounding: float) -> Case:
    reason = golden.reason(subject.form, layout)
    scenes = [] if reason else golden.scenes(subject.form, layout)
    tolerance = golden.tolerance or max(STRICT, min(2 * rounding, ROUNDING_AT_MOST))
    if golden.name == "bf16":
        # This case is about the dtype: a scene that goes wrong in fp32 too belongs to another one.
        scenes = [s for s in scenes if _measure(subject, layout, _in_fp32(s)).error <= tolerance]
        reason = "" if scenes else "the same logits in fp32 go wrong too"
    if any(not View(s, subject.form, layout).truth.isfinite().all() for s in scenes):
        reason = "without a mask of the response, tokens count that the sampler could not draw"
    if reason:
        return Case(name=golden.name, quantity=layout.quantity, exposes=golden.exposes,
                    verdict="not applicable", meaning=reason)  # fmt: skip
    measurements = [_measure(subject, layout, s) for s in scenes]
    bad = [m for m in measurements if not m.error <= tolerance]
    shown = max(bad or measurements, key=lambda m: m.error)
    mistake = None
    # The scene in which the mistake is recognised is the one to show.
    for measured in sorted(bad, key=lambda m: -m.error):
        if mistake := _recognised(measured, golden, tolerance):
            shown = measured
            break
    verdict = "wrong" if bad else "right"
    name, meaning, fix = _explained(shown, mistake, golden) if bad else ("", "", "")
    got = None if shown.got is None else float(shown.got[shown.worst])
    return Case(
        name=golden.name,
        quantity=layout.quantity,
        exposes=golden.exposes,
        verdict=verdict,
        expected=float(shown.truth[shown.worst]),
        got=got,
        error_nats=shown.error,
        scene=shown.view.scene.label,
        mistake=name,
        meaning=meaning,
        fix=fix,
    )


def _in_fp32(scene: Scene) -> Scene:
    return replace(scene, table_RV=scene.table_RV.float())


def _recognised(measured: _Measured, golden: Golden, tolerance: float) -> Mistake | None:
    if measured.got is None or not bool(measured.got.isfinite().all()):
        return None
    best, best_distance = None, tolerance
    for mistake in known(measured.view, golden):
        if mistake.value.shape != measured.got.shape:
            continue
        if float((mistake.value - measured.truth).abs().max()) <= tolerance:
            continue  # this mistake cannot be seen here
        distance = float((mistake.value - measured.got).abs().max())
        # Strictly closer by more than rounding: among equals the case's own mistake is named.
        if distance <= tolerance and distance < best_distance - 1e-9:
            best, best_distance = mistake, distance
    return best


def _explained(
    measured: _Measured, mistake: Mistake | None, golden: Golden
) -> tuple[str, str, str]:
    if measured.raised:
        return "raised", f"no number: {measured.raised}", "make the function accept this case"
    if mistake is not None:
        return mistake.name, mistake.meaning, mistake.fix
    if measured.got is not None and not bool(measured.got.isfinite().all()):
        name, meaning = "not a number", "a banned token has log p = -inf, and 0 * -inf is NaN"
        if measured.view.layout.quantity == "entropy":
            return name, meaning, "torch.where(p > 0, p * log p, 0) before the sum"
        return name, f"{meaning}: a mask of 0 does not hide it", "torch.where(mask, log p, 0)"
    if golden.name == "bf16" or (golden.name == "fp32" and measured.error < 1):
        return (
            "rounding",
            "the error is of the size of half-precision rounding",
            "logits.float() before log_softmax; return fp32",
        )
    return (
        "not recognised",
        "no known mistake gives this value",
        f"compare by hand on {measured.view.scene.label!r}; this case is about {golden.exposes}",
    )


def _judge_ranks(
    subject: _Subject, layout: Layout, at: tuple[str, int, Mapping[str, str] | None]
) -> Case:
    """Two ranks with 8 and 3 tokens: from a list of shards, or from real processes."""
    address, reading, roles = at
    scene = sharded()
    view = View(scene, subject.form, layout)
    truth = float(view.truth.sum()) if layout.kind == "scalar" else math.nan
    blank = Case(name=RANKS, quantity=layout.quantity, exposes="mean of per-rank means",
                 verdict="not applicable")  # fmt: skip
    if layout.kind != "scalar":
        return replace(blank, meaning=f"one value per {layout.kind} is returned: "
                       "the caller reduces; add sums and counts, never means")  # fmt: skip
    if layout.reduction != "mean":
        return replace(blank, meaning=f"a {layout.reduction} is returned: add them over ranks")
    parts = [float(View(s, subject.form, layout).truth) for s in scene.shards]
    naive = sum(parts) / len(parts)
    if subject.form.has("shards"):
        measured = _measure(subject, layout, scene)
        values = (math.nan,) if measured.got is None else (float(measured.got),)
        error = measured.raised
    elif not ranks.communicates(subject.function):
        return replace(blank, meaning="the function calls no collective and takes no `shards`: the "
                       "caller reduces. The mean of these means would be "
                       f"{abs(naive - truth):.3f} nats off on two uneven ranks")  # fmt: skip
    elif not address:
        return replace(blank, meaning="the ranks are processes of their own, and the function "
                       "cannot be imported there: name it as module:function")  # fmt: skip
    else:
        run = ranks.run_ranks(address, reading, layout.key, roles)
        values, error = run.values or (math.nan,), run.error
    local = len(values) > 1 and all(abs(v - p) < STRICT for v, p in zip(values, parts))
    if local:
        return replace(blank, meaning="each rank returns the mean of its own tokens: the caller "
                       "reduces, and must add sums and counts")  # fmt: skip
    got = max(values, key=lambda v: abs(v - truth) if math.isfinite(v) else math.inf)
    wrong = abs(got - truth) if math.isfinite(got) else math.inf
    case = replace(blank, verdict="right" if wrong <= STRICT else "wrong", expected=truth,
                   got=None if error else got, error_nats=wrong, scene=scene.label)  # fmt: skip
    if case.verdict == "right":
        return case
    if error:
        named = ("raised", f"no number: {error}", "make the function run on two ranks")
    elif abs(got - naive) <= STRICT:
        named = MEAN_OF_MEANS
    else:
        named = ("not recognised", f"ranks gave {values}, own means are {parts}", MEAN_OF_MEANS[2])
    return replace(case, mistake=named[0], meaning=named[1], fix=named[2])
