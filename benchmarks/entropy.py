"""Token log-prob and entropy at a 152k vocabulary: error, time and peak memory.

    python -m benchmarks.entropy [--tokens 512] [--vocabulary 152000] [--json FILE]

Side by side in one process, alternating, medians: ours against the plain way, which is exactly

    logp = torch.log_softmax((hidden @ head.T).float(), -1)
    l, h = logp.gather(-1, token[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)

Peak memory is the growth of a fresh process's resident size, sampled every 2 ms, over its size when
the inputs (hidden states and head) are in place, one process per method and pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor

from entropy_experiments.numerics.entropy import token_scores_from_hidden

WIDTH = 896
ROUNDS = 5
PASSES = ("forward", "backward", "jvp")


def ours(hidden_TD: Tensor, head_VD: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
    return token_scores_from_hidden(hidden_TD, head_VD, token_T)


def plain(hidden_TD: Tensor, head_VD: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
    logp_TV = torch.log_softmax((hidden_TD @ head_VD.T).float(), -1)
    l_T = logp_TV.gather(-1, token_T[:, None]).squeeze(-1)
    return l_T, -(logp_TV.exp() * logp_TV).sum(-1)


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "ours": ours,
    "plain": plain,
}


def inputs(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(tokens, WIDTH, generator=generator)
    head_VD = 3 * torch.randn(vocabulary, WIDTH, generator=generator) / WIDTH**0.5
    token_T = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden_TD, head_VD, token_T


def run(method: str, how: str, data: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden_TD, head_VD, token_T = data
    if how == "forward":
        with torch.no_grad():
            METHODS[method](*data)
    elif how == "backward":
        leaf = hidden_TD.clone().requires_grad_()
        l_T, h_T = METHODS[method](leaf, head_VD, token_T)
        (l_T.sum() + h_T.sum()).backward()
    else:
        with torch.no_grad():
            torch.func.jvp(
                lambda x: METHODS[method](x, head_VD, token_T),
                (hidden_TD,),
                (torch.ones_like(hidden_TD),),
            )


def peak_of(method: str, how: str, tokens: int, vocabulary: int) -> float:
    """MiB beyond the inputs, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.entropy", "--peak", method, how]
    command += ["--tokens", str(tokens), "--vocabulary", str(vocabulary)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(found.stdout)


def peak_here(method: str, how: str, tokens: int, vocabulary: int) -> float:
    run(method, how, inputs(4, 1000))  # load torch's lazy parts
    data = inputs(tokens, vocabulary)
    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run(method, how, data)
    done.set()
    watcher.join()
    return (peak - before) / 2**20


def error_of(method: str, data: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Largest error against fp64 arithmetic on fp32 logits, made anew one token at a time."""
    hidden_TD, head_VD, token_T = (x[:64] if x is not data[1] else x for x in data)
    found = METHODS[method](hidden_TD, head_VD, token_T)
    worst = [0.0, 0.0]
    for i in range(len(token_T)):
        logits_V = (hidden_TD[i] @ head_VD.T).double()
        logp_V = torch.log_softmax(logits_V, -1)
        truth = (logp_V[token_T[i]], -(logp_V.exp() * logp_V).sum())
        for k in range(2):
            worst[k] = max(worst[k], abs(float(found[k][i] - truth[k])))
    return {"logprob": worst[0], "entropy": worst[1]}


def measure(tokens: int, vocabulary: int) -> dict:
    data = inputs(tokens, vocabulary)
    times: dict[str, dict[str, list[float]]] = {m: {p: [] for p in PASSES} for m in METHODS}
    for _ in range(ROUNDS):
        for how in PASSES:
            for method in METHODS:  # alternating, so that a noisy moment hits both
                start = time.perf_counter()
                run(method, how, data)
                times[method][how].append(time.perf_counter() - start)
    ratios = {
        how: statistics.median(a / b for a, b in zip(times["plain"][how], times["ours"][how]))
        for how in PASSES
    }
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "width": WIDTH,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "error_nats": {m: error_of(m, data) for m in METHODS},
        "peak_extra_mib": {
            m: {p: round(peak_of(m, p, tokens, vocabulary), 1) for p in PASSES} for m in METHODS
        },
        "median_seconds": {
            m: {p: round(statistics.median(times[m][p]), 3) for p in PASSES} for m in METHODS
        },
        "speed_ratio_plain_over_ours": {p: round(r, 2) for p, r in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--peak", nargs=2, metavar=("METHOD", "PASS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = (arguments.tokens, arguments.vocabulary)
    if arguments.peak:
        method, how = arguments.peak
        print(peak_here(method, how, *size))
        return
    found = measure(*size)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
