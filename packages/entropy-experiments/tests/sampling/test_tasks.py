"""Datasets and rewards: what is asked, and that answers are judged as a reader would."""

import json
import threading

import pytest
import torch

from entropy_experiments.sampling import datasets as tasks
from entropy_experiments.sampling.countdown import Countdown, attempts
from entropy_experiments.sampling.datasets import (
    Problem,
    load_problems,
    without,
)
from entropy_experiments.sampling.rewards import build_reward, default_functions, final_answer

pytestmark = pytest.mark.naive

GSM8K = [
    {"question": f"Ann has {n} pens and buys {n}. How many?", "answer": f"<<{n}+{n}=0>>\n#### {a}"}
    for n, a in ((1, "2"), (500, "1,000"), (21, "$42"), (3, "6"), (4, "8"), (5, "-10"))
]


@pytest.fixture
def gsm8k(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, GSM8K)) + "\n\n")
    return path


def test_gsm8k_in_its_own_format(gsm8k):
    found = load_problems("gsm8k_r1_template", path=gsm8k)
    by_question = {p.facts["question"]: p for p in found}
    assert len(found) == len(GSM8K)
    answers = [by_question[line["question"]].answer for line in GSM8K]
    assert answers == ["2", "1000", "42", "6", "8", "-10"]
    prompt = found[0].prompt
    assert found[0].facts["question"] in prompt
    assert prompt.endswith("Assistant: <think>")
    assert "<answer>" in prompt
    plain = load_problems("gsm8k", path=gsm8k.parent, split="train")
    assert [p.id for p in plain] != [p.id for p in found] or plain[0].prompt != prompt
    assert all("####" in p.prompt and "<think>" not in p.prompt for p in plain)


def test_order_depends_on_the_seed_alone(gsm8k):
    def ids(**options):
        return [p.id for p in load_problems("gsm8k", path=gsm8k, **options)]

    assert ids(seed=1) == ids(seed=1)
    assert ids(seed=1) != ids(seed=2)
    assert sorted(ids(seed=1)) == sorted(ids(seed=2))
    assert ids(seed=1, count=2) == ids(seed=1)[:2]
    assert len(ids(count=100)) == len(GSM8K)


def test_jsonl_of_ones_own(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "2+2=", "answer": 4, "level": "easy"}\n{"prompt": "a", "answer": "b"}'
    )
    found = {p.prompt: p for p in load_problems("jsonl", path=path)}
    assert found["2+2="].answer == "4"
    assert found["2+2="].facts["level"] == "easy"
    reward = build_reward(["answer_exact"])
    result = reward(["b", " b ", "c", "so <answer> b </answer>"], [found["a"]] * 4)
    assert result.total_N.tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{bad", r"x\.jsonl:2: not JSON"),
        ("[1]", r"x\.jsonl:2: got a JSON list; expected an object like"),
        ('{"question": "q"}', r'x\.jsonl:2: "answer" is None; expected text'),
        ('{"question": "", "answer": "#### 1"}', r'x\.jsonl:2: "question" is \'\'; expected text'),
        ('{"question": "q", "answer": "42"}', r"x\.jsonl:2: .* '#### <number>'.*\"jsonl\""),
        ('{"question": "q", "answer": "#### "}', r"gsm8k/train/2: nothing follows '####'"),
        (b"\xff\xfe", r"x\.jsonl:2: not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, match):
    path = tmp_path / "x.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps(GSM8K[0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=match):
        load_problems("gsm8k", path=path)


def test_missing_files_and_names(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file: .*nope.jsonl. Expected lines like"):
        load_problems("gsm8k", path=tmp_path / "nope.jsonl")
    with pytest.raises(FileNotFoundError, match=r"has no test.jsonl; it has \[\]"):
        load_problems("gsm8k", path=tmp_path, split="test")
    with pytest.raises(ValueError, match=r"Unknown dataset 'gsm'; expected one of gsm8k_r1"):
        load_problems("gsm")
    with pytest.raises(ValueError, match=r"needs data.file"):
        load_problems("jsonl")
    with pytest.raises(ValueError, match=r"made without end: say how many"):
        load_problems("countdown")
    with pytest.raises(ValueError, match=r"count is 0"):
        load_problems("countdown", count=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl has no lines"):
        load_problems("jsonl", path=tmp_path / "empty.jsonl")
    (tmp_path / "x.jsonl").write_text('{"prompt": "p", "answer": null}')
    with pytest.raises(
        ValueError, match=r'x.jsonl:1: "answer" is NoneType; expected text or a num'
    ):
        load_problems("jsonl", path=tmp_path / "x.jsonl")


def test_offline_the_hub_error_names_the_local_file(monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("no route to huggingface.co")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"no route .* data.file"):
        load_problems("gsm8k_r1_template", count=3)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: GSM8K)
    assert len(load_problems("gsm8k_r1_template", count=3)) == 3
    assert len(load_problems("gsm8k", split="train[:50%]+test", count=3)) == 3
    with pytest.raises(ValueError, match=r"no split 'validation'; expected train or test"):
        load_problems("gsm8k", split="validation", count=3)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets"):
        load_problems("gsm8k", count=3)


def test_a_split_is_no_path(tmp_path):
    for split in (str(tmp_path / "train"), "../train"):
        with pytest.raises(FileNotFoundError, match=r"has no .*train.jsonl; it has \[\]"):
            load_problems("jsonl", path=tmp_path, split=split)


@pytest.mark.parametrize("name", ["countdown", "countdown_r1_template"])
def test_countdown_is_made_from_the_seed(name):
    made = load_problems(name, count=50, seed=3)
    assert [p.id for p in made] == [p.id for p in load_problems(name, count=50, seed=3)]
    assert [p.id for p in made[:20]] == [p.id for p in load_problems(name, count=20, seed=3)]
    assert {p.id for p in made} != {p.id for p in load_problems(name, count=50, seed=4)}
    assert {p.id for p in made} != {
        p.id for p in load_problems(name, count=50, seed=3, split="test")
    }
    assert len({p.prompt for p in made}) == len({p.id for p in made}) == 50
    reward = build_reward(["countdown"])
    for problem in made[:10]:
        asked = Countdown(numbers=problem.facts["numbers"], target=problem.facts["target"])
        right = next(a for a in attempts(asked.numbers) if a.value == asked.target)
        wrong = next(a for a in attempts(asked.numbers) if a.value != asked.target)
        texts = [f"... </think> <answer> {x.expression} </answer>" for x in (right, wrong)]
        assert reward(texts, [problem] * 2).total_N.tolist() == [1.0, 0.0]


def test_reasoning_gym_when_installed():
    pytest.importorskip("reasoning_gym")
    made = load_problems("reasoning_gym:leg_counting", count=4, seed=1)
    assert made == load_problems("reasoning_gym:leg_counting", count=4, seed=1)
    reward = build_reward(default_functions("reasoning_gym:leg_counting"))
    texts = [f"<answer>{made[0].answer}</answer>", "<answer>-1</answer>", "none"]
    right, wrong, none = reward(texts, [made[0]] * 3).total_N.tolist()
    assert right == 1.0
    assert max(wrong, none) < 0.1
    with pytest.raises(ValueError, match=r"does not know the task 'nonsense'"):
        load_problems("reasoning_gym:nonsense", count=1)


def test_reasoning_gym_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'entropy-experiments\[reasoning-gym\]'"):
        load_problems("reasoning_gym:leg_counting", count=1)
    asked = Problem(id="x", prompt="", answer="1", facts={"task": "leg_counting", "entry": {}})
    with pytest.raises(ValueError, match=r"reward 'reasoning_gym' needs reasoning-gym"):
        build_reward(["reasoning_gym"])(["1"], [asked])


def test_math_verify_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"pip install 'math-verify"):
        build_reward(["math_verify"])(["<answer>1</answer>"], [tagged()])


def test_evaluation_and_update_share_no_prompt(gsm8k):
    pool = load_problems("gsm8k", path=gsm8k)
    evaluation = pool[:2]
    update = without(pool, evaluation)
    assert len(update) == len(GSM8K) - 2
    assert not {p.prompt for p in evaluation} & {p.prompt for p in update}
    assert update == [p for p in pool if p not in evaluation]
    renamed = [Problem(id=f"other {p.id}", prompt=p.prompt, answer=p.answer) for p in evaluation]
    assert without(pool, renamed) == without(pool, evaluation)


def test_prompts_of_messages_go_through_the_template_whether_or_not_it_is_asked_for(tmp_path):
    class Tokenizer:
        name_or_path, chat_template = "one", "any"

        def apply_chat_template(self, messages, **_):
            return "|".join(f"{one['role']}>{one['content']}" for one in messages)

    talk = [{"role": "system", "content": "short"}, {"role": "user", "content": "1+1"}]
    rows = [
        {"prompt": talk, "answer": 2, "hint": "two"},
        {"prompt": "2+2", "answer": "4", "messages": "mine"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for chat, plain in ((False, "2+2"), (True, "user>2+2")):
        found = load_problems("jsonl", path=file, tokenizer=Tokenizer(), chat=chat)
        by_answer = {problem.answer: problem for problem in found}
        assert by_answer["2"].prompt == "system>short|user>1+1"
        assert by_answer["2"].facts["messages"] == talk
        assert by_answer["2"].facts["columns"] == {"answer": "2", "hint": "two"}
        assert by_answer["4"].prompt == plain
        assert "messages" not in by_answer["4"].facts
        assert by_answer["4"].facts["columns"]["messages"] == "mine"
    file.write_text(json.dumps({"prompt": [{"role": "user"}], "answer": "4"}))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*expected text, or messages such as"):
        load_problems("jsonl", path=file)


def test_a_chat_template_is_applied_when_asked(gsm8k):
    from oracles.tiny_models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=r"needs a tokenizer with a chat template; got Tok"):
        load_problems("gsm8k", path=gsm8k, tokenizer=tokenizer, chat=True)
    tokenizer.chat_template = (
        "[{{ messages[0].content }}]{% if add_generation_prompt %}A:{% endif %}"
    )
    plain = load_problems("gsm8k_r1_template", path=gsm8k, tokenizer=tokenizer)[0]
    chat = load_problems("gsm8k_r1_template", path=gsm8k, tokenizer=tokenizer, chat=True)[0]
    assert chat.facts["chat"]
    assert chat.prompt == f"[{plain.prompt.removesuffix(chr(10) + 'Assistant: <think>')}]A:<think>"


def tagged(answer="42", **facts):
    return Problem(id="x", prompt="", answer=answer, facts={"style": "tag", **facts})


MATHS = [
    ("42", "42", 1),
    ("42", " 42.0 ", 1),
    ("42", "$42", 1),
    ("42", "42 apples", 1),
    ("1000", "1,000", 1),
    ("0.5", "1/2", 1),
    ("0.5", r"\frac{1}{2}", 1),
    (r"\frac{1}{2}", r"\boxed{0.5}", 1),
    ("2", r"\frac{1}{2}", 0),
    ("42", "43", 0),
    ("42", "-42", 0),
    ("42", "", 0),
    ("42", "forty", 0),
    ("42", "9**9**9**9", 0),
    ("42", "2^99999999", 0),
    ("42", "x" * 500, 0),
    ("42", "__import__('os').system('false')", 0),
]


@pytest.mark.parametrize("where", ["main", "thread"])
def test_math_verify_judges_the_answer_tag(where):
    reward = build_reward(["math_verify"])
    texts = [f"6*7 </think> <answer>{said}</answer>" for _, said, _ in MATHS]
    asked = [tagged(gold) for gold, _, _ in MATHS]
    found = []

    def run():
        found.extend(reward(texts, asked).total_N.tolist())

    if where == "main":
        run()
    else:  # math-verify's own timeouts raise here
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [float(score) for _, _, score in MATHS]


def test_only_the_last_complete_tag_counts():
    reward = build_reward(["math_verify"])
    texts = [
        "42",
        "<answer>42",
        "42</answer>",
        "<answer>41</answer> no, <answer>42</answer>",
        "<answer>42</answer> no, <answer>41</answer>",
        "<answer>\n42\n</answer><answer>",
    ]
    assert reward(texts, [tagged()] * 6).total_N.tolist() == [0, 0, 0, 1, 0, 1]
    hashed = Problem(id="h", prompt="", answer="42", facts={"style": "hash"})
    texts = ["so\n#### 42\nDone", "42", "#### 41", "####", "<answer>42</answer>"]
    assert reward(texts, [hashed] * 5).total_N.tolist() == [1, 0, 0, 0, 1]
    assert final_answer("####", hashed) is None


def test_an_answer_that_is_no_mathematics_is_an_error_not_a_zero():
    with pytest.raises(
        ValueError, match=r"cannot read the answer 'Paris' of problem 'x'.*answer_ex"
    ):
        build_reward(["math_verify"])(["<answer>1</answer>"], [tagged("Paris")])


def test_format():
    reward = build_reward(["format"])
    good = "<think> a </think> <answer> b </answer>"
    texts = [
        good,
        f" {good}\n",
        good + " more",
        "<answer>b</answer>",
        good.replace("</think>", ""),
        "<think>a</think><think>a</think><answer>b</answer>",
        "<answer>b</answer><think>a</think>",
    ]
    assert reward(texts, [tagged()] * 7).total_N.tolist() == [1, 1, 0, 0, 0, 0, 0]
    open_checkpoint = tagged(opening="<think>")
    texts = [good.removeprefix("<think>"), good]
    assert reward(texts, [open_checkpoint] * 2).total_N.tolist() == [1, 0]


def test_weighted_sums():
    reward = build_reward(["answer_exact", "format"], [1.0, 0.25])
    texts = ["<think>a</think><answer>42</answer>", "<answer>42</answer>", "no"]
    result = reward(texts, [tagged()] * 3)
    assert result.total_N.tolist() == [1.25, 1.0, 0.0]
    assert result.by_function["format"].tolist() == [1, 0, 0]
    assert list(result.by_function) == ["answer_exact", "format"]
    assert result.take(slice(1, 3)).total_N.tolist() == [1.0, 0.0]
    assert result.total_N.dtype == torch.float64


MINE = """
def plain(texts, asked):
    return [len(text) + float(problem.answer) for text, problem in zip(texts, asked)]
def by_name(answers, completions):
    return [len(text) + float(answer) for text, answer in zip(completions, answers)]
def like_trl(prompts, completions, **kwargs):
    return [len(text) + float(answer) for text, answer in zip(completions, kwargs["answers"])]
def tensor(completions, problems):
    import torch
    return torch.tensor([len(text) + 42.0 for text in completions])
def short(completions, problems): return [1.0]
def nothing(completions, problems): return None
def nan(completions, problems): return [0.0, float("nan"), 0.0]
def words(completions, problems): return [0.0, 0.0, "1"]
def unsure(completions, problems): return [None, 1, 1]
number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_for_tests.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards_for_tests"


@pytest.mark.parametrize("name", ["plain", "by_name", "like_trl", "tensor"])
def test_functions_of_ones_own(mine, name):
    result = build_reward([f"{mine}:{name}"])(["a", "bc", ""], [tagged()] * 3)
    assert result.total_N.tolist() == [43, 44, 42]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("short", r"returned 1 values for 3 completions"),
        ("nothing", r"returned NoneType; expected a list, tuple, tensor or array of 3"),
        ("nan", r"returned nan for completion 1; expected a finite number"),
        ("words", r"returned '1' for completion 2"),
        ("unsure", r"returned None for completion 0"),
    ],
)
def test_functions_of_ones_own_that_misbehave(mine, name, match):
    with pytest.raises(ValueError, match=match):
        build_reward([f"{mine}:{name}"])(["a", "bc", ""], [tagged()] * 3)


@pytest.mark.parametrize(
    ("functions", "weights", "match"),
    [
        (["math_verfy"], None, r"Unknown reward 'math_verfy'.*Did you mean 'math_verify'\?"),
        ([], None, r"expected a list with at least one"),
        ("format", None, r"expected a list"),
        (["format", "format"], None, r"names one twice"),
        (["format"], [1, 2], r"has 2 entries for 1 functions"),
        (["format"], [float("nan")], r"expected finite numbers"),
        (["my_rewards_for_tests:absent"], None, r"has no such name under 'absent'"),
        (["my_rewards_for_tests:number"], None, r"has a int under 'number'"),
    ],
)
def test_rewards_that_cannot_be_built(mine, functions, weights, match):
    with pytest.raises(ValueError, match=match):
        build_reward(functions, weights)


def test_a_module_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"module 'no_such_module' cannot be imported.*PYTHONPATH"):
        build_reward(["no_such_module:f"])
    (tmp_path / "broken_rewards.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'broken_rewards' cannot be imported \(SyntaxError"):
        build_reward(["broken_rewards:f"])
    with pytest.raises(ValueError, match=r"2 completions for 1 problems"):
        build_reward(["format"])(["a", "b"], [tagged()])
    with pytest.raises(
        ValueError, match=r"has no numbers and target, which the reward 'countdown'"
    ):
        build_reward(["countdown"])(["a"], [tagged()])


def test_default_rewards():
    assert default_functions("countdown_r1_template") == ("countdown",)
    assert default_functions("gsm8k_r1_template") == ("math_verify",)
    assert set(tasks.DATASETS) >= {"gsm8k", "jsonl", "countdown"}
