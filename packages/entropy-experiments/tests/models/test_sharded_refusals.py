"""What a sharded model refuses, in one process: the ranks and the model are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entropy_experiments.checkpoints import load
from entropy_experiments.checkpoints.base import Base
from entropy_experiments.distributed import LostRankError, Ranks, announced
from entropy_experiments.models.sharded import NEEDED, ShardedModel, _Scored, check_torch
from entropy_experiments.types import Scores

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("missing", NEEDED)
def test_a_torch_that_cannot_sum_gradients_is_refused(missing):
    older: Any = type("Older", (), {name: None for name in NEEDED if name != missing})
    match = (
        rf"torch {torch.__version__.split('+')[0]}.* has no {missing} on Older; .*2\.13.*Upgrade"
    )
    with pytest.raises(RuntimeError, match=match):
        check_torch(older)


def test_this_torch_can():
    check_torch()


class Failing:
    """As much of a ShardedModel as a pass needs before it reaches the model."""

    def __init__(self) -> None:
        self._failed, self.ranks, self.resharded = False, Ranks(), 0

    def _fsdp_modules(self) -> list[Any]:
        return [self]

    def reshard(self) -> None:
        self.resharded += 1

    def run_in_step(self, work: Any) -> Any:
        return ShardedModel.run_in_step(self, work)  # type: ignore[arg-type]


def _raising(error: BaseException) -> Any:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("in a layer")])
def test_after_a_pass_that_ended_half_way_there_is_no_other(error):
    model = Failing()
    with pytest.raises(type(error)) as caught:
        model.run_in_step(_raising(error))
    assert caught.value is error
    assert model.resharded == 1
    with pytest.raises(RuntimeError, match=r"earlier pass of the sharded model failed") as again:
        model.run_in_step(lambda: None)
    assert announced(again.value)  # an announcement would wait for ranks that are gone
    assert model.resharded == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("in a layer")])
def test_the_first_error_is_told_whatever_happens_after_it(error):
    """Two modules: the second is dropped, too, though the first cannot be."""

    class Stuck(Failing):
        def _fsdp_modules(self) -> list[Any]:
            return [SimpleNamespace(reshard=_raising(RuntimeError("no memory"))), self]

    model = Stuck()
    with pytest.raises(type(error)) as caught:
        model.run_in_step(_raising(error))
    assert caught.value is error
    assert error.__notes__ == ["Its layers could not be dropped, either: RuntimeError('no memory')"]
    assert model.resharded == 1


def test_a_lost_rank_is_told_once():
    lost = LostRankError("Another rank is gone (Connection closed by peer).")
    with pytest.raises(LostRankError) as caught:
        Failing().run_in_step(_raising(lost))
    assert caught.value is lost
    with pytest.raises(LostRankError, match=r"gone \(gloo/transport broke\)"):
        Failing().run_in_step(_raising(RuntimeError("gloo/transport broke")))


class Squares:
    """A policy whose scores are w^2 and 2 w^2; the pass of its backward is an ordinary one."""

    def _score_pass(self, params: Any, rollouts: Any) -> Scores:
        self.leaf = params["w"].detach().requires_grad_()
        return Scores(self.leaf**2, 2 * self.leaf**2)

    def _gradient_shards(self, params: Any, scores: Any, cotangents: Any) -> list[Any]:
        return list(torch.autograd.grad(list(scores), [self.leaf], list(cotangents)))


def _scored() -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    scores = Scores(*_Scored.apply(Squares(), None, ["w"], w))
    return w, (scores.logprob_NS + scores.entropy_NS).sum()


def test_scores_are_differentiated_once():
    w, loss = _scored()
    (gradient,) = torch.autograd.grad(loss, w, retain_graph=True)
    assert torch.equal(gradient, 6 * w.detach())
    with pytest.raises(
        RuntimeError, match=r"second backward through the same scores .*Score again"
    ):
        torch.autograd.grad(loss, w)


def test_a_graph_of_the_gradient_is_refused():
    w, loss = _scored()
    with pytest.raises(ValueError, match=r"create_graph=True; expected False: FSDP has no double"):
        torch.autograd.grad(loss, w, create_graph=True)
    # Where the incoming gradient is differentiable itself, too.
    w, loss = _scored()
    with pytest.raises(ValueError, match=r"create_graph=True; expected False"):
        torch.autograd.grad(loss * w.sum(), w, create_graph=True)


@pytest.fixture
def with_bitsandbytes(monkeypatch):
    """A machine with a GPU and bitsandbytes, as far as the choice of precision goes."""
    monkeypatch.setattr(load, "_on_cuda", lambda _: True)
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr("transformers.BitsAndBytesConfig", SimpleNamespace)


def _stored(monkeypatch: pytest.MonkeyPatch, quantization: Any) -> None:
    config = SimpleNamespace(quantization_config=quantization)
    monkeypatch.setattr(load, "model_config", lambda _, **__: config)


@pytest.mark.usefixtures("with_bitsandbytes")
def test_a_base_that_will_be_cut_is_not_quantised(monkeypatch):
    base, facts = Base(location="somewhere", words="a base"), {"load_in_4bit": True}
    _stored(monkeypatch, None)
    found, words = load._quantization(base, facts, None, quantise=False)
    assert found is None
    assert words == " and unquantised, though training used it in 4 bit"
    found, words = load._quantization(base, facts, None, quantise=True)
    assert found.load_in_4bit
    assert words == ", quantised to 4 bit"

    _stored(monkeypatch, {"quant_method": "bitsandbytes"})
    assert load._quantization(base, {}, None, quantise=True) == (None, ", quantised as stored")
    match = r"somewhere is stored quantised; expected floating point, .*checkpoint\.sharding: none"
    with pytest.raises(ValueError, match=match):
        load._quantization(base, {}, None, quantise=False)


def _rounded_by_fsdp(sums: torch.Tensor, *, at: int) -> Any:
    """As much of a ShardedModel and a shard as the reading of a gradient needs."""
    flat = torch.arange(6.0) / 3
    gradient = SimpleNamespace(dtype=flat.dtype, to_local=lambda: flat[at : at + 2])
    model = SimpleNamespace(_sums={"layer": sums}, _groups={"weight": "layer"})
    return ShardedModel._unrounded(model, "weight", SimpleNamespace(grad=gradient))  # type: ignore[arg-type]


@pytest.mark.parametrize("sums", [torch.arange(6.0).double(), torch.arange(2.0).double() / 3])
def test_a_gradient_that_fsdp_keeps_elsewhere_is_refused(sums):
    """Other numbers at that place, or no such place."""
    with pytest.raises(RuntimeError, match=r"FSDP of torch .* keeps the gradient of weight elsewh"):
        _rounded_by_fsdp(sums, at=4)


def test_a_gradient_whose_sums_are_no_wider_is_taken_as_it_is():
    gradient = SimpleNamespace(dtype=torch.bfloat16)
    model = SimpleNamespace(_sums={"layer": torch.zeros(6)}, _groups={"weight": "layer"})
    shard = SimpleNamespace(grad=gradient)
    assert ShardedModel._unrounded(model, "weight", shard) is gradient  # type: ignore[arg-type]
