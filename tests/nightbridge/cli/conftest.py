"""The program, run in an empty folder."""

from pathlib import Path
from typing import Protocol

import pytest

from nightbridge.cli import main as cli

EXAMPLES = Path(__file__).parents[3] / "conf" / "examples"
NIGHTLY, TEST = str(EXAMPLES / "nightly.toml"), str(EXAMPLES / "llama3_8b.toml")

BROKEN = """name = "broken"
test_template_name = "MegatronBridge"
[[git_repos]]
url = "https://example.org/Megatron-Bridge.git"
commit = "v0.4.2"
[cmd_args]
gpu_type = "h100"
num_gpus = 8
container_image = "none"
model_family_name = "llama"
model_recipe_name = "llama3_8b"
"""


class Program(Protocol):
    """Runs a command; returns exit code, stdout and stderr."""

    def __call__(self, *arguments: str) -> tuple[int, str, str]: ...


@pytest.fixture
def nightbridge(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIGHTBRIDGE_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(list(arguments))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return code, captured.out, captured.err

    return run
