"""One batch before training: the doctor's look at it, and tests that need the batch changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradient_doctor.doctor import Doctor
from gradient_doctor.findings import Finding, Severity, ordered
from gradient_doctor.keep import everything_kept, random_states, restore_random_states
from gradient_doctor.pads import known_pad, padded_places
from gradient_doctor.score import ScoreTest, score_test
from gradient_doctor.taint import tensors_in

__all__ = ["ScoreTest", "preflight", "score_test"]

_GROWS, _SHRINKS = 1.6, 0.6  # of the gradient when the batch is doubled; a mean gives 1, a sum 2
_COUNTS = 1e-3  # a parameter's share of the whole gradient, below which its ratio is noise


def preflight(
    loss_fn: Callable[..., Tensor],
    modules: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    scaler: Any = None,
    contract: Mapping[str, Any] | None = None,
    batch: Any = None,
    pad_id: int | None = None,
) -> list[Finding]:
    """Examine one forward and backward; afterwards everything is as it was.

    Parameters, gradients, buffers, modes and random states are put back. With `batch` two more
    tests are made: the batch twice over must not change the size of the gradient, and other values
    in padded places must not change the loss.

    Args:
        loss_fn: Returns the loss; called with `batch`, if there is one.
        modules: By name, so that findings can name parameters.
        optimizers: By name.
        scaler: A gradient scaler, if the loop has one.
        contract: As of `Doctor`.
        batch: A tensor, or a dict, list or tuple of tensors.
        pad_id: The padding token; None: the model's own.

    Returns:
        The findings, the worst first; none: nothing is wrong with this batch.

    Raises:
        TypeError: If `loss_fn` does not return a tensor with one value.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> batch = torch.ones(4, 2)
        >>> findings = preflight(lambda x: model(x).sum(), {"model": model}, batch=batch)
        >>> findings[0].what
        'The same batch twice over makes the gradient 2 times as long.'
    """
    doctor = Doctor(modules, optimizers, scaler, contract, mode="trace", trace_steps=1)
    registry = doctor.session.registry
    parameters = list({id(p): p for p in registry.everything()}.values())
    roots = list(registry.roots.values())
    run = _Run(loss_fn, parameters, batch, random_states())
    with everything_kept(roots, parameters), torch.enable_grad():
        error = _examine(doctor, run)
        findings = list(doctor.findings)
        count = len([f for f in findings if f.severity >= Severity.WARNING])
        if error is not None and not count:
            raise error
        if error is None and batch is not None:
            findings += _doubled(run, registry.name)
            findings += _perturbed(run, roots, pad_id)
    return ordered(findings)


@dataclass
class _Run:
    """Evaluates the loss, each time from the same random state."""

    loss_fn: Callable[..., Tensor]
    parameters: list[Tensor]
    batch: Any
    states: dict[str, Any]

    def loss(self, batch: Any) -> Tensor:
        restore_random_states(self.states)
        loss = self.loss_fn() if self.batch is None else self.loss_fn(batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else loss
            raise TypeError(f"loss_fn returned {what!r}; it must return a tensor with one value")
        return loss

    def gradients(self, batch: Any) -> list[Tensor | None]:
        for parameter in self.parameters:
            parameter.grad = None
        self.loss(batch).backward()
        return [p.grad for p in self.parameters]


def _examine(doctor: Doctor, run: _Run) -> Exception | None:
    try:
        with doctor:
            run.loss(run.batch).backward()
    except TypeError:
        raise
    except Exception as error:
        return error
    return None


# twice the batch


def _doubled(run: _Run, name: Callable[[Tensor], str]) -> list[Finding]:
    rows = _rows(run.batch)
    if rows is None:
        return []
    once = run.gradients(run.batch)
    try:
        twice = run.gradients(_map(run.batch, lambda t: _twice(t, rows)))
    except Exception as error:
        return [_only_fits_here(error, rows)]
    whole = math.sqrt(sum(float(g.float().square().sum()) for g in once if g is not None))
    ratios: dict[str, float] = {}
    for parameter, first, second in zip(run.parameters, once, twice):
        if first is None or second is None:
            continue
        length = float(first.float().square().sum())
        if math.sqrt(length) > _COUNTS * whole > 0 and math.isfinite(length):
            # along the old gradient: what dropout or other noise adds does not count
            ratios[name(parameter)] = float((first.float() * second.float()).sum()) / length
    for grows in (True, False):
        off = {n: r for n, r in ratios.items() if (r > _GROWS if grows else 0 < r < _SHRINKS)}
        if off:
            return [_scales(off, rows)]
    return []


def _scales(off: dict[str, float], rows: int) -> Finding:
    ratio = sorted(off.values())[len(off) // 2]
    sum_like = ratio > 1
    return Finding(
        22,
        Severity.WARNING,
        f"The same batch twice over makes the gradient {ratio:.2g} times as long.",
        f"{rows} rows repeated are {2 * rows} rows with the same mean; a loss that is a mean has "
        "the same gradient. "
        + ("Part of it is a sum." if sum_like else "Part of it is divided by the rows twice."),
        "Divide by the number of rows (or of tokens that count), once: then learning rate and "
        "clipping mean the same for every batch size and length.",
        parameters=tuple(off),
    )


def _only_fits_here(error: Exception, rows: int) -> Finding:
    return Finding(
        18,
        Severity.NOTE,
        f"The loss fails for twice the batch: it works for {rows} rows only.",
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        "If the batch may have another size, look for an axis that fits by coincidence, or a size "
        "that is written into the code.",
    )


# other values in padded places


def _perturbed(run: _Run, roots: list[nn.Module], pad_id: int | None) -> list[Finding]:
    pad, eos = pad_id, None
    for root in roots if pad is None else ():
        if pad is None:
            pad, eos = known_pad(root)
    changed, places, kinds = _other_padding(run.batch, pad, eos)
    if not places:
        return []
    before = float(run.loss(run.batch).detach())
    again = float(run.loss(run.batch).detach())
    try:
        after = float(run.loss(changed).detach())
    except Exception:
        return []  # other ids than padding are not allowed there
    noise = abs(again - before)
    allowed = 1e-5 * max(abs(before), 1e-3) + 4 * noise
    if not math.isfinite(before) or abs(after - before) <= allowed:
        return []
    return [
        Finding(
            19,
            Severity.WARNING,
            f"Padding changes the loss: {before:.6g} becomes {after:.6g} with other values in "
            f"{places} padded places.",
            f"Only {kinds} were changed, at ends of rows that are padding; a loss that masks them "
            "is the same to the last digit.",
            "Give the model its attention mask, leave padded positions out of the loss, and keep "
            "them out of statistics over the batch.",
            parameters=(),
        )
    ]


def _other_padding(batch: Any, pad: int | None, eos: Any) -> tuple[Any, int, str]:
    """The batch with other values in padded places, how many places, and of what."""
    masks = [t for t in tensors_in(batch) if _is_mask(t)]
    places = 0
    kinds: list[str] = []

    def change(tensor: Tensor) -> Tensor:
        nonlocal places
        if _is_mask(tensor):
            return tensor
        if tensor.dtype in (torch.long, torch.int) and tensor.dim() == 2 and pad is not None:
            where = padded_places(tensor, pad, eos)
            if not bool(where.any()) or bool((tensor < 0).any()):
                return tensor  # nothing padded; or labels, with their own mark
            real = tensor[~where & (tensor != pad)]
            if not real.numel():
                return tensor
            places += int(where.sum())
            kinds.append("token ids")
            # ids of this very batch are sure to be in the vocabulary
            others = real[torch.arange(int(where.sum())) % real.numel()]
            return tensor.masked_scatter(where, others)
        if tensor.is_floating_point() and tensor.dim() > 1:
            where = _hidden_zeros(tensor, masks)
            if where is not None and bool(where.any()):
                places += int(where.sum())
                kinds.append("inputs of rows that a mask of the batch excludes")
                return torch.where(_spread(where, tensor), tensor + 1.0, tensor)
        return tensor

    changed = _map(batch, change)
    return changed, places, " and ".join(dict.fromkeys(kinds))


def _is_mask(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool:
        return True
    return tensor.numel() > 0 and bool(((tensor == 0) | (tensor == 1)).all())


def _hidden_zeros(tensor: Tensor, masks: list[Tensor]) -> Tensor | None:
    """Places that some mask excludes and that hold nothing but zeros: padding, by both signs."""
    for mask in masks:
        if mask.dim() < tensor.dim() and tensor.shape[: mask.dim()] == mask.shape:
            empty = (tensor == 0).flatten(mask.dim()).all(-1)
            hidden = empty & (mask == 0)
            if bool(hidden.any()) and bool((mask == 0).sum() == hidden.sum()):
                return hidden
    return None


def _spread(where: Tensor, tensor: Tensor) -> Tensor:
    return where.reshape(*where.shape, *([1] * (tensor.dim() - where.dim()))).expand_as(tensor)


# batches


def _rows(batch: Any) -> int | None:
    """The size of the first axis that most tensors of the batch share."""
    sizes = [t.shape[0] for t in tensors_in(batch) if t.dim()]
    if not sizes:
        return None
    return max(dict.fromkeys(sizes), key=sizes.count)


def _twice(tensor: Tensor, rows: int) -> Tensor:
    if tensor.dim() and tensor.shape[0] == rows:
        return torch.cat([tensor, tensor])
    return tensor


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with changed tensors; what is no tensor is passed on."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        items = {key: _map(value, change) for key, value in batch.items()}
        return _rebuilt(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(item, change) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map(item, change) for item in batch)
    return batch


def _rebuilt(batch: Mapping[str, Any], items: dict[str, Any]) -> Any:
    if type(batch) is dict:
        return items
    try:
        return type(batch)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
