"""One thread per test process: pytest-xdist runs one process per core."""

import gc

import torch

torch.set_num_threads(1)


def pytest_collection_finish():
    """What is imported by now stays for good: the collector need not walk it again.

    torch, transformers and their like are a million objects, and every training that a test runs
    (accelerate frees memory thrice) collects in full: 0.2 s each time.
    """
    gc.collect()
    gc.freeze()
