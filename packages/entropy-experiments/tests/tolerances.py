"""Every tolerance of the suite, once, with why it is what it is."""

EXACT = 1e-10
"""fp64 estimators against enumeration: rounding of a few hundred terms, no Monte Carlo."""
CENTRAL = 1e-6
"""Central differences in fp64: truncation eps^(2/3), times the third derivative."""
CENTRAL_SECOND = 1e-4
"""Second differences in fp64: eps^(1/2), times the fourth derivative."""
INVARIANT = 1e-12
"""Padding, order and packing may change the order of fp64 additions, nothing else."""
OPTIMIZER = {"float64": 1e-12, "float32": 1e-6}
"""Our step against torch's, relative to its norm."""
PARTS = 1e-12
"""Parts of a direction against the whole."""
FP32_ENTROPY = 1e-5
"""fp32 entropy at a 152k vocabulary, in nats."""
TRL = 1e-12
"""Our loss and token coefficients against TRL's, both in fp64."""
FALSE_ALARM = 1e-4
"""Chance that a statistical test fails though all is well."""
TRL_ADVANTAGE = 2e-5
"""Advantages in fp32 against TRL's: the centred reward's rounding over a standard deviation."""
SAMPLED_LOGPROB = 1e-5
"""Log-probs recorded while decoding in fp32 (KV cache, left padding) against teacher forcing."""

SCORES_FP32 = 1e-5
"""Scores of tiny fp32 models, batched against one at a time, in nats."""
SLOPES_FP32 = 2e-5
"""Directional derivatives of the same by different methods, relative."""
SLOPES_FP64 = 1e-7
"""Central differences of a truly fp64 model against its slope; plain .double() misses 1e-4."""
SWEEP = {"score": 2e-5, "change": 5e-4, "slope": 5e-4}
"""Tiny fp32 models of every type against a plain loop: scores in nats (models whose recurrences let
rounding grow included), changes and slopes relative as `assert_close` counts."""
CURVATURE_FP32 = 0.02
"""Second derivatives of fp32 models against fp64, relative: in five digits of slopes, the step's
own width leaves about three; 1e-4 and less is seen."""


def assert_close(got: float, expected: float, tolerance: float) -> None:
    """Relative, but that values below 0.01 nats (which cancel from terms of order 1) count as 0.01.

    So never laxer than the same tolerance taken absolutely, for anything up to 1 nat.
    """
    scale = max(abs(expected), 1e-2)
    assert abs(got - expected) <= tolerance * scale, (
        f"got {got!r}, expected {expected!r}: off by {abs(got - expected) / scale:.3g} relative, "
        f"tolerance {tolerance:g}"
    )


def assert_exact(got: float, expected: float) -> None:
    assert_close(got, expected, EXACT)
