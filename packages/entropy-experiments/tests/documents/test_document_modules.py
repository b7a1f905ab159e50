"""The documents' classes against plain loops over the model, in fp64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from entropy_experiments import Objective, first_order, measured, measured_many, read_state
from entropy_experiments.adam_preconditioner import AdamPreconditioner
from entropy_experiments.delta_entropy_approx import DeltaEntropyApprox
from entropy_experiments.delta_entropy_is import DeltaEntropyIS
from entropy_experiments.delta_entropy_true import DeltaEntropyTrue
from entropy_experiments.distributed_helpers import (
    all_reduce_scalar_sum,
    count_global,
    get_dist_info,
)
from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.probe_components import ProbeComponents
from entropy_experiments.simple_entropy_probe import (
    SimpleEntropyProbe,
    compute_entropy_gradients_only,
)
from entropy_experiments.types import Rollouts, UpdateBatch
from entropy_experiments.update_vector import compute_update_vector_adamw
from entropy_experiments.utils.param_overrides import build_functional_params_named
from entropy_experiments.utils.precision_utils import (
    apply_global_precision,
    force_grads_fp32,
    str_to_dtype,
)
from oracles.processes import on_ranks
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts, train_a_little
from tolerances import CENTRAL, CENTRAL_SECOND, EXACT, OPTIMIZER, assert_close, assert_exact

pytestmark = pytest.mark.naive

LR, ETA = 1e-3, 2e-3
LENGTHS = {"prompts": (3, 9, 5, 4, 6), "responses": (4, 7, 2, 1, 12)}


class Case:
    """A tiny adapter with Adam's memory, an evaluation batch and an update batch."""

    def __init__(self) -> None:
        self.model = true_float64(tiny_lora("qwen2"))
        self.optimizer = train_a_little(self.model, grouped=True, lr=LR)
        self.policy = SequenceProcessor(self.model)
        self.evaluation = tiny_rollouts(seed=1, **LENGTHS)
        rollouts = tiny_rollouts(seed=2, prompts=(4, 4, 7, 7), responses=(3, 5, 2, 6))
        sign_N = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
        advantage_NS = torch.where(rollouts.response_NS, sign_N[:, None], 0.0)
        self.update = UpdateBatch(rollouts=rollouts, advantage_NS=advantage_NS)

    @property
    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def state(self):
        return read_state(self.optimizer, self.trainable)


@pytest.fixture(scope="module")
def case():
    """Not to be changed."""
    return Case()


def plain_scores(model, rollouts: Rollouts, row: int) -> tuple[Tensor, Tensor]:
    """(log-prob, entropy) of each response token of one rollout, alone and without padding."""
    inside_S, response_S = rollouts.attention_NS[row], rollouts.response_NS[row]
    tokens_S = rollouts.tokens_NS[row][inside_S]
    logp_SV = model(input_ids=tokens_S[None]).logits[0].log_softmax(-1)
    at = response_S[inside_S].nonzero().squeeze(1)
    rows_TV = logp_SV[at - 1]
    return rows_TV[torch.arange(len(at)), tokens_S[at]], -(rows_TV.exp() * rows_TV).sum(-1)


def entropy_per_token(model, rollouts: Rollouts) -> float:
    with torch.no_grad():
        found = [plain_scores(model, rollouts, i)[1] for i in range(len(rollouts))]
    return float(torch.cat(found).mean())


def plain_gradient(model, rollouts: Rollouts, trainable, *, states: bool = True) -> list[Tensor]:
    """dH by the textbook: each token's entropy, and its log-prob times what comes after it."""
    level = entropy_per_token(model, rollouts)
    loss, tokens = torch.zeros((), dtype=torch.float64), 0
    for i in range(len(rollouts)):
        logp_T, h_T = plain_scores(model, rollouts, i)
        for k in range(len(h_T)):
            later = (h_T[k + 1 :].detach() - level).sum()
            loss = loss + h_T[k] + states * later * logp_T[k]
        tokens += len(h_T)
    return list(torch.autograd.grad(loss / tokens, list(trainable)))


def snis_by_hand(before, after, rollouts: Rollouts) -> float:
    top = bottom = old = tokens = 0.0
    for i in range(len(rollouts)):
        with torch.no_grad():
            (l0_T, h0_T), (l1_T, h1_T) = (plain_scores(m, rollouts, i) for m in (before, after))
        weight = math.exp(float((l1_T - l0_T).sum()))
        top, bottom = top + weight * float(h1_T.sum()), bottom + weight * len(h1_T)
        old, tokens = old + float(h0_T.sum()), tokens + len(h0_T)
    return top / bottom - old / tokens


def stepped(case: Case) -> tuple[torch.nn.Module, list[Tensor]]:
    """(a copy after torch's own step on the GRPO loss, the loss gradient)."""
    model, optimizer = copy.deepcopy((case.model, case.optimizer))
    batch, loss = case.update, torch.zeros((), dtype=torch.float64)
    for i in range(len(batch.rollouts)):
        logp_T, _ = plain_scores(model, batch.rollouts, i)
        ratio_T = (logp_T - logp_T.detach()).exp()
        at = batch.rollouts.response_NS[i]
        loss = loss - (ratio_T * batch.advantage_NS[i][at]).mean() / len(batch.rollouts)
    optimizer.zero_grad()
    loss.backward()
    trainable = [p for p in model.parameters() if p.requires_grad]
    gradient = [p.grad.clone() for p in trainable]
    optimizer.step()
    return model, gradient


def a_direction(case: Case, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in case.policy.params.items()
    }


def at(case: Case, v: dict[str, Tensor], eta: float):
    moved = copy.deepcopy(case.model)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            if name in v:
                p.add_(v[name], alpha=eta)
    return moved


SNIS = {"importance": {"is_mode": "snis"}, "memory_config": {"microbatch_size": 4}}


class TestDeltaEntropyTrue:
    def test_it_is_the_change_of_a_model_that_was_really_moved(self, case):
        v = a_direction(case, 0)
        true = DeltaEntropyTrue(sequence_processor=case.policy, config=SNIS, model=case.model)
        details = true.compute_delta_h_true(case.evaluation, v, ETA, return_details=True)
        expected = snis_by_hand(case.model, at(case, v, ETA), case.evaluation)
        assert abs(expected) > 1e-4
        assert_exact(details["delta_h_true"], expected)
        assert_exact(sum(details["integrand"]), details["delta_h_true"])
        assert details["token_counts"] == list(LENGTHS["responses"])
        assert 0 < details["ess"] <= 5
        assert details["clip_fraction"] == 0
        assert details["trusted"] is (not details["why_not"])
        assert details["interval"][0] < details["delta_h_true"] < details["interval"][1]

    def test_the_number_alone_warns_where_it_cannot_be_trusted(self, case):
        few = case.evaluation.take(torch.tensor([0, 1]))
        few = Rollouts(
            tokens_NS=few.tokens_NS,
            attention_NS=few.attention_NS,
            response_NS=few.response_NS,
            prompt_N=few.prompt_N,
        )
        true = DeltaEntropyTrue(case.policy, SNIS)
        with pytest.warns(UserWarning, match="is not trusted: 2 prompts"):
            value = true.compute_delta_h_true(few, a_direction(case, 0), ETA)
        assert isinstance(value, float)

    def test_several_directions_are_each_alone(self, case):
        vs = [a_direction(case, seed) for seed in range(3)]
        true = DeltaEntropyTrue(case.policy, SNIS)
        together = true.compute_delta_h_true_multi(case.evaluation, vs, ETA)
        for v, details in zip(vs, together, strict=True):
            alone = DeltaEntropyTrue(case.policy, SNIS)
            found = alone.compute_delta_h_true(case.evaluation, v, ETA, return_details=True)
            assert_exact(details["delta_h_true"], found["delta_h_true"])
        assert len({details["delta_h_true"] for details in together}) == 3
        assert true.compute_delta_h_true_multi(case.evaluation, [], ETA) == []

    def test_scores_before_the_step_are_kept_until_the_weights_change(self, monkeypatch):
        case = Case()
        v, passes = a_direction(case, 0), []
        own = case.policy.score
        monkeypatch.setattr(
            case.policy, "score", lambda params, r: passes.append(1) or own(params, r)
        )
        true = DeltaEntropyTrue(case.policy, SNIS)
        counts = []
        for eta in (ETA, ETA / 2, ETA / 4):
            passes.clear()
            true.compute_delta_h_true(case.evaluation, v, eta)
            counts.append(sum(passes))
        assert counts[1] == counts[2] < counts[0]
        with torch.no_grad():
            for p in case.trainable.values():
                p.data.mul_(1.5)  # .data: autograd's own counter does not see it
        after = true.compute_delta_h_true(case.evaluation, v, ETA)
        assert_exact(after, snis_by_hand(case.model, at(case, v, ETA), case.evaluation))

    def test_other_clips_and_both_signs(self, case):
        v = a_direction(case, 3)
        true = DeltaEntropyTrue(case.policy, SNIS)
        found = true.compute_delta_h_true(
            case.evaluation, v, 20 * ETA, clip_overrides=[1e-3], symmetric_eta=1e-5
        )
        assert found["clip_overrides"]["0.001"]["clip_fraction"] > 0
        assert found["clip_overrides"]["0.001"]["delta_h_true"] != found["delta_h_true"]
        slope = first_order(case.policy, case.evaluation, _as_direction(v), form="matched")
        assert_close(found["symmetric_fd"]["slope"]["value"], slope.value, 1e-5)

    def test_cfg_stands_in_for_the_configuration(self, case):
        v = a_direction(case, 0)
        true = DeltaEntropyTrue(case.policy, SNIS)
        found = true.compute_delta_h_true(
            case.evaluation,
            v,
            ETA,
            {"tf_batch_size": 2, "report_per_token": False, "clip_c": 10.0},
            return_details=True,
        )
        again = measured(
            case.policy,
            case.evaluation,
            _as_direction(v),
            ETA,
            form="snis",
            unit="sequence",
            clips=(10.0,),
        )
        assert_exact(found["delta_h_true"], again.value)

    def test_another_model_is_refused(self, case):
        with pytest.raises(ValueError, match="not the model of sequence_processor"):
            DeltaEntropyTrue(case.policy, model=tiny_model())


def _as_direction(v):
    from entropy_experiments.types import Direction

    return Direction(parts={"direction": v}, lr=1.0)


def test_the_approximation_is_the_exact_derivative(case):
    """Against a difference of the very sum that is differentiated."""
    v = a_direction(case, 1)
    found = DeltaEntropyApprox(case.policy).compute_delta_h_approx(
        case.evaluation, v, ETA, quadratic=True
    )
    near, far = 1e-5, 1e-4
    changes = measured_many(
        case.policy,
        case.evaluation,
        {"v": _as_direction(v)},
        [near, far],
        symmetric=True,
        repackings=0,
    )
    value = {case.eta: change.value for case, change in changes.items()}
    assert_close(found["slope"]["value"], (value[near] - value[-near]) / (2 * near), CENTRAL)
    bend = (value[far] + value[-far]) / far**2
    assert_close(found["delta_h2"]["value"] / (ETA**2 / 2), bend, CENTRAL_SECOND)


class TestDeltaEntropyIS:
    def test_it_is_the_change_under_torchs_own_step(self, case):
        after, _ = stepped(case)
        before = copy.deepcopy(dict(case.model.named_parameters()))
        probe = DeltaEntropyIS(case.policy, objective=Objective(loss="grpo"))
        found = probe.entropy_change_two_batch(case.evaluation, case.update, case.optimizer)
        expected = snis_by_hand(case.model, after, case.evaluation)
        assert abs(expected) > 1e-6
        assert abs(found["deltaH_true"] - expected) < 1e-9
        assert found["H_upd"] == found["H_orig"] + found["deltaH_true"]
        assert_exact(found["H_orig"], entropy_per_token(case.model, case.evaluation))
        assert found["w_min"] <= 1 <= found["w_max"]
        assert 0 < found["ESS"] <= 5
        for name, p in case.model.named_parameters():
            assert torch.equal(p, before[name])

    def test_a_state_by_name_serves_as_well(self, case):
        probe = DeltaEntropyIS(case.policy, objective=Objective(loss="grpo"))
        live = probe.entropy_change_two_batch(case.evaluation, case.update, case.optimizer)
        named = probe.entropy_change_two_batch(case.evaluation, case.update, case.state)
        assert live["deltaH_true"] == named["deltaH_true"]

    def test_a_torch_optimizer_needs_a_model(self, case):
        class Bare:
            params = case.policy.params

        with pytest.raises(TypeError, match="a policy without a model"):
            DeltaEntropyIS(Bare()).entropy_change_two_batch(  # type: ignore[arg-type]
                case.evaluation, case.update, case.optimizer
            )


class TestProbeComponents:
    @pytest.mark.parametrize(("form", "slope"), [("per_decision", "to_go"), ("snis", "matched")])
    def test_bars_dot_is_the_slope_along_the_step(self, case, form, slope):
        parts = ProbeComponents(case.policy, objective=Objective(loss="grpo"), form=form)
        found = parts.compute_delta_h1_from_batches(case.evaluation, case.update, case.optimizer)
        direction, _, _ = compute_update_vector_adamw(
            case.policy, case.update, Objective(loss="grpo"), case.state
        )
        forward = first_order(case.policy, case.evaluation, direction, form=slope, mode="jvp")
        assert_exact(found["bars_dot"], forward.value)
        assert found["deltaH1"] == LR * found["bars_dot"]
        assert (found["learning_rate"], found["B_E"], found["B_U"]) == (LR, 5, 4)

    def test_sums_over_prompts_and_their_mean(self, case):
        """Document 000's crash: the backward of X has a graph, and every parameter a gradient."""
        sum_X, count = ProbeComponents(case.policy).accumulate_sum_X(case.evaluation, 2)
        expected = plain_gradient(case.model, case.evaluation, case.trainable.values())
        assert count == 5
        for name, g in zip(case.trainable, expected, strict=True):
            torch.testing.assert_close(sum_X[name] / count, g, rtol=1e-8, atol=EXACT)


class TestUpdateVector:
    def test_each_rollouts_share_and_their_sum(self, case):
        shares, facts = [], []
        direction, baseline, stats = compute_update_vector_adamw(
            case.policy,
            case.update,
            Objective(loss="grpo"),
            case.state,
            max_grad_norm=1e-3,
            sequence_callback=lambda i, v, known: (shares.append(v), facts.append((i, known))),
        )
        assert stats.clip_factor < 1
        assert [i for i, _ in facts] == [0, 1, 2, 3]
        assert [known["prompt"] for _, known in facts] == [0, 1, 2, 3]
        for name, whole in direction.gradient.items():
            together = sum(v.gradient[name] for v in shares)
            torch.testing.assert_close(together, whole, rtol=1e-9, atol=1e-12)
        assert set(baseline.parts) == {"momentum", "decay"}
        assert max(known["norm"] for _, known in facts) > 0

    def test_a_share_is_the_gradient_of_its_own_loss(self, case):
        shares = []
        direction, _, _ = compute_update_vector_adamw(
            case.policy,
            case.update,
            Objective(loss="grpo"),
            case.state,
            sequence_callback=lambda i, v, known: shares.append(v),
        )
        logp_T, _ = plain_scores(case.model, case.update.rollouts, 1)
        loss = -(-1.0 * logp_T).mean() / 4  # advantage -1, at ratio 1
        own = torch.autograd.grad(loss, list(case.trainable.values()))
        for name, g in zip(case.trainable, own, strict=True):
            expected = -direction.clip_factor * direction.preconditioner[name] * g
            torch.testing.assert_close(shares[1].gradient[name], expected, rtol=1e-8, atol=1e-12)

    def test_the_whole_step_is_torchs(self, case):
        after, _ = stepped(case)
        direction, _, _ = compute_update_vector_adamw(
            case.policy, case.update, Objective(loss="grpo"), case.state
        )
        moved = {n: p for n, p in after.named_parameters() if p.requires_grad}
        for name, p in case.trainable.items():
            expected = (moved[name] - p).detach()
            error = (LR * direction.total[name] - expected).norm() / expected.norm()
            assert error < OPTIMIZER["float64"] * 1e3  # a difference of two parameters


def test_the_preconditioner_is_the_steps_own(case):
    after, gradient = stepped(case)
    named = dict(zip(case.trainable, gradient, strict=True))
    adam = AdamPreconditioner(case.optimizer, case.trainable)
    moved = {n: p for n, p in after.named_parameters() if p.requires_grad}
    direction, applied = adam.direction(named), adam.apply_preconditioner(named)
    for name, p in case.trainable.items():
        whole = direction.momentum[name] + direction.decay[name] - applied[name]
        torch.testing.assert_close(p + LR * whole, moved[name], rtol=1e-9, atol=1e-12)
        assert applied[name].abs().max() > 0


class TestSimpleEntropyProbe:
    """Document 001: lengths that differ (372 against 200 there), and no gradient is None."""

    def ask(self, case, **changes):
        options = {
            "entropy_rollouts": case.evaluation,
            "trainable_params": list(case.trainable.values()),
            "policy_model": case.model,
            "cfg": {"microbatch_size": 4},
            "step_number": 1,
            "microbatch_size": 2,
            **changes,
        }
        return compute_entropy_gradients_only(**options)

    def test_gradients_of_variable_lengths_are_those_of_a_plain_loop(self, case):
        found = self.ask(case)
        expected = plain_gradient(case.model, case.evaluation, case.trainable.values())
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-8, atol=EXACT)
        assert all(p.grad is None or not p.grad.any() for p in case.model.parameters())

    def test_has_teeth(self, case):
        """Forgetting that other states are visited would be seen."""
        params = list(case.trainable.values())
        found = self.ask(case)
        direct = plain_gradient(case.model, case.evaluation, params, states=False)
        assert any((g - d).norm() > 0.05 * g.norm() for g, d in zip(found, direct, strict=True))

    def test_the_microbatch_changes_nothing(self, case):
        for one, all_ in zip(
            self.ask(case, microbatch_size=1), self.ask(case, microbatch_size=5), strict=True
        ):
            torch.testing.assert_close(one, all_, rtol=1e-9, atol=1e-12)

    def test_order_and_choice_of_parameters_are_the_callers(self, case):
        params = list(case.trainable.values())
        everything, some = self.ask(case), self.ask(case, trainable_params=[params[2], params[0]])
        assert torch.equal(some[0], everything[2])
        assert torch.equal(some[1], everything[0])

    def test_temperature_is_part_of_the_policy(self, case):
        for cfg in ({"temperature": 0.5}, {"generation": {"temperature": 0.5}}):
            hot, own = self.ask(case)[0], self.ask(case, cfg=cfg)[0]
            assert (hot - own).abs().max() > 1e-6

    def test_the_probes_product_predicts_a_step(self, case):
        """Gradient times a small change of the parameters, against H after and before, SNIS."""
        probe = SimpleEntropyProbe()
        grads = probe.compute_entropy_gradients_only(
            entropy_rollouts=case.evaluation,
            trainable_params=list(case.trainable.values()),
            policy_model=case.model,
            cfg={},
            step_number=7,
            microbatch_size=4,
        )
        v = a_direction(case, 5)
        changes = [1e-6 * v[name] for name in case.trainable]
        predicted = probe.delta_h_predicted(grads, changes)
        direction = _as_direction(v)
        expected = first_order(case.policy, case.evaluation, direction).value * 1e-6
        assert predicted == pytest.approx(expected, rel=1e-9)
        assert set(probe.metrics) == {
            f"simple_entropy_{name}"
            for name in ("delta_h_predicted", "grad_norm", "param_norm", "step_count")
        }
        assert probe.metrics["simple_entropy_step_count"] == 1

    def test_what_is_no_rollouts_is_refused(self, case):
        with pytest.raises(TypeError, match=r"entropy_rollouts at step 3 is a dict; expected Roll"):
            self.ask(case, entropy_rollouts={}, step_number=3)

    def test_parameters_of_another_model_are_refused(self, case):
        other = list(tiny_model().parameters())[:2]
        with pytest.raises(ValueError, match="has 2 tensors: 2 are not parameters of policy_model"):
            self.ask(case, trainable_params=other)

    @pytest.mark.slow
    def test_under_ddp_each_rank_has_the_gradient_of_all_rollouts(self, case):
        expected = plain_gradient(case.model, case.evaluation, case.trainable.values())
        for found in on_ranks(2, ddp_gradients):
            for got, want in zip(found, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-8, atol=EXACT)


def ddp_gradients() -> list[Tensor]:
    """On one of two ranks: three rollouts here, two there, through a DDP module; twice."""
    import torch.distributed as dist

    case = Case()
    rows = [[0, 1, 2], [3, 4]][dist.get_rank()]
    part = case.evaluation.take(torch.tensor(rows))
    mine = Rollouts(
        tokens_NS=part.tokens_NS,
        attention_NS=part.attention_NS,
        response_NS=part.response_NS,
        prompt_N=part.prompt_N,
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(case.model)
    params = [p for p in wrapped.parameters() if p.requires_grad]
    for step in range(2):  # a training asks again and again
        found = compute_entropy_gradients_only(
            entropy_rollouts=mine,
            trainable_params=params,
            policy_model=wrapped,
            cfg={},
            step_number=step,
            microbatch_size=2,
        )
    assert count_global(len(rows)) == 5
    assert get_dist_info() == (True, dist.get_rank(), 2)
    return found


def test_alone_there_is_nothing_to_reduce():
    assert get_dist_info() == (False, 0, 1)
    assert all_reduce_scalar_sum(torch.tensor(2.5)) == 2.5
    assert count_global(3) == 3


class TestUtilities:
    def test_overridden_parameters_are_those_of_a_moved_model(self, case):
        v = a_direction(case, 2)
        state = build_functional_params_named(case.model, v, ETA)
        tokens = case.evaluation.tokens_NS[1:2]
        with torch.no_grad():
            got = functional_call(case.model, state, (), {"input_ids": tokens}).logits
            want = at(case, v, ETA)(input_ids=tokens).logits
            own = case.model(input_ids=tokens).logits
        assert torch.equal(got, want)
        assert not torch.equal(got, own)

    def test_unknown_names_are_refused(self, case):
        with pytest.raises(ValueError, match=r"names \['nobody'\], which the model does not have"):
            build_functional_params_named(case.model, {"nobody": torch.zeros(1)}, 1.0)

    def test_dtypes_by_name(self):
        assert str_to_dtype("bf16") is torch.bfloat16
        assert str_to_dtype("float64") is torch.float64
        with pytest.raises(ValueError, match="dtype is 'int4'; expected one of float32"):
            str_to_dtype("int4")

    def test_global_precision(self):
        before = torch.get_float32_matmul_precision()
        try:
            apply_global_precision(allow_tf32=True)
            assert torch.get_float32_matmul_precision() == "high"
            apply_global_precision()
            assert torch.get_float32_matmul_precision() == "highest"
            with pytest.raises(ValueError, match="matmul_precision is 'low'; expected highest"):
                apply_global_precision(matmul_precision="low")
            with pytest.raises(
                ValueError, match="allow_tf32 is False with matmul_precision 'high'"
            ):
                apply_global_precision(allow_tf32=False, matmul_precision="high")
        finally:
            torch.set_float32_matmul_precision(before)

    def test_gradients_take_their_parameters_precision(self):
        """torch holds a gradient in its parameter's dtype: only float32 weights have such ones."""
        layer = torch.nn.Linear(2, 2).to(torch.bfloat16)
        layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        layer.float()
        force_grads_fp32(layer)
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
