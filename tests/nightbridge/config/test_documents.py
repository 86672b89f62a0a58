"""The line of every key, in texts that tomllib accepts, and what of a file is read at all."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightbridge.config.documents import Findings, KeyPath, Layer, Layered, key_lines, line_of, read_document
from nightbridge.models import Violation

TEXT = '''# a comment with [brackets] and "quotes
name = "x" # and one behind
a."b.c" . d = [1, # ] "
  "]", """x
]""" ]
[cmd_args]
tp = 3
inline = {one = 1, two = [2,
3]}

[[Tests]]
id = "1"
[Tests.cmd_args]
misspelt = 1
[[Tests]]
  id = 'q'
  [[Tests.git_repos]]
  url = ""
["quoted \\u0041"]
key = 1
'''


def test_keys_stand_where_an_editor_shows_them() -> None:
    tomllib.loads(TEXT)
    lines = key_lines(TEXT)

    assert lines["name",] == 2
    assert lines["a", "b.c", "d"] == 3
    assert lines["cmd_args",] == 6
    assert lines["cmd_args", "tp"] == 7
    assert lines["Tests", 0] == 11
    assert lines["Tests", 0, "cmd_args", "misspelt"] == 14
    assert lines["Tests", 1, "id"] == 16
    assert lines["Tests", 1, "git_repos", 0, "url"] == 18
    assert lines["quoted A", "key"] == 20


def test_a_key_inside_an_inline_table_has_the_line_of_the_key_that_holds_it() -> None:
    assert line_of(key_lines(TEXT), ("cmd_args", "inline", "two")) == 8


def test_a_table_that_only_others_name_has_the_line_of_the_first_of_them() -> None:
    lines = key_lines("name = 1\n[env_params.A]\nx = 1\n[env_params.B]\n[late.inner]\n[late]\n")

    assert (lines["env_params",], lines["env_params", "B"], lines["late",]) == (2, 4, 6)


def test_a_key_that_is_not_there_has_no_line() -> None:
    assert line_of(key_lines(TEXT), ("nothing",)) is None


@pytest.mark.thorough
@given(st.text())
def test_no_text_breaks_the_scan(text: str) -> None:
    key_lines(text)


BARE = st.text("abcXYZ019_-", min_size=1, max_size=5)
VALUES = st.sampled_from(["1", '"a # b"', "'[x]'", '["]",\n"["]', '"""\n# no\n"""', "{ q = [1] }", "true # tail"])


@given(st.dictionaries(BARE, st.dictionaries(BARE, VALUES, max_size=4), max_size=4))
def test_every_key_of_generated_tables_is_found_on_its_own_line(tables: Any) -> None:
    lines: list[str] = []
    expected: dict[KeyPath, int] = {}
    for table, entries in tables.items():
        lines.append(f"[{table}]")
        expected[(table,)] = len(lines)
        for key, value in entries.items():
            expected[table, key] = len(lines) + 1
            lines.extend(f"{key} = {value}".split("\n"))

    found = key_lines("\n".join(lines))

    assert {path: found.get(path) for path in expected} == expected


def test_the_byte_order_mark_of_an_editor_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "test.toml").write_bytes(b'\xef\xbb\xbfname = "x"\n')

    document = read_document(tmp_path / "test.toml")

    assert document.table == {"name": "x"}
    assert document.where(("name",)).endswith("test.toml:1")


def test_findings_are_told_once_and_are_not_compared_with_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.toml"
    file.write_text("a = 1\n")
    document = read_document(file)
    findings, again = (Findings(Layered([Layer(document.table, document)])) for _ in range(2))
    compared = []

    def is_same(one: Violation, other: object) -> bool:
        compared.append(other)
        return one is other

    monkeypatch.setattr(Violation, "__eq__", is_same)
    monkeypatch.setattr(Violation, "__hash__", lambda one: hash(one.message))

    for number in range(200):
        findings.problem((f"k{number}",), "unknown key")
    assert len(compared) < 200

    monkeypatch.undo()
    again.problem(("k7",), "unknown key")
    again.problem(("k7",), "unknown key")
    assert len(again.problems) == 1
