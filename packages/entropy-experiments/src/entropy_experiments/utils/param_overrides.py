"""Document 004's `utils.param_overrides`: parameters of a model as an argument of it.

    state = build_functional_params_named(model, v, eta)
    torch.func.functional_call(model, state, (tokens,))

Estimators do the same through `policy.score(params, rollouts)`; the model is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from entropy_experiments.numerics.derivatives import shifted


def build_functional_params_named(
    model: nn.Module, v_named: Mapping[str, Tensor] | None = None, eta: float = 0.0
) -> dict[str, Tensor]:
    """Every parameter and buffer by name, with eta v added to those that `v_named` names."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    unknown = sorted(set(v_named or {}) - set(params))
    if unknown:
        raise ValueError(
            f"The direction names {unknown[:3]}, which the model does not have; expected names of "
            "model.named_parameters(). Inside a wrapper (DDP, compile) take the bare model's."
        )
    if v_named:
        params |= shifted({name: params[name] for name in v_named}, v_named, eta)
    return {**dict(model.named_buffers()), **params}
