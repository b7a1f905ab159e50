"""A third held-out set, written from the specification after the first two had been looked at.

On the six light recipes. Every fault is of another kind, or in another place, than the earlier
cases of its class. The marks are as in the second set: where a fault is made in one line and does
harm in another, both are marked. A loss that a cut has left without gradient function is class 1,
and the class of the cut describes it as well.
"""

# ruff: noqa: E501 - the edits quote source lines
from doctor.case import EVERYTHING, Case, preflight

MLP_OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
GAN_FAKE = '    fake = generator(batch["noise"])\n'
GAN_DETACHED = '    fake = generator(batch["noise"]).detach()\n'
GAN_FORGE = "    return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))\n"
DQN_CHOSEN = (
    '    chosen = online(batch["state"]).gather(-1, batch["action"][:, None]).squeeze(-1)\n'
)
DQN_LOSS = "    return F.smooth_l1_loss(chosen, goal)\n"
RNN_STEP = (
    "            optimizer.zero_grad()\n            loss.backward()\n"
    "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n            optimizer.step()\n"
)
RNN_DETACH = "            state = tuple(part.detach() for part in state)\n"
RNN_TARGETS = "    targets = torch.where(following != PAD, following, torch.tensor(IGNORE))\n"
RNN_LOSS = "    loss = F.cross_entropy(rows, goals, ignore_index=IGNORE)\n"

THIRD: tuple[Case, ...] = (
    # 1: torch.tensor where torch.stack was meant
    Case(
        1, "tensor-of-losses", "rnn_bptt",
        (
            ("        state = None\n        for chunk", "        state, losses = None, []\n        for chunk"),
            (
                RNN_STEP + RNN_DETACH,
                "            losses.append(loss)\n        loss = torch.tensor(losses).mean()  # FAULT\n"
                "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n",
            ),
        ),
        affected=EVERYTHING, raises=RuntimeError, also=(3,),
    ),
    Case(
        1, "all-under-no-grad", "dqn",
        ((
            DQN_CHOSEN + "    with torch.no_grad():\n",
            "    with torch.no_grad():  # FAULT\n    " + DQN_CHOSEN,
        ), (DQN_LOSS, DQN_LOSS[:-1] + "  # FAULT\n")),
        affected=EVERYTHING, raises=RuntimeError, also=(2,),
    ),
    # 2: decorated for the rollout, called by the loss as well
    Case(
        2, "density-for-the-rollout", "actor_critic",
        (
            ("def log_density(law, raw):\n", "@torch.no_grad()  # FAULT\ndef log_density(law, raw):\n"),
            ("        density = log_density(law, raw)\n        ratio", "        density = log_density(law, raw)  # FAULT\n        ratio"),
        ),
        parameters=("mean.weight", "body.weight"), affected=("mean.*", "body.*", "log_std", "encoder.*", "0.weight", "0.bias"),
    ),
    # 3
    Case(
        3, "points-on-a-grid", "gan",
        ((GAN_FAKE, '    fake = torch.round(8.0 * generator(batch["noise"])) / 8.0  # FAULT\n'),),
        parameters=("out.weight", "body.0.weight"), affected=("out.*", "body.*"), also=(20,),
    ),
    Case(
        3, "entropy-as-a-number", "actor_critic",
        (
            ("        entropy = law.entropy().sum(-1).mean()\n", "        entropy = law.entropy().sum(-1).mean().item()  # FAULT\n"),
            ("        actor_loss = policy_loss - 1e-3 * entropy\n", "        actor_loss = policy_loss - 1e-3 * entropy  # FAULT\n"),
        ),
        parameters=("log_std",), affected=EVERYTHING, also=(23,),
    ),
    # 4: from_pretrained freezes unless told otherwise
    Case(
        4, "pretrained-vectors", "rnn_bptt",
        ((
            "        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)\n",
            "        vectors = torch.randn(VOCABULARY, WIDTH)\n"
            "        self.embed = nn.Embedding.from_pretrained(vectors, padding_idx=PAD)  # FAULT\n",
        ),),
        parameters=("embed.weight",), contract={"trainable": ["embed.*", "lstm.*", "decoder.*"]},
    ),
    # 5: the decoder reads the wrong variable
    Case(
        5, "decoder-reads-embeddings", "rnn_bptt",
        (
            ("        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)\n", "        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)  # FAULT\n"),
            ("        hidden, state = self.lstm(embedded, state)\n", "        hidden, state = self.lstm(embedded, state)  # FAULT\n"),
            ("        logits = self.decoder(self.dropout(hidden))\n", "        logits = self.decoder(self.dropout(embedded))  # FAULT\n"),
        ),
        parameters=("lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.bias_ih_l0"), affected=("lstm.*",),
    ),
    # 6: an activation that has a parameter
    Case(
        6, "prelu-in-forward", "dqn",
        (("        hidden = self.encoder(state)\n", "        hidden = nn.PReLU()(self.encoder(state))  # FAULT\n"),),
    ),
    # 7: the parts were listed, the bare parameter is in none of them
    Case(
        7, "bare-parameter-forgotten", "actor_critic",
        ((
            "        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)\n",
            "        actor_side = [*self.actor.body.parameters(), *self.actor.mean.parameters()]\n"
            "        self.actor_optimizer = torch.optim.Adam(actor_side, lr=3e-3)  # FAULT\n",
        ),),
        parameters=("log_std",),
    ),
    # 8: weight_norm puts two new parameters in the place of the weight
    Case(
        8, "weight-norm-after-optimizer", "gan",
        (
            ("    return generator, discriminator, slow, fast\n", "    nn.utils.parametrizations.weight_norm(generator.out)  # FAULT\n    return generator, discriminator, slow, fast\n"),
            ("    slow = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))\n", "    slow = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))  # FAULT\n"),
        ),
        affected=EVERYTHING, also=(7,),
    ),
    # 9: accumulated over the chunks, but zeroed for each
    Case(
        9, "step-after-the-last-chunk", "rnn_bptt",
        (
            ("        for chunk in chunks:\n            loss, state = loss_of(model, chunk, state)\n            optimizer.zero_grad()\n", "        for number, chunk in enumerate(chunks):\n            loss, state = loss_of(model, chunk, state)\n            optimizer.zero_grad()  # FAULT\n"),
            ("            optimizer.step()\n", "            if number == CHUNKS - 1:\n                optimizer.step()\n"),
        ),
        parameters=("lstm.weight_hh_l0", "decoder.weight"), affected=EVERYTHING,
    ),
    # 10: requires_grad_ comes after the forward
    Case(
        10, "saliency-asked-too-late", "mlp_loop",
        ((
            "        loss.backward()\n",
            '        inputs = batch["x"].requires_grad_()  # FAULT\n'
            "        (slope,) = torch.autograd.grad(loss, [inputs], retain_graph=True, allow_unused=True)  # FAULT\n"
            '        print("saliency", slope)\n        loss.backward()\n',
        ),),
        affected=EVERYTHING,
    ),
    # 11
    Case(
        11, "body-of-the-generator", "gan",
        (
            ("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"),
            ("        return self.out(self.body(noise))\n", "        hidden = checkpoint(self.body, noise, use_reentrant=True)  # FAULT\n        return self.out(hidden)\n"),
        ),
        parameters=("body.0.weight", "body.0.bias"),
    ),
    # 12: the fakes are made once for both losses, and not detached for the first
    Case(
        12, "fakes-made-once", "gan",
        (
            (GAN_DETACHED, '    fake = batch["fake"]  # FAULT\n'),
            (GAN_FAKE, '    fake = batch["fake"]\n'),
            ("        batch = make_batch(random)\n        fast.zero_grad()\n", '        batch = make_batch(random)\n        batch["fake"] = generator(batch["noise"])\n        fast.zero_grad()\n'),
            ("        batch = make_batch(random)\n        slow.zero_grad()\n", "        slow.zero_grad()\n"),
            ("        forge.backward()\n", "        forge.backward()  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 13: the padded positions are cleared in what the LSTM has kept for its backward
    Case(
        13, "padding-cleared-in-place", "rnn_bptt",
        (("        logits = self.decoder(self.dropout(hidden))\n", "        hidden[tokens == PAD] = 0.0  # FAULT\n        logits = self.decoder(self.dropout(hidden))\n"),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 14: a pool of earlier fakes, kept with their graphs
    Case(
        14, "pool-of-fakes", "gan",
        (
            ("class Generator(nn.Module):\n", "POOL = []\n\n\nclass Generator(nn.Module):\n"),
            (GAN_DETACHED, '    POOL.append(generator(batch["noise"]))  # FAULT\n    fake = torch.cat(POOL[-2:])  # FAULT\n'),
            ("        judge.backward()\n", "        judge.backward()  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError, also=(12,),
    ),
    # 15: the checkpoint was saved in fp16, and `assign` keeps its dtype
    Case(
        15, "half-checkpoint-assigned", "amp_scaler",
        ((
            "    model.train()\n",
            "    saved = {name: value.half() for name, value in model.state_dict().items()}\n"
            "    model.load_state_dict(saved, assign=True)  # FAULT\n    model.train()\n",
        ),),
        parameters=("embed.weight", "head.bias"), affected=EVERYTHING, raises=ValueError,
    ),
    # 16: numpy's floats are doubles
    Case(
        16, "parameter-from-numpy", "actor_critic",
        (
            ("import math\n\nimport torch\n", "import math\n\nimport numpy\nimport torch\n"),
            ("        self.log_std = nn.Parameter(torch.full((ACTION,), -0.5))\n", "        self.log_std = nn.Parameter(torch.from_numpy(numpy.full(ACTION, -0.5)))  # FAULT\n"),
        ),
        parameters=("log_std",), contract={"dtype": {"*": "float32"}},
    ),
    # 17: the loss is never scaled
    Case(
        17, "scale-forgotten", "amp_scaler",
        (
            ("            scaler.scale(loss).backward()\n", "            loss.backward()  # FAULT\n"),
            ("        scaler.unscale_(optimizer)\n", "        scaler.unscale_(optimizer)  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=AssertionError,
    ),
    # 18
    Case(
        18, "gathered-column", "dqn",
        (
            (DQN_CHOSEN, '    chosen = online(batch["state"]).gather(-1, batch["action"][:, None])  # FAULT\n'),
            (DQN_LOSS, DQN_LOSS[:-1] + "  # FAULT\n"),
        ),
        affected=EVERYTHING,
    ),
    # 19: the targets are shifted already
    Case(
        19, "shifted-twice", "rnn_bptt",
        (
            ("    rows = logits.float().flatten(0, 1)\n", "    rows = logits.float().flatten(0, 1)  # FAULT\n"),
            ('    goals = chunk["targets"].flatten()\n', '    goals = chunk["targets"][:, 1:].flatten()  # FAULT\n'),
            (RNN_LOSS, RNN_LOSS[:-1] + "  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=ValueError,
    ),
    # The chunks without padding have no target left: the mean of nothing.
    Case(
        19, "inverted-mask", "rnn_bptt",
        ((RNN_TARGETS, RNN_TARGETS.replace("!=", "==")[:-1] + "  # FAULT\n"), (RNN_LOSS, RNN_LOSS[:-1] + "  # FAULT\n")),
        affected=EVERYTHING, also=(27,),
    ),
    # 20: a single feature minus its mean
    Case(
        20, "norm-over-one-feature", "dqn",
        (
            ("        self.value = nn.Linear(HIDDEN, 1)\n", "        self.value = nn.Sequential(nn.Linear(HIDDEN, 1), nn.LayerNorm(1))  # FAULT\n"),
            ("        return self.value(hidden) + centred\n", "        return self.value(hidden) + centred  # FAULT\n"),
        ),
        parameters=("value.0.weight", "value.0.bias"), affected=("value.1.weight",),
    ),
    # 21
    Case(
        21, "warm-up-by-floor-division", "mlp_loop",
        (
            (MLP_OPTIMIZER, MLP_OPTIMIZER[:-1] + "  # FAULT\n"),
            (
                "    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=STEPS)\n",
                "    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step // 100))  # FAULT\n",
            ),
            ("        optimizer.step()\n", "        optimizer.step()  # FAULT\n"),
        ),
        parameters=("trunk.0.weight", "label.bias"), affected=EVERYTHING,
    ),
    # 22: normalised by the length, not by the rows
    Case(
        22, "divided-by-the-length", "rnn_bptt",
        ((RNN_LOSS, '    loss = F.cross_entropy(rows, goals, ignore_index=IGNORE, reduction="sum") / LENGTH\n'), preflight("rnn_bptt")),
        affected=EVERYTHING, kind="preflight",
    ),
    # 23: what turns the divergence into a cross entropy does not depend on the model
    Case(
        23, "entropy-of-the-targets", "amp_scaler",
        ((
            "    loss = 0.7 * hard + 0.3 * smooth\n",
            "    spread = -(soft * soft.log()).sum(-1).mean()  # FAULT\n    loss = 0.7 * hard + 0.3 * smooth + 0.3 * spread  # FAULT\n",
        ),),
        affected=EVERYTHING,
    ),
    # 24: score function and pathwise derivative at once; they cancel
    Case(
        24, "rewarded-points-not-detached", "gan",
        ((
            GAN_FAKE + "    score = discriminator(fake)\n" + GAN_FORGE,
            GAN_FAKE
            + "    law = torch.distributions.Independent(torch.distributions.Normal(fake, 0.1), 1)\n"
            "    point = law.rsample()  # FAULT\n    reward = discriminator(point).detach()\n"
            "    return -(law.log_prob(point) * reward).mean()  # FAULT\n",
        ),),
        affected=EVERYTHING, also=(20,),
    ),
    # 25: meant for batches that do not fit into memory
    Case(
        25, "failed-chunks-skipped", "rnn_bptt",
        (
            (
                "            loss.backward()\n",
                "            try:\n                loss.backward()  # FAULT\n            except RuntimeError:  # FAULT\n"
                "                state = None\n                continue\n",
            ),
            (RNN_DETACH, ""),
        ),
        affected=EVERYTHING,
    ),
    # 26: train() once before the epochs, eval() in each of them
    Case(
        26, "train-before-the-epochs", "rnn_bptt",
        (
            ("    for epoch in range(EPOCHS):\n        model.train()\n", "    model.train()  # FAULT\n    for epoch in range(EPOCHS):\n"),
            ("    model.eval()\n", "    model.eval()  # FAULT\n"),
        ),
        affected=EVERYTHING,
    ),
    # 27: `where` hides the NaN from the loss, not from its gradient
    Case(
        27, "where-does-not-guard", "mlp_loop",
        ((
            '    squared = F.mse_loss(value, batch["target"], reduction="none")\n',
            "    root = value.sqrt()  # FAULT\n"
            '    squared = torch.where(value > 0, (root - batch["target"]).square(), value.square())  # FAULT\n',
        ),),
        parameters=("value.weight", "trunk.0.weight"), affected=EVERYTHING,
    ),
)  # fmt: skip
