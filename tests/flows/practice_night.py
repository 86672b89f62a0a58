"""Nights of the practice workload with a test's own repositories: the samples of `conf/practice`, changed where asked."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from pydantic import Field

from examples.practice.repositories import PracticeRepositories
from nightbridge.cli.main import run
from nightbridge.models import Model, StoreSettings
from nightbridge.models.metrics import METRICS

SAMPLES = Path(__file__).parents[2] / "conf" / "practice"
NIGHTBRIDGE = Path(sys.executable).with_name("nightbridge")


Sample = Literal["llama_small", "deepseek_small", "vlm_small"]


WIDE = {metric.name: max(1.0, metric.band) for metric in METRICS}
"""Bands for nights that are about something else: ten steps' losses are noise, and a busy machine is slow to start."""


class Entry(Model):
    """An entry of a scenario: a sample, what is laid over its `[cmd_args]` and `[gate]`, and the commit it is pinned to."""

    id: str
    sample: Sample = "llama_small"
    cmd_args: Mapping[str, Any] = Field({})
    gate: Mapping[str, Any] = Field({})
    commit: str | None = None

    def toml(self, repositories: PracticeRepositories) -> str:
        """The entry as it stands in a scenario file."""
        lines = ["[[Tests]]", f"id = {toml(self.id)}", f"test_name = {toml(self.sample)}"]
        lines += [f"cmd_args.{key} = {toml(value)}" for key, value in self.cmd_args.items()]
        lines += [f"gate.{key} = {toml(value)}" for key, value in self.gate.items()]
        if self.commit:
            url = repositories.megatron_lm_url if self.sample == "vlm_small" else repositories.bridge_url
            lines += ["[[Tests.git_repos]]", f"url = {toml(url)}", f"commit = {toml(self.commit)}"]
        return "\n".join(lines) + "\n"


def write_scenario(folder: Path, repositories: PracticeRepositories, name: str, *entries: Entry) -> Path:
    """Write a scenario of these entries, and beside it the samples with these repositories in place of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    for sample in get_args(Sample):
        text = (SAMPLES / f"{sample}.toml").read_text(encoding="utf-8")
        text = text.replace(".nightbridge/practice", str(Path(repositories.bridge_url).parent))
        (folder / f"{sample}.toml").write_text(text, encoding="utf-8")
    path = folder / f"{name}.toml"
    path.write_text("\n".join([f"name = {toml(name)}\n", *(entry.toml(repositories) for entry in entries)]))
    return path


def write_site(
    path: Path,
    *,
    workspace: Path,
    environments: Path,
    cluster: Mapping[str, Any] | None = None,
    store: StoreSettings | None = None,
) -> Path:
    """Write a site file."""
    lines = [f"workspace = {toml(workspace)}", f"environments = {toml(environments)}"]
    if cluster is not None:
        lines += ["[cluster]", *(f"{key} = {toml(value)}" for key, value in cluster.items())]
    if store is not None:
        lines += ["[store]", f"url = {toml(store.url)}"]
        plain = {"endpoint_url": store.endpoint_url, "region": store.region, "ca_bundle": store.ca_bundle}
        lines += [f"{key} = {toml(value)}" for key, value in plain.items() if value is not None]
        secrets = {"access_key": store.access_key, "secret_key": store.secret_key}
        lines += [f"{key} = {toml(f'{ref.source}:{ref.name}')}" for key, ref in secrets.items() if ref is not None]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def nightbridge(
    *arguments: str | Path, environment: Mapping[str, str], timeout: float = 1200, python: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command line as a person does, or with a Python of the test's."""
    program = [NIGHTBRIDGE] if python is None else [python, "-P", "-m", "nightbridge"]
    return subprocess.run(
        [*program, *arguments], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def nightbridge_here(
    output: pytest.CaptureFixture[str], *arguments: str | Path, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command line within this process: the two seconds that it takes to start are the same for all."""
    words = [str(argument) for argument in arguments]
    output.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        code = run(words)
    return subprocess.CompletedProcess(words, code, *output.readouterr())


def set_remote(folder: Path, remote: str) -> None:
    """Give every test of a folder another git server."""
    for file in folder.glob("*.toml"):
        lines = file.read_text(encoding="utf-8").splitlines()
        changed = (
            f"url = {toml(f'{remote}/Megatron-Bridge.git')}" if line.startswith("url") else line for line in lines
        )
        file.write_text("\n".join(changed), encoding="utf-8")


def toml(value: object) -> str:
    """A text, path, number, flag or list of them as TOML: of these JSON writes them all alike."""
    return json.dumps(value, default=str)
