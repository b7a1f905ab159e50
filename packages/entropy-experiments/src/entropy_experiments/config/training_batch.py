"""How many prompts go where: document 001's sizes and TRL's, and what follows from them.

    sequences per backward (TRL's per_device_train_batch_size) = microbatch_size x num_generations
    accumulation = buffer_size / (ranks x microbatch_size),   refused if not whole

TRL shares one generation among `steps_per_generation` backward passes and `num_iterations` rounds;
that must be whole optimizer steps, or a step would learn from responses of two policies.
"""

from __future__ import annotations

from dataclasses import dataclass

from entropy_experiments.config.problems import ConfigError
from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.torchrun import ranks_of_job

__all__ = ["BatchPlan", "batch_plan", "plan_line", "plan_notes", "ranks_of_job"]

BUFFER, MICROBATCH = 16, 4
MOST_PROMPTS, MOST_RESPONSES = 10**7, 10**8
"""Of a whole run."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    ranks: int
    prompts_per_step: int
    """buffer_size, over all ranks."""
    sequences_per_backward: int
    """Per rank: TRL's per_device_train_batch_size."""
    accumulation: int
    steps_per_generation: int
    prompts_per_generation: int
    """Over all ranks."""
    steps_served: int
    """Optimizer steps that learn from one generation."""

    def generations(self, steps: int) -> int:
        return -(-steps // self.steps_served)


def plan_line(config: TrainingConfig, plan: BatchPlan) -> str:
    return (
        f"{config.max_steps} steps of {plan.prompts_per_step} prompts x {config.num_generations} "
        f"responses: ranks {plan.ranks}, backward passes {plan.accumulation} of "
        f"{plan.sequences_per_backward} sequences each"
    )


def plan_notes(config: TrainingConfig, plan: BatchPlan) -> list[str]:
    """What was asked for and these sizes cannot give."""
    measured = config.probe.enabled and config.probe.noise_scale
    if measured and plan.ranks == 1 and plan.accumulation == 1:
        return [
            "probe.noise_scale: a step is one backward pass on one rank, so there is no second "
            "gradient to compare it with, and no noise scale. For two passes or more, lower "
            "microbatch_size."
        ]
    return []


def batch_plan(config: TrainingConfig, *, ranks: int = 1) -> BatchPlan:
    """Sizes for so many ranks; conflicts and remainders are refused."""
    group = config.num_generations
    sequences = _sequences(config, ranks)
    accumulation = config.gradient_accumulation_steps
    buffer = config.buffer_size
    if buffer is None and accumulation is None:
        buffer = BUFFER
    if buffer is not None:
        whole, rest = divmod(buffer * group, ranks * sequences)
        if rest or not whole:
            raise ConfigError(
                config.source,
                [
                    f"buffer_size: {buffer} prompts x {group} responses do not divide into passes "
                    f"of {sequences} sequences on each of {ranks} ranks "
                    f"({buffer * group / (ranks * sequences):.3g} passes). Make buffer_size a "
                    "multiple of ranks x microbatch_size."
                ],
            )
        if accumulation is not None and accumulation != whole:
            raise ConfigError(
                config.source,
                [
                    f"gradient_accumulation_steps: got {accumulation}, but buffer_size {buffer} on "
                    f"{ranks} ranks with {sequences} sequences a pass makes {whole}, and they are "
                    "one setting. Keep one of the two."
                ],
            )
        accumulation = whole
    assert accumulation is not None
    prompts, rest = divmod(ranks * sequences * accumulation, group)
    if rest or not prompts:
        raise ConfigError(
            config.source,
            [
                f"per_device_train_batch_size: {sequences} sequences x {accumulation} passes x "
                f"{ranks} ranks are no whole groups of num_generations {group}. Make it a multiple "
                "of num_generations."
            ],
        )
    return _with_generation(config, ranks, prompts, sequences, accumulation)


def _sequences(config: TrainingConfig, ranks: int) -> int:
    group, size = config.num_generations, config.per_device_train_batch_size
    if config.microbatch_size is not None:
        sequences = config.microbatch_size * group
        if size is not None and size != sequences:
            raise ConfigError(
                config.source,
                [
                    f"per_device_train_batch_size: got {size}, but microbatch_size "
                    f"{config.microbatch_size} x num_generations {group} is {sequences}, and they "
                    "are one setting. Keep one of the two."
                ],
            )
        return sequences
    if size is not None:
        return size
    share = (config.buffer_size or BUFFER) // ranks
    # Of a share that 4 does not divide, the largest size below that does.
    return group * next((m for m in range(MICROBATCH, 0, -1) if share and share % m == 0), 1)


def _with_generation(
    config: TrainingConfig, ranks: int, prompts: int, sequences: int, accumulation: int
) -> BatchPlan:
    per_generation = config.steps_per_generation or accumulation
    served, rest = divmod(per_generation * config.num_iterations, accumulation)
    asked, odd = divmod(ranks * sequences * per_generation, config.num_generations)
    if rest or odd or per_generation % accumulation:
        raise ConfigError(
            config.source,
            [
                f"steps_per_generation: got {per_generation}, expected a multiple of the "
                f"{accumulation} backward passes of a step, so that each step learns from one "
                "generation. Leave it out for one generation a step."
            ],
        )
    if config.save_steps % served:
        raise ConfigError(
            config.source,
            [
                f"save_steps: got {config.save_steps}, but one generation serves {served} steps, "
                "and a checkpoint in the middle of them cannot be resumed exactly. Make save_steps "
                f"a multiple of {served}."
            ],
        )
    plan = BatchPlan(
        ranks=ranks,
        prompts_per_step=prompts,
        sequences_per_backward=sequences,
        accumulation=accumulation,
        steps_per_generation=per_generation,
        prompts_per_generation=asked,
        steps_served=served,
    )
    _refuse_endless(config, plan)
    return plan


def _refuse_endless(config: TrainingConfig, plan: BatchPlan) -> None:
    """The prompts of a whole run are one list: of a run that nobody ends it would not be made."""
    prompts = plan.prompts_per_generation * plan.generations(config.max_steps)
    responses = prompts * config.num_generations
    if prompts > MOST_PROMPTS or responses >= MOST_RESPONSES:
        raise ConfigError(
            config.source,
            [
                f"max_steps: {config.max_steps} steps of {plan.prompts_per_step} prompts x "
                f"{config.num_generations} responses are {prompts:.3g} prompts and {responses:.3g} "
                f"responses; expected at most {MOST_PROMPTS:.0e} and below {MOST_RESPONSES:.0e}. "
                "Lower max_steps (--steps), buffer_size or num_generations; --resume with more "
                "steps continues a run."
            ],
        )
