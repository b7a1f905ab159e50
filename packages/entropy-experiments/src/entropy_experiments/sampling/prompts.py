"""How a question is put to the policy.

The R1-style prompt opens the first tag itself, so a response starts inside <think>. Rewards that
look at the whole exchange put `R1_OPENING` back in front of it (`Problem.facts["opening"]`). Chat
templates are not applied here; `load_problems(..., chat=True)` does that when asked.
"""

from __future__ import annotations

R1_OPENING = "<think>"

_R1 = """\
Below, a user asks a question and an assistant solves it. The assistant first works through the \
problem between <think> and </think>, then writes its final answer, and nothing else, between \
<answer> and </answer>.

User: {question}
Assistant: {opening}"""

_PLAIN = """\
Question: {question}
Solve it step by step and write the final answer on its own line after ####.
Answer:"""

_COUNTDOWN = """\
Use each of the numbers {numbers} exactly once, with +, - and * and parentheses, to make {target}. \
Give the expression as the answer, for example <answer>(1 + 2) * 3</answer>."""


def r1_prompt(question: str) -> str:
    return _R1.format(question=question.strip(), opening=R1_OPENING)


def plain_prompt(question: str) -> str:
    return _PLAIN.format(question=question.strip())


def countdown_question(numbers: tuple[int, ...], target: int) -> str:
    return _COUNTDOWN.format(numbers=", ".join(map(str, numbers)), target=target)
