"""Class 10: autograd.grad, and backward(inputs=...), that give None."""

import pytest

from doctor.snippets import look, loop, nothing, only, serious
from gradient_doctor import Severity

BODY = {"body.weight", "body.bias"}
TAKE = [
    "weights = [*body.parameters(), *head.parameters()]",
    "{call}  # FAULT",
    "for weight, gradient in zip(weights, gradients):",
    "    weight.grad = gradient",
    "optimizer.step()",
    "continue",
]
UNUSED = "gradients = torch.autograd.grad(loss, weights, allow_unused=True)"


def taking(*lines, call=UNUSED):
    return loop(*lines, *(line.replace("{call}", call) for line in TAKE))


def test_partly_none_names_the_call_and_the_cut(tmp_path):
    source = taking("f = body(x).detach()", "loss = F.cross_entropy(head(f), y)")
    finding = only(tmp_path, source, 10)
    assert finding.severity is Severity.ERROR
    assert set(finding.parameters) == BODY
    assert "2/4 None" in finding.why
    assert "`detach`" in finding.why
    assert len(finding.related) == 1


def test_nothing_is_none_nothing_is_said(tmp_path):
    nothing(tmp_path, taking("loss = F.cross_entropy(head(body(x)), y)"))


def test_not_used_at_all(tmp_path):
    source = taking("loss = F.cross_entropy(head(x.repeat(1, 2)), y)")
    finding = only(tmp_path, source, 10)
    assert "without them" in finding.why


def test_reentrant_checkpoint_hides_everything(tmp_path):
    source = taking(
        "x.requires_grad_()",
        "o = checkpoint(lambda x: head(body(x)), x, use_reentrant=True)",
        "loss = F.cross_entropy(o, y)",
    )
    finding = only(tmp_path, source, 10)
    assert "4/4 None" in finding.why
    assert "reentrant" in finding.why
    assert "use_reentrant=False" in finding.fix
    assert len(finding.parameters) == 4


def test_checkpoint_without_reentry_is_clean(tmp_path):
    nothing(
        tmp_path,
        taking(
            "o = checkpoint(lambda x: head(body(x)), x, use_reentrant=False)",
            "loss = F.cross_entropy(o, y)",
        ),
    )


@pytest.mark.parametrize("inputs", ["weights", "weights[:1]"])
def test_the_error_about_unused_inputs_is_translated(inputs, tmp_path):
    source = taking(
        "loss = F.cross_entropy(head(body(x).detach()), y)",
        call=f"gradients = torch.autograd.grad(loss, {inputs})",
    )
    finding = only(tmp_path, source, 10)
    assert set(finding.parameters) == (BODY if inputs == "weights" else {"body.weight"})
    examination, _ = look(tmp_path, source)
    assert "10 grad-none" in examination.error.__notes__[0]


def test_backward_with_inputs_that_it_cannot_reach(tmp_path):
    source = loop(
        "loss = F.cross_entropy(head(body(x).detach()), y)",
        "optimizer.zero_grad()",
        "loss.backward(inputs=[*body.parameters(), *head.parameters()])  # FAULT",
        "optimizer.step()",
        "continue",
    )
    finding = only(tmp_path, source, 10)
    assert set(finding.parameters) == BODY


def test_copies_of_parameters_are_other_tensors(tmp_path):
    source = loop(
        "loss = F.cross_entropy(head(body(x)), y)",
        "copies = [p.clone() for p in body.parameters()]",
        "torch.autograd.grad(loss, copies, allow_unused=True, retain_graph=True)  # FAULT",
    )
    finding = only(tmp_path, source, 10)
    assert "copy" in finding.why
    assert set(finding.parameters) == BODY


def test_unused_in_one_loss_but_trained_by_another_is_clean(tmp_path):
    nothing(
        tmp_path,
        loop(
            "weights = [*body.parameters(), *head.parameters()]",
            "torch.autograd.grad(body(x).square().mean(), weights, allow_unused=True)",
            "loss = F.cross_entropy(head(body(x)), y)",
        ),
    )


def test_gradient_penalties_are_clean(tmp_path):
    nothing(
        tmp_path,
        loop(
            "x.requires_grad_()",
            "slope, = torch.autograd.grad(head(body(x).tanh()).sum(), x, create_graph=True)",
            "loss = F.cross_entropy(head(body(x)), y) + (slope.norm(dim=-1) - 1).square().mean()",
        ),
    )


def test_a_parameter_is_not_reported_twice(tmp_path):
    source = taking("f = body(x).detach()", "loss = F.cross_entropy(head(f), y)")
    examination, _ = look(tmp_path, source)
    assert [f.number for f in serious(examination)] == [10]
