"""The classes of fault that the doctor knows. Number 0 is for what it cannot see."""

from __future__ import annotations

from typing import NamedTuple


class FaultClass(NamedTuple):
    slug: str
    title: str


CLASSES: dict[int, FaultClass] = {
    0: FaultClass("blind-spot", "the doctor cannot see here"),
    1: FaultClass("constant-loss", "the loss has no gradient function"),
    2: FaultClass("no-grad-region", "a no_grad or inference_mode region on the path to the loss"),
    3: FaultClass("explicit-cut", "detach, item, argmax and the like on the path to the loss"),
    4: FaultClass("frozen", "should train, but requires_grad is False"),
    5: FaultClass("unreachable", "trainable, but no loss reaches it"),
    6: FaultClass("throwaway-module", "parameters created again inside the step"),
    7: FaultClass("no-optimizer", "receives gradient, but no optimizer holds it"),
    8: FaultClass("foreign-optimizer", "the optimizer holds stale parameters or a wrong state"),
    9: FaultClass("erased-gradient", "the gradient is erased before its optimizer steps"),
    10: FaultClass("grad-none", "autograd.grad returns None"),
    11: FaultClass("checkpoint-inputs", "reentrant checkpoint, no input needs gradient"),
    12: FaultClass("second-backward", "a second backward through a freed graph"),
    13: FaultClass("changed-in-place", "changed in place between forward and backward"),
    14: FaultClass("stale-graph", "a tensor of an earlier step is used with its graph"),
    15: FaultClass("scaler-dtype", "half-precision parameters under a gradient scaler"),
    16: FaultClass("wrong-dtype", "parameters do not have the requested dtype"),
    17: FaultClass("scaler-protocol", "the gradient scaler's calls are out of order"),
    18: FaultClass("target", "dtype or shape of the target; a silent broadcast"),
    19: FaultClass("padding", "padding, slice or mask"),
    20: FaultClass("zero-gradient", "connected, but the gradient is exactly zero"),
    21: FaultClass("unchanged-weights", "gradient is there, but the weights do not change"),
    22: FaultClass("magnitude", "the gradient's size depends on batch size or length"),
    23: FaultClass("cosmetic-term", "a loss term without influence on the update"),
    24: FaultClass("wrong-estimator", "the log-probability is not that of the sampler"),
    25: FaultClass("swallowed-error", "an autograd failure was caught and papered over"),
    26: FaultClass("train-eval-mode", "train() or eval() mode does not fit the phase"),
    27: FaultClass("non-finite", "the loss or its gradient is not finite"),
    28: FaultClass("accumulated-gradient", "a step uses gradients that an earlier step has used"),
    29: FaultClass(
        "activation-twice",
        "softmax or sigmoid is applied again by the loss; or no activation at all",
    ),
    30: FaultClass("wrong-owner", "a loss trains a network that it should not"),
    31: FaultClass("schedule", "the learning rate is scheduled too often, too early or to nothing"),
    32: FaultClass("wrong-sign", "the steps drive the loss the wrong way"),
    33: FaultClass("mixed-axes", "one axis is taken for another: samples or steps are mixed"),
}
