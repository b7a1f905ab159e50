"""Our objectives against TRL's own `GRPOTrainer._compute_loss`, token coefficients included.

The method is called on a stand-in for the trainer that has just the attributes it reads and returns
leaf tensors as scores: what is differentiated is TRL's installed code, over two accumulated
microbatches.
"""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from entropy_experiments.types import Rollouts, Scores, UpdateBatch
from entropy_experiments.update.objective import Objective, token_coefficients
from tolerances import TRL

pytestmark = pytest.mark.contract

MICROBATCHES, PER_MICROBATCH, PROMPT, WIDTH, MAX_LENGTH = 2, 4, 3, 9, 16
N = MICROBATCHES * PER_MICROBATCH


@pytest.fixture(scope="module")
def compute_loss():
    from trl import GRPOTrainer

    return GRPOTrainer._compute_loss


def arrays(seed=0, *, stale):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths_N = torch.randint(1, WIDTH + 1, (N,), generator=generator)
    mask_NS = torch.arange(WIDTH) < lengths_N[:, None]
    logprob_NS = -draw(N, WIDTH).abs() - 0.1
    return SimpleNamespace(
        mask_NS=mask_NS,
        logprob_NS=logprob_NS,
        entropy_NS=draw(N, WIDTH).abs(),
        # Far enough that some ratios leave the clipping range on either side.
        old_NS=logprob_NS + draw(N, WIDTH, scale=0.3) if stale else None,
        ref_NS=logprob_NS + draw(N, WIDTH, scale=0.5),
        advantage_N=draw(N),
    )


def trl_loss(compute_loss, data, objective, *, items=None, steps_per_generation=MICROBATCHES):
    """Loss and its derivatives by (log-prob, entropy), summed over the accumulation window."""
    leaves = Scores(data.logprob_NS.clone(), data.entropy_NS.clone())
    for leaf in leaves:
        leaf.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(MICROBATCHES):
        rows = slice(microbatch * PER_MICROBATCH, (microbatch + 1) * PER_MICROBATCH)
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *a, rows=rows, **k: (
                leaves.logprob_NS[rows],
                leaves.entropy_NS[rows],
                None,
            ),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=objective.ratio,
            beta=objective.beta,
            epsilon_low=objective.clip_low,
            epsilon_high=objective.clip_high,
            loss_type=objective.loss,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=MICROBATCHES,
            max_completion_length=MAX_LENGTH,
            _entropy_bonus_enabled=objective.entropy_coef != 0,
            entropy_coef=objective.entropy_coef,
            use_adaptive_entropy=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            args=SimpleNamespace(
                delta=objective.delta,
                sapo_temperature_pos=objective.sapo_positive,
                sapo_temperature_neg=objective.sapo_negative,
                use_bias_correction_kl=objective.kl_ratio,
                steps_per_generation=steps_per_generation,
            ),
            accelerator=SimpleNamespace(
                num_processes=1,
                sync_gradients=True,
                gather=lambda x: x,
                gather_for_metrics=lambda x: x,
                reduce=lambda x, reduction: x,
            ),
        )
        inputs = {
            "prompt_ids": torch.zeros(PER_MICROBATCH, PROMPT, dtype=torch.int64),
            "prompt_mask": torch.ones(PER_MICROBATCH, PROMPT, dtype=torch.int64),
            "completion_ids": torch.zeros(PER_MICROBATCH, WIDTH, dtype=torch.int64),
            "completion_mask": data.mask_NS[rows].to(torch.float64),
            "advantages": data.advantage_N[rows],
            "num_items_in_batch": torch.tensor(float(items or data.mask_NS.sum())).double(),
            "ref_per_token_logps": data.ref_NS[rows],
        }
        if data.old_NS is not None:
            inputs["old_per_token_logps"] = data.old_NS[rows]
        total = total + compute_loss(trainer, trainer.model, inputs)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return total.detach(), Scores(
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads))
    )


def our_loss(data, objective):
    def widen(x_NS, fill=0.0):
        return torch.nn.functional.pad(x_NS, (PROMPT, 0), value=fill)

    mask_NS = widen(data.mask_NS, False)
    inside_NS = torch.where(data.mask_NS, 1.0, 0.0)
    rollouts = Rollouts(
        tokens_NS=torch.zeros(N, PROMPT + WIDTH, dtype=torch.int64),
        attention_NS=mask_NS | (torch.arange(PROMPT + WIDTH) < PROMPT),
        response_NS=mask_NS,
        prompt_N=torch.arange(N),
    )
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=data.advantage_N[:, None].expand(N, PROMPT + WIDTH),
        old_logprob_NS=None if data.old_NS is None else widen(data.old_NS),
        ref_logprob_NS=widen(data.ref_NS),
        microbatch_N=torch.arange(N) // PER_MICROBATCH,
    )
    scores = Scores(*(widen(x_NS * inside_NS) for x_NS in (data.logprob_NS, data.entropy_NS)))
    cotangent = token_coefficients(objective, scores, batch)
    return objective(scores, batch), Scores(*(x_NS[:, PROMPT:] for x_NS in cotangent))


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.02], ids=["", "bonus"])
@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["", "kl"])
@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo"])
def test_loss_and_token_coefficients(compute_loss, loss, beta, entropy_coef, ratio, stale):
    data = arrays(stale=stale)
    objective = Objective(
        loss=loss,
        beta=beta,
        entropy_coef=entropy_coef,
        ratio=ratio,
        clip_low=0.2,
        # cispo's bound is of the ratio itself, and other losses' of its distance from 1.
        clip_high=1.28 if loss == "cispo" else 0.28,
        sapo_positive=1.3,
        sapo_negative=0.7,
        max_completion_length=MAX_LENGTH,
    )
    _assert_same(trl_loss(compute_loss, data, objective), our_loss(data, objective))


@pytest.mark.parametrize("loss", ["grpo", "dapo", "luspo"])
def test_two_sided_clipping(compute_loss, loss):
    data = arrays(stale=True)
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    objective = Objective(loss=loss, delta=1.4, **clip)
    found = our_loss(data, objective)
    _assert_same(trl_loss(compute_loss, data, objective), found)
    _, without = our_loss(data, replace(objective, delta=None))
    assert float((without.logprob_NS - found[1].logprob_NS).abs().max()) > 1e-6  # it took part


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "cispo"])
def test_a_kl_term_times_the_ratio(compute_loss, loss, ratio, stale):
    """TRL's default with beta. At ratio 1 the loss is the same, and the gradient is not."""
    data = arrays(stale=stale)
    objective = Objective(loss=loss, ratio=ratio, beta=0.1, clip_high=0.28, kl_ratio=True)
    found = our_loss(data, objective)
    _assert_same(trl_loss(compute_loss, data, objective), found)
    _, without = our_loss(data, replace(objective, kl_ratio=False))
    assert float((without.logprob_NS - found[1].logprob_NS).abs().max()) > 1e-4


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_a_step_that_learns_from_a_part_of_what_was_generated(compute_loss, loss):
    """TRL divides by the tokens of the generation batch, scaled to one accumulation window."""
    data, items, passes = arrays(stale=True), 101, 4
    objective = Objective(loss=loss, clip_high=1.2, divisor=items * MICROBATCHES / passes)
    found = our_loss(data, objective)
    theirs = trl_loss(compute_loss, data, objective, items=items, steps_per_generation=passes)
    _assert_same(theirs, found)
    loss_value, _ = our_loss(data, replace(objective, divisor=None))
    assert abs(loss_value - found[0]) > 1e-6


def rloo_loss(data, objective):
    """TRL's own `RLOOTrainer._compute_loss`, and the Trainer's division by the accumulation."""
    from trl import RLOOTrainer

    logprob_NS = data.logprob_NS.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(MICROBATCHES):
        rows = slice(microbatch * PER_MICROBATCH, (microbatch + 1) * PER_MICROBATCH)
        mask_NS = data.mask_NS[rows].to(torch.float64)
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *a, rows=rows, **k: (
                logprob_NS[rows],
                data.entropy_NS[rows],
                None,
            ),
            aux_loss_enabled=False,
            epsilon_low=objective.clip_low,
            epsilon_high=objective.clip_high,
            model=SimpleNamespace(training=True),
            _metrics=defaultdict(lambda: defaultdict(list)),
            accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        )
        inputs = {
            "prompt_ids": torch.zeros(PER_MICROBATCH, PROMPT, dtype=torch.int64),
            "prompt_mask": torch.ones(PER_MICROBATCH, PROMPT, dtype=torch.int64),
            "completion_ids": torch.zeros(PER_MICROBATCH, WIDTH, dtype=torch.int64),
            "completion_mask": mask_NS,
            "advantages": data.advantage_N[rows],
            "old_logps": (data.old_NS[rows] * mask_NS).sum(1),
        }
        loss = RLOOTrainer._compute_loss(trainer, trainer.model, inputs)
        total = total + loss / MICROBATCHES
    (grad_NS,) = torch.autograd.grad(total, [logprob_NS])
    return total.detach(), Scores(grad_NS, torch.zeros_like(grad_NS))


def test_rloo(compute_loss):
    data = arrays(stale=True)
    objective = Objective(loss="rloo", clip_low=0.2, clip_high=0.28)
    found = our_loss(data, objective)
    _assert_same(rloo_loss(data, objective), found)
    for wrong in (
        Objective(loss="grpo", ratio="sequence", clip_low=0.2, clip_high=0.28),
        Objective(loss="luspo", ratio="sequence", clip_low=0.2, clip_high=0.28),
    ):
        assert abs(our_loss(data, wrong)[0] - found[0]) > 1e-6


def _assert_same(expected, found):
    (their_loss, theirs), (loss_value, ours) = expected, found
    assert abs(loss_value - their_loss) <= TRL * max(1.0, abs(their_loss))
    for name, got, expected in zip(Scores._fields, ours, theirs):
        scale = max(float(expected.abs().max()), 1e-3)
        assert float((got - expected).abs().max()) <= TRL * scale, name


def test_clipping_is_in_play(compute_loss):
    """The cases above have tokens on both sides of the clip, or they would prove little."""
    data = arrays(stale=True)
    _, cotangent = our_loss(data, Objective(loss="dapo", clip_low=0.2, clip_high=0.28))
    zero_NS = (cotangent.logprob_NS == 0) & data.mask_NS
    assert 0.05 < float(zero_NS.sum() / data.mask_NS.sum()) < 0.6


def test_the_comparison_has_teeth(compute_loss):
    data = arrays(stale=True)
    right = Objective(loss="grpo", beta=0.1, clip_low=0.2, clip_high=0.28)
    their_loss, theirs = trl_loss(compute_loss, data, right)
    for wrong in (
        Objective(loss="dapo", beta=0.1, clip_low=0.2, clip_high=0.28),
        Objective(loss="grpo", beta=0.1, clip_low=None, clip_high=None),
        Objective(loss="grpo", beta=0.1, clip_low=0.2, clip_high=0.28, kl="k2"),
        Objective(loss="grpo", beta=0.0, clip_low=0.2, clip_high=0.28),
    ):
        loss, ours = our_loss(data, wrong)
        assert abs(loss - their_loss) > 1e-6
        assert float((ours.logprob_NS - theirs.logprob_NS).abs().max()) > 1e-6
