"""The demo: what its nights and the samples that it copies find in its folder."""

import re
from pathlib import Path

import pytest

from examples.practice import demo
from nightbridge.models import NightReport


def test_everything_that_the_copied_samples_name_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "prepare_base", lambda folder: folder / "base")
    monkeypatch.setattr(
        demo,
        "nightly_regression",
        lambda _path, *, night, system: NightReport(scenario=system, night=night, verdicts=()),
    )

    demo.run_demo(tmp_path, lambda _night, _report: None)

    samples = [path.read_text() for path in (tmp_path / "demo/conf").glob("*.toml")]
    named = {Path(name) for text in samples for name in re.findall(rf'"({re.escape(str(tmp_path))}[^"]*)"', text)}
    assert tmp_path / "demo/practice/bin/torchrun" in named
    assert [path for path in named if not path.exists()] == []
