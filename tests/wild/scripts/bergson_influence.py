"""How fast each token's loss moves along the entropy gradient: bergson, ours, and plain autograd.

Autograd takes one backward pass for each token of the same batch; the two others use forward mode.
"""

import json
import sys
from pathlib import Path

import torch
from bergson import IndexConfig
from bergson.score.output_influence import output_token_influence, query_directions
from torch import nn

from entropy_experiments.attribution.jacobian import score_slopes
from entropy_experiments.models.scoring import SequenceProcessor
from oracles.tiny_models import tiny_model, tiny_rollouts

PROMPT = 5


def main(result):
    model = tiny_model()
    model.set_attn_implementation("eager")  # bergson: the fused one has no forward mode on a CPU
    rollouts = tiny_rollouts(prompts=(PROMPT,) * 3, responses=(7,) * 3)  # equal: without padding
    tokens = rollouts.tokens_NS
    layers = {n: m for n, m in model.base_model.named_modules() if isinstance(m, nn.Linear)}
    weights = [layer.weight for layer in layers.values()]

    logp = model(tokens).logits[:, :-1].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)[:, PROMPT - 1 :].mean()
    direction = torch.autograd.grad(entropy, weights, retain_graph=True)

    loss = -logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, PROMPT - 1 :]
    rows = (torch.autograd.grad(x, weights, retain_graph=True) for x in loss.flatten())
    autograd = torch.stack([sum((g * u).sum() for g, u in zip(row, direction)) for row in rows])

    query = {name: u.reshape(-1, 1) for name, u in zip(layers, direction)}
    scored = {n: (m.weight.device, m.weight.shape, False) for n, m in layers.items()}
    labels = torch.where(rollouts.response_NS, tokens, -100)
    config = IndexConfig(run_path="unused", loss_reduction="sum")
    directions = query_directions(model, query, scored)
    rates, _ = output_token_influence(model, tokens, labels, directions, config)

    names = {id(p): name for name, p in model.named_parameters()}
    moved = {names[id(w)]: u for w, u in zip(weights, direction)}
    policy = SequenceProcessor(model)
    v = {name: moved.get(name, torch.zeros_like(p)) for name, p in policy.params.items()}
    slopes = score_slopes(policy, rollouts, [v], mode="jvp", microbatch=3).slope_K

    report = {
        "autograd": autograd.tolist(),
        "bergson": rates[:, PROMPT - 1 :, 0].flatten().tolist(),
        "ours": (-slopes.logprob_NS[0])[rollouts.response_NS].tolist(),
    }
    result.write_text(json.dumps(report))


main(Path(sys.argv[1]))
