"""csrc/letter.py: words may change without the letter, code may not."""

from __future__ import annotations

import re
import runpy
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(ROOT / "csrc" / "letter.py"))
letter, tokens, read = MADE["letter"], MADE["tokens"], MADE["read"]
FILES = {path.relative_to(ROOT).as_posix(): path for path in MADE["files"]()}
# What a first message is made of, and checked by. Each such message begins with the letter.
HANDSHAKE = {
    "csrc/**/*.cpp": r"\bput_letter\(|\bexpect_letter\(|\bbase::letter\(\)",
    "csrc/**/*.h": r"\bput_letter\(out|\bexpect_letter\(in|\bbase::letter\(\)",
    "moe_p2p/**/*.py": r"\bcheck_letter\(|\bletter\(\)|\bletter\.default\(\)|\.send(all|msg|to)\(",
}
NO_MESSAGE = {
    "csrc/ops/engine_ops.cpp",  # gives the letter to Python
    "moe_p2p/machine/tuned.py",  # puts it into a file, for later processes of this machine
    "moe_p2p/tools/doctor/examine.py",  # prints it; a report's form has a number of its own
    "moe_p2p/mooncake/handshake.py",  # has a version; the addresses within have the letter
}
CPP = """// Of words.
struct Head {
  u32 step;  /* one */
  const char* url = "http://x";  // 2
};
"""
PYTHON = """'''Of words.'''

def magic(x):
    # Why.
    if x:
        return "# 1", f(
            x)
    return x
"""


def test_a_file_s_code_changes_the_letter_and_its_words_do_not() -> None:
    path = FILES["kernels/abi/slot.h"]

    def with_more(more: str) -> str:
        return str(letter(lambda file: read(file) + more * (file == path)))

    assert with_more("// word") == letter() != with_more("word")


def test_every_handshake_is_in_the_letter() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for pattern, calls in HANDSHAKE.items()
        for path in ROOT.glob(pattern)
        if re.search(calls, path.read_text(encoding="utf-8"))
    }
    assert len(found) > 10
    assert found >= NO_MESSAGE
    assert found - NO_MESSAGE <= FILES.keys()


def same(suffix: str, before: str, after: str) -> bool:
    path = Path("x" + suffix)
    return bool(tokens(path, before) == tokens(path, after))


@pytest.mark.parametrize("name", FILES)
def test_a_comment_changes_no_code(name: str) -> None:
    path, text = FILES[name], read(FILES[name])
    comment = "# word" if path.suffix == ".py" else "// word"
    code = tokens(path, text)
    assert tokens(path, f"{comment}\n\n{text}\n\n{comment}\n") == code
    assert tokens(path, text.replace(" = ", "  =  ", 1)) == code
    assert tokens(path, f"{text}\nx\n") != code
    word = "import " if path.suffix == ".py" else "namespace "
    assert word in text
    assert tokens(path, text.replace(word, word + "x", 1)) != code


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// Of words.", ""),
        ("/* one */", "/* two\n lines */"),
        ("  u32", "\tu32"),
        ("// 2\n", "\n"),
    ],
)
def test_words_of_cpp_do_not_count(old: str, new: str) -> None:
    assert old in CPP
    assert same(".h", CPP, CPP.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"), [("u32", "u64"), ("http://x", "http://y"), ("step", "st ep"), ("{", "{{")]
)
def test_code_of_cpp_counts(old: str, new: str) -> None:
    assert old in CPP
    assert not same(".h", CPP, CPP.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("'''Of words.'''", "'''Other\n#\nwords.'''"), ("# Why.", ""), ("\n\n", "\n\n\n"),
     ("f(\n            x)", "f(x)"), ("    if", "    '''Doc.'''\n    if")],
)  # fmt: skip
def test_words_of_python_do_not_count(old: str, new: str) -> None:
    assert old in PYTHON
    assert same(".py", PYTHON, PYTHON.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("# 1", "# 2"), ("magic", "maggic"), ("    return x\n", "        return x\n"), ("if x", "if")],
)
def test_code_of_python_counts(old: str, new: str) -> None:
    assert old in PYTHON
    assert not same(".py", PYTHON, PYTHON.replace(old, new))


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_no_code_of_python_is_taken_for_words(name: str) -> None:
    """Against Python's own lexer: every name and number is a token."""
    with FILES[name].open("rb") as file:
        theirs = [
            token.string
            for token in tokenize.tokenize(file.readline)
            if token.type in (tokenize.NAME, tokenize.NUMBER) and not set(".+-") & {*token.string}
        ]
    ours = [token for token in tokens(FILES[name], read(FILES[name])) if token in set(theirs)]
    assert len(ours) >= len(theirs) > 30
