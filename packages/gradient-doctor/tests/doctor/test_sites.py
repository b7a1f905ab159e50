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
