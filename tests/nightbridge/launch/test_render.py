"""What `render` shows for CloudAI's published examples, and where that is not the command line of CloudAI.

The command lines of CloudAI are what its flag table says (order of emission, formatting), for a system with an account,
a partition and nodes of eight GPUs that Slurm knows as gres, with a token in HF_TOKEN. The flags themselves exist in
every version of the launcher, so one command line holds for all; what a version adds or takes away is a deviation.
"""

import difflib
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from nightbridge.launch.flags import FLAGS
from tests.nightbridge.launch.examples import VERSIONS, argv_of

MOUNT = "{bridge}:/opt/Megatron-Bridge"
CONFIG = ("--save_config_filepath", "/nemo_run/configs/ConfigContainer.yaml")
GRES = ("--additional_slurm_params", "gpus-per-node=8;gres=gpu:8")
OVERRIDES = (
    "logger.tensorboard_dir=/nemo_run/tb_logs",
    "logger.log_timers_to_tensorboard=true",
    "logger.log_throughput_to_tensorboard=true",
    "logger.log_memory_to_tensorboard=true",
)

CLOUDAI = {
    "test": (
        *("-a", "acct", "-p", "batch", "-g", "gb200", "-i", "{image}", "-c", "fp8_mx", "--task", "pretrain"),
        *("-hf", "TOKEN", "-ng", "8", "-gn", "8", "-cm", MOUNT, "--domain", "llm", "-m", "qwen"),
        *("-mr", "qwen3_30b_a3b", "--detach", "false", *CONFIG, *GRES, *OVERRIDES),
    ),
    "test in scenario": (
        *("-a", "acct", "-p", "batch", "-g", "gb200", "-t", "00:30:00", "-i", "{image}", "-c", "fp8_mx"),
        *("--task", "pretrain", "-hf", "TOKEN", "-ng", "8", "-gn", "8", "-cm", MOUNT, "--domain", "llm", "-m", "qwen"),
        *("-mr", "qwen3_30b_a3b", "--detach", "false", *CONFIG, *GRES, *OVERRIDES),
    ),
    "more fields": (
        *("-a", "acct", "-p", "batch", "-g", "gb200", "-l", "/logs", "-i", "{image}", "-c", "fp8_mx"),
        *("--task", "pretrain", "-hf", "TOKEN", "-wdk", "KEY", "-wdp", "nightly", "-ng", "8", "-gn", "8", "-cm", MOUNT),
        *("-cb", "export LIST=a,b=c", "-cb", "export NCCL_DEBUG=WARN", "--domain", "llm", "-m", "qwen"),
        *("-mr", "qwen3_30b_a3b", "--pipeline_model_parallel_layout", "Et|t*46L"),
        *("--cuda_graph_impl", "transformer_engine"),
        *("--cuda_graph_scope", "moe_router,moe_preprocess", "-tp", "2", "-vp", "None", "--moe_a2a_overlap", "false"),
        *("--recompute_modules", '"core_attn,mlp"', "--detach", "false", *CONFIG),
        *("--dataset_paths", "/data/a", "/data/b", "--profiling_ranks", "0,4", *GRES, *OVERRIDES),
    ),
}


class Deviation(NamedTuple):
    """Words of CloudAI that are not written here, words that stand in their place, for which versions, and why."""

    cloudai: tuple[str, ...]
    ours: tuple[str, ...]
    versions: tuple[str, ...]
    reason: str


FROM_V0_4 = VERSIONS[1:]

DEVIATIONS = (
    Deviation(
        ("-hf", "TOKEN"),
        (),
        VERSIONS,
        "a token in argv is in process lists, and NeMo-Run copies argv into four files; it travels in the environment",
    ),
    Deviation(("-wdk", "KEY"), (), VERSIONS, "as for -hf"),
    Deviation(
        (),
        ("-cb", "export TRANSFORMERS_OFFLINE=0"),
        VERSIONS[:1],
        "what -hf does besides, where the test has a token: the libraries may go online",
    ),
    Deviation((), ("-E", "TRANSFORMERS_OFFLINE=0"), FROM_V0_4, "the same by -E"),
    Deviation(("-l", "/logs"), (), VERSIONS, "each attempt has a folder of its own; -l would write past it"),
    Deviation(
        ("-cb", "export LIST=a,b=c"),
        ("-E", "LIST=a,b=c"),
        FROM_V0_4,
        "the launcher has a flag that takes one variable whole, and the container's environment has it then",
    ),
    Deviation(("-cb", "export NCCL_DEBUG=WARN"), ("-E", "NCCL_DEBUG=WARN"), FROM_V0_4, "as for every variable"),
    Deviation(
        ("--recompute_modules", '"core_attn,mlp"'),
        ("--recompute_modules", "core_attn,mlp"),
        VERSIONS,
        "NeMo-Run escapes quotes for HTML, so literal ones would be part of the names",
    ),
    Deviation(
        ("--pipeline_model_parallel_layout", "Et|t*46L"),
        ("--pipeline_model_parallel_layout", r"Et\|t\*46L"),
        VERSIONS,
        "NeMo-Run quotes nothing, so the job's shell would take | and * for its own",
    ),
    Deviation(
        ("--detach", "false"),
        ("--detach", "true"),
        VERSIONS,
        "the job is watched here; a launcher that waits dies with its login session",
    ),
    Deviation(
        (),
        ("--packager", "none"),
        FROM_V0_4,
        "the code is mounted from a checkout that never changes; git archive would package the folder's repository",
    ),
    Deviation((), ("--save_interval", "50"), VERSIONS, "a performance recipe writes no checkpoint to harvest"),
    Deviation(
        GRES,
        (),
        VERSIONS,
        "the launcher asks for whole nodes, which have their GPUs; a site's own options are given to sbatch",
    ),
)


def cloudais(example: str, version: str) -> tuple[str, ...]:
    known = {
        "bridge": f"/placeholder/checkouts/Megatron-Bridge/{version}",
        "image": "/placeholder/images/image.sqsh",
    }
    return tuple(word.format(**known) if "{" in word else word for word in CLOUDAI[example])


def by_flag(words: Sequence[str]) -> list[tuple[str, ...]]:
    """A command line as its flags, each with its values; an override is one by itself."""
    options = {flag.option for flag in FLAGS if flag.option} | {"-l"}
    groups: list[list[str]] = []
    for word in words:
        if word in options or word.startswith("logger."):
            groups.append([word])
        else:
            groups[-1].append(word)
    return [tuple(group) for group in groups]


LISTS = ("--c4_train_shards", "--dataset_paths")
"""Flags that are written before --detach: the launcher takes overrides right behind their values, as in CloudAI's command
line of a test without a later flag, for values."""


def in_our_order(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    lists = [group for group in groups if group[0] in LISTS]
    others = [group for group in groups if group[0] not in LISTS]
    at = next(index for index, group in enumerate(others) if group[0] == "--detach")
    return [*others[:at], *lists, *others[at:]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", CLOUDAI)
def test_the_command_line_is_cloudais_but_for_the_deviations_of_the_table(example: str, version: str) -> None:
    theirs, made = in_our_order(by_flag(cloudais(example, version))), by_flag(argv_of(example, version))

    taken, added = [], []
    for change, a, b, c, d in difflib.SequenceMatcher(None, theirs, made, autojunk=False).get_opcodes():
        if change != "equal":
            taken += theirs[a:b]
            added += made[c:d]

    listed = [row for row in DEVIATIONS if version in row.versions]
    assert taken == [row for row in theirs if row in {deviation.cloudai for deviation in listed}]
    assert added == [row for row in made if row in {deviation.ours for deviation in listed}]


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda row: " ".join(row.ours or row.cloudai))
def test_every_deviation_of_the_table_is_one(deviation: Deviation) -> None:
    for version in deviation.versions:
        theirs, made = by_flag(cloudais("more fields", version)), by_flag(argv_of("more fields", version))

        assert not deviation.cloudai or (deviation.cloudai in theirs and deviation.cloudai not in made)
        assert not deviation.ours or (deviation.ours in made and deviation.ours not in theirs)
    assert deviation.reason


# --- the same, written out -------------------------------------------------------------------------------------------

BEGIN = ("-a", "acct", "-p", "batch", "-g", "gb200")
PUBLISHED = (
    *("-i", "{image}", "-c", "fp8_mx", "--task", "pretrain", "-ng", "8", "-gn", "8", "-cm", MOUNT, "--domain", "llm"),
    *("-m", "qwen", "-mr", "qwen3_30b_a3b", "--detach", "true"),
)
PACKAGER = {"v0.3.0": (), **dict.fromkeys(FROM_V0_4, ("--packager", "none"))}
END = ("--save_interval", "50", *CONFIG, *OVERRIDES)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("example", "limit"), [("test", ()), ("test in scenario", ("-t", "00:30:00"))])
def test_the_published_examples_are_written_out_whole(example: str, limit: tuple[str, ...], version: str) -> None:
    bridge, image = f"/placeholder/checkouts/Megatron-Bridge/{version}", "/placeholder/images/image.sqsh"
    expected = (*BEGIN, *limit, *PUBLISHED, *PACKAGER[version], *END)

    assert argv_of(example, version) == tuple(
        word.replace("{bridge}", bridge).replace("{image}", image) for word in expected
    )
