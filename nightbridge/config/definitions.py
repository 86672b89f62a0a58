"""One merged test table to a `TestDefinition`, or to all of its problems.

References to secrets stay references, and a literal token becomes one immediately.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from nightbridge.config.arguments import (
    CMD_ARGS,
    REFERENCE_PREFIXES,
    SECRET_NAME,
    Arguments,
    SweepChoice,
    looks_secret,
    names_secret,
    read_arguments,
    read_hetero_arguments,
    read_secret,
    shows_secret,
)
from nightbridge.config.cloudai_compat import check_options, gate_of, sbatch_options, split_drawn, sweep_of
from nightbridge.config.documents import Findings, KeyPath, Layered
from nightbridge.config.schema import TestTable, check_table, keys_by_table
from nightbridge.errors import PermanentError
from nightbridge.files import read_regular
from nightbridge.launch.flags import expands
from nightbridge.launch.resources import gpus_per_node, oversized_checkpoint
from nightbridge.launch.versions import version_for_pin
from nightbridge.models import (
    GOLDEN_LIMIT,
    HETERO_MIMO,
    MOUNT_POINT,
    Dependency,
    GatePolicy,
    GitRepo,
    InvalidTest,
    SecretRef,
    SweepAxis,
    TestDefinition,
    Violation,
)

NEMO_RUN = GitRepo(url="https://github.com/NVIDIA-NeMo/Run.git", commit="main")
"""CloudAI's default for `nemo_run_repo`."""


def define_test(
    source: Layered, *, test_id: str, file: str
) -> tuple[TestDefinition | InvalidTest, tuple[Violation, ...]]:
    """Read one test, whose table has everything laid over it; `file` is the one to open to fix it.

    Returns:
        The test, or an invalid test with every violation and what is readable of it; and the warnings.
    """
    hetero = source.table.get("test_template_name") == HETERO_MIMO
    findings = Findings(source, keys_by_table(hetero=hetero))
    table = check_table(source, findings)
    readable: TestDefinition | None = None
    choice = SweepChoice()
    if table is not None:
        fields = [field.removeprefix(f"{CMD_ARGS}.") for field in table.sweep.fields]
        choice = SweepChoice(fields, table.dse_excluded_args, table.env_params)
    arguments = read_hetero_arguments(findings) if hetero else read_arguments(findings, choice)
    if table is not None:
        if not (hetero or any(repo.launcher is not None or repo.is_megatron_bridge for repo in table.git_repos)):
            findings.problem(
                ("git_repos",),
                "does not name Megatron-Bridge: write a url that contains Megatron-Bridge, "
                f"mount_as = {MOUNT_POINT!r}, or launcher with the path of its setup_experiment.py, and its commit",
            )
        shows_secrets = _check_secrets(table, findings)
        sbatch_args = (*_node_options(table, findings), *sbatch_options(table.extra_srun_args, findings))
        check_options(sbatch_args, ("extra_srun_args",), findings)
        if table.gate.reference == test_id:
            findings.problem(("gate", "reference"), "names this test itself; name another one, or a stored run")
        variables, secrets = _split_secrets(table, arguments, findings)
        swept, drawn = split_drawn(arguments.axes, table, findings)
        axes = (*swept, *_variable_axes(table, findings), *_node_axis(table, arguments, findings))
        sweep = sweep_of(table.sweep, table, (*axes, *drawn), findings)
        if "points" in table.sweep.model_fields_set and sweep.method == "grid" and (axes or not drawn):
            findings.warn(("sweep", "points"), 'has no effect: all valid points are run; write method = "random"')
        if table.time_limit == "":
            findings.warn(("time_limit",), "is empty, as if it were not written; write HH:MM:SS, or remove it")
        if hetero == ("nemo_run_repo" in source.table):
            not_pinned = f"is not written; {NEMO_RUN.url} at {NEMO_RUN.commit} is not pinned"
            findings.warn(("nemo_run_repo",), "has no effect: this workload has no launcher" if hetero else not_pinned)
        test = TestDefinition(
            id=test_id,
            name=table.name,
            description=table.description,
            test_template_name=table.test_template_name,
            source=file,
            cmd_args=arguments.values,
            extra_env_vars=variables,
            extra_cmd_args=table.extra_cmd_args,
            extra_container_mounts=(*table.extra_container_mounts, *arguments.mounts),
            git_repos=table.git_repos,
            nemo_run_repo=table.nemo_run_repo or NEMO_RUN,
            time_limit=table.time_limit or arguments.time_limit,
            iterations=table.iterations,
            harvest=table.harvest.model_copy(update={"training_report": True} if table.training_report else {}),
            gate=gate_of(_gate(table, file, findings), table.training_report, findings),
            canary=table.canary,
            compat=table.compat,
            secrets=secrets,
            axes=axes,
            drawn=drawn,
            sweep=sweep,
            sbatch_args=sbatch_args,
            dependencies=tuple(_dependencies(table, findings)),
            lines=source.lines,
        )
        _check_nodes(test, findings)
        test = _without_oversized_checkpoint(test, table, findings)
        if not findings.problems:
            return test, tuple(findings.warnings)
        # Of two grids nothing is read where one value is wrong, and rules would miss what is written.
        unread = hetero and not (arguments.values or arguments.axes)
        readable = None if shows_secrets or unread else test
    invalid = InvalidTest(id=test_id, source=file, findings=tuple(findings.problems), readable=readable)
    return invalid, tuple(findings.warnings)


def _without_oversized_checkpoint(test: TestDefinition, table: TestTable, findings: Findings) -> TestDefinition:
    """The test with no checkpoint requested where none is written and the likely one is beyond the limit."""
    swept = next((axis.values for axis in test.axes if axis.name == "model_recipe_name"), ())
    recipes = [test.model_copy(update={"cmd_args": {**test.cmd_args, "model_recipe_name": name}}) for name in swept]
    sizes = (oversized_checkpoint(recipe) for recipe in recipes or [test])
    size = next(filter(None, sizes), None) if test.has_launcher else None
    if size is None or "checkpoint" in table.harvest.model_fields_set:
        return test
    findings.warn(("harvest", "checkpoint"), f"none is requested: {size}")
    return test.model_copy(update={"harvest": test.harvest.model_copy(update={"checkpoint": "none"})})


def _repositories(table: TestTable) -> dict[KeyPath, GitRepo]:
    """All repositories that a test names, by their position in its file."""
    named: dict[KeyPath, GitRepo] = {("git_repos", index): repo for index, repo in enumerate(table.git_repos)}
    if table.nemo_run_repo is not None:
        named["nemo_run_repo",] = table.nemo_run_repo
    return named


def _check_secrets(table: TestTable, findings: Findings) -> bool:
    """Refuse secrets in addresses and overrides before the test is stored anywhere; say whether there are any."""
    before = len(findings.problems)
    for path, repo in _repositories(table).items():
        if shows_secret(repo.url):
            findings.problem(
                (*path, "url"),
                "contains a user name or token, which process lists and logs would show; "
                "remove it and use a git credential helper (git help credentials)",
            )
    image = table.cmd_args.get("container_image")
    images = image if isinstance(image, list) else [image]
    if any(isinstance(reference, str) and shows_secret(reference) for reference in images):
        findings.problem(
            ("cmd_args", "container_image"),
            "contains a password, which process lists and logs would show; put it in enroot's .credentials file",
        )
    for key, value in table.extra_cmd_args.items():
        if looks_secret(key) or looks_secret(value):
            findings.problem(
                ("extra_cmd_args",) if looks_secret(key) else ("extra_cmd_args", key),
                "contains a token or a password, which process lists and logs would show; "
                "name it in extra_env_vars as env:NAME or block:NAME",
            )
    return len(findings.problems) > before


def _gate(table: TestTable, file: str, findings: Findings) -> GatePolicy:
    """The gate with its golden file as an absolute path; a relative one is resolved against the test's directory."""
    # A canary must not move: it shows the drift of the cluster alone.
    for at, repo in _repositories(table).items() if table.canary else ():
        if not re.fullmatch(r"[0-9a-f]{40}", repo.commit):
            findings.problem((*at, "commit"), "may move, and a canary needs fixed pins; write the full commit")
    gate = table.gate
    if gate.confirm is not None:
        findings.warn(
            ("gate", "confirm"), f"is read as pairs = {gate.pairs}: each is two runs, tonight's and the last good"
        )
        gate = gate.model_copy(update={"confirm": None})
    if gate.golden is None:
        return gate
    path = (Path(file).parent / gate.golden).absolute()
    if fault := _golden_fault(path):
        findings.problem(("gate", "golden"), f"{fault}: {path}")
    return gate.model_copy(update={"golden": str(path)})


def _golden_fault(path: Path) -> str:
    """Why a file holds no golden values, as far as its form says so: the night would know when the run has ended."""
    if not os.path.isfile(path):
        return "no such file"
    try:
        content = json.loads(read_regular(path.resolve(), limit=GOLDEN_LIMIT).decode())
    except (OSError, PermanentError) as error:
        return f"cannot be read ({error})"
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return "" if isinstance(content, dict) and content else "contains no golden values"


def _node_options(table: TestTable, findings: Findings) -> tuple[str, ...]:
    """`nodes` and `exclude_nodes` as options of sbatch."""
    options = []
    for field, option, hosts in (("nodes", "nodelist", table.nodes), ("exclude_nodes", "exclude", table.exclude_nodes)):
        if any(":" in host for host in hosts):
            findings.problem((field,), "names a group of a CloudAI system file; name hosts, as in host-[01-03]")
        elif hosts:
            options.append(f"--{option}={','.join(hosts)}")
    return tuple(options)


def _dependencies(table: TestTable, findings: Findings) -> Iterator[Dependency]:
    for index, dependency in enumerate(table.dependencies):
        if dependency.type == "end_post_comp":
            findings.warn(("dependencies", index), "has no effect: a test never ends because another one has ended")
        else:
            yield Dependency(type=dependency.type, id=dependency.id)


def _variable_axes(table: TestTable, findings: Findings) -> Iterator[SweepAxis]:
    """Environment variables that are lists; a secret cannot be swept over."""
    for name, values in table.extra_env_vars.items():
        if isinstance(values, str):
            continue
        path = ("extra_env_vars", name)
        if any(
            names_secret(name, value) or value.startswith(REFERENCE_PREFIXES) or looks_secret(value) for value in values
        ):
            findings.problem(path, "contains secrets, which cannot be swept over; write one")
        elif not values:
            findings.problem(path, "is an empty list, a sweep over nothing; write a value or remove it")
        else:
            yield SweepAxis(field=f"extra_env_vars.{name}", values=tuple(dict.fromkeys(values)))


def _node_axis(table: TestTable, arguments: Arguments, findings: Findings) -> Iterator[SweepAxis]:
    """`num_nodes` as a list: the GPUs follow from it. A single number adds nothing to num_gpus."""
    path, nodes = ("num_nodes",), table.num_nodes
    if nodes is None:
        return
    if not isinstance(nodes, tuple):
        findings.warn(path, "has no effect: the number of nodes follows from num_gpus and the GPUs of a node")
    elif not nodes or min(nodes) < 1:
        findings.problem(path, "must be whole numbers from 1 on, at least one of them")
    elif any(axis.name == "num_gpus" for axis in arguments.axes):
        findings.problem(path, "is swept over together with cmd_args.num_gpus; keep one: the other follows from it")
    else:
        if "num_gpus" in arguments.values:
            findings.warn(path, "is swept over and sets the GPUs of each point, so cmd_args.num_gpus has no effect")
        yield SweepAxis(field="num_nodes", values=tuple(dict.fromkeys(nodes)))


def _check_nodes(test: TestDefinition, findings: Findings) -> None:
    swept = {axis.name for axis in test.axes}
    if "num_nodes" not in swept or swept & {"gpu_type", "gpus_per_node"}:
        return
    if gpus_per_node(test, version_for_pin(test.megatron_bridge.commit)) is None:
        findings.problem(
            ("num_nodes",), "is swept over, but the number of GPUs per node is unknown; write gpus_per_node"
        )


def _split_secrets(
    table: TestTable, arguments: Arguments, findings: Findings
) -> tuple[dict[str, str], dict[str, SecretRef]]:
    """Variables that are named like secrets or hold one become references, as the tokens of `[cmd_args]` do."""
    variables: dict[str, str] = {}
    secrets: dict[str, SecretRef] = dict(arguments.secrets)
    for name, value in table.extra_env_vars.items():
        if not isinstance(value, str):
            continue  # swept over
        path = ("extra_env_vars", name)
        named = value.startswith(REFERENCE_PREFIXES) or names_secret(name, value)
        if not named and not looks_secret(value):
            variables[name] = value
            if value and SECRET_NAME.search(name):
                findings.warn(
                    path, "is passed on as written, since its value does not look like a secret; write one as env:NAME"
                )
        elif not named and expands(value):
            # Only a command in the container fills such a value in, and every command is in the launcher's arguments.
            variables[name] = value
            findings.warn(
                path,
                "contains a secret, which process lists and logs will show; write it as a variable of its own, "
                "env:NAME or block:NAME, and ${...} of that here",
            )
        elif ref := read_secret(value, path, findings):
            secrets[name] = ref
    return variables, secrets
