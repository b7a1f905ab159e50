"""The conditions under which `functional_model` calls a model; each leaves the model unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_interpreter_stack
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from entropy_experiments.types import Params

EXPERTS = "_experts_implementation_internal"
"""Where transformers keeps the name of the kernel. Its public setter goes through all modules, and
this is set at every call."""


def causal_lm(model: nn.Module) -> Any:
    """The transformers model inside a PeftModel, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def call_with(module: nn.Module, params: Params, args: Any, kwargs: Any) -> Any:
    """`module(*args, **kwargs)` with these parameters in place of its own, which then come back.

    torch's functional_call puts a parameter into every *name* that it has. A module that stands in
    two places (a layer used twice, peft's trainable tokens over tied embeddings) has two names for
    one slot: the second one would keep what the first had put there, and the module's own parameter
    would be lost to its optimizer. So every slot is named once here.
    """
    return functional_call(module, _slots(module, params), args, kwargs, tie_weights=False)


def _slots(module: nn.Module, params: Params) -> dict[str, Tensor]:
    """Every slot that holds one of these parameters, once, whatever ties them."""
    own = dict(module.named_parameters(remove_duplicate=False))
    value_of = {id(own[name]): value for name, value in params.items() if name in own}
    slots = {name: value for name, value in params.items() if name not in own}  # torch refuses them
    for path, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in value_of:
                slots[f"{path}.{key}" if path else key] = value_of[id(parameter)]
    return slots


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; outside, each module's own mode again."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def plain_inputs(model: nn.Module) -> Iterator[None]:
    """Embeddings that do not demand a gradient of themselves.

    Training with gradient checkpointing hooks `output.requires_grad_()` onto the input embeddings;
    it changes no value, and torch.func refuses it.
    """
    hooks = causal_lm(model).get_input_embeddings()._forward_hooks
    demanding = {key: hook for key, hook in hooks.items() if _demands_gradients(hook)}
    before = dict(hooks)
    for key in demanding:
        del hooks[key]
    try:
        yield
    finally:
        if demanding:
            hooks.clear()
            hooks.update(before)  # in their old order


def _demands_gradients(hook: Any) -> bool:
    # transformers and peft define it inside other functions, under these names.
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def math_attention() -> Any:
    return sdpa_kernel(SDPBackend.MATH)


def nothing_differentiated() -> bool:
    """No graph is being recorded, and no transform of torch.func is under way."""
    return not torch.is_grad_enabled() and not get_interpreter_stack()


def records_a_graph() -> bool:
    """For an ordinary backward, as a training's is; torch.func's own graphs are another matter."""
    return torch.is_grad_enabled() and not get_interpreter_stack()


def fastest_attention() -> Any:
    """torch's own choice where nothing is differentiated, else what every derivative goes through.

    Fused kernels have neither forward mode nor a double backward.
    """
    return nullcontext() if nothing_differentiated() else math_attention()


def expert_configs(model: nn.Module) -> tuple[Any, ...]:
    """Configs that say by which kernel a mixture's experts are computed; each once."""
    configs = {
        id(module.config): module.config
        for module in model.modules()
        if getattr(getattr(module, "config", None), EXPERTS, None) not in (None, "eager")
    }
    return tuple(configs.values())


@contextmanager
def plain_experts(configs: Sequence[Any]) -> Iterator[None]:
    """Under a transform of torch.func, a mixture's experts go one after another.

    Grouped products have no forward mode. The numbers are the same but for rounding; elsewhere the
    model's own kernel runs, as in training.
    """
    configs = configs if get_interpreter_stack() else ()
    before = [getattr(config, EXPERTS) for config in configs]
    for config in configs:
        setattr(config, EXPERTS, "eager")
    try:
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            setattr(config, EXPERTS, own)


@contextmanager
def differentiate_dora_fully(layers: Sequence[nn.Module]) -> Iterator[None]:
    """DoRA layers whose norm is a function of the parameters, as in truth it is.

    DoRA *trains* as if ||W + BA|| were constant (peft detaches it), but moving the parameters
    moves it: the slope of anything along an update needs its derivative.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(forward_as(layer, _undetached(layer.forward)))
        yield


class PaddingRows(TorchFunctionMode):
    """Inside, the row of an embedding's `padding_idx` is a row like any other, or a constant.

    Training takes no gradient of that row. But where its token is a real one (end of text serving
    as padding), momentum or decay moving it moves the policy. torch itself is of two minds: no
    gradient of the row in backward, a tangent in forward mode. Adapters of embeddings look up
    their own tables with the same `padding_idx`; they come through here, too.
    """

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not nn.functional.embedding:
            return func(*args, **kwargs)
        named = dict(zip(("input", "weight", "padding_idx"), args)) | kwargs
        index = named.pop("padding_idx", None)
        embedded = func(named.pop("input"), named.pop("weight"), None, *args[3:], **named)
        if index is None or not self.frozen:
            return embedded
        tokens = args[0] if args else kwargs["input"]
        return torch.where((tokens == index)[..., None], embedded.detach(), embedded)


class GradientsKept(TorchFunctionMode):
    """Inside, `torch.no_grad()` switches nothing off.

    A model that runs some of its layers so (HRM's early cycles) *trains* with a part of its
    gradient; but these layers move with their parameters, and the slope of anything along an
    update needs the whole. Forward mode has it: it knows nothing of `no_grad`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch._C._set_grad_enabled and not args[0]:
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def layers_without_gradients(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Inside, modules with parameters that run while gradients are switched off are listed."""
    frozen_layers: list[nn.Module] = []

    def note(module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            frozen_layers.append(module)

    owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    handles = [module.register_forward_pre_hook(note) for module in owners]
    try:
        yield frozen_layers
    finally:
        for handle in handles:
            handle.remove()


def trains_padded_embeddings(model: nn.Module) -> bool:
    """Whether an embedding with a `padding_idx`, or an adapter around it, is trained."""
    padded = [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    ]
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    return any(name.startswith(f"{home}.") for home in padded for name in trained)


def dora_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    try:
        from peft.tuners.lora.dora import DoraLinearLayer
    except ImportError:  # without peft there are no adapters
        return ()
    return tuple(m for m in model.modules() if isinstance(m, DoraLinearLayer))


class _DetachKeeps(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is torch.Tensor.detach else func(*args, **(kwargs or {}))


def _undetached(own_forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _DetachKeeps():
            return own_forward(*args, **kwargs)

    return forward


@contextmanager
def recompute_layers(layers: Sequence[nn.Module], dora: Sequence[nn.Module]) -> Iterator[None]:
    """Layers whose activations are made again in backward (non-reentrant checkpointing).

    transformers' own switch works in training mode only, and would recompute with the model's
    parameters: by the time of backward, functional_call has put those back. So each layer takes
    along the parameters it was called with.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(forward_as(layer, _recomputing(layer, layer.forward, dora)))
        yield


def checkpointable_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = tuple(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    if not layers:
        raise ValueError(
            f"{type(causal_lm(model)).__name__} has no layers that transformers can checkpoint. "
            "Set memory.gradient_checkpointing to false and use smaller microbatches."
        )
    return layers


class _Bare(nn.Module):
    """A layer's own forward under another roof, so that functional_call can feed its parameters."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.own_forward = layer, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


def _recomputing(
    layer: nn.Module, own_forward: Callable[..., Any], dora: Sequence[nn.Module]
) -> Callable[..., Any]:
    bare, first = _Bare(layer, own_forward), True
    within = [module for module in layer.modules() if module in dora]

    def run(params: Params, args: Any, kwargs: Any) -> Any:
        nonlocal first
        # The first time, these conditions hold already; in backward they are long over.
        again, first = () if first else within, False
        with eval_mode(layer), math_attention(), differentiate_dora_fully(again):
            return call_with(bare, params, args, kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        params = {f"layer.{name}": value for name, value in layer.named_parameters()}
        return checkpoint(run, params, args, kwargs, use_reentrant=False, preserve_rng_state=False)

    return forward


@contextmanager
def forward_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module runs this forward instead of its own."""
    before = module.__dict__.get("forward")
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            object.__setattr__(module, "forward", before)
