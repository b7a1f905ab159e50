"""A model cut over ranks (FSDP2) against the whole model in one process.

Five rollouts in microbatches of two are three for two ranks: one of them idles. A width of 49 and
adapters of rank 3 are cut unevenly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from entropy_experiments import (
    AdamGroup,
    Estimate,
    Objective,
    OptimizerState,
    UpdateBatch,
    compute_update_vector_adamw,
    curvature,
    first_order,
    first_order_by_part,
)
from entropy_experiments.distributed import (
    LostRankError,
    RankError,
    Ranks,
    across,
    announced,
)
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import ShardedModel, ShardedPolicy, decoder_layers
from entropy_experiments.numerics.derivatives import dot, norm, pullback
from entropy_experiments.types import Direction, Rollouts, Scores
from oracles.processes import on_ranks
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts

pytestmark = pytest.mark.invariant

MICROBATCH, LR = 2, 1e-3
ETAS = (1e-3, 5e-3)
TOLERANCE = {"float64": 1e-10, "float32": 1e-6}
ODD = {"intermediate_size": 49, "num_hidden_layers": 2}
KINDS: dict[str, tuple[str, Any]] = {
    "full, fp64": ("float64", lambda: tiny_model("llama", **ODD)),
    "full, fp32": ("float32", lambda: tiny_model("llama", **ODD)),
    "LoRA, fp64": ("float64", lambda: tiny_lora("llama", r=3)),
    "LoRA, fp32": ("float32", lambda: tiny_lora("llama", r=3)),
    "tied head, fp64": ("float64", lambda: tiny_model("qwen2")),
    "biases, fp32": ("float32", lambda: tiny_model("gpt2")),
    "LoRA on bf16, fp32": ("float32", lambda: _half_base(tiny_lora("llama", r=3))),
}


def _half_base(model: Any) -> Any:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model


def _model(kind: str) -> Any:
    dtype, make = KINDS[kind]
    model = make()
    return true_float64(model) if dtype == "float64" else model


def _rollouts() -> Rollouts:
    return tiny_rollouts(prompts=(3, 9, 5, 4, 4), responses=(4, 7, 2, 3, 5))


def _drawn(shapes: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in shapes.items()
    }


def _state(shapes: dict[str, Tensor]) -> OptimizerState:
    first, second = _drawn(shapes, 1), _drawn(shapes, 2)
    group = AdamGroup(names=tuple(shapes), lr=LR, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    state = {
        name: {"step": 3, "exp_avg": 0.1 * first[name], "exp_avg_sq": second[name] ** 2}
        for name in shapes
    }
    return OptimizerState(groups=(group,), state=state)


def _batch() -> UpdateBatch:
    rollouts = tiny_rollouts(seed=5, prompts=(2, 4, 4), responses=(3, 6, 2))
    advantage_N = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    return UpdateBatch(
        rollouts=rollouts, advantage_NS=advantage_N[:, None].expand(rollouts.tokens_NS.shape)
    )


def _given(shapes: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {"momentum": _drawn(shapes, 3), "gradient": _drawn(shapes, 4)}


def _everything(policy: Any, optimizer: OptimizerState, given: Direction) -> dict[str, Any]:
    """Numbers by name; what has one entry per parameter has the whole of it."""
    rollouts, speaks = _rollouts(), dict[str, Any](microbatch=MICROBATCH, repackings=1)
    found = score_all(policy, policy.params, rollouts, microbatch=MICROBATCH)
    out: dict[str, Any] = {"scores": torch.stack(list(found))}
    direction, _, stats = compute_update_vector_adamw(
        policy, _batch(), Objective(), optimizer, max_grad_norm=0.05, microbatch=MICROBATCH
    )
    out["update"] = [stats.loss, stats.grad_norm, stats.clip_factor, stats.microbatches]
    out["update scores"] = torch.stack(list(stats.found.scores))
    out["part norms"] = list(stats.part_norms.values())
    out["shares"] = [share for part in stats.shares.values() for share in part.values()]
    out |= {f"direction {n}": _whole(v) for n, v in direction.total.items()}
    out["dot"] = [dot(policy.params, direction.total), norm(policy.params)]
    out["step"] = first_order(policy, rollouts, direction, mode="reverse", **speaks)
    # The rebuilt step differs in its last bit where gradients were added in another order, and
    # differences in fp32 magnify that: what follows is along a step that is given.
    direction = given
    for mode in ("central", "reverse"):
        slope = first_order_by_part(policy, rollouts, direction, mode=mode, **speaks)
        out[mode] = [slope.total, *slope.lines.values()]
    out["matched"] = first_order(policy, rollouts, direction, mode="central", form="matched")
    out["curvature"] = curvature(policy, rollouts, direction, mode="central", **speaks)
    changes = measured_many(policy, rollouts, {"v": direction}, ETAS, symmetric=True, **speaks)
    out["measured"] = list(changes.values())
    return out


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach()


def _sharded(kinds: list[str], **options: Any) -> dict[str, Any]:
    out, ranks = {}, Ranks.all()
    for kind in kinds:
        model = _model(kind)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        trained = {n: before[n] for n, p in model.named_parameters() if p.requires_grad}
        with across(ranks):
            sharded = ShardedModel(model, ranks)
            policy = ShardedPolicy(sharded, **options)
            parts = {part: policy.cut(v) for part, v in _given(trained).items()}
            given = Direction(parts=parts, lr=LR)
            out[kind] = _everything(policy, sharded.cut_state(_state(trained)), given)
        after = {n: _whole(p) for n, p in model.named_parameters()}
        assert after.keys() == before.keys()
        assert list(policy.params) == list(trained)
        out[kind]["unchanged"] = all(torch.equal(after[n], before[n]) for n in before)
        out[kind]["held"] = _bytes(p.detach().to_local() for p in sharded.parameters())  # type: ignore[union-attr]
        out[kind]["left"] = [p.grad is None for p in sharded.parameters()]
    return out


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory behind them, which may be more than they show."""
    memory = (value.untyped_storage() for value in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def _alone(kind: str, **options: Any) -> dict[str, Any]:
    policy = SequenceProcessor(_model(kind), **options)
    given = Direction(parts=_given(policy.params), lr=LR)
    return _everything(policy, _state(policy.params), given)


def _flat(found: Any) -> Tensor:
    if isinstance(found, Estimate):
        found = [found.value, found.stderr or 0.0]
    if isinstance(found, list):
        return torch.cat([_flat(x) for x in found])
    return torch.as_tensor(found).detach().double().flatten()


def _gap(one: Any, other: Any) -> float:
    """Largest difference, relative to the largest value."""
    one_X, other_X = _flat(one), _flat(other)
    return float((one_X - other_X).abs().max() / one_X.abs().max())


CASES = [(2, list(KINDS), {}), (3, ["full, fp64", "LoRA, fp32"], {"checkpointing": True})]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kinds", "options"), CASES, ids=["two", "three"])
def test_a_sharded_model_gives_the_numbers_of_the_whole(size, kinds, options):
    everyone = on_ranks(size, _called, kinds, options)
    for kind in kinds:
        alone, tolerance = _alone(kind, **options), TOLERANCE[KINDS[kind][0]]
        for shared in (found[kind] for found in everyone):
            assert shared.pop("unchanged")
            assert all(shared.pop("left"))
            held = shared.pop("held")
            assert shared.keys() == alone.keys()
            for name in alone:
                assert _gap(alone[name], shared[name]) <= tolerance, (kind, name)
            assert held < 0.6 * _bytes(_model(kind).parameters())


def _called(kinds: list[str], options: dict[str, Any]) -> dict[str, Any]:
    return _sharded(kinds, **options)


def _with_another_factor(factor: float) -> float:
    model, ranks = _model("full, fp64"), Ranks.all()
    sharded = ShardedModel(model, ranks)
    for module in sharded._fsdp_modules():
        module.set_gradient_divide_factor(factor)
    policy = ShardedPolicy(sharded)
    return _slope(policy, policy.cut(_drawn(policy.params, 3)), ranks)


def _slope(policy: Any, v: Any, ranks: Ranks) -> float:
    with across(ranks):
        direction = Direction(parts={"observed": v}, lr=LR)
        return first_order(
            policy, _rollouts(), direction, mode="reverse", microbatch=2, repackings=0
        ).value


def _two_factors() -> list[float]:
    return [_with_another_factor(factor) for factor in (1.0, 2.0)]


@pytest.mark.slow
def test_the_comparison_has_teeth():
    """FSDP's own convention, the mean over ranks, is half of the sum."""
    whole = SequenceProcessor(_model("full, fp64"))
    expected = _slope(whole, _drawn(whole.params, 3), Ranks())
    for right, wrong in on_ranks(2, _two_factors):
        assert right == pytest.approx(expected, rel=1e-10)
        assert wrong == pytest.approx(expected / 2, rel=1e-10)


class InjectedError(Exception):
    pass


class Refusing(ShardedPolicy):
    """One rank finds a score that is no number, between two passes."""

    def score(self, params: Any, rollouts: Rollouts) -> Scores:
        scores = super().score(params, rollouts)
        if self.ranks.rank == 1:
            return Scores(scores.logprob_NS, scores.entropy_NS * torch.nan)
        return scores


def _half(ranks: Ranks, policy: Any) -> None:
    if ranks.first:
        policy.score(policy.params, _rollouts())
    else:
        ranks.all_reduce(lambda: [torch.ones(1)])


def _refused() -> list[str]:
    """A refusal between passes: the same on both ranks, and the model is as good as before."""
    ranks = Ranks.all()
    sharded = ShardedModel(_model("full, fp32"), ranks)
    said = []
    with across(ranks):
        policy: Any = Refusing(sharded)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"gave entropy_NS = nan for rollout") as caught:
                score_all(policy, policy.params, _rollouts(), microbatch=1)
            assert announced(caught.value)
            assert isinstance(caught.value, RankError) == ranks.first
            said.append(str(caught.value))
        plain = ShardedPolicy(sharded)
        found = score_all(plain, plain.params, _rollouts(), microbatch=1)

        # Half of the ranks come to a pass: nobody waits for the others.
        with pytest.raises(RankError, match=r"1 of 2 ranks begin a pass .* expected all at once"):
            _half(ranks, plain)

        shards, rollouts = plain.params, _rollouts()
        v = {name: torch.zeros(p.shape) for name, p in shards.items()}
        direction = Direction(parts={"observed": plain.cut(v)}, lr=LR)
        for mode in ("jvp", "double_backward"):
            with pytest.raises(ValueError, match=rf"mode='{mode}' on a ShardedPolicy; expected"):
                first_order(plain, _rollouts(), direction, mode=mode)
        with pytest.raises(ValueError, match=r"direction has whole for .*; expected a shard"):
            first_order(plain, _rollouts(), Direction(parts={"observed": v}, lr=LR))
        with pytest.raises(ValueError, match=r"inside a transform of torch\.func"):
            torch.func.vmap(lambda _: plain.score(shards, rollouts))(torch.ones(2))
        with pytest.raises(ValueError, match=r"gradient of one scalar for sharded parameters"):
            pullback(lambda p: plain.score(p, rollouts).logprob_NS.sum(), shards)
        with pytest.raises(ValueError, match=r"shape \(3,\) to cut as a parameter of shape"):
            plain.cut({name: torch.ones(3) for name in shards})
    with pytest.raises(ValueError, match=r"sharded over 2 ranks, and the work is not shared"):
        first_order(plain, _rollouts(), direction, mode="reverse", base=found)
    return [*said, str(float(found.entropy_NS.sum()))]


@pytest.mark.slow
def test_a_refusal_between_passes_is_the_same_on_all_ranks():
    one, other = on_ranks(2, _refused)
    assert one == other


def _broken() -> list[Any]:
    """Rank 1 fails in the first layer; rank 0 waits for its share of the second."""
    ranks = Ranks.all()
    model: Any = _model("full, fp32")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sharded = ShardedModel(model, ranks)
    policy = ShardedPolicy(sharded)
    moved = {n: p + 1.0 for n, p in policy.params.items()}

    def fail(*_: Any) -> None:
        raise InjectedError("in the first layer")

    if ranks.rank == 1:
        model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with across(ranks), pytest.raises((InjectedError, LostRankError)) as caught:
        score_all(policy, moved, _rollouts(), microbatch=MICROBATCH)
    assert announced(caught.value)
    with pytest.raises(RuntimeError, match="earlier pass of the sharded model failed half-way"):
        policy.score(moved, _rollouts())
    size = ranks.size
    same = all(
        torch.equal(p.detach().to_local(), _rows(before[n], ranks.rank, size))
        for n, p in model.named_parameters()
    )
    return [type(caught.value).__name__, same]


def _rows(whole: Tensor, rank: int, size: int) -> Tensor:
    pieces = whole.chunk(size)
    return pieces[rank] if rank < len(pieces) else whole[:0]


@pytest.mark.slow
def test_a_failure_inside_a_pass_ends_all_ranks_and_puts_the_parameters_back():
    one, other = on_ranks(2, _broken)
    assert one == ["LostRankError", True]
    assert other == ["InjectedError", True]


@pytest.mark.parametrize(("rollouts", "microbatch", "parts"), [(5, 2, 4), (4, 2, 2), (1, 8, 2)])
def test_idle_parts_make_the_passes_even(rollouts, microbatch, parts):
    class Two:
        lockstep = 2

    batch = tiny_rollouts(prompts=(3,) * rollouts, responses=(4,) * rollouts)
    found = list(batch.split(microbatch, Two()))
    assert len(found) == parts
    idle = [part for part in found if not len(part.rows_N)]
    assert len(idle) == parts - len(list(batch.split(microbatch)))
    assert all(len(part.rollouts) == 1 for part in idle)
    filled = torch.zeros(batch.tokens_NS.shape)
    for rows_N, columns, part in found:
        filled[rows_N, columns] += torch.ones(part.tokens_NS.shape)
    assert torch.equal(filled > 0, batch.attention_NS.any(0).expand(filled.shape))
    assert float(filled.max()) == 1.0


def _two() -> Any:
    ranks: Any = Ranks()
    ranks.group, ranks.size = object(), 2
    return ranks


def test_models_that_cannot_be_cut_are_refused():
    mixed = tiny_model("llama")
    mixed.lm_head.weight.data = mixed.lm_head.weight.data.double()
    with pytest.raises(ValueError, match=r"several dtypes \(torch.float32, torch.float64\)"):
        ShardedModel(mixed, _two())
    stored = tiny_model("llama").requires_grad_(False)
    stored.lm_head.weight.data = stored.lm_head.weight.data.to(torch.uint8)
    with pytest.raises(ValueError, match=r"1 parameters are quantised \(lm_head.weight is torch"):
        ShardedModel(stored, _two())
    with pytest.raises(ValueError, match=r"Linear names no layers that belong together"):
        decoder_layers(torch.nn.Linear(2, 2))


def test_one_process_cannot_shard():
    with pytest.raises(ValueError, match=r"sharded model in 1 process; .*torchrun"):
        ShardedModel(tiny_model("llama"), Ranks())
