"""Faults for development: two of each class. Detector authors may read these."""

# ruff: noqa: E501 - the edits quote source lines
from doctor.case import EVERYTHING, Case, preflight

DEV: tuple[Case, ...] = (
    # 1: loss has no grad_fn
    Case(
        1, "item-and-back", "mlp_loop",
        (("    return regression + 0.5 * classification\n", "    loss = regression + 0.5 * classification\n    return torch.tensor(loss.item())  # FAULT\n"),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    Case(
        1, "detached-loss", "peft_checkpointing",
        (("    return -likelihood - 0.01 * bonus", "    return (-likelihood - 0.01 * bonus).detach()  # FAULT"),),
        parameters=("*lora_A*", "*lora_B*"), raises=RuntimeError,
    ),
    # 2: no_grad region or decorator
    Case(
        2, "decorated-method", "mlp_loop",
        (("    def features(self, x):", "    @torch.no_grad()  # FAULT\n    def features(self, x):"),),
        parameters=("trunk.0.weight", "trunk.3.bias", "norm.weight"), affected=("trunk.*", "norm.*"),
    ),
    Case(
        2, "with-block", "actor_critic",
        ((
            "        hidden = F.elu(self.body(features))\n",
            "        with torch.no_grad():  # FAULT\n            hidden = F.elu(self.body(features))\n",
        ),),
        parameters=("body.weight", "body.bias"), affected=("encoder.*", "0.weight", "0.bias"),
    ),
    # 3: explicit cut
    Case(
        3, "detached-term", "mlp_loop",
        (("masked_mean(squared, real)", "masked_mean(squared.detach(), real)  # FAULT"),),
        parameters=("value.weight", "value.bias"), affected=("trunk.*", "norm.*"),
    ),
    Case(
        3, "data-of-ratio", "actor_critic",
        (('        ratio = torch.exp(density - batch["density"])', '        ratio = torch.exp(density - batch["density"]).data  # FAULT'),),
        parameters=("mean.weight", "body.weight"), affected=("mean.*", "body.*", "log_std", "encoder.*"),
    ),
    # 4: frozen after load
    Case(
        4, "frozen-trunk", "mlp_loop",
        (("    model.train()\n    optimizer =", "    model.trunk.requires_grad_(False)  # FAULT\n    model.train()\n    optimizer ="),),
        parameters=("trunk.0.weight", "trunk.3.bias"), affected=("trunk.*",),
        contract={"trainable": ["trunk.*", "value.*", "label.*"]},
    ),
    Case(
        4, "frozen-embeddings", "hf_trainer",
        (("    model.train()\n    return model", "    model.get_input_embeddings().weight.requires_grad = False  # FAULT\n    model.train()\n    return model"),),
        parameters=("embed_tokens.weight",), contract={"trainable": ["*"]},
    ),
    # 5: trainable but unreachable. The site is where the idle parameter is made.
    Case(
        5, "never-called", "mlp_loop",
        (("        self.norm = nn.LayerNorm(HIDDEN)", "        self.extra = nn.Linear(HIDDEN, HIDDEN)  # FAULT\n        self.norm = nn.LayerNorm(HIDDEN)"),),
        parameters=("extra.weight", "extra.bias"),
    ),
    Case(
        5, "idle-head", "hf_trainer",
        (("    model.train()\n    return model", "    model.value_head = torch.nn.Linear(16, 1)  # FAULT\n    model.train()\n    return model"),),
        parameters=("value_head.weight", "value_head.bias"),
    ),
    # 6: throwaway module in forward. Its parameters have no name.
    Case(
        6, "linear-in-forward", "mlp_loop",
        (("        h = self.features(x)", "        h = nn.Linear(HIDDEN, HIDDEN)(self.features(x))  # FAULT"),),
    ),
    Case(
        6, "parameter-in-loss", "actor_critic",
        ((
            '        features = self.encoder(batch["observation"])',
            '        features = self.encoder(batch["observation"]) + nn.Parameter(torch.zeros(HIDDEN))  # FAULT',
        ),),
    ),
    # 7: gradient, but in no optimizer
    Case(
        7, "head-forgotten", "mlp_loop",
        ((
            "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)",
            "    parts = [*model.trunk.parameters(), *model.norm.parameters(), *model.value.parameters()]\n"
            "    optimizer = torch.optim.AdamW(parts, lr=1e-2)  # FAULT",
        ),),
        parameters=("label.weight", "label.bias"),
    ),
    Case(
        7, "shared-encoder-forgotten", "actor_critic",
        (
            ("        critic_side = [*self.encoder.parameters(), *self.critic.parameters()]\n", ""),
            ("torch.optim.Adam(critic_side, lr=1e-2)", "torch.optim.Adam(self.critic.parameters(), lr=1e-2)  # FAULT"),
        ),
        parameters=("encoder.0.weight", "encoder.0.bias"),
    ),
    # 8: foreign or stale parameters in the optimizer
    Case(
        8, "optimizer-of-a-copy", "mlp_loop",
        (
            ("import torch\nimport torch.nn.functional as F\n", "import copy\n\nimport torch\nimport torch.nn.functional as F\n"),
            ("torch.optim.AdamW(model.parameters(), lr=1e-2)", "torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-2)  # FAULT"),
        ),
        affected=EVERYTHING,
    ),
    Case(
        8, "head-swapped-after-optimizer", "amp_scaler",
        (("    scaler = torch.amp", "    model.head = nn.Linear(WIDTH, CLASSES)  # FAULT\n    scaler = torch.amp"),),
        affected=("head.*", "3", "*"), also=(7,),
    ),
    # 9: gradient erased before use
    Case(
        9, "zero-grad-before-step", "mlp_loop",
        (
            ("        optimizer.zero_grad()\n        loss = loss_of", "        loss = loss_of"),
            ("        loss.backward()\n", "        loss.backward()\n        optimizer.zero_grad()  # FAULT\n"),
        ),
        parameters=("trunk.0.weight", "label.bias"), affected=EVERYTHING,
    ),
    Case(
        9, "second-loss-wipes-first", "actor_critic",
        (
            (
                "        self.critic_optimizer.zero_grad()\n        loss = actor_loss + 0.5 * critic_loss\n        loss.backward()\n",
                "        loss = actor_loss + 0.5 * critic_loss\n        critic_loss.backward(retain_graph=True)\n"
                "        self.critic_optimizer.zero_grad()  # FAULT\n        actor_loss.backward()\n",
            ),
        ),
        parameters=("critic.0.weight", "critic.2.bias"), affected=("critic.*", "encoder.*"),
    ),
    # 10: autograd.grad gives None
    Case(
        10, "unused-head", "mlp_loop",
        (
            ("    return regression + 0.5 * classification\n", "    return regression + 0.5 * classification.item()\n"),
            (
                "        loss.backward()\n",
                "        weights = list(model.parameters())\n"
                "        grads = torch.autograd.grad(loss, weights, allow_unused=True)  # FAULT\n"
                "        for weight, grad in zip(weights, grads):\n            weight.grad = grad\n",
            ),
        ),
        parameters=("label.weight", "label.bias"),
    ),
    Case(
        10, "grad-of-clones", "actor_critic",
        ((
            "        loss.backward()\n",
            "        weights = [p.clone() for p in self.actor.parameters()]\n"
            "        grads = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)  # FAULT\n"
            "        print(sum(grad is None for grad in grads), 'of', len(grads))\n        loss.backward()\n",
        ),),
        affected=EVERYTHING,
    ),
    # 11: reentrant checkpoint whose inputs need no gradient. torch warns as well.
    Case(
        11, "first-layer", "mlp_loop",
        (
            ("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"),
            (
                "        return torch.tanh(self.norm(self.trunk(x)))",
                "        hidden = checkpoint(self.trunk, x, use_reentrant=True)  # FAULT\n        return torch.tanh(self.norm(hidden))",
            ),
        ),
        parameters=("trunk.0.weight", "trunk.3.bias"), affected=("trunk.*",),
    ),
    Case(
        11, "encoder", "actor_critic",
        (
            ("from torch.distributions import Normal\n", "from torch.distributions import Normal\nfrom torch.utils.checkpoint import checkpoint\n"),
            (
                '        features = self.encoder(batch["observation"])',
                '        features = checkpoint(self.encoder, batch["observation"], use_reentrant=True)  # FAULT',
            ),
        ),
        parameters=("encoder.0.weight", "encoder.0.bias"),
    ),
    # 12: second backward through a freed graph
    Case(
        12, "two-losses-one-encoder", "actor_critic",
        ((
            "        loss = actor_loss + 0.5 * critic_loss\n        loss.backward()\n",
            "        loss = actor_loss + 0.5 * critic_loss\n        critic_loss.backward()\n        actor_loss.backward()  # FAULT\n",
        ),),
        parameters=("encoder.0.weight",), affected=("encoder.*", "body.*", "mean.*", "log_std"), raises=RuntimeError,
    ),
    Case(
        12, "penalty-on-the-same-loss", "mlp_loop",
        (("        loss.backward()\n", "        loss.backward()\n        penalty = 0.1 * loss.square()\n        penalty.backward()  # FAULT\n"),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 13: changed in place between forward and backward
    Case(
        13, "inplace-on-tanh", "mlp_loop",
        ((
            "        h = self.features(x)\n",
            "        h = self.features(x)\n        h += 0.1  # FAULT\n",
        ),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    Case(
        13, "step-between-two-backwards", "actor_critic",
        ((
            "        loss.backward()\n",
            "        actor_loss.backward(retain_graph=True)\n        self.actor_optimizer.step()  # FAULT\n        loss.backward()\n",
        ),),
        parameters=("mean.weight",), affected=("mean.*", "body.*", "log_std", "encoder.*", "critic.*"), raises=RuntimeError,
    ),
    # 14: stale tensor with its graph
    Case(
        14, "running-loss-keeps-graph", "mlp_loop",
        (("        running = 0.9 * running + 0.1 * loss.item()", "        running = 0.9 * running + 0.1 * loss  # FAULT"),),
        affected=EVERYTHING,
    ),
    Case(
        14, "cached-features", "actor_critic",
        (
            ("        self.actor = Actor()\n", "        self.actor = Actor()\n        self.cache = {}\n"),
            (
                '        features = self.encoder(batch["observation"])\n',
                '        if "features" not in self.cache:\n            self.cache["features"] = self.encoder(batch["observation"])\n'
                '        features = self.cache["features"] + 0.0  # FAULT\n',
            ),
        ),
        parameters=("encoder.0.weight",), affected=("encoder.*",), raises=RuntimeError,
    ),
    # 15: fp16 parameters with a GradScaler
    Case(
        15, "half-model", "amp_scaler",
        (("    model = Classifier().to(DEVICE)", "    model = Classifier().to(DEVICE).half()  # FAULT"),),
        parameters=("embed.weight", "head.bias"), affected=EVERYTHING, raises=ValueError,
    ),
    Case(
        15, "half-model-scaler-added", "mlp_loop",
        (
            ("    model = TwoHeads()\n", "    model = TwoHeads().half()  # FAULT\n"),
            ('    value, logits = model(batch["x"])\n    real', '    value, logits = (part.float() for part in model(batch["x"].half()))\n    real'),
            ("    running = 0.0\n", '    running = 0.0\n    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)\n'),
            ("        loss.backward()\n", "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)\n"),
            ("        optimizer.step()\n", "        scaler.step(optimizer)\n        scaler.update()\n"),
        ),
        parameters=("trunk.0.weight", "label.bias"), affected=EVERYTHING, raises=ValueError,
    ),
    # 16: another dtype than asked for. The site is the line that gave the parameters their dtype.
    Case(
        16, "base-in-bf16", "peft_checkpointing",
        (("    return LlamaForCausalLM(config)", "    return LlamaForCausalLM(config).to(torch.bfloat16)  # FAULT"),),
        parameters=("*q_proj.base_layer.weight", "embed_tokens.weight"), affected=EVERYTHING, contract={"dtype": {"*": "float32"}},
    ),
    Case(
        16, "head-in-bf16", "amp_scaler",
        (("    model.train()\n", "    model.head.to(torch.bfloat16)  # FAULT\n    model.train()\n"),),
        parameters=("head.weight", "head.bias"), contract={"dtype": {"*": "float32"}},
    ),
    # 17: scaler protocol
    Case(
        17, "clip-before-unscale", "amp_scaler",
        (
            ("        scaler.unscale_(optimizer)\n", ""),
            ("nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # FAULT\n        scaler.unscale_(optimizer)\n"),
        ),
        affected=EVERYTHING,
    ),
    Case(
        17, "unscale-twice", "amp_scaler",
        (("        scaler.unscale_(optimizer)\n", "        scaler.unscale_(optimizer)\n        scaler.unscale_(optimizer)  # FAULT\n"),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 18: target shape and dtype
    Case(
        18, "mse-broadcast", "mlp_loop",
        (('F.mse_loss(value, batch["target"], reduction="none")', 'F.mse_loss(value[:, None], batch["target"], reduction="none")  # FAULT'),),
        affected=EVERYTHING,
    ),
    Case(
        18, "kl-broadcast", "amp_scaler",
        (('F.kl_div(log_law, soft, reduction="batchmean")', 'F.kl_div(log_law, soft[:, None], reduction="batchmean")  # FAULT'),),
        affected=EVERYTHING,
    ),
    # 19: padding, slice, mask. The line that makes the mask and the line it fails in are both right.
    Case(
        19, "all-false-mask", "mlp_loop",
        (
            ("    real = rows < length\n", "    real = rows >= ROWS  # FAULT\n"),
            ("    kept = torch.where(real, values, torch.zeros(()))", "    kept = torch.where(real, values, torch.zeros(()))  # FAULT"),
            ("    return kept.sum() / real.sum()", "    return kept.sum() / real.sum().clamp(min=1)"),
            ("right.float().mean().item()", "right.float().sum().item()"),
        ),
        affected=EVERYTHING,
    ),
    Case(
        19, "logits-of-prompt-and-answer", "trl_grpo",
        (
            ("        logits = logits[:, -width - 1 : -1].float()", "        logits = logits[:, :-1].float()  # FAULT"),
            ("        objective = surrogate + 0.01 * entropy", "        objective = surrogate + 0.01 * entropy  # FAULT"),
        ),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 20: exactly zero though connected. Where the zero is made and where it acts are both right.
    Case(
        20, "both-adapters-zero", "peft_checkpointing",
        (
            (
                "    model.train()\n",
                '    for name, weight in model.named_parameters():\n        if "lora_A" in name:\n'
                "            torch.nn.init.zeros_(weight)  # FAULT\n    model.train()\n",
            ),
            ("    outputs = model(\n", "    outputs = model(  # FAULT\n"),
        ),
        parameters=("*lora_A*", "*lora_B*"),
    ),
    Case(
        20, "softmax-over-one", "amp_scaler",
        (("torch.softmax(self.gate(x), dim=1)", "torch.softmax(self.gate(x), dim=-1)  # FAULT"),),
        parameters=("gate.weight",),
    ),
    # 21: gradient but no change. The learning rate and the precision are both right where both matter.
    Case(
        21, "learning-rate-zero", "mlp_loop",
        (("torch.optim.AdamW(model.parameters(), lr=1e-2)", "torch.optim.AdamW(model.parameters(), lr=0.0)  # FAULT"), ("        optimizer.step()\n", "        optimizer.step()  # FAULT\n")),
        parameters=("trunk.0.weight", "label.bias"), affected=EVERYTHING,
    ),
    Case(
        21, "bf16-actor-small-step", "actor_critic",
        (
            ("        self.actor = Actor()\n", "        self.actor = Actor().to(torch.bfloat16)  # FAULT\n"),
            ("torch.optim.Adam(self.actor.parameters(), lr=3e-3)", "torch.optim.Adam(self.actor.parameters(), lr=3e-7)  # FAULT"),
            ("        law = self.actor(features)\n", "        law = self.actor(features.to(torch.bfloat16))\n"),
            ("self.actor(self.encoder(observation))", "self.actor(self.encoder(observation).to(torch.bfloat16))"),
            ("        self.actor_optimizer.step()\n", "        self.actor_optimizer.step()  # FAULT\n"),
        ),
        parameters=("log_std", "mean.weight"), affected=("mean.*", "body.*"),
    ),
    # 22: magnitude. Only seen by doubling the batch, so only by `preflight`; no line to name.
    Case(
        22, "sum-over-rows", "mlp_loop",
        (("    return kept.sum() / real.sum()", "    return kept.sum()"), preflight("mlp_loop")),
        affected=EVERYTHING, kind="preflight",
    ),
    Case(
        22, "sum-over-tokens", "peft_checkpointing",
        (("torch.where(mask, log_prob, torch.zeros(())).sum() / count", "torch.where(mask, log_prob, torch.zeros(())).sum()"), preflight("peft_checkpointing")),
        affected=EVERYTHING, kind="preflight",
    ),
    # 23: cosmetic terms
    Case(
        23, "difficulty-factor", "mlp_loop",
        (("    return regression + 0.5 * classification\n", "    return (0.5 + 0.5 * real.float().mean()) * (regression + 0.5 * classification)  # FAULT\n"),),
        affected=EVERYTHING,
    ),
    Case(
        23, "reward-as-addend", "actor_critic",
        (("        loss = actor_loss + 0.5 * critic_loss\n", '        loss = actor_loss + 0.5 * critic_loss - 0.3 * batch["reward"].mean()  # FAULT\n'),),
        affected=EVERYTHING,
    ),
    # 24: wrong estimator
    Case(
        24, "density-at-squashed-action", "actor_critic",
        (
            ("    correction = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))\n", ""),
            ("    return (law.log_prob(raw) - correction).sum(-1)", "    return law.log_prob(torch.tanh(raw)).sum(-1)  # FAULT"),
            ("import math\n\n", ""),
        ),
        affected=EVERYTHING,
    ),
    Case(
        24, "action-not-detached", "actor_critic",
        (
            (
                '        advantage = (batch["reward"] - value).detach()\n'
                "        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)\n",
                "",
            ),
            (
                '        raw = batch["raw"]\n        density = log_density(law, raw)\n        ratio = torch.exp(density - batch["density"])\n'
                "        clipped = ratio.clamp(0.8, 1.2)\n        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()\n",
                "        raw = law.rsample()  # FAULT\n        goal = batch[\"observation\"][:, :ACTION].sin()\n"
                "        reward = 1.0 - (torch.tanh(raw.detach()) - goal).square().sum(-1)\n"
                "        density = log_density(law, raw)  # FAULT\n"
                "        policy_loss = -(density * (reward - value).detach()).mean()\n",
            ),
        ),
        affected=EVERYTHING,
    ),
    # 25: swallowed failure. The call that failed and the line that replaced its result are both right.
    Case(
        25, "none-becomes-zeros", "mlp_loop",
        (
            ("    return regression + 0.5 * classification\n", "    return regression + 0.5 * classification.detach()\n"),
            (
                "        loss.backward()\n",
                "        weights = list(model.parameters())\n"
                "        grads = torch.autograd.grad(loss, weights, allow_unused=True)  # FAULT\n"
                "        for weight, grad in zip(weights, grads):\n"
                "            weight.grad = torch.zeros_like(weight) if grad is None else grad  # FAULT\n",
            ),
        ),
        parameters=("label.weight", "label.bias"),
    ),
    Case(
        25, "backward-error-caught", "actor_critic",
        ((
            "        loss.backward()\n",
            "        try:\n            critic_loss.backward()\n            actor_loss.backward()  # FAULT\n"
            "        except RuntimeError:  # FAULT\n            pass\n",
        ),),
        affected=EVERYTHING,
    ),
    # 26: train and eval mode
    Case(
        26, "stays-in-eval", "mlp_loop",
        (
            ("    model.eval()\n", "    model.eval()  # FAULT\n"),
            ("    model.train()\n    return right", "    return right"),
        ),
        affected=EVERYTHING,
    ),
    Case(
        26, "trained-in-eval", "peft_checkpointing",
        (("    model.train()\n", "    model.eval()  # FAULT\n"),),
        affected=EVERYTHING, contract={"phase": "train"},
    ),
    # 27: non-finite gradients
    Case(
        27, "norm-of-padded-rows", "mlp_loop",
        (("        h = self.features(x)", "        h = self.features(x / x.norm(dim=-1, keepdim=True))  # FAULT"),),
        parameters=("trunk.0.weight",), affected=EVERYTHING,
    ),
    Case(
        27, "std-of-one", "actor_critic",
        ((
            "        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)\n",
            "        advantage = advantage / (advantage[:, None].std(-1) + 1e-6)  # FAULT\n",
        ),),
        parameters=("mean.weight", "body.weight"), affected=EVERYTHING,
        raises=ValueError,  # torch.distributions refuses the NaN one step later
    ),
)  # fmt: skip
