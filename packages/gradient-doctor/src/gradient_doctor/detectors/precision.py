"""Classes 15 and 16: dtypes that a scaler, or the user, did not ask for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradient_doctor.detectors.places import (
    birth_site,
    by_site,
    called,
    count,
    dtype_site,
    most_common,
)
from gradient_doctor.findings import Severity
from gradient_doctor.registry import fits, owned_by
from gradient_doctor.session import Detector, Event, Session, StepRecord

_BITS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}


class Precision(Detector):
    """Compares the dtypes of parameters with the scaler, the contract and the models' configs."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._scaled: set[int] = set()  # optimizers that were looked at because of a scaler
        self._said = 0

    def start(self) -> None:
        scaler = self.session.scaler
        if scaler is not None and scaler.is_enabled():
            for optimizer in self.session.registry.optimizers.values():
                self._under_scaler(optimizer, None)
        self._contract()

    def event(self, event: Event) -> None:
        if event.kind in ("unscale", "scaler_step") and event.data["args"]:
            optimizer = event.data["args"][0]
            if event.data["scaler"].is_enabled() and id(optimizer) not in self._scaled:
                self._under_scaler(optimizer, event, torch.bfloat16)

    def event_failed(self, event: Event, error: BaseException) -> None:
        text = str(error)
        called = event.kind in ("unscale", "scaler_step") and event.data["args"]
        if called and ("FP16 gradients" in text or "not implemented for" in text):
            self._under_scaler(event.data["args"][0], event)

    def step_ended(self, record: StepRecord) -> None:
        if record.checked and self.session.age + 1 >= self.session.trace_steps:
            self._contract()
            self._configs()

    def finish(self, error: BaseException | None) -> None:
        self._contract()
        self._configs()

    # 15

    def _under_scaler(
        self, optimizer: Any, event: Event | None, only: torch.dtype | None = None
    ) -> None:
        registry = self.session.registry
        self._scaled.add(id(optimizer))
        name = registry.optimizer_name(optimizer)
        for dtype in (torch.float16, torch.bfloat16) if only is None else (only,):
            held = [p for p in owned_by(optimizer) if p.dtype == dtype and p.requires_grad]
            if not held:
                continue
            sites = [dtype_site(registry, p) for p in held]
            site = most_common(sites) or birth_site(registry, optimizer)
            used = None if event is None else event.site
            fp16 = dtype is torch.float16
            refused = event is not None and "error" in event.data
            alone = all(p.dtype == dtype for p in owned_by(optimizer) if p.requires_grad)
            severity = Severity.WARNING if alone else Severity.NOTE
            self.report(
                15,
                Severity.ERROR if fp16 or refused else severity,
                f"{count(len(held), 'parameter')} of the {called(name)} are "
                f"{_word(dtype)} under an enabled GradScaler.",
                why=(
                    "The scaler expects fp32 weights: gradients of fp16 weights are fp16 too, "
                    "cannot be unscaled without loss, and unscale_ and step refuse them."
                    if fp16
                    else "bfloat16 has the range of float32, so there is nothing to scale; some "
                    "devices cannot unscale such gradients at all."
                ),
                fix=(
                    "Keep the weights in float32 and run the forward under "
                    "torch.autocast(dtype=torch.float16)."
                    if fp16
                    else "Remove the scaler, or keep the weights in float32 under autocast."
                ),
                site=site or used,
                parameters=registry.bits(held),
                related=(used,),
            )

    # 16

    def _contract(self) -> None:
        wanted = self.session.contract.get("dtype") or {}
        registry = self.session.registry
        wrong: dict[tuple[torch.dtype, torch.dtype], list[Tensor]] = {}
        for name, parameter in registry.aliases().items():
            required = next((d for pattern, d in wanted.items() if fits(name, pattern)), None)
            required = None if required is None else as_dtype(required)
            if required is None or parameter.dtype == required or not parameter.is_floating_point():
                continue
            if not registry.bit(parameter) & self._said:
                wrong.setdefault((required, parameter.dtype), []).append(parameter)
        for (required, got), parameters in wrong.items():
            self._said |= registry.bits(parameters)
            groups = by_site(registry, parameters, lambda p: dtype_site(registry, p))
            for site, mask in groups.items():
                self.report(
                    16,
                    Severity.WARNING,
                    f"{registry.many(mask)} should be {_word(required)}, but are {_word(got)}.",
                    why=f"The contract requires {_word(required)}. "
                    + (
                        "Small updates are rounded away in 16 bits."
                        if _BITS.get(got, 8) < _BITS.get(required, 8)
                        else "The memory is that of the wider type."
                    ),
                    fix=f"Load or convert them with dtype=torch.{_word(required)}.",
                    site=site,
                    parameters=mask,
                )

    def _configs(self) -> None:
        """Without a contract: what the model's own config says of its dtype."""
        registry = self.session.registry
        if self.session.contract.get("dtype"):
            return
        for root, module in registry.roots.items():
            config = getattr(module, "config", None)
            # newer transformers warn at the sight of the old name
            name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
            configured = as_dtype(getattr(config, name, None))
            if configured is None:
                continue
            floating = [p for p in module.parameters() if p.dtype in _BITS]
            other = [p for p in floating if p.dtype != configured]
            if 2 * sum(p.numel() for p in other) <= sum(p.numel() for p in floating):
                continue  # adapters, norms and heads have a dtype of their own
            if registry.bits(other) & self._said:
                continue
            self._said |= registry.bits(other)
            # an explicit conversion leaves the config as it was: then it is the user's own wish
            born_so = all(
                registry.birth(p) is not None and p not in registry.converted_at for p in other
            )
            narrower = all(_BITS[p.dtype] < _BITS[configured] for p in other)
            got = other[0].dtype
            self.report(
                16,
                Severity.WARNING if born_so and narrower else Severity.NOTE,
                f"The config of {root} says {_word(configured)}, "
                f"but {count(len(other), 'parameter')} are {_word(got)}.",
                why=f"{len(other)} of {len(floating)} floating-point parameters differ from it.",
                fix=f"Set the dtype where the model is loaded: dtype=torch.{_word(configured)}.",
                site=most_common(dtype_site(registry, p) for p in other),
                parameters=registry.bits(other),
            )


def as_dtype(value: Any) -> torch.dtype | None:
    """`torch.float32`, "float32" or "torch.float32"."""
    if isinstance(value, str):
        value = getattr(torch, value.removeprefix("torch."), None)
    return value if isinstance(value, torch.dtype) else None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
