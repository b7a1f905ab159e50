"""What a run did, in a line each: sampling and its retries, the update's norms, times.

These stand in the log from level standard on, and on the screen while a probe runs.
"""

from __future__ import annotations

from entropy_experiments.findings import Findings


def messages(found: Findings) -> list[str]:
    return [_sampling(found), _update(found), *_clips(found), _timing(found)]


def _sampling(found: Findings) -> str:
    rollouts, batch = found.evaluation, found.update.rollouts
    said = (
        f"sampling: {len(rollouts)} evaluation rollouts, {rollouts.truncated_share:.0%} cut off at "
        f"the length limit; update batch {'recorded' if found.real else 'drawn'}, {len(batch)} "
        "rollouts"
    )
    if found.retries is None:
        return said
    again = "no group" if found.retries == 0 else f"{found.retries} group(s)"
    return f"{said}, {again} drawn again for equal rewards"


def _update(found: Findings) -> str:
    stats = found.stats
    parts = ", ".join(f"{name} {norm:.3g}" for name, norm in stats.part_norms.items())
    clip = "not clipped" if stats.clip_factor == 1 else f"clipped to {stats.clipped_norm:.3g}"
    if found.made.of_gradient:
        clip = f"rebuilt from the batch; training's own, after clipping: {stats.clipped_norm:.3g}"
    return (
        f"update vector: gradient norm {stats.grad_norm:.3g} ({clip}), {stats.microbatches} "
        f"microbatches; norms per unit learning rate: {parts}"
    )


def _clips(found: Findings) -> list[str]:
    """Etas at which the estimator clipped weights."""
    clipped = {
        eta: change.diagnostics["weights"].clip_fraction
        for eta, change in sorted((found.measured or {}).items())
    }
    told = [f"{share:.1%} at eta {eta:g}" for eta, share in clipped.items() if share > 0]
    return [f"estimator: log-weights clipped, {', '.join(told)}"] if told else []


def _timing(found: Findings) -> str:
    spent = ", ".join(f"{name} {took:.2g}" for name, took in found.timing.items())
    return f"seconds: {spent}"
