"""The networks of a run, their parameters by group, and the optimizers, which are made last.

Groups: `lm` (the language model), `encoder` (the rest of the prompt encoder), `agent` (forward and
backward agent), `efe` (parameters of the loss), `policy`. The main optimizer has all but the
policy; with `refine=rl` the policy has its own, with `refine=pathwise` it is one group more of the
main one, with `refine=off` there is no policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arc_refine.agent import BackwardAgent, GridAgent
from arc_refine.config import TrainConfig
from arc_refine.efe import EFE, EfeWeights
from arc_refine.features import FEATURE_NAMES
from arc_refine.language import load_language_model
from arc_refine.policy import RefinePolicy
from arc_refine.prompt import PromptEncoder

GROUPS = ("lm", "encoder", "agent", "efe", "policy")


@dataclass(frozen=True, kw_only=True)
class Networks:
    """All modules that hold parameters. `backward` and `policy` may be absent."""

    encoder: PromptEncoder
    agent: GridAgent
    efe: EFE
    backward: BackwardAgent | None
    policy: RefinePolicy | None
    lm_fingerprint: str | None = None
    """Of the language model as it was loaded: checkpoints leave its frozen weights out."""

    def modules(self) -> dict[str, nn.Module]:
        """By name; a network that this run does not have is left out."""
        return {k: m for k, m in vars(self).items() if isinstance(m, nn.Module)}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, module in self.modules().items():
            for name, parameter in module.named_parameters():
                yield f"{prefix}.{name}", parameter

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """Trainable parameters by group and name; empty groups are left out."""
        language = {id(p) for p in self.language_parameters()}
        by_group: dict[str, dict[str, nn.Parameter]] = {name: {} for name in GROUPS}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                network = name.split(".", 1)[0]
                group = "agent" if network == "backward" else network
                by_group["lm" if id(parameter) in language else group][name] = parameter
        return {name: members for name, members in by_group.items() if members}

    def language_parameters(self) -> list[nn.Parameter]:
        lm = self.encoder.lm
        return [] if lm is None else list(lm.parameters())

    def train(self, on: bool = True) -> None:
        for module in self.modules().values():
            module.train(on)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of all networks, by name; not the language model's frozen ones,
        which come from where they came from."""
        frozen = {
            f"encoder.{name}"
            for name, p in self.encoder.named_parameters()
            if name.startswith("lm.") and not p.requires_grad
        }
        return {
            full: value
            for prefix, module in self.modules().items()
            for name, value in module.state_dict().items()
            if (full := f"{prefix}.{name}") not in frozen
        }

    def load(self, state: dict[str, Tensor]) -> None:
        mine = self.state()
        missing, unknown = sorted(set(mine) - set(state)), sorted(set(state) - set(mine))
        if missing or unknown:
            raise ValueError(
                f"The checkpoint does not fit the networks: missing {missing[:4]}, unknown "
                f"{unknown[:4]}. It belongs to another configuration; use its own header.json."
            )
        for prefix, module in self.modules().items():
            cut = len(prefix) + 1
            own = {k[cut:]: v for k, v in state.items() if k.startswith(f"{prefix}.")}
            module.load_state_dict(own, strict=False)  # names were compared above


def build_networks(config: TrainConfig) -> Networks:
    """The same weights for the same seed, whatever was drawn before; parameters are float32."""
    device = torch.device(config.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        language = load_language_model(
            config.lm,
            train=config.lm_train,  # type: ignore[arg-type]  # checked by the configuration
            seed=config.seed,
        )
        width = config.prompt_width
        encoder = PromptEncoder(language, prompt_width=width, fuse=config.fuse)
        agent = GridAgent(prompt_width=width, width=config.agent_width, steps=config.agent_steps)
        weights = efe_weights(config)
        efe = EFE(width, config.agent_width, weights=weights)
        backward = None
        if weights.needs_backward_agent:
            backward = BackwardAgent(width, width=config.agent_width // 2, steps=config.agent_steps)
        policy = None
        if config.refine != "off":
            policy = RefinePolicy(
                prompt_width=width, feature_dim=len(FEATURE_NAMES), bound=config.bound
            )
    networks = Networks(
        encoder=encoder,
        agent=agent,
        efe=efe,
        backward=backward,
        policy=policy,
        lm_fingerprint=None if language is None else language.fingerprint,
    )
    for module in networks.modules().values():
        module.to(device)
    return networks


def efe_weights(config: TrainConfig) -> EfeWeights:
    return EfeWeights(
        hard=config.hard_weight,
        risk=config.risk_weight,
        z=config.z_weight,
        bi=config.bi_weight,
        back=config.back_weight,
        prompt=config.prompt_weight,
        size=config.size_weight,
    )


def build_optimizers(networks: Networks, config: TrainConfig) -> dict[str, torch.optim.AdamW]:
    """`main`, and with `refine=rl` `policy`; each parameter group carries its name."""
    rates = {"lm": config.lr_lm, "policy": config.lr_policy}
    groups = [
        {"params": list(members.values()), "lr": rates.get(name, config.lr_agent), "name": name}
        for name, members in networks.groups().items()
    ]
    own = [g for g in groups if g["name"] == "policy"] if config.refine == "rl" else []
    main = [g for g in groups if not any(g is o for o in own)]
    optimizers = {"main": torch.optim.AdamW(main, weight_decay=config.weight_decay)}
    if own:
        # decay would pull the log of sigma towards 0: an entropy change that no reward asked for
        optimizers["policy"] = torch.optim.AdamW(own, weight_decay=0.0)
    return optimizers


def describe_optimizers(
    networks: Networks, optimizers: dict[str, torch.optim.AdamW]
) -> dict[str, list[dict]]:
    """For the header: which parameter is where, at what rate."""
    name_of = {id(p): name for name, p in networks.named_parameters()}
    return {
        name: [
            {
                "group": group["name"],
                "lr": group["lr"],
                "weight_decay": group["weight_decay"],
                "parameters": [name_of[id(p)] for p in group["params"]],
                "count": sum(p.numel() for p in group["params"]),
            }
            for group in optimizer.param_groups
        ]
        for name, optimizer in optimizers.items()
    }
