"""Document 004's `DeltaEntropyTrue`; the mathematics is in `estimate.measured`.

    true = DeltaEntropyTrue(sequence_processor=policy, config=config)
    true.compute_delta_h_true(rollouts, direction, eta)                       # a number
    true.compute_delta_h_true(rollouts, direction, eta, return_details=True)  # with all behind it
    true.compute_delta_h_true_multi(rollouts, [v_0, v_1, v_2], eta)           # several directions

Scores before the step are kept for every evaluation batch, as long as the weights stay the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from entropy_experiments.config import Config, parse_config
from entropy_experiments.estimate.measured import Case, measured_many
from entropy_experiments.estimate.noise import REPACKINGS
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.pipelines.probe_inputs import estimator_options
from entropy_experiments.results import numbers, weights_of
from entropy_experiments.types import Direction, Estimate, Params, Policy, Rollouts, Scores

NAME = "direction_{}"


class DeltaEntropyTrue:
    """Measures H(theta + eta v) - H(theta) of one policy by importance weights."""

    def __init__(
        self,
        sequence_processor: Policy,
        config: Config | Mapping[str, Any] | None = None,
        *,
        model: Any = None,
        logger: Callable[[str], object] | None = None,
    ) -> None:
        """`model` may be given too, as the earlier class wanted it: it must be the policy's own."""
        own = getattr(sequence_processor, "model", None)
        if model is not None and model is not own:
            raise ValueError(
                "model is not the model of sequence_processor; expected the same one. Leave model "
                "out: the processor knows its own."
            )
        self.policy = sequence_processor
        self.config = config if isinstance(config, Config) else parse_config(config or {})
        self._logger = logger
        self._base: WeakKeyDictionary[Rollouts, tuple[tuple[float, ...], Scores]]
        self._base = WeakKeyDictionary()

    def compute_delta_h_true(
        self,
        E_batch: Rollouts,
        v_named: Direction | Params,
        eta: float,
        cfg: Mapping[str, Any] | None = None,
        *,
        return_details: bool = False,
        symmetric_eta: float | None = None,
        clip_overrides: Sequence[float] = (),
    ) -> Any:
        """The change as a number, or, with any of the last three options, as a dict of details.

        `cfg`: keys of the true_delta_h section (tf_batch_size, clip_c, report_per_token, is_mode)
        in place of the configuration's. `symmetric_eta` adds the changes at plus and minus that
        step, `clip_overrides` those under other clips.
        """
        config = self._configured(cfg)
        own = config.measure.clip_log_weights
        clips = tuple(dict.fromkeys((own, *map(float, clip_overrides))))
        wanted = return_details or symmetric_eta is not None or bool(clip_overrides)
        etas = [float(eta)]
        if symmetric_eta is not None:
            etas += [float(symmetric_eta), -float(symmetric_eta)]
        changes = self._changes(E_batch, [v_named], etas, clips, config, details=wanted)
        name = NAME.format(0)
        change = changes[Case(name, float(eta), own)]
        self._say(change, eta)
        if not wanted:
            if not change.trusted:
                warnings.warn(
                    f"the measured change {change.value:.3g} is not trusted: "
                    f"{'; '.join(change.why_not)}. return_details=True has the interval.",
                    stacklevel=2,
                )
            return change.value
        details = change_details(change)
        if clip_overrides:
            details["clip_overrides"] = {
                f"{clip:.6g}": change_details(changes[Case(name, float(eta), float(clip))])
                for clip in clip_overrides
            }
        if symmetric_eta is not None:
            plus, minus = (changes[Case(name, sign * abs(etas[1]), own)] for sign in (1, -1))
            details["symmetric_fd"] = {
                "eta": abs(etas[1]),
                "plus": plus.value,
                "minus": minus.value,
                "slope": numbers((0.5 / abs(etas[1])) * (plus - minus)),
            }
        return details

    def compute_delta_h_true_multi(
        self,
        E_batch: Rollouts,
        v_named_list: Sequence[Direction | Params],
        eta: float,
        cfg: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """The details of every direction, in order; scores before the step are shared by all."""
        if not v_named_list:
            return []
        config = self._configured(cfg)
        own = config.measure.clip_log_weights
        changes = self._changes(E_batch, v_named_list, [float(eta)], (own,), config, details=True)
        estimates = [
            changes[Case(NAME.format(i), float(eta), own)] for i in range(len(v_named_list))
        ]
        for change in estimates:
            self._say(change, eta)
        return [change_details(change) for change in estimates]

    def _configured(self, cfg: Mapping[str, Any] | None) -> Config:
        if not cfg:
            return self.config
        changes = {f"true_delta_h.{name}": value for name, value in cfg.items()}
        return self.config.replaced(changes, where="cfg")

    def _changes(
        self,
        rollouts: Rollouts,
        directions: Sequence[Direction | Params],
        etas: Sequence[float],
        clips: Sequence[float | None],
        config: Config,
        *,
        details: bool,
    ) -> dict[Case, Estimate]:
        named = {NAME.format(i): _direction(v) for i, v in enumerate(directions)}
        return measured_many(
            self.policy,
            rollouts,
            named,
            list(dict.fromkeys(etas)),
            estimator_options(config, config.sampling.max_new_tokens),
            base=self._base_scores(rollouts, config),
            clips=clips,
            # The noise floor takes passes of its own, and a plain number has no place for it.
            repackings=REPACKINGS if details else 0,
        )

    def _base_scores(self, rollouts: Rollouts, config: Config) -> Scores:
        weights = _weights(self.policy.params)
        cached = self._base.get(rollouts)
        if cached is not None and cached[0] == weights:
            return cached[1]
        microbatch = config.forward_batch_size
        scores = score_all(self.policy, self.policy.params, rollouts, microbatch=microbatch)
        self._base[rollouts] = (weights, scores)
        return scores

    def _say(self, change: Estimate, eta: float) -> None:
        if self._logger is not None:
            weights = weights_of(change)
            self._logger(
                f"eta {eta:g}: measured change {change.value:.6g}, effective sample size "
                f"{weights['ESS']:.1f}, clipped {weights['clip_fraction']:.1%}"
            )


def change_details(change: Estimate) -> dict[str, Any]:
    """What is behind a measured change, as JSON values.

    `integrand` sums to the change; `h_base` and `h_new` are each rollout's summed entropy.
    """
    known, weights = change.diagnostics, change.diagnostics["weights"]
    logweight_N = weights.logweight_N
    before_N, after_N = known["entropy_base_N"], known["entropy_N"]
    return {
        "delta_h_true": change.value,
        **{name: value for name, value in numbers(change).items() if name != "value"},
        **weights_of(change),
        "ess": weights.ess,
        "integrand": known["integrand_N"].tolist(),
        "token_counts": known["tokens_N"].tolist(),
        "h_base": before_N.tolist(),
        "h_new": after_N.tolist(),
        "delta_h_seq": (after_N - before_N).tolist(),
        "log_weights": logweight_N.tolist(),
        "logweight_stats": {
            "min": float(logweight_N.min()),
            "median": float(logweight_N.median()),
            "max": float(logweight_N.max()),
        },
        "step_rounding": known["step_rounding"],
    }


def _direction(v: Direction | Params) -> Direction:
    return v if isinstance(v, Direction) else Direction(parts={"direction": v}, lr=1.0)


def _weights(params: Params) -> tuple[float, ...]:
    """Two sums of every parameter: an optimizer step between two calls does not go unnoticed."""
    return tuple(
        float(total)
        for value in params.values()
        for total in (value.detach().double().sum(), value.detach().double().square().sum())
    )
