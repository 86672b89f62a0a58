"""The recipes of CONTRIBUTING.md, followed step by step in a copy of the package: each ends with what it promises.

That of a metric is followed in `tests/nightbridge/models/test_metrics.py`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST_FILE = ROOT / "conf" / "examples" / "llama3_8b.toml"


class Copy:
    """A copy of the package that a recipe changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # With what is compiled, except for what is being written.
        shutil.copytree(ROOT / "nightbridge", folder / "nightbridge", ignore=shutil.ignore_patterns("*.pyc.*"))

    def add(self, module: str, text: str) -> None:
        """Add a module, or lines at the end of one."""
        with (self.folder / "nightbridge" / module).open("a", encoding="utf-8") as file:
            file.write(text)

    def insert(self, module: str, after: str, text: str) -> None:
        """Insert lines after the one place of a module that matches."""
        path = self.folder / "nightbridge" / module
        changed, count = re.subn(after, lambda match: match[0] + text, path.read_text(encoding="utf-8"), flags=re.S)
        assert count == 1, f"{module}: {after} matches {count} times"
        path.write_text(changed, encoding="utf-8")

    def python(self, *arguments: str) -> str:
        """Run Python with the changed package; returns what it prints."""
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended.stdout + ended.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.fixture
def program(copy: Copy) -> Callable[..., str]:
    """Run `nightbridge` of the changed package; returns what it prints."""
    return lambda *arguments: copy.python("-m", "nightbridge", *arguments)


def test_a_rule_is_one_function(copy: Copy, program: Callable[..., str]) -> None:
    copy.add(
        "rules/megatron_core.py",
        '''

@rule("gpus-named", "example", cmd_args("num_gpus"), "warning")
def _gpus_named(run: RuleContext) -> Iterator[str]:
    """A test of the recipe."""
    yield f"num_gpus is {run.gpus}; write another number"
''',
    )

    assert "warning: num_gpus is 8; write another number [gpus-named]" in program("validate", str(TEST_FILE))
    assert re.search(r"reason +A test of the recipe\.", program("rules", "gpus-named"))


def test_a_way_to_reach_slurm_is_one_module_one_row_and_its_name(copy: Copy, program: Callable[..., str]) -> None:
    copy.add(
        "slurm/rest.py",
        '''"""Slurm's REST interface; here it stands for the embedded cluster."""

from nightbridge.slurm.local import LocalCluster


class RestCluster(LocalCluster):
    """A cluster of another kind."""

    description = "using slurmrestd"
''',
    )
    copy.insert("models/site.py", r"\nClusterKind = Literal\[", '"rest", ')
    copy.insert(
        "slurm/factory.py",
        r"from nightbridge\.slurm\.protocol import Cluster\n",
        "from nightbridge.slurm.rest import RestCluster\n",
    )
    copy.insert(
        "slurm/factory.py",
        r"\nOPENERS: [^\n]* = \{\n",
        '    "rest": lambda settings, workspace: RestCluster(settings, workspace / "cluster"),\n',
    )

    assert re.search("✓ cluster +slurm: using slurmrestd", program("doctor", "--cluster", "rest"))


def test_an_object_store_is_one_module_and_one_row(copy: Copy, program: Callable[..., str]) -> None:
    copy.add(
        "store/mounted.py",
        '''"""A store on a mounted file system."""

from nightbridge.models import StoreSettings
from nightbridge.store.directory import DirectoryStore


class MountedStore(DirectoryStore):
    """A folder under another scheme."""

    def __init__(self, settings: StoreSettings, block_value: object = None) -> None:
        super().__init__(settings.model_copy(update={"url": settings.url.replace("mounted:", "file:")}))
''',
    )
    copy.insert(
        "store/object_store.py", r"\nSTORES = \{\n", '    "mounted": "nightbridge.store.mounted:MountedStore",\n'
    )

    listing = program("doctor", "--store", f"mounted://{copy.folder}/store")

    assert re.search(f"✓ store +{copy.folder}/store: the first night makes it", listing)


def test_a_notification_is_one_function_one_row_and_its_settings(copy: Copy) -> None:
    copy.insert(
        "models/site.py",
        r'class NotifySettings\(\w+\):\n    """.*?"""\n',
        '\n    journal: Path | None = Field(None, description="File that gets a line for each notice.")\n',
    )
    copy.insert("notify.py", r"\nCHANNELS: [^\n]* = \(", "_journal, ")
    copy.insert(
        "notify.py",
        r"(?=\n\nCHANNELS: )",
        """

def _journal(notice: Notice, settings: NotifySettings, block_value: _BlockValue) -> _Delivery | None:
    if settings.journal is None:
        return None
    return f"journal {settings.journal}", lambda: settings.journal.write_text(notice.subject)
""",
    )
    code = """
from pathlib import Path
from nightbridge.models import NotifySettings
from nightbridge.notify import Notice, notify
print(notify(Notice(subject="1 verdict missing", text=""), NotifySettings(journal=Path("journal"))))
"""

    assert copy.python("-c", code) == "('journal journal',)\n"
    assert (copy.folder / "journal").read_text() == "1 verdict missing"
