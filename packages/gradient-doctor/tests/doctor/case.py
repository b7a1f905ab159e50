"""A case: a clean recipe, the edits that break it, and what a good report must say.

An edit replaces text that occurs exactly once in the recipe. The comment `# FAULT` in the new text
marks the line that the report must name. More than one marked line means that each of them is
equally right (where a value is made and where it does harm); no marked line means that the fault
has no line (a test of the whole loss function, as `preflight` makes them).

Parameter patterns are globs over a parameter's full name or any dotted suffix of it, because the
name of the root (`model.`, `agent.actor.`) is the tool's to choose. Every pattern of `parameters`
must be matched by a named parameter, and every named parameter must be matched by `parameters` or
`affected`. Both empty: the class does not speak of registered parameters, nothing is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EVERYTHING = ("*",)


@dataclass(frozen=True)
class Case:
    number: int
    name: str
    recipe: str
    edits: tuple[tuple[str, str], ...]
    parameters: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    contract: Mapping[str, Any] | None = None
    raises: type[BaseException] | None = None
    argv: tuple[str, ...] = ()
    kind: str = "script"  # "preflight": the script defines loss_fn, modules, optimizers, batch
    pad_id: int | None = None
    also: tuple[int, ...] = field(default=())  # classes that describe this fault as well

    @property
    def id(self) -> str:
        return f"{self.number:02d}-{self.recipe}-{self.name}"


MAIN = 'if __name__ == "__main__":\n    main()\n'

# What `preflight` needs, made from the functions of a recipe instead of running its loop.
PREFLIGHT: dict[str, str] = {
    "mlp_loop": """\
model, optimizer, _ = build()
modules, optimizers = {"model": model}, {"optimizer": optimizer}
batch = make_batch(torch.Generator().manual_seed(1))
model.trunk[2].p = 0.0


def loss_fn(batch):
    return loss_of(model, batch)
""",
    "actor_critic": """\
agent = Agent()
modules = {"encoder": agent.encoder, "actor": agent.actor, "critic": agent.critic}
optimizers = {"actor": agent.actor_optimizer, "critic": agent.critic_optimizer}
batch = agent.collect(torch.Generator().manual_seed(1))


def loss_fn(batch):
    actor_loss, critic_loss = agent.losses(batch)
    return actor_loss + 0.5 * critic_loss
""",
    "amp_scaler": """\
model, optimizer, _ = build()
modules, optimizers = {"model": model}, {"optimizer": optimizer}
batch = dict(zip(("signal", "label", "soft"), make_batch(torch.Generator().manual_seed(1))))


def loss_fn(batch):
    return loss_of(model, **batch)
""",
    "dqn": """\
online, target, optimizer = build()
modules, optimizers = {"online": online, "target": target}, {"optimizer": optimizer}
generator = torch.Generator().manual_seed(1)
state = torch.randn(ROWS, STATE, generator=generator)
batch = walk(state, act(online, state, 0.3, generator), generator)


def loss_fn(batch):
    return loss_of(online, target, batch)
""",
    "gan": """\
generator, discriminator, slow, fast = build()
modules = {"generator": generator, "discriminator": discriminator}
optimizers = {"generator": slow, "discriminator": fast}
batch = make_batch(torch.Generator().manual_seed(1))


def loss_fn(batch):
    judge = discriminator_loss(generator, discriminator, batch)
    return judge + generator_loss(generator, discriminator, batch)
""",
    "rnn_bptt": """\
model, optimizer = build()
model.dropout.p = 0.0
modules, optimizers = {"model": model}, {"optimizer": optimizer}
batch = make_texts(torch.Generator().manual_seed(1))[-1]


def loss_fn(batch):
    return loss_of(model, batch)[0]
""",
    "hf_trainer": """\
model = build()
model.config._attn_implementation = "eager"
model.config.attention_dropout = 0.0
for layer in model.model.layers:
    layer.self_attn.attention_dropout = 0.0
modules = {"model": model}
optimizers = {"optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3)}
rows = Answers().rows[:6]
batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def loss_fn(batch):
    return weighted_loss(model, batch)[0]
""",
    "peft_checkpointing": """\
model, optimizer = build()
for name, module in model.named_modules():
    if name.endswith("lora_dropout.default"):
        module.p = 0.0
modules, optimizers = {"model": model}, {"optimizer": optimizer}
batch = make_batch(torch.Generator().manual_seed(1))


def loss_fn(batch):
    return loss_of(model, batch)
""",
}


def preflight(recipe: str) -> tuple[str, str]:
    """The edit that turns a recipe into what `preflight` is called with."""
    return (MAIN, PREFLIGHT[recipe])
