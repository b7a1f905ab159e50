"""Held-out faults: at least one per class, on a recipe that `doctor.injectors` does not use for it.

Fewer recipes where a class has no natural place in the others:
- 15 and 17 need a GradScaler; transformers' Trainer refuses fp16 on a CPU, so hf and trl are out.
- 19's padding test and 22's doubling test need a batch that can be changed: `preflight` only.
- 24 needs a sampler in the script; TRL samples inside its own library, from another call.
- 11 needs inputs without gradient: transformers and peft ask for input gradients by themselves
  when their own checkpointing is reentrant, so only a checkpoint in the script is a fault.
"""

# ruff: noqa: E501 - the edits quote source lines
from doctor.case import EVERYTHING, Case, preflight

HF_OUTPUTS = (
    '    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])\n'
)
HF_LOGITS = "    logits = outputs.logits[:, :-1].float()\n"
TRL_LOGITS = "        logits = model(input_ids=tokens, attention_mask=attention).logits\n"
PEFT_TRAINABLE = (
    "    model.train()\n    trainable = [p for p in model.parameters() if p.requires_grad]\n"
)
PEFT_STEP = "        loss.backward()\n        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)\n        optimizer.step()\n"

JUDGED: tuple[Case, ...] = (
    # 1
    Case(
        1, "small-batch-fallback", "actor_critic",
        (("        loss = actor_loss + 0.5 * critic_loss\n", "        loss = actor_loss + 0.5 * critic_loss\n        if len(batch[\"reward\"]) < 64:\n            loss = torch.zeros(())  # FAULT\n"),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    Case(
        1, "data-of-loss", "hf_trainer",
        (("    loss = answer_loss + 1e-3 * z_loss\n", "    loss = (answer_loss + 1e-3 * z_loss).data  # FAULT\n"),),
        parameters=("lm_head.weight", "embed_tokens.weight"), affected=EVERYTHING, raises=RuntimeError,
    ),
    # 2
    Case(
        2, "no-grad-in-block", "amp_scaler",
        ((
            "        hidden = F.gelu(self.up(self.norm(x)))\n",
            "        with torch.no_grad():  # FAULT\n            hidden = F.gelu(self.up(self.norm(x)))\n",
        ),),
        parameters=("blocks.0.up.weight", "blocks.1.norm.bias"), affected=("up.*", "norm.*", "embed.*", "down.*"),
    ),
    Case(
        2, "set-grad-enabled", "trl_grpo",
        ((
            TRL_LOGITS,
            "        torch.set_grad_enabled(False)  # FAULT\n"
            "        hidden = model.model(input_ids=tokens, attention_mask=attention).last_hidden_state\n"
            "        torch.set_grad_enabled(True)\n        logits = model.lm_head(hidden)\n",
        ),),
        parameters=("embed_tokens.weight", "layers.1.mlp.down_proj.weight"), affected=("model.*", "layers.*", "norm.*"),
    ),
    # 3
    Case(
        3, "through-numpy", "hf_trainer",
        (
            (HF_OUTPUTS, HF_OUTPUTS.replace("model(", "model.model(")),
            (
                HF_LOGITS,
                "    hidden = torch.from_numpy(outputs.last_hidden_state.detach().numpy())  # FAULT\n"
                "    logits = model.lm_head(hidden)[:, :-1].float()\n",
            ),
        ),
        parameters=("embed_tokens.weight", "layers.0.self_attn.q_proj.weight"), affected=("model.*", "layers.*", "norm.*"),
    ),
    Case(
        3, "compared-gate", "amp_scaler",
        (("torch.softmax(self.gate(x), dim=1)", "(torch.softmax(self.gate(x), dim=1) > 0.14).float()  # FAULT"),),
        parameters=("gate.weight",), affected=("embed.*", "blocks.*"),
    ),
    Case(
        3, "through-a-list", "trl_grpo",
        ((
            TRL_LOGITS,
            "        hidden = model.model(input_ids=tokens, attention_mask=attention).last_hidden_state\n"
            "        logits = model.lm_head(torch.tensor(hidden.tolist()))  # FAULT\n",
        ),),
        parameters=("embed_tokens.weight", "layers.1.mlp.down_proj.weight"), affected=("model.*", "layers.*", "norm.*"),
    ),
    # 4
    Case(
        4, "adapter-not-trainable", "peft_checkpointing",
        (
            ("from peft import LoraConfig, get_peft_model\n", "from peft import LoraConfig, PeftModel, get_peft_model\n"),
            ("import torch\nimport torch.nn.functional as F\n", "import tempfile\n\nimport torch\nimport torch.nn.functional as F\n"),
            (
                PEFT_TRAINABLE,
                "    with tempfile.TemporaryDirectory() as folder:\n        model.save_pretrained(folder)\n"
                "        model = PeftModel.from_pretrained(load_base(), folder)  # FAULT\n    model.train()\n"
                '    trainable = [p for n, p in model.named_parameters() if "lora_" in n]\n',
            ),
        ),
        parameters=("*lora_A*", "*lora_B*"), contract={"trainable": ["*lora_*"]}, raises=RuntimeError,
    ),
    Case(
        4, "frozen-encoder", "actor_critic",
        (("        self.actor = Actor()\n", "        self.encoder.requires_grad_(False)  # FAULT\n        self.actor = Actor()\n"),),
        parameters=("encoder.0.weight", "encoder.0.bias"), contract={"trainable": ["encoder.*", "actor.*"]},
    ),
    # 5
    Case(
        5, "idle-temperature", "actor_critic",
        (("        self.mean = nn.Linear(HIDDEN, ACTION)\n", "        self.mean = nn.Linear(HIDDEN, ACTION)\n        self.temperature = nn.Parameter(torch.zeros(()))  # FAULT\n"),),
        parameters=("temperature",),
    ),
    Case(
        5, "called-and-dropped", "amp_scaler",
        (
            ("        self.head = nn.Linear(WIDTH, CLASSES)\n", "        self.head = nn.Linear(WIDTH, CLASSES)\n        self.skip = nn.Linear(WIDTH, WIDTH)  # FAULT\n"),
            ("            x = block(x)\n", "            x = block(x)\n        side = x + self.skip(x)  # FAULT\n        assert side.shape == x.shape\n"),
            ("[model.embed, model.gate, model.head]", "[model.embed, model.gate, model.head, model.skip]"),
        ),
        parameters=("skip.weight", "skip.bias"),
    ),
    # 6
    Case(
        6, "norm-in-forward", "amp_scaler",
        (("            x = block(x)\n", "            x = nn.LayerNorm(WIDTH)(block(x))  # FAULT\n"),),
    ),
    Case(
        6, "projection-in-loss", "hf_trainer",
        ((HF_LOGITS, "    logits = torch.nn.Linear(VOCABULARY, VOCABULARY)(outputs.logits[:, :-1].float())  # FAULT\n"),),
    ),
    Case(
        6, "temperature-in-loss", "peft_checkpointing",
        (("    law = F.log_softmax(logits, dim=-1)\n", "    temperature = torch.nn.Parameter(torch.ones(()))  # FAULT\n    law = F.log_softmax(logits / temperature, dim=-1)\n"),),
    ),
    # 7
    Case(
        7, "one-projection-forgotten", "peft_checkpointing",
        (
            ("    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)\n", '    attention = [p for n, p in model.named_parameters() if "lora_" in n and "down" not in n]\n    optimizer = torch.optim.AdamW(attention, lr=1e-2, weight_decay=0.0)  # FAULT\n'),
            (PEFT_TRAINABLE, "    model.train()\n"),
        ),
        parameters=("*down_proj.lora_A*", "*down_proj.lora_B*"),
    ),
    Case(
        7, "head-not-given-to-trainer", "hf_trainer",
        (
            ("        trainer = WeightedTrainer(model=model, args=arguments, train_dataset=Answers())\n", "        optimizer = torch.optim.AdamW(model.model.parameters(), lr=3e-3)  # FAULT\n        trainer = WeightedTrainer(\n            model=model, args=arguments, train_dataset=Answers(), optimizers=(optimizer, None)\n        )\n"),
        ),
        parameters=("lm_head.weight",),
    ),
    Case(
        7, "registered-after-optimizer", "amp_scaler",
        (
            ("        pooled = (weight * x).sum(1)\n", '        pooled = (weight * x).sum(1) + getattr(self, "shift", 0.0)\n'),
            ("    scaler = torch.amp", "    model.shift = nn.Parameter(torch.zeros(WIDTH))  # FAULT\n    scaler = torch.amp"),
        ),
        parameters=("shift",),
    ),
    # 8
    Case(
        8, "optimizer-of-another-model", "hf_trainer",
        (("        trainer = WeightedTrainer(model=model, args=arguments, train_dataset=Answers())\n", "        optimizer = torch.optim.AdamW(build().parameters(), lr=3e-3)  # FAULT\n        trainer = WeightedTrainer(\n            model=model, args=arguments, train_dataset=Answers(), optimizers=(optimizer, None)\n        )\n"),),
        affected=EVERYTHING,
    ),
    Case(
        8, "state-in-another-order", "peft_checkpointing",
        ((
            "    return model, optimizer\n",
            "    earlier = torch.optim.AdamW(trainable[::-1], lr=1e-2, weight_decay=0.0)\n"
            "    for weight in trainable:\n        weight.grad = torch.zeros_like(weight)\n"
            "    earlier.step()\n    earlier.zero_grad()\n    optimizer.load_state_dict(earlier.state_dict())  # FAULT\n    return model, optimizer\n",
        ),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 9
    Case(
        9, "zeroed-per-micro-batch", "amp_scaler",
        (
            ("        optimizer.zero_grad(set_to_none=True)\n", ""),
            ("            scaler.scale(loss).backward()\n", "            optimizer.zero_grad(set_to_none=True)  # FAULT\n            scaler.scale(loss).backward()\n"),
        ),
        parameters=("embed.weight", "head.bias"), affected=EVERYTHING,
    ),
    Case(
        9, "callback-zeroes", "hf_trainer",
        (
            ("Trainer, TrainingArguments\n", "Trainer, TrainerCallback, TrainingArguments\n"),
            ("def build():\n", "class Clean(TrainerCallback):\n    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):\n        model.zero_grad()  # FAULT\n\n\ndef build():\n"),
            ("        trainer.train()\n", "        trainer.add_callback(Clean())\n        trainer.train()\n"),
        ),
        parameters=("lm_head.weight", "embed_tokens.weight"), affected=EVERYTHING,
    ),
    Case(
        9, "grad-set-to-none", "peft_checkpointing",
        (("        optimizer.step()\n", "        for weight in trainable[:2]:\n            weight.grad = None  # FAULT\n        optimizer.step()\n"),),
        parameters=("*layers.0.self_attn.q_proj.lora_A*", "*layers.0.self_attn.q_proj.lora_B*"),
    ),
    # 10
    Case(
        10, "hidden-by-reentrant", "peft_checkpointing",
        (
            ('{"use_reentrant": False}', '{"use_reentrant": True}'),
            (
                PEFT_STEP,
                "        grads = torch.autograd.grad(loss, trainable, allow_unused=True)  # FAULT\n"
                "        for weight, grad in zip(trainable, grads):\n            weight.grad = grad\n"
                "        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)\n        optimizer.step()\n",
            ),
        ),
        parameters=("*lora_A*", "*lora_B*"),
    ),
    Case(
        10, "grad-of-a-copy", "hf_trainer",
        (
            ("import tempfile\n", "import copy\nimport tempfile\n"),
            ("    return loss, outputs\n", "    weights = list(copy.deepcopy(model).parameters())\n    grads = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)  # FAULT\n    print(sum(grad is None for grad in grads))\n    return loss, outputs\n"),
        ),
        affected=EVERYTHING,
    ),
    # 11
    Case(
        11, "embed-checkpointed", "amp_scaler",
        (
            ("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"),
            ("        x = self.embed(signal)\n", "        x = checkpoint(self.embed, signal, use_reentrant=True)  # FAULT\n"),
        ),
        parameters=("embed.weight", "embed.bias"),
    ),
    Case(
        11, "embeddings-checkpointed", "hf_trainer",
        (
            ("import torch.nn.functional as F\n", "import torch.nn.functional as F\nfrom torch.utils.checkpoint import checkpoint\n"),
            (
                HF_OUTPUTS,
                '    embedded = checkpoint(model.get_input_embeddings(), inputs["input_ids"], use_reentrant=True)  # FAULT\n'
                '    outputs = model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"])\n',
            ),
        ),
        parameters=("embed_tokens.weight",),
    ),
    # 12
    Case(
        12, "running-total", "amp_scaler",
        ((
            "            scaler.scale(loss).backward()\n            total += loss.item()\n",
            "            total = total + loss\n            scaler.scale(total).backward()  # FAULT\n",
        ),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    Case(
        12, "bonus-after-loss", "peft_checkpointing",
        (
            ("    return -likelihood - 0.01 * bonus\n", "    return -likelihood, -0.01 * bonus\n"),
            ("        loss = loss_of(model, batch)\n        loss.backward()\n", "        loss, bonus = loss_of(model, batch)\n        loss.backward()\n        bonus.backward()  # FAULT\n"),
        ),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 13
    Case(
        13, "buffer-reused", "amp_scaler",
        (("        return x + self.down(hidden)\n", "        out = x + self.down(hidden)\n        hidden.zero_()  # FAULT\n        return out\n"),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    Case(
        13, "clamped-log-law", "trl_grpo",
        (("        entropy = -(law.exp() * law).sum(-1)\n", "        law.clamp_(min=-8.0)  # FAULT\n        entropy = -(law.exp() * law).sum(-1)\n"),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # With non-reentrant checkpointing nothing fails: the recomputation uses the changed weights.
    Case(
        13, "weights-shrunk-before-backward", "peft_checkpointing",
        (("        loss.backward()\n", "        with torch.no_grad():\n            for weight in trainable:\n                weight.mul_(0.9)  # FAULT\n        loss.backward()\n"),),
        parameters=("*lora_A*", "*lora_B*"),
    ),
    # 14
    Case(
        14, "cached-scale", "hf_trainer",
        (
            ("def weighted_loss(model, inputs):\n", "CACHE = {}\n\n\ndef weighted_loss(model, inputs):\n"),
            (HF_LOGITS, '    if "scale" not in CACHE:\n        CACHE["scale"] = 1.0 + model.model.embed_tokens.weight.mean()\n    logits = outputs.logits[:, :-1].float() + CACHE["scale"]  # FAULT\n'),
        ),
        parameters=("embed_tokens.weight",),
    ),
    Case(
        14, "last-entropy", "trl_grpo",
        ((
            "        objective = surrogate + 0.01 * entropy\n",
            '        smooth = 0.5 * entropy.mean() + 0.5 * getattr(self, "last", entropy.mean())  # FAULT\n'
            "        self.last = entropy.mean()\n        objective = surrogate + 0.01 * smooth\n",
        ),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # 15
    Case(
        15, "half-adapters", "peft_checkpointing",
        (
            ("    model = get_peft_model(base, lora)\n", "    model = get_peft_model(base.half(), lora, autocast_adapter_dtype=False)  # FAULT\n"),
            ("    model, optimizer = build()\n", '    model, optimizer = build()\n    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)\n'),
            ("        loss.backward()\n", "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)\n"),
            ("        optimizer.step()\n", "        scaler.step(optimizer)\n        scaler.update()\n"),
        ),
        parameters=("*lora_A*", "*lora_B*"), affected=EVERYTHING, raises=ValueError,
    ),
    Case(
        15, "half-actor", "actor_critic",
        (
            ("        self.actor = Actor()\n", '        self.actor = Actor().half()  # FAULT\n        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)\n'),
            ("self.actor(self.encoder(observation))", "self.actor(self.encoder(observation).half())"),
            ("        law = self.actor(features)\n", "        law = self.actor(features.half())\n"),
            ("        loss.backward()\n", "        self.scaler.scale(loss).backward()\n        self.scaler.unscale_(self.actor_optimizer)\n        self.scaler.unscale_(self.critic_optimizer)\n"),
            ("        self.actor_optimizer.step()\n        self.critic_optimizer.step()\n", "        self.scaler.step(self.actor_optimizer)\n        self.scaler.step(self.critic_optimizer)\n        self.scaler.update()\n"),
        ),
        parameters=("mean.weight", "log_std"), affected=("mean.*", "body.*"), raises=ValueError,
    ),
    # 16
    Case(
        16, "made-in-bf16", "hf_trainer",
        (("    model = Qwen2ForCausalLM(config)\n", "    model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)  # FAULT\n"),),
        parameters=("lm_head.weight", "embed_tokens.weight"), affected=EVERYTHING, contract={"dtype": {"*": "float32"}},
    ),
    Case(
        16, "critic-in-double", "actor_critic",
        (
            ("nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))\n", "nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))\n        self.critic.double()  # FAULT\n"),
            ("        value = self.critic(features).squeeze(-1)\n", "        value = self.critic(features.double()).squeeze(-1).float()\n"),
        ),
        parameters=("critic.0.weight", "critic.2.bias"), affected=("critic.*",), contract={"dtype": {"critic.*": "float32", "actor.*": "float32"}},
    ),
    # 17
    Case(
        17, "scaler-in-fp32", "mlp_loop",
        (
            ("    running = 0.0\n", '    running = 0.0\n    scaler = torch.amp.GradScaler("cpu")  # FAULT\n'),
            ("        loss.backward()\n", "        scaler.scale(loss).backward()  # FAULT\n        scaler.unscale_(optimizer)\n"),
            ("        optimizer.step()\n", "        scaler.step(optimizer)\n        scaler.update()\n"),
        ),
        affected=EVERYTHING,
    ),
    Case(
        17, "second-optimizer-unscaled", "actor_critic",
        (
            ("        self.actor = Actor()\n", '        self.actor = Actor()\n        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)\n'),
            ("        actor_loss, critic_loss = self.losses(batch)\n", '        with torch.autocast("cpu", dtype=torch.float16):\n            actor_loss, critic_loss = self.losses(batch)\n'),
            ("        loss.backward()\n", "        self.scaler.scale(loss).backward()\n        self.scaler.unscale_(self.actor_optimizer)\n"),
            ("        self.actor_optimizer.step()\n        self.critic_optimizer.step()\n", "        self.scaler.step(self.actor_optimizer)\n        self.critic_optimizer.step()  # FAULT\n        self.scaler.update()\n"),
        ),
        affected=("critic.*", "encoder.*"),
    ),
    Case(
        17, "clip-after-step", "peft_checkpointing",
        (
            ("    model, optimizer = build()\n", '    model, optimizer = build()\n    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)\n'),
            ("        loss = loss_of(model, batch)\n", '        with torch.autocast("cpu", dtype=torch.float16):\n            loss = loss_of(model, batch)\n'),
            (PEFT_STEP, "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)\n        scaler.step(optimizer)\n        scaler.update()\n        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)  # FAULT\n"),
        ),
        affected=EVERYTHING,
    ),
    # 18
    Case(
        18, "difference-broadcast", "actor_critic",
        (('        critic_loss = F.mse_loss(value, batch["reward"])\n', '        critic_loss = (value[:, None] - batch["reward"]).square().mean()  # FAULT\n'),),
        affected=EVERYTHING,
    ),
    Case(
        18, "class-ids-as-floats", "hf_trainer",
        ((
            "    token_loss = F.cross_entropy(\n        logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction=\"none\"\n    )\n",
            '    token_loss = F.cross_entropy(logits.transpose(1, 2), labels.float(), reduction="none")  # FAULT\n',
        ),),
        affected=EVERYTHING, raises=RuntimeError,
    ),
    # Eight rows and, because some answer always reaches the limit, eight columns: only a coincidence.
    Case(
        18, "advantage-along-time", "trl_grpo",
        (
            ('        advantage = inputs["advantages"][:, None]\n', '        advantage = inputs["advantages"]  # FAULT\n'),
            ("        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)\n", "        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)  # FAULT\n"),
        ),
        affected=EVERYTHING,
    ),
    # 19
    Case(
        19, "attention-to-padding", "peft_checkpointing",
        (('attention_mask=batch["attention"],', 'attention_mask=torch.ones_like(batch["attention"]),'), preflight("peft_checkpointing")),
        affected=EVERYTHING, kind="preflight", pad_id=0,
    ),
    Case(
        19, "loss-on-padding", "hf_trainer",
        (("            answer = attention.bool() & (position >= prompt)\n", "            answer = position >= prompt\n"), preflight("hf_trainer")),
        affected=EVERYTHING, kind="preflight", pad_id=0,
    ),
    Case(
        19, "no-answer-token-kept", "peft_checkpointing",
        (
            ("    answer = attention & (position >= PROMPT)\n", "    answer = attention & (position >= width)  # FAULT\n"),
            ("torch.where(mask, log_prob, torch.zeros(())).sum() / count\n", "torch.where(mask, log_prob, torch.zeros(())).sum() / count  # FAULT\n"),
            ("torch.where(mask, entropy, torch.zeros(())).sum() / count\n", "torch.where(mask, entropy, torch.zeros(())).sum() / count  # FAULT\n"),
        ),
        affected=EVERYTHING,
    ),
    # 20
    Case(
        20, "dead-relu", "mlp_loop",
        (
            ("    model.train()\n    optimizer", "    nn.init.constant_(model.trunk[0].bias, -50.0)  # FAULT\n    model.train()\n    optimizer"),
            ("        return torch.tanh(self.norm(self.trunk(x)))\n", "        return torch.tanh(self.norm(self.trunk(x)))  # FAULT\n"),
        ),
        parameters=("trunk.0.weight", "trunk.0.bias"), affected=("trunk.3.weight",),
    ),
    Case(
        20, "group-of-one", "actor_critic",
        (
            ("        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)\n", "        advantage = advantage - advantage[:, None].mean(-1)  # FAULT\n"),
            ("        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()\n", "        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()  # FAULT\n"),
        ),
        parameters=("mean.weight", "body.weight"), affected=("mean.*", "body.*", "log_std"),
    ),
    Case(
        20, "equal-rewards", "trl_grpo",
        (
            ("    return [sum(c.isdigit() for c in text) / LENGTH + 0.01 * len(text) for text in completions]\n", "    return [1.0 for _ in completions]  # FAULT\n"),
            ("        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)\n        objective = surrogate + 0.01 * entropy\n", "        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)  # FAULT\n        objective = surrogate\n"),
        ),
        parameters=("lm_head.weight", "embed_tokens.weight"), affected=EVERYTHING,
    ),
    Case(
        20, "saturated-logits", "hf_trainer",
        ((HF_LOGITS, "    logits = 5.0 * torch.tanh(1e9 * outputs.logits[:, :-1].float())  # FAULT\n"),),
        parameters=("lm_head.weight", "embed_tokens.weight"), affected=EVERYTHING,
    ),
    # 21
    Case(
        21, "every-step-skipped", "amp_scaler",
        (
            ("init_scale=1024.0)\n", "init_scale=2.0**60)  # FAULT\n"),
            ("        scaler.step(optimizer)\n", "        scaler.step(optimizer)  # FAULT\n"),
        ),
        parameters=("embed.weight", "head.bias"), affected=EVERYTHING, also=(17,),
    ),
    Case(
        21, "bf16-small-step", "hf_trainer",
        (
            ("    model = Qwen2ForCausalLM(config)\n", "    model = Qwen2ForCausalLM(config).to(torch.bfloat16)  # FAULT\n"),
            ("learning_rate=3e-3,\n", "learning_rate=1e-6,\n"),
            ("        trainer.train()\n", "        trainer.train()  # FAULT\n"),
        ),
        parameters=("norm.weight",), affected=EVERYTHING,
    ),
    Case(
        21, "schedule-of-zero", "peft_checkpointing",
        (
            ("    return model, optimizer\n", "    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)  # FAULT\n    return model, optimizer\n"),
            ("        optimizer.step()\n", "        optimizer.step()  # FAULT\n"),
            ("    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)\n", "    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)  # FAULT\n"),
        ),
        parameters=("*lora_B*",), affected=("*lora_A*",),
    ),
    # 22
    Case(
        22, "sum-over-batch", "amp_scaler",
        (("F.cross_entropy(logits.float(), label)", 'F.cross_entropy(logits.float(), label, reduction="sum")'), preflight("amp_scaler")),
        affected=EVERYTHING, kind="preflight",
    ),
    Case(
        22, "sum-over-episodes", "actor_critic",
        (("clipped * advantage).mean()", "clipped * advantage).sum()"), preflight("actor_critic")),
        affected=EVERYTHING, kind="preflight",
    ),
    Case(
        22, "weights-not-normalised", "hf_trainer",
        (("(weight * row_loss).sum() / weight.sum()", "(weight * token_loss.sum(1)).sum()"), preflight("hf_trainer")),
        affected=EVERYTHING, kind="preflight",
    ),
    # 23
    Case(
        23, "kept-share-as-factor", "hf_trainer",
        (("    loss = answer_loss + 1e-3 * z_loss\n", "    loss = (0.5 + 0.5 * kept.float().mean()) * (answer_loss + 1e-3 * z_loss)  # FAULT\n"),),
        affected=EVERYTHING,
    ),
    Case(
        23, "length-as-addend", "peft_checkpointing",
        (("    return -likelihood - 0.01 * bonus\n", '    return -likelihood - 0.01 * bonus + 0.1 * batch["attention"].float().mean()  # FAULT\n'),),
        affected=EVERYTHING,
    ),
    Case(
        23, "reward-as-addend", "trl_grpo",
        (("torch.zeros(())).sum() / count\n        self._metrics", 'torch.zeros(())).sum() / count\n        loss = loss - 0.3 * inputs["advantages"].square().mean()  # FAULT\n        self._metrics'),),
        affected=EVERYTHING,
    ),
    # 24
    Case(
        24, "action-not-detached", "mlp_loop",
        ((
            '    squared = F.mse_loss(value, batch["target"], reduction="none")\n',
            "    law = torch.distributions.Normal(value, 0.5)\n    action = law.rsample()  # FAULT\n"
            '    reward = -(action - batch["target"]).square().detach()\n    squared = -law.log_prob(action) * reward  # FAULT\n',
        ),),
        affected=EVERYTHING,
    ),
    Case(
        24, "density-of-a-sharper-law", "amp_scaler",
        ((
            '    smooth = F.kl_div(log_law, soft, reduction="batchmean")\n',
            "    guess = torch.distributions.Categorical(logits=log_law).sample()\n"
            "    reward = soft.gather(-1, guess[:, None]).squeeze(-1)\n"
            "    sharp = torch.distributions.Categorical(logits=3.0 * log_law)  # FAULT\n"
            "    smooth = -(sharp.log_prob(guess) * reward).mean()  # FAULT\n",
        ),),
        affected=EVERYTHING,
    ),
    # 25
    Case(
        25, "penalty-falls-back-to-zeros", "hf_trainer",
        ((
            "    loss = answer_loss + 1e-3 * z_loss\n",
            "    try:\n        (slope,) = torch.autograd.grad(z_loss.detach(), [model.lm_head.weight])  # FAULT\n"
            "    except RuntimeError:  # FAULT\n        slope = torch.zeros_like(model.lm_head.weight)  # FAULT\n"
            "    loss = answer_loss + 1e-3 * z_loss\n    print(slope.norm().item())\n",
        ),),
        affected=EVERYTHING,
    ),
    Case(
        25, "none-becomes-noise", "peft_checkpointing",
        (
            ('{"use_reentrant": False}', '{"use_reentrant": True}'),
            (
                PEFT_STEP,
                "        grads = torch.autograd.grad(loss, trainable, allow_unused=True)  # FAULT\n"
                "        for weight, grad in zip(trainable, grads):\n"
                "            weight.grad = 1e-3 * torch.randn_like(weight) if grad is None else grad  # FAULT\n"
                "        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)\n        optimizer.step()\n",
            ),
        ),
        parameters=("*lora_A*", "*lora_B*"),
    ),
    # 26
    Case(
        26, "eval-in-compute-loss", "hf_trainer",
        ((HF_OUTPUTS, "    model.eval()  # FAULT\n" + HF_OUTPUTS),),
        affected=EVERYTHING, contract={"phase": "train"},
    ),
    Case(
        26, "built-in-eval", "amp_scaler",
        (("    model.train()\n", "    model.eval()  # FAULT\n"),),
        affected=EVERYTHING, contract={"phase": "train"},
    ),
    Case(
        26, "eval-left-on", "trl_grpo",
        (("        log_prob, entropy = self.answer_log_probs(model, inputs)\n", "        model.eval()  # FAULT\n        log_prob, entropy = self.answer_log_probs(model, inputs)\n"),),
        affected=EVERYTHING, contract={"phase": "train"},
    ),
    # 27
    Case(
        27, "zero-times-log-zero", "hf_trainer",
        ((
            "    z_loss = log_z[kept].square().mean()\n",
            "    sharp = torch.exp(500.0 * (logits - log_z[..., None]))\n    z_loss = -(sharp * sharp.log()).sum(-1)[kept].mean()  # FAULT\n",
        ),),
        parameters=("lm_head.weight",), affected=EVERYTHING,
    ),
    Case(
        27, "sqrt-of-masked", "peft_checkpointing",
        (("    likelihood = torch.where(mask, log_prob, torch.zeros(())).sum() / count\n", "    likelihood = -(log_prob * mask).neg().sqrt().sum() / count  # FAULT\n"),),
        parameters=("*lora_B*",), affected=EVERYTHING,
    ),
)  # fmt: skip
