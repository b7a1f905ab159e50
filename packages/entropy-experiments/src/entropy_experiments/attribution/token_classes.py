"""The class of a token by its text: what people name when they ask who spent the entropy.

    end         end-of-text and other special tokens
    format      tags, brackets, quotes, code fences and punctuation that shapes an answer
    number      digits
    operator    + - * / = and the like
    connective  so, because, wait, therefore, ...: words on which reasoning turns
    space       white space alone
    word        other letters
    other       what remains

By the text alone, so that a table can be grouped again without a tokenizer.
"""

from __future__ import annotations

import re

CONNECTIVES = frozenset(
    [
        "so",
        "because",
        "therefore",
        "thus",
        "hence",
        "then",
        "but",
        "however",
        "although",
        "though",
        "since",
        "if",
        "else",
        "otherwise",
        "wait",
        "hmm",
        "actually",
        "instead",
        "alternatively",
        "maybe",
        "perhaps",
        "let",
        "first",
        "next",
        "finally",
        "now",
        "and",
        "or",
        "also",
        "while",
        "until",
        "unless",
        "whereas",
        "again",
    ]
)
_SPECIAL = re.compile(r"<\|.*\|>|</s>|<s>|<eos>|<bos>|<pad>|\[(?:EOS|PAD|CLS|SEP|BOS)\]")
_NUMBER = re.compile(r"[+-]?\d[\d.,]*")
_OPERATOR = re.compile(r"[-+*/=^%<>×÷·±≤≥≠≈&|~!]+")
_TAG = re.compile(r"</[\w-]*>?|<[\w-]+>?|[\w-]*[\w]>|\\\w+\{?")
_SHAPE = re.compile(r"[\[\](){}<>\"'`#$.,;:?_\\@…-]+")


def token_class(text: str, *, special: bool = False) -> str:
    """One of `results.TOKEN_CLASSES`.

    Args:
        text: The token as the tokenizer decodes it.
        special: The tokenizer counts it among its special tokens.
    """
    if special or _SPECIAL.fullmatch(text.strip()):
        return "end"
    if not text.strip():
        return "space" if text else "end"
    word = text.strip()
    if _NUMBER.fullmatch(word):
        return "number"
    if _TAG.fullmatch(word):
        return "format"
    if _OPERATOR.fullmatch(word):
        return "operator"
    if word.lower() in CONNECTIVES:
        return "connective"
    if _SHAPE.fullmatch(word):
        return "format"
    return "word" if any(letter.isalpha() for letter in word) else "other"
