"""Secrets: found where a reference names them."""

from pathlib import Path

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.models import SecretRef
from nightbridge.secrets import resolve_secret

TOKEN = "hf_PlantedToken"


def test_a_secret_in_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    assert resolve_secret(SecretRef(source="env", name="HF_TOKEN")) == TOKEN


def test_a_secret_in_a_block_is_asked_of_prefect() -> None:
    blocks = {"hf-token": TOKEN}

    assert resolve_secret(SecretRef(source="block", name="hf-token"), blocks.__getitem__) == TOKEN


@pytest.mark.parametrize("key", ["cmd_args.hf_token", "Tests.1.cmd_args.hf_token"])
def test_a_secret_in_a_toml_file(tmp_path: Path, key: str) -> None:
    file = tmp_path / "c#" / "test.toml"
    file.parent.mkdir()
    table = f'hf_token = "{TOKEN}"'
    file.write_text(f"[cmd_args]\n{table}\n[[Tests]]\nid = 'a'\n[[Tests]]\n[Tests.cmd_args]\n{table}\n")

    assert resolve_secret(SecretRef(source="toml", name=f"{file}#{key}")) == TOKEN


def test_a_secret_in_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "test.toml"
    file.write_text(f'hf_token = "{TOKEN}"\n', encoding="utf-8-sig")

    assert resolve_secret(SecretRef(source="toml", name=f"{file}#hf_token")) == TOKEN


@pytest.mark.parametrize("key", ["cmd_args.nowhere", "cmd_args", "cmd_args.hf_token.deeper", "Tests.5.x", ""])
def test_a_key_that_is_gone_is_named(tmp_path: Path, key: str) -> None:
    file = tmp_path / "test.toml"
    file.write_text(f'[cmd_args]\nhf_token = "{TOKEN}"\n[[Tests]]\nx = "{TOKEN}"\n')

    with pytest.raises(InvalidInput, match="secret not found in toml") as refused:
        resolve_secret(SecretRef(source="toml", name=f"{file}#{key}"))

    assert refused.value.subject == f"{file}#{key}"
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("content", [None, f'hf_token = "{TOKEN}', b"\xff\xfe"])
def test_a_file_that_cannot_be_read_any_more_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "test.toml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(InvalidInput, match=f"{file}#hf_token: ") as refused:
        resolve_secret(SecretRef(source="toml", name=f"{file}#hf_token"))

    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_or_empty_is_named(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_TOKEN", value)

    with pytest.raises(InvalidInput, match="HF_TOKEN: secret not found in env"):
        resolve_secret(SecretRef(source="env", name="HF_TOKEN"))


def test_a_block_without_prefect_says_how_it_is_read() -> None:
    with pytest.raises(
        InvalidInput, match=r"hf-token: Prefect Secret blocks are available in flows only\. Run it as a flow"
    ):
        resolve_secret(SecretRef(source="block", name="hf-token"))
