"""Which line is the user's: wrappers that hide themselves from tracebacks are walked over."""

from __future__ import annotations

from gradient_doctor.sites import here, user_frame


def _plain(call):
    return call()


def _hidden(call):
    __tracebackhide__ = True
    return call()


def _line():
    site = here()
    assert site is not None
    return site.function


def test_a_hidden_wrapper_is_not_the_users_line():
    assert _plain(here).function == "_plain"
    assert _hidden(here).function == "test_a_hidden_wrapper_is_not_the_users_line"
    assert _hidden(user_frame).f_code.co_name == "test_a_hidden_wrapper_is_not_the_users_line"


def test_what_a_hidden_wrapper_calls_is_the_users_again():
    assert _hidden(_line) == "_line"


def test_a_region_is_named_by_the_line_that_made_it(tmp_path):
    from doctor.snippets import only

    source = """
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
region = torch.inference_mode()  # FAULT
with region:
    x = torch.randn(8, 4).requires_grad_(True)
    torch.autograd.grad(model(x).sum(), x)
"""
    finding = only(tmp_path, source, 2)
    assert "inside of inference_mode" in finding.what
