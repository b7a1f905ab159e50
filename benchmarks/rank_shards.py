"""How much memory it takes to put verl's rank files together, beside the model itself.

    python -m benchmarks.rank_shards [--json FILE] [--ranks 3] [--mb 300]

A random model of so many megabytes (fp32, a quarter of it the embedding) is cut over the ranks and
saved as verl saves it, AdamW moments included. Each way of reading runs in a process of its own:

    weights      the model from the ranks' model files
    optimizer    its moments too: three times the model
    torch        torch.load of every model file and a concatenation, as a merger does it

`peak` is the largest resident memory (VmHWM) minus what was resident before the first file was
opened; a model of a megabyte was loaded before that, so libraries are in memory. Exit code 1 if
`weights` takes more than the model and 1.2 of one rank's file, or `optimizer` more than model and
moments and 1.2 of one rank's largest file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import conditions

ROOM = 1.2
"""Of one rank's file, beside what is kept."""
WAYS = ("weights", "optimizer", "torch")
WIDTH, LAYER = 512, 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
"""Of the model, and the parameters of one of its layers."""


def save(folder: Path, ranks: int, megabytes: int) -> None:
    """A model of about so many megabytes in global_step_1/actor."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from oracles.rank_files import write_ranks
    from oracles.tiny_models import tiny_tokenizer

    parameters = megabytes * 2**20 // 4
    config = LlamaConfig(
        vocab_size=parameters // 4 // WIDTH,
        hidden_size=WIDTH,
        intermediate_size=1024,
        num_hidden_layers=max(1, parameters // 2 // LAYER),
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    weights = model.state_dict()
    optimizer = torch.optim.AdamW(model.parameters())
    groups = optimizer.state_dict()["param_groups"]
    names = [name for name, _ in model.named_parameters()]
    actor = folder / "global_step_1" / "actor"
    write_ranks(actor, lambda cut, _: {n: cut(v) for n, v in weights.items()}, size=ranks)

    def moments(cut: Any, _: int) -> dict[str, Any]:
        entries = {
            i: {
                "step": torch.tensor(1.0),
                "exp_avg": cut(weights[n]),
                "exp_avg_sq": cut(weights[n] ** 2),
            }
            for i, n in enumerate(names)
        }
        return {"state": entries, "param_groups": groups}

    write_ranks(actor, moments, size=ranks, part="optim")
    config.save_pretrained(actor / "huggingface")
    tiny_tokenizer().save_pretrained(actor / "huggingface")


def status_mb(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def read(way: str, folder: Path) -> dict[str, float]:
    """In a process of its own: seconds, and megabytes at the peak over those before."""
    import torch
    import torch.distributed.tensor
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: F401

    from entropy_experiments.checkpoints.load import load_checkpoint

    load_checkpoint(folder.parent / "small" / folder.name, dtype="float32")
    before, start = status_mb("VmRSS"), time.perf_counter()
    if way == "torch":
        files = sorted((folder / "actor").glob("model_*.pt"))
        shards = [torch.load(file, weights_only=True) for file in files]
        kept: Any = {
            name: torch.cat([shard[name].to_local() for shard in shards]) for name in shards[0]
        }
    else:
        more = way == "optimizer"
        kept = load_checkpoint(folder, need_optimizer=more, read_optimizer=more, dtype="float32")
    seconds = time.perf_counter() - start
    del kept
    return {"peak_mb": status_mb("VmHWM") - before, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--read", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.read[0], Path(options.read[1]))))
        return 0
    with tempfile.TemporaryDirectory() as home:
        module = [sys.executable, "-m", "benchmarks.rank_shards"]
        save(Path(home) / "small", options.ranks, 1)
        save(Path(home), options.ranks, options.mb)
        folder = Path(home) / "global_step_1"
        sizes = {
            part: [f.stat().st_size / 2**20 for f in folder.glob(f"actor/{part}_*.pt")]
            for part in ("model", "optim")
        }
        rows: dict[str, Any] = {}
        for way in WAYS:
            done = subprocess.run(
                [*module, "--read", way, str(folder)], capture_output=True, text=True, check=True
            )
            rows[way] = json.loads(done.stdout)
    model = sum(sizes["model"])
    limits = {
        "weights": model + ROOM * max(sizes["model"]),
        "optimizer": model + sum(sizes["optim"]) + ROOM * max(sizes["optim"]),
    }
    print(f"model {model:.0f} MB in {options.ranks} files of at most {max(sizes['model']):.0f} MB")
    for way, row in rows.items():
        row["limit_mb"] = limits.get(way)
        limit = "" if way not in limits else f" (limit {limits[way]:.0f})"
        print(f"{way:<10} peak {row['peak_mb']:.0f} MB{limit}, {row['seconds']:.1f} s")
    if options.json:
        about = {"ranks": options.ranks, "model_mb": model, "files_mb": sizes, "ways": rows}
        options.json.write_text(json.dumps({**conditions(1), **about}, indent=1) + "\n")
    return int(any(rows[way]["peak_mb"] > limit for way, limit in limits.items()))


if __name__ == "__main__":
    sys.exit(main())
