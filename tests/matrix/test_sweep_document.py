"""The YAML of a sweep file: plain data with lines, or one refusal with a line."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_texts import parse_sweep, refusal

from bench.errors import UsageError
from sweeps.definition import load_sweep
from sweeps.document import SweepFileError, parse_document, read_document

VALID = """\
name: damaged
description: a file that the fuzzer damages
base:
  model: {preset: debug, vocab: 300}
  train: {steps: 4, lr: 3.0e-4}
  launch:
    env: &shared {NCCL_DEBUG: "INFO"}
matrix:
  product:
    engine.name: [ddp, mfsdp]
    policy:
      - {label: fp32, dtypes.compute: fp32}
      - {label: bf16, dtypes: {compute: bf16}}
  zip:
    - train.global_batch: [4, 8]
      train.micro_batch: [1, 2]
  include:
    - {engine.name: single, launch.ranks: 1}
  exclude:
    - {engine.name: ddp, policy: bf16}
overrides:
  - when: {engine.name: mfsdp}
    set: {engine.strategy: optim}
repeat: 2
"""


def test_every_key_and_item_knows_its_line():
    document = parse_document("name: a\nmatrix:\n  product:\n    k:\n      - 1\n      - 2\n", "x")
    assert document.line(("matrix", "product", "k", 1)) == 6
    assert document.line(("matrix", "product", "k", 1, "deeper")) == 6
    assert document.line(("unknown",)) == 1


def test_words_and_numbers_follow_yaml_1_2():
    text = "a: yes\nb: 3e-4\nc: 010\nd: 2026-01-01\ne: ~\nf: 0x10\ng: &one [1, 2]\nh: *one\n"
    data = parse_document(text, "x").data
    assert (data.pop("g"), data.pop("h")) == ([1, 2], [1, 2])
    assert data == {"a": "yes", "b": 3e-4, "c": 10, "d": "2026-01-01", "e": None, "f": 16}


DEEP = "name: " + "[" * 50_000 + "]" * 50_000
LAUGHS = "\n".join(
    [
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]",
        *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)),
    ]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "x.yaml: the file is empty"),
        ("# only a comment\n", "x.yaml: the file has no content"),
        ("- a\n", "x.yaml:1: expected a mapping (`name: ...`), found a list"),
        ("just a word\n", "x.yaml:1: expected a mapping"),
        ("name: [1\n", "not valid YAML"),
        ("name: a\n\tb: 1\n", "x.yaml:2: not valid YAML"),
        ("name: !!python/object:os.system x\n", "x.yaml:1: tags are not accepted"),
        ("name: !secret x\n", "x.yaml:1: tags are not accepted: remove `!secret`"),
        ("repeat: !!bool foo\n", "x.yaml:1: tags are not accepted"),
        ("name: !!str 3\n", "x.yaml:1: tags are not accepted"),
        ("name: a\nrepeat: ! 3\n", "x.yaml:2: tags are not accepted: remove `!`"),
        ("%YAML 1.1\n---\nname: a\n", "directives are not accepted"),
        ("name: a\n---\nname: b\n", "x.yaml:2: one document is expected"),
        ("name: a\n1: b\n", "x.yaml:2: a key must be a word; quote it: '1'"),
        ("name: a\n? [b]\n: c\n", "x.yaml:2: a key must be a word, found a list or mapping"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "x.yaml:3: `<<` is not accepted"),
        ("name: *nowhere\n", "x.yaml:1: not valid YAML"),
        ("repeat: .inf\n", "x.yaml:1: '.inf' is not a finite number"),
        ("repeat: 1e999\n", "x.yaml:1: '1e999' is not a finite number"),
        (f"repeat: {'9' * 6000}\n", "x.yaml:1: '9999999999"),
        ("name: a\0b\n", "not valid YAML"),
        ("name: a\nrepeat: 1\nname: b\n", "x.yaml:3: key 'name' is already on line 1"),
        pytest.param(DEEP, "nested deeper than 24 levels", id="deep"),
        pytest.param(LAUGHS, "expands to more than", id="aliases of aliases"),
        ("a: &a [*a]\n", "contains itself"),
    ],
)
def test_damage_is_refused_in_words(text: str, expected: str):
    assert expected in refusal(text)


def test_what_is_no_file_of_utf8_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may have only 108 bytes
    os.mkfifo("pipe.yaml")
    Path("latin.yaml").write_bytes(b"name: a\ndescription: caf\xe9\n")
    Path("large.yaml").write_text(f"name: {'a' * (256 * 1024 - 5)}")
    Path("bom.yaml").write_bytes(b"\xef\xbb\xbfname: a\n")
    assert read_document(Path("bom.yaml")).data == {"name": "a"}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.yaml")
        for name, message in (
            (".", "found a folder"),
            ("none.yaml", "no such file"),
            ("pipe.yaml", "regular file"),
            ("s.yaml", "regular file"),
            ("large.yaml", "a file has at most 262,144 bytes, found 262,145 bytes"),
            ("latin.yaml", r"latin\.yaml:2: expected UTF-8 text, found byte 0xe9"),
        ):
            with pytest.raises(SweepFileError, match=message):
                read_document(Path(name))


def message_of(load: Callable[[], object], accepted: str) -> str:
    """Of the only kind of exception that may come out; `accepted` without one."""
    try:
        load()
    except UsageError as error:
        return str(error)
    return accepted


mutations = st.lists(
    st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 3), st.binary(min_size=0, max_size=6)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(mutations)
def test_damaged_bytes_raise_usage_errors_and_nothing_else(tmp_path_factory, edits):
    assert parse_sweep(VALID).matrix.size == 8
    raw = bytearray(VALID.encode())
    for position, removed, inserted in edits:
        raw[position : position + removed] = inserted
    path = tmp_path_factory.mktemp("fuzz") / "sweep.yaml"
    path.write_bytes(bytes(raw))
    assert message_of(lambda: load_sweep(path), str(path)).startswith(str(path))


tokens = st.sampled_from(
    [
        *"{}[]:,-?!&*#|>%@`\"'\n \t\u2028\x85",
        *("name", "matrix", "product", "label", "include", "engine.name", "null", "1e3"),
        *("- ", ": ", "&a ", "*a", "<<: ", "---\n", "...\n", "|\n  "),
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(tokens, max_size=40))
def test_arbitrary_yaml_tokens_raise_usage_errors_and_nothing_else(words):
    text, source = "".join(words), "sweep.yaml"
    assert message_of(lambda: parse_sweep(text), source).startswith(source)
