"""The practice workload for attributions: a site whose cluster, test, code and image a test changes between nights."""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.practice.repositories import PracticeRepositories, make_practice_repositories
from nightbridge.attribution.attribution_result import AttributionResult
from nightbridge.embedded.jobs import all_jobs
from nightbridge.flows import attribute_regression, run_pipeline
from nightbridge.models import StoreSettings, VerdictStatus
from nightbridge.repos.environments import prepare_base
from nightbridge.store.directory import DirectoryStore
from tests.flows.practice_night import Entry, write_scenario, write_site

ROOT = Path(__file__).parents[2]
REAL = ROOT / "tests" / "real"

TEST = "slower"
FEW_STEPS = {"max_steps": 14, "save_interval": 14}
SLOW = {1: {"step_time_factor": 1.1}}


class Practice:
    """A site whose cluster, test and code a test changes from night to night."""

    def __init__(self, folder: Path, environments: Path) -> None:
        self.folder, self.environments = folder, environments
        self.repositories: PracticeRepositories = make_practice_repositories(folder / "practice")
        entry = Entry(id=TEST, cmd_args=FEW_STEPS, gate={"pairs": 0})
        self.scenario = write_scenario(folder / "conf", self.repositories, "one", entry)
        sample = self.scenario.parent / "llama_small.toml"
        self.sample = sample.read_text().replace("[harvest]", '[harvest]\ncheckpoint = "none"')
        self.site = folder / "site.toml"
        self.cluster: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.more = ""

    def prepare(self, night: str, factor: float, exclude: Sequence[str] = (), **cluster: Any) -> None:
        """A night with a cluster of this speed, which its site's environment names, and not on some nodes."""
        speed = self.folder / f"{night}.json"
        speed.write_text(json.dumps({"factor": factor, **cluster}))
        write_site(
            self.site, workspace=self.folder / "workspace", environments=self.environments, cluster=self.cluster or None
        )
        variables = self.variables or {"PRACTICE_CLUSTER": str(speed)}
        lines = [f"{name} = {json.dumps(value)}" for name, value in variables.items()]
        self.site.write_text("\n".join([self.site.read_text(), "[cluster.env_vars]", *lines, self.more]))
        excluded = f"\nexclude_nodes = {json.dumps([*exclude])}\n[cmd_args]" if exclude else "\n[cmd_args]"
        (self.scenario.parent / "llama_small.toml").write_text(self.sample.replace("\n[cmd_args]", excluded, 1))

    def run(self, night: str, factor: float, exclude: Sequence[str] = (), **cluster: Any) -> VerdictStatus:
        """One run of such a night."""
        self.prepare(night, factor, exclude, **cluster)
        return run_pipeline(self.scenario, night=night, system=str(self.site)).status

    def attribute(self, **request: Any) -> AttributionResult:
        return attribute_regression(TEST, system=str(self.site), **request)

    @property
    def store(self) -> DirectoryStore:
        return DirectoryStore(StoreSettings(url=f"file://{self.folder}/workspace/store"))

    @property
    def jobs(self) -> Counter[str]:
        return Counter(job.request.name for job in all_jobs(self.folder / "workspace" / "cluster"))

    # --- in containers, of the front of pyxis that stands before the embedded cluster's own srun ----------------------

    def run_in_containers(self) -> None:
        """Let jobs of the embedded cluster start containers; an image is to be named before each night."""
        front = self.folder / "front"
        front.mkdir()
        real = self.folder / "workspace" / "cluster" / "bin" / "srun"
        (front / "srun").write_text((REAL / "pyxis_srun.sh").read_text().replace("@SRUN@", str(real)))
        (front / "srun").chmod(0o755)
        self.cluster = {"containers": "pyxis"}
        # The image's own speed counts, and its Python is the launcher's.
        python = prepare_base(self.environments) / "bin"
        self.variables = {"PATH": f"{python}:{front}:{os.environ['PATH']}"}

    def use_image(self, image: Path) -> None:
        """The image of the next nights. What it lacks is this machine's."""
        machine = {Path("/usr"), self.folder, self.environments, Path(sys.base_prefix), Path(sys.prefix), ROOT}
        mounts = ",".join(f"{folder}:{folder}" for folder in sorted(machine))
        lines = [line for line in self.sample.splitlines() if not line.startswith(("container_image", "custom_mounts"))]
        named = f'[cmd_args]\ncontainer_image = "{image}"\ncustom_mounts = "{mounts}"'
        self.sample = "\n".join(lines).replace("[cmd_args]", named)
