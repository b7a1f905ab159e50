"""Facts about installed libraries that the numerics rely on, or work around."""

import numpy as np
import pytest
import torch
from arviz_stats.base.array import array_stats
from torch.func import grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from entropy_experiments.numerics.derivatives import NoDerivativeError, pushforward
from entropy_experiments.numerics.entropy import token_scores
from entropy_experiments.numerics.forward_mode import values_list
from entropy_experiments.numerics.second_order import pushforward2
from entropy_experiments.numerics.weights import pareto_k_hat

pytestmark = pytest.mark.contract


def test_forward_over_forward_is_refused_by_token_scores():
    """torch gives a wrong second derivative there without a word; we raise."""
    logits_TV = torch.randn(4, 5, dtype=torch.float64)
    token_T = torch.tensor([0, 1, 2, 3])

    def scores(z_TV):
        return token_scores(z_TV, token_T)

    along = (torch.ones_like(logits_TV),)
    with pytest.raises(RuntimeError, match="pushforward2"):
        jvp(lambda z: jvp(scores, (z,), along)[1], (logits_TV,), along)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, dx):
        return 2 * ctx.saved_tensors[0] * dx


def test_torch_still_drops_terms_in_a_jvp_of_a_jvp():
    """When this fails, torch has mended it and the guard above can go."""
    x, one = torch.tensor(3.0), torch.tensor(1.0)
    _, second = jvp(lambda x: jvp(_Square.apply, (x,), (one,))[1], (x,), (one,))
    assert float(second) != 2.0


def test_torch_still_gets_the_nested_derivative_of_layer_norm_wrong():
    """When this fails, second derivatives could be nested instead of differenced."""
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))

    def f(params):
        return layer_norm(params["x"], (6,))

    def twice_reversed(params):
        """J v by reverse mode alone, in torch.func's own terms."""
        out, pull = vjp(f, params)
        return vjp(lambda u: pull(u)[0], torch.zeros_like(out))[1]({"x": v})[0]

    _, nested = jvp(twice_reversed, ({"x": x},), ({"x": v},))
    true = pushforward2(f, {"x": x}, {"x": v}, how="jvp", step=1e-3).second
    differences = (f({"x": x + 1e-3 * v}) - 2 * f({"x": x}) + f({"x": x - 1e-3 * v})) / 1e-6
    assert torch.allclose(true, differences, atol=1e-4)
    assert not torch.allclose(nested, differences, atol=1e-1)


def test_arviz_takes_minus_log_weights():
    """A Pareto tail of known shape comes back; with the other sign it would not."""
    generator = np.random.default_rng(0)
    for shape in (0.2, 0.5, 0.9):
        logweights = np.log(generator.pareto(1 / shape, 20_000) + 1)
        assert abs(pareto_k_hat(torch.from_numpy(logweights)) - shape) < 0.15
        _, wrong = array_stats.psislw(logweights)
        assert wrong < 0


@pytest.mark.parametrize("how", ["jvp", "double_backward"])
def test_fused_attention_cannot_be_differentiated_and_says_what_to_do(how):
    """On CPU neither forward mode nor a double backward exists; the MATH kernel has both."""
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(1, 2, 8, 4, generator=generator) for _ in range(2))

    def attend(params):
        return scaled_dot_product_attention(params["q"], params["q"], params["q"])

    told = rf"cannot be differentiated by '{how}' .*method: auto.*attn_implementation='eager'"
    with pytest.raises(NoDerivativeError, match=told) as caught:
        pushforward(attend, {"q": q}, {"q": v}, how=how)
    assert "\n" not in str(caught.value)
    with sdpa_kernel(SDPBackend.MATH):
        _, slope = pushforward(attend, {"q": q}, {"q": v}, how=how)
    _, difference = pushforward(attend, {"q": q}, {"q": v}, how="central")
    assert torch.allclose(slope, difference, atol=1e-3)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f, x: f(x),
        lambda f, x: jvp(f, (x,), (x,)),
        lambda f, x: grad(f)(x),
        lambda f, x: jvp(grad(f), (x,), (x,)),
        lambda f, x: jvp(lambda y: jvp(f, (y,), (y,))[1], (x,), (x,)),
        lambda f, x: vmap(lambda v: jvp(f, (x,), (v,))[1])(torch.stack([x, x])),
    ],
    ids=["plain", "jvp", "grad", "jvp of grad", "jvp of jvp", "vmap of jvp"],
)
def test_lengths_are_read_inside_any_transform(transformed):
    """What `x.tolist()` itself does only since torch 2.10: the lowest torch shows the teeth."""
    seen = []
    attention_NS = torch.tensor([[1, 1, 1], [1, 0, 0]])

    def f(x):
        seen.append(values_list(attention_NS.sum(1) - 1))
        return (x * x).sum()

    transformed(f, torch.ones(2))
    assert seen
    assert all(found == [2, 0] for found in seen)


def test_values_of_a_hidden_batch_are_refused():
    with pytest.raises(RuntimeError):
        vmap(lambda x: torch.tensor(values_list(x)))(torch.ones(2, 3))
