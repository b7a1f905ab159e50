"""Advantages, recorded batches and completion files against a real `GRPOTrainer`.

One optimizer step of a tiny model per `scale_rewards`. Two reward functions with weights, one of
which now and then has no opinion, and once both have none: TRL's NaN rules are exercised too.
"""

from types import SimpleNamespace

import pytest
import torch

from entropy_experiments.sampling.advantages import group_advantages, weighted_rewards
from entropy_experiments.sampling.generate import end_tokens
from entropy_experiments.sampling.importers import from_trl_completions, from_trl_inputs
from entropy_experiments.sampling.rollout_files import load_update_batch, save_update_batch
from oracles.tiny_models import EOS, PAD, tiny_model, tiny_tokenizer
from tolerances import TRL_ADVANTAGE

pytestmark = pytest.mark.contract

WEIGHTS = [1.0, 0.5]
GROUP, PROMPTS, LENGTH = 4, 4, 12


def digits(completions, **_):
    return [None if len(c) % 5 == 0 else sum(x.isdigit() for x in c) / 7 for c in completions]


def brevity(completions, **_):
    return [None if len(c) % 10 == 0 else 0.3 - 0.1 * len(c) for c in completions]


def train(folder, **options):
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    recorded = []

    class Record(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            recorded.append([dict(part) for part in trainer._buffered_inputs])

    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    model = tiny_model()
    model.config._name_or_path = str(folder / "model")  # where TRL looks for the reference model
    model.save_pretrained(folder / "model")
    prompts = ["1+1=", "(12+34)*5=", "7-3=", "9:2+1="]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[digits, brevity],
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Record()],
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=1,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=GROUP,
            max_completion_length=LENGTH,
            reward_weights=WEIGHTS,
            log_completions=True,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            disable_tqdm=True,
            num_completions_to_print=0,
            **options,
        ),
    )
    with torch.random.fork_rng(devices=[]):
        trainer.train()
    parquet = next((folder / "completions").glob("*.parquet"))
    return SimpleNamespace(parts=recorded[0], parquet=parquet, tokenizer=tokenizer, trainer=trainer)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    made = {}

    def get(scale="group", **options):
        key = (scale, *sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("trl")
            made[key] = train(folder, scale_rewards=scale, **options)
        return made[key]

    return get


@pytest.mark.filterwarnings("ignore")  # of the trainer's own libraries
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(step, scale):
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(step(scale).parquet).to_pydict()
    reward_NF = torch.tensor(
        [
            [torch.nan if x is None else x for x in pair]
            for pair in zip(table["digits"], table["brevity"])
        ]
    )
    assert reward_NF.isnan().any()
    assert reward_NF.isnan().all(1).any(), "a completion without any opinion was wanted"
    advantage_N = group_advantages(weighted_rewards(reward_NF, WEIGHTS), GROUP, scale)
    expected_N = torch.tensor(table["advantage"])
    assert expected_N.abs().max() > 0.05
    assert torch.allclose(advantage_N, expected_N, atol=TRL_ADVANTAGE, rtol=0)
    # Teeth: the weights and the kind of scaling are visible at this tolerance.
    for other in {"group", "batch", "none"} - {scale}:
        wrong_N = group_advantages(weighted_rewards(reward_NF, WEIGHTS), GROUP, other)
        assert not torch.allclose(wrong_N, expected_N, atol=1e-3, rtol=0)
    unweighted_N = group_advantages(weighted_rewards(reward_NF, [1.0, 1.0]), GROUP, scale)
    assert not torch.allclose(unweighted_N, expected_N, atol=1e-3, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_recorded_inputs_become_the_batch_that_was_trained_on(step, tmp_path):
    made = step("group")
    batch = from_trl_inputs(made.parts, eos=EOS, pad=PAD)
    rollouts = batch.rollouts
    assert len(rollouts) == GROUP * PROMPTS
    assert batch.microbatch_N is not None
    assert batch.microbatch_N.tolist() == [0] * 8 + [1] * 8
    assert int(batch.counted_NS.sum()) == int(made.parts[0]["num_items_in_batch"])
    assert torch.bincount(rollouts.prompt_N).tolist() == [GROUP] * PROMPTS
    row = 0
    for part in made.parts:
        for i in range(len(part["prompt_ids"])):
            prompt = part["prompt_ids"][i][part["prompt_mask"][i].bool()].tolist()
            answer = part["completion_ids"][i][part["completion_mask"][i].bool()].tolist()
            assert rollouts.tokens_NS[row][rollouts.attention_NS[row]].tolist() == prompt + answer
            assert rollouts.tokens_NS[row][rollouts.response_NS[row]].tolist() == answer
            assert bool(rollouts.truncated_N[row]) == (answer[-1] != EOS)
            advantage = batch.advantage_NS[row][rollouts.response_NS[row]]
            assert (advantage == part["advantages"][i]).all()
            row += 1
    save_update_batch(tmp_path / "update_batch", batch, meta={"step": 1})
    again, meta = load_update_batch(tmp_path / "update_batch")
    assert meta == {"step": 1}
    assert again.rollouts.fingerprint == rollouts.fingerprint
    assert torch.equal(again.advantage_NS, batch.advantage_NS)


@pytest.mark.filterwarnings("ignore")
def test_stale_and_reference_log_probs_and_masked_rollouts(step):
    made = step("none", num_iterations=2, beta=0.1, mask_truncated_completions=True)
    batch = from_trl_inputs(made.parts, eos=EOS, pad=PAD)
    response_NS = batch.rollouts.response_NS
    assert batch.old_logprob_NS is not None
    assert batch.ref_logprob_NS is not None
    assert batch.loss_NS is not None
    assert batch.rollouts.truncated_N.any()
    assert not batch.loss_NS[batch.rollouts.truncated_N].any()
    whole_N = ~batch.rollouts.truncated_N
    assert torch.equal(batch.loss_NS[whole_N], response_NS[whole_N])
    assert (batch.rollouts.tokens_N[batch.rollouts.truncated_N] == LENGTH).all()
    mask = torch.cat([part["completion_mask"] for part in made.parts]).bool()
    old = torch.cat([part["old_per_token_logps"] for part in made.parts])
    assert torch.equal(batch.old_logprob_NS[batch.loss_NS], old[mask])
    with pytest.raises(ValueError, match=r"give pad=tokenizer.pad_token_id"):
        from_trl_inputs(made.parts, eos=EOS)


@pytest.mark.filterwarnings("ignore")
def test_completions_parquet_gives_the_same_rollouts(step):
    made = step("group")
    imported = from_trl_completions(
        made.parquet, made.tokenizer, max_completion_length=LENGTH, weights=WEIGHTS
    )
    recorded = from_trl_inputs(made.parts, eos=EOS, pad=PAD)

    def lines(batch):
        rollouts = batch.rollouts
        return sorted(
            (
                rollouts.tokens_NS[n][rollouts.attention_NS[n]].tolist(),
                round(float(batch.advantage_NS[n][rollouts.response_NS[n]][0]), 5),
            )
            for n in range(len(rollouts))
        )

    assert imported.batch is not None
    # TRL decodes without special tokens: a response that drew <pad> or <unk> cannot be had again.
    lossless = [
        x for x in lines(recorded) if not {PAD, 2} & set(x[0][:-1]) and EOS not in x[0][:-1]
    ]
    assert len(lossless) > 5
    assert all(line in lines(imported.batch) for line in lossless)
    assert any("digits" in note for note in imported.notes)


@pytest.mark.filterwarnings("ignore")
def test_trl_ends_completions_with_the_same_tokens(step):
    made = step("group")
    assert sorted(made.trainer.eos_token_ids) == list(
        end_tokens(made.trainer.model, made.tokenizer)
    )


@pytest.mark.filterwarnings("ignore")
def test_every_key_of_the_buffer_is_understood(step):
    parts = step("group").parts
    with pytest.raises(
        ValueError, match=r"do not understand|does not understand: \['pixel_values'\]"
    ):
        from_trl_inputs({**parts[0], "pixel_values": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"lack \['advantages'\]"):
        from_trl_inputs({k: v for k, v in parts[0].items() if k != "advantages"})
    with pytest.raises(ValueError, match=r"Give every microbatch"):
        from_trl_inputs(parts[0])
    assert len(from_trl_inputs(parts[0], check_items=False).rollouts) == 8


def test_vllm_importance_ratios_scale_the_policy_loss_alone():
    """TRL multiplies the clipped loss by w, then adds the KL: the same as advantages times w."""
    parts = {
        "prompt_ids": torch.tensor([[5, 6], [0, 6]]),
        "prompt_mask": torch.tensor([[1, 1], [0, 1]]),
        "completion_ids": torch.tensor([[7, 8, 1], [9, 1, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "advantages": torch.tensor([1.0, -2.0]),
        "num_items_in_batch": torch.tensor(5),
        "importance_sampling_ratio": torch.tensor([[0.5, 1.0, 2.0], [1.5, 1.0, 9.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0], [-1.0, torch.nan, 0.0]]),
    }
    batch = from_trl_inputs(parts, eos=1)
    assert batch.advantage_NS.tolist() == [[0, 0, 0.5, 1.0, 2.0], [0, 0, -3.0, -2.0, 0]]
    assert batch.rollouts.behaviour_logprob_NS is None
    one_per_row = {**parts, "importance_sampling_ratio": torch.tensor([[0.5], [2.0]])}
    assert from_trl_inputs(one_per_row).advantage_NS[1].tolist() == [0, 0, -4.0, -4.0, 0]
    finite = {**parts, "sampling_per_token_logps": torch.full((2, 3), -1.0)}
    behaviour_NS = from_trl_inputs(finite).rollouts.behaviour_logprob_NS
    assert behaviour_NS is not None
    assert behaviour_NS[1].tolist() == [0, 0, -1.0, -1.0, 0]


def test_tool_results_are_holes_in_the_response():
    parts = {
        "prompt_ids": torch.tensor([[5]]),
        "prompt_mask": torch.tensor([[1]]),
        "completion_ids": torch.tensor([[7, 8, 9, 1]]),
        "completion_mask": torch.ones(1, 4, dtype=torch.long),
        "tool_mask": torch.tensor([[1, 0, 0, 1]]),
        "advantages": torch.tensor([2.0]),
    }
    batch = from_trl_inputs(parts, eos=[1, 3])
    assert batch.rollouts.response_NS.tolist() == [[False, True, False, False, True]]
    assert batch.rollouts.attention_NS.all()
    assert batch.advantage_NS.tolist() == [[0, 2.0, 0, 0, 2.0]]
    assert batch.loss_NS is None
    assert not batch.rollouts.truncated_N.any()
