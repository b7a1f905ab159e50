"""How far the step of an influence study is from the one that training made.

A study splits the step that is rebuilt from the recorded batch. Where that is another step than
training's, shares of it would be shares of a step that nobody made: it is refused. A batch that was
imported from a file names no weights: it is training's where a certificate says so. Where it makes
another step, or nothing certifies it, the study is of the step from this batch, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.optimizer_state import ORDER_NOTE
from entropy_experiments.checkpoints.runs import next_checkpoint
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.pipelines.probe_inputs import ProbeInputs
from entropy_experiments.pipelines.run_conditions import own_device
from entropy_experiments.results import Certified
from entropy_experiments.types import Direction, Params
from entropy_experiments.update.certificate import (
    APART,
    FingerprintCertificate,
    StepCertificate,
    fingerprint_certificate,
    step_certificate,
)

SAME_STEP = 1e-4
"""Relative distance below which a rebuilt step has every moment at its own parameter."""


def certified_step(probe: ProbeInputs, direction: Direction, gradient: Params) -> Certified:
    """JSON: `step_distance` relative to the step made and its `certificate` in words, or
    `unchecked`, why it is not known.

    `another_step` says that an imported batch makes another step than training's.
    """
    if not probe.real:
        return {}
    gradient_distance = probe.gradient_distance(gradient)
    distances: Certified = {"gradient_distance": gradient_distance}
    certificate, absent = certificate_of(probe, direction)
    apart = None
    other_gradient = gradient_distance is not None and gradient_distance > APART
    if start := probe.other_start:
        apart = f"this is not the step that training made: {start}"
    elif certificate is not None and certificate.apart:
        apart = str(certificate)
    elif other_gradient:
        apart = (
            "the gradient rebuilt from the recorded batch is not the one that training used: it is "
            f"{gradient_distance:.0%} away from its recorded fingerprint"
        )
    if apart is not None and probe.bound:
        whole = probe.has_gradient and other_gradient
        raise _refused(apart[:1].upper() + apart[1:], probe, by_recorded_gradient=whole)
    if certificate is not None:
        distances["step_distance"] = certificate.relative_error
        distances["certificate"] = str(certificate)
    else:
        open_questions = (absent, probe.checkpoint.other_count)
        distances["unchecked"] = "; ".join(text for text in open_questions if text)
    if apart is not None:
        distances["another_step"] = apart
    return distances


def _refused(what: str, probe: ProbeInputs, *, by_recorded_gradient: bool) -> ValueError:
    """`by_recorded_gradient`: training recorded another gradient than the rebuilt one, so that
    `run` has the step that training made."""
    reasons = "; ".join(probe.reasons) or "no reason is known"
    whole = (
        "`entropy-probe run` analyses the whole step, by the gradient that training recorded"
        if by_recorded_gradient
        else "`entropy-probe run` does not trust it either"
    )
    return ValueError(
        f"{what} ({reasons}). Its split into rollouts and tokens would be of a step that nobody "
        f"made. {whole}; data.update_rollouts: drawn splits a hypothetical one."
    )


def still_open(notes: Iterable[str], distance: float | None) -> tuple[str, ...]:
    """Of what the files leave open, what a step this near to training's (or None) leaves open too.

    Moments of two parameters in each other's place would have made another step.
    """
    proven = distance is not None and distance < SAME_STEP
    return tuple(note for note in notes if not (proven and note.startswith(ORDER_NOTE)))


def certificate_of(
    probe: ProbeInputs, direction: Direction
) -> tuple[StepCertificate | FingerprintCertificate | None, str]:
    """The step against the checkpoint that followed, or against its recorded fingerprint.

    Both are at the rate of training: a step asked about at another one is checked at that.
    """
    if not probe.real:
        return None, "the update is hypothetical, nobody made this step"
    if probe.altered:
        return None, f"the config asks for another loss ({'; '.join(probe.altered)})"
    if probe.config.checkpoint.sharding != "none":
        return None, "the model is cut over the processes, and so is the rebuilt step"
    if probe.other_start:
        return None, f"another step was made: {probe.other_start}"
    if probe.made is not None and probe.made.lr == 0:
        return None, "training made its step at learning rate 0, as recorded: nothing moved"
    if probe.lr_stored > 0:
        direction = replace(direction, lr=probe.lr_stored)
    later = next_checkpoint(probe.checkpoint.path)
    if later is None:
        return _by_fingerprint(probe, direction)
    settings = probe.config.checkpoint
    try:
        after = load_checkpoint(
            later,
            base=settings.base,
            backbone=settings.backbone,
            dtype=settings.dtype,
            device_map=own_device(settings.device),
            need_optimizer=False,
            read_optimizer=False,
        )
        params = SequenceProcessor(after.model).params
        certificate = step_certificate(direction, probe.policy.params, params)
    except (ValueError, OSError) as error:  # half-written, say: the probe itself is done
        certificate, absent = _by_fingerprint(probe, direction)
        unusable = f"the checkpoint one step later cannot be used ({error})"
        return certificate, "" if certificate is not None else f"{unusable}; {absent}"
    if certificate.apart:
        # More than the step may lie between two checkpoints: a callback that changes weights, say.
        of_step, _ = _by_fingerprint(probe, direction)
        if of_step is not None and not of_step.apart:
            return of_step, ""
    return certificate, ""


def _by_fingerprint(
    probe: ProbeInputs, direction: Direction
) -> tuple[FingerprintCertificate | None, str]:
    check = probe.made
    if check is None:
        return None, "the checkpoint one step later is not beside this one, nor is a fingerprint"
    if check.change is None or not bool(check.change.any()):
        return None, "training ended before this step was made, or it moved nothing"
    return fingerprint_certificate(direction, check.change), ""
