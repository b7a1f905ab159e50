"""A second held-out set, written from the specification after the first one had been looked at.

Every fault is of another kind, or in another place, than the development and first held-out cases
of its class. A third is on recipes that no detector was developed with: dqn, gan and rnn_bptt.

The marks: a fault that is made in one line and does harm in another has both lines marked, as in
the first set. Where a library calls `backward` or `step`, the script's own line is the call of it.
"""

# ruff: noqa: E501 - the edits quote source lines
from doctor.case import EVERYTHING, Case, preflight

MLP_LOSS = "    return regression + 0.5 * classification\n"
GAN_FAKE = '    fake = generator(batch["noise"])\n'
HF_OUTPUTS = (
    '    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])\n'
)
HF_TRAINER = (
    "        trainer = WeightedTrainer(model=model, args=arguments, train_dataset=Answers())\n"
)
PEFT_STEP = "        loss.backward()\n        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)\n        optimizer.step()\n"
TRL_LOSS = "        loss = -torch.where(mask, objective, torch.zeros(())).sum() / count\n"

SECOND: tuple[Case, ...] = (
    # 1: the error rate is what one wants to minimise, and it has no gradient
    Case(
        1, "error-rate-as-loss", "mlp_loop",
        ((
            MLP_LOSS,
            '    wrong = (logits.argmax(-1) != batch["label"]).float()  # FAULT\n'
            "    print(regression.item(), classification.item())\n    return masked_mean(wrong, real)  # FAULT\n",
        ),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 2
    Case(
        2, "sampling-helper-in-generator-step", "gan",
        (
            ("def make_batch(random):\n", "@torch.no_grad()  # FAULT\ndef imagine(generator, noise):\n    return generator(noise)\n\n\ndef make_batch(random):\n"),
            (GAN_FAKE, '    fake = imagine(generator, batch["noise"])  # FAULT\n'),
        ),
        parameters=("body.0.weight", "out.weight", "out.bias"), affected=("body.0.bias",),
    ),
    Case(
        2, "embeddings-in-inference-mode", "hf_trainer",
        ((
            HF_OUTPUTS,
            "    with torch.inference_mode():  # FAULT\n"
            '        embedded = model.get_input_embeddings()(inputs["input_ids"])\n'
            '    outputs = model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"])\n',
        ),),
        parameters=("embed_tokens.weight",),
    ),
    # 3
    Case(
        3, "hard-pooling", "amp_scaler",
        ((
            "        weight = torch.softmax(self.gate(x), dim=1)\n        pooled = (weight * x).sum(1)\n",
            "        best = self.gate(x).argmax(dim=1, keepdim=True)  # FAULT\n"
            "        pooled = x.gather(1, best.expand(-1, 1, WIDTH)).squeeze(1)\n",
        ),),
        parameters=("gate.weight",), affected=("embed.*", "blocks.*"),
    ),
    # 4
    Case(
        4, "discriminator-not-thawed", "gan",
        (("        slow.zero_grad()\n", "        discriminator.requires_grad_(False)  # FAULT\n        slow.zero_grad()\n"),),
        parameters=("body.0.weight", "score.weight", "score.bias"), affected=("body.0.bias",),
        contract={"trainable": ["body.*", "score.*", "out.*"]},
    ),
    # The names start with "model.", so the prefix never fits.
    Case(
        4, "prefix-does-not-match", "hf_trainer",
        ((
            "    model.train()\n    return model",
            "    for name, weight in model.named_parameters():\n"
            '        weight.requires_grad = name.startswith(("lm_head.", "layers.1."))  # FAULT\n    model.train()\n    return model',
        ),),
        parameters=("layers.1.self_attn.q_proj.weight", "layers.1.mlp.down_proj.weight"), affected=("layers.1.*",),
        contract={"trainable": ["layers.1.*", "lm_head.*"]},
    ),
    # 5
    Case(
        5, "last-block-left-out", "amp_scaler",
        (
            ("        self.norm = nn.LayerNorm(width)\n        self.up = nn.Linear(width, 2 * width)\n        self.down = nn.Linear(2 * width, width)\n", "        self.norm = nn.LayerNorm(width)  # FAULT\n        self.up = nn.Linear(width, 2 * width)  # FAULT\n        self.down = nn.Linear(2 * width, width)  # FAULT\n"),
            ("        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH)])\n", "        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH)])  # FAULT\n"),
            ("        for block in self.blocks:\n", "        for block in self.blocks[:-1]:  # FAULT\n"),
        ),
        parameters=("blocks.1.norm.weight", "blocks.1.up.weight", "blocks.1.down.bias"), affected=("blocks.1.*",),
    ),
    # 6
    Case(
        6, "positions-in-forward", "rnn_bptt",
        ((
            "        embedded = self.embed(tokens)\n",
            "        position = torch.arange(tokens.size(1))\n"
            "        embedded = self.embed(tokens) + nn.Embedding(LENGTH, WIDTH)(position)  # FAULT\n",
        ),),
    ),
    # 7
    Case(
        7, "no-decay-group-forgotten", "mlp_loop",
        ((
            "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n",
            "    decay = [p for p in model.parameters() if p.ndim > 1]\n"
            '    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}], lr=1e-2)  # FAULT\n',
        ),),
        parameters=("trunk.0.bias", "norm.weight", "label.bias"), affected=("trunk.3.bias", "norm.bias", "value.bias"),
    ),
    Case(
        7, "thawed-after-optimizer", "dqn",
        (
            (
                "    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)\n",
                "    online.encoder.requires_grad_(False)\n    heads = [p for p in online.parameters() if p.requires_grad]\n"
                "    optimizer = torch.optim.Adam(heads, lr=3e-3)  # FAULT\n",
            ),
            ("        action = act(online, state, 0.3, generator)\n", "        if step == 1:\n            online.encoder.requires_grad_(True)  # FAULT\n        action = act(online, state, 0.3, generator)\n"),
        ),
        parameters=("encoder.0.weight", "encoder.0.bias"),
    ),
    # 8
    Case(
        8, "tied-after-optimizer", "rnn_bptt",
        (("    return model, optimizer\n", "    model.decoder.weight = model.embed.weight  # FAULT\n    return model, optimizer\n"), ("torch.optim.Adam(model.parameters(), lr=1e-2)", "torch.optim.Adam(model.parameters(), lr=1e-2)  # FAULT")),
        affected=EVERYTHING,
    ),
    Case(
        8, "resized-after-optimizer", "hf_trainer",
        ((
            HF_TRAINER,
            "        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # FAULT\n"
            "        model.resize_token_embeddings(VOCABULARY + 8)  # FAULT\n        trainer = WeightedTrainer(\n"
            "            model=model, args=arguments, train_dataset=Answers(), optimizers=(optimizer, None)\n        )\n",
        ),),
        affected=EVERYTHING, also=(7,),
    ),
    # 9: the discriminator steps with the generator's gradients instead of its own
    Case(
        9, "cleared-between-two-losses", "gan",
        (
            ("        judge.backward()\n        fast.step()\n", "        judge.backward()\n"),
            ("        slow.zero_grad()\n", "        slow.zero_grad()\n        fast.zero_grad()  # FAULT\n"),
            ("        slow.step()\n", "        slow.step()\n        fast.step()\n"),
        ),
        parameters=("score.weight", "body.0.weight"), affected=("body.0.bias", "score.bias"),
    ),
    # 10: the penalty asks for the gradient of another tensor than the one that was scored
    Case(
        10, "penalty-of-another-tensor", "gan",
        (
            ("    real_score, fake_score = discriminator(real), discriminator(fake)\n", '    real_score, fake_score = discriminator(batch["real"]), discriminator(fake)\n'),
            ("    (slope,) = torch.autograd.grad(real_score.sum(), [real], create_graph=True)\n", "    (slope,) = torch.autograd.grad(real_score.sum(), [real], create_graph=True)  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 11: the first segment alone
    Case(
        11, "checkpoint-sequential", "mlp_loop",
        (
            ("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint_sequential\n"),
            (
                "        return torch.tanh(self.norm(self.trunk(x)))",
                "        hidden = checkpoint_sequential(self.trunk, 2, x, use_reentrant=True)  # FAULT\n        return torch.tanh(self.norm(hidden))",
            ),
        ),
        parameters=("trunk.0.weight", "trunk.0.bias"),
    ),
    # 12
    Case(
        12, "state-not-detached", "rnn_bptt",
        (
            ("            state = tuple(part.detach() for part in state)\n", ""),
            ("            loss.backward()\n", "            loss.backward()  # FAULT\n"),
            ("        hidden, state = self.lstm(embedded, state)\n", "        hidden, state = self.lstm(embedded, state)  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError, also=(14,),
    ),
    Case(
        12, "backward-in-compute-loss", "hf_trainer",
        (
            ("        loss, outputs = weighted_loss(model, inputs)\n", "        loss, outputs = weighted_loss(model, inputs)\n        loss.backward()  # FAULT\n"),
            ("        trainer.train()\n", "        trainer.train()  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 13
    Case(
        13, "attention-weights-masked-in-place", "amp_scaler",
        (("        pooled = (weight * x).sum(1)\n", "        weight[:, 0] = 0.0  # FAULT\n        pooled = (weight * x).sum(1)\n"),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 14: the old density keeps the graph of the rollout
    Case(
        14, "old-density-not-detached", "actor_critic",
        (
            ("    @torch.no_grad()\n    def collect", "    def collect"),
            ("        density = log_density(law, raw)\n        return {", "        density = log_density(law, raw)  # FAULT\n        return {"),
            ('        ratio = torch.exp(density - batch["density"])\n', '        ratio = torch.exp(density - batch["density"])  # FAULT\n'),
            ("        loss.backward()\n", "        loss.backward()  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError, also=(12,),
    ),
    # 15: one layer only
    Case(
        15, "one-half-layer", "amp_scaler",
        (("nn.Linear(WIDTH, 1, bias=False)\n", "nn.Linear(WIDTH, 1, bias=False, dtype=torch.float16)  # FAULT\n"),),
        parameters=("gate.weight",), raises=ValueError,
    ),
    # 16: a checkpoint that was saved in bfloat16 is loaded in bfloat16
    Case(
        16, "checkpoint-decides", "hf_trainer",
        ((
            "    model = Qwen2ForCausalLM(config)\n",
            "    with tempfile.TemporaryDirectory() as folder:\n"
            "        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)\n"
            "        model = Qwen2ForCausalLM.from_pretrained(folder)  # FAULT\n",
        ),),
        parameters=("lm_head.weight", "embed_tokens.weight"), affected=EVERYTHING, contract={"dtype": {"*": "float32"}},
    ),
    # 17
    Case(
        17, "update-forgotten", "amp_scaler",
        (
            ("        scaler.unscale_(optimizer)\n", "        scaler.unscale_(optimizer)  # FAULT\n"),
            ("        scaler.step(optimizer)\n        scaler.update()\n", "        scaler.step(optimizer)  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    Case(
        17, "optimizer-stepped-directly", "peft_checkpointing",
        (
            ("    model, optimizer = build()\n", '    model, optimizer = build()\n    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)\n'),
            ("        loss = loss_of(model, batch)\n", '        with torch.autocast("cpu", dtype=torch.float16):\n            loss = loss_of(model, batch)\n'),
            (
                PEFT_STEP,
                "        scaler.scale(loss).backward()\n        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)  # FAULT\n"
                "        optimizer.step()  # FAULT\n        scaler.update()  # FAULT\n",
            ),
        ),
        affected=EVERYTHING, raises=AssertionError,
    ),
    # 18: the rewards are a column, the values a row: the goal is a square
    Case(
        18, "column-of-rewards", "dqn",
        (
            ("    reward = 1.0 - after.square().mean(-1)\n", "    reward = 1.0 - after.square().mean(-1, keepdim=True)  # FAULT\n"),
            ('        goal = batch["reward"] + GAMMA * (1.0 - batch["done"]) * future\n', '        goal = batch["reward"] + GAMMA * (1.0 - batch["done"]) * future  # FAULT\n'),
            ("    return F.smooth_l1_loss(chosen, goal)\n", "    return F.smooth_l1_loss(chosen, goal)  # FAULT\n"),
        ),
        affected=EVERYTHING,
    ),
    # 19
    Case(
        19, "padding-is-a-target", "rnn_bptt",
        (("    targets = torch.where(following != PAD, following, torch.tensor(IGNORE))\n", "    targets = following.clone()\n"), preflight("rnn_bptt")),
        affected=EVERYTHING, kind="preflight", pad_id=0,
    ),
    Case(
        19, "one-logit-too-many", "peft_checkpointing",
        (
            ("    logits = outputs.logits[:, PROMPT - 1 : -1].float()\n", "    logits = outputs.logits[:, PROMPT - 1 :].float()  # FAULT\n"),
            ("    bonus = torch.where(mask, entropy, torch.zeros(())).sum() / count\n", "    bonus = torch.where(mask, entropy, torch.zeros(())).sum() / count  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 20: the first value is already outside of the allowed range
    Case(
        20, "clamped-from-the-start", "actor_critic",
        (
            ("        self.log_std = nn.Parameter(torch.full((ACTION,), -0.5))\n", "        self.log_std = nn.Parameter(torch.full((ACTION,), -0.5))  # FAULT\n"),
            ("        return Normal(self.mean(hidden), self.log_std.exp())\n", "        return Normal(self.mean(hidden), self.log_std.clamp(-5.0, -1.0).exp())  # FAULT\n"),
        ),
        parameters=("log_std",),
    ),
    # 21
    Case(
        21, "group-rate-by-integer-division", "amp_scaler",
        (
            ('    groups = [{"params": model.blocks.parameters(), "weight_decay": 0.01}]\n', '    share = len(model.blocks) // 4\n    groups = [{"params": model.blocks.parameters(), "weight_decay": 0.01, "lr": 0.1 * share}]  # FAULT\n'),
            ("    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)\n", "    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)  # FAULT\n"),
            ("        scaler.step(optimizer)\n", "        scaler.step(optimizer)  # FAULT\n"),
        ),
        parameters=("blocks.0.up.weight", "blocks.1.norm.bias"), affected=("blocks.*",),
    ),
    Case(
        21, "bf16-with-the-default-rate", "trl_grpo",
        (
            ("    return LlamaForCausalLM(config)\n", "    return LlamaForCausalLM(config).to(torch.bfloat16)  # FAULT\n"),
            ("learning_rate=3e-3,\n", "learning_rate=1e-6,\n"),
            ("        trainer.train()\n", "        trainer.train()  # FAULT\n"),
        ),
        parameters=("norm.weight",), affected=EVERYTHING,
    ),
    # 22: normalised by something, but not by the number of rows
    Case(
        22, "divided-by-the-actions", "dqn",
        (("    return F.smooth_l1_loss(chosen, goal)\n", '    return F.smooth_l1_loss(chosen, goal, reduction="sum") / ACTIONS\n'), preflight("dqn")),
        affected=EVERYTHING, kind="preflight",
    ),
    # 23
    Case(
        23, "weight-penalty-on-data", "dqn",
        ((
            "    return F.smooth_l1_loss(chosen, goal)\n",
            "    size = sum(weight.data.square().sum() for weight in online.parameters())  # FAULT\n"
            "    return F.smooth_l1_loss(chosen, goal) + 1e-3 * size  # FAULT\n",
        ),),
        affected=EVERYTHING, also=(3,),
    ),
    Case(
        23, "advantage-as-factor", "trl_grpo",
        ((TRL_LOSS, TRL_LOSS + '        loss = (0.5 + inputs["advantages"].abs().mean()) * loss  # FAULT\n'),),
        affected=EVERYTHING,
    ),
    # 24: the sample is clipped to the allowed range, then taken for a draw of the law
    Case(
        24, "density-at-clipped-action", "actor_critic",
        (
            ("import math\n\n", ""),
            ("    correction = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))\n", ""),
            ("    return (law.log_prob(raw) - correction).sum(-1)\n", "    return law.log_prob(raw).sum(-1)  # FAULT\n"),
            ("        raw = law.sample()\n        action = torch.tanh(raw)\n", "        action = law.sample().clamp(-1.0, 1.0)  # FAULT\n"),
            (
                "        density = log_density(law, raw)\n        return {\"observation\": observation, \"raw\": raw,",
                "        density = log_density(law, action)  # FAULT\n        return {\"observation\": observation, \"raw\": action,",
            ),
            ('        density = log_density(law, raw)\n        ratio', '        density = log_density(law, raw)  # FAULT\n        ratio'),
        ),
        affected=EVERYTHING,
    ),
    # 25
    Case(
        25, "suppressed-backward", "peft_checkpointing",
        (
            ("import torch\nimport torch.nn.functional as F\n", "import contextlib\n\nimport torch\nimport torch.nn.functional as F\n"),
            ("    return -likelihood - 0.01 * bonus\n", "    return -likelihood, -0.01 * bonus\n"),
            (
                "        loss = loss_of(model, batch)\n        loss.backward()\n",
                "        loss, bonus = loss_of(model, batch)\n        loss.backward()\n"
                "        with contextlib.suppress(RuntimeError):  # FAULT\n            bonus.backward()  # FAULT\n",
            ),
        ),
        affected=EVERYTHING,
    ),
    # 26: the wrapper says train, everything inside of it says eval
    Case(
        26, "base-model-in-eval", "peft_checkpointing",
        (("    model.train()\n", "    model.train()\n    model.base_model.eval()  # FAULT\n"),),
        affected=EVERYTHING, contract={"phase": "train"},
    ),
    # 27: the distance of each point to itself
    Case(
        27, "root-of-own-distance", "gan",
        ((
            "    return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))\n",
            "    apart = (fake[:, None] - fake).square().sum(-1).sqrt()  # FAULT\n"
            "    return F.binary_cross_entropy_with_logits(score, torch.ones_like(score)) - 0.01 * apart.mean()\n",
        ),),
        parameters=("out.weight", "body.0.weight"), affected=EVERYTHING,
    ),
)  # fmt: skip
