#!/usr/bin/env python3
"""Submit a practice training run to Slurm through NeMo-Run."""

import logging
import os
import re
import shlex
import sys
from pathlib import Path

from argument_parser import GPUS_PER_NODE, parse_cli_args

SCRIPTS = Path(__file__).resolve().parent
BRIDGE = SCRIPTS.parents[1] / "src" / "megatron" / "bridge"
BOOTSTRAP = SCRIPTS / "bootstrap.py"

# Options with one value that concern the launcher alone. Tokens are among them: the job's command line is written to
# files, so a token reaches the job through its environment or not at all.
LAUNCHER_ONLY = {
    "--additional_slurm_params",
    "-vb",
    "--enable_vboost",
    "-lgc",
    "--lock_gpu_freq",
    "-lmc",
    "--peak_mem_clk",
    "--csp",
    "-hf",
    "--hf_token",
    "-wdk",
    "--wandb_key",
}

# Without a container NeMo-Run puts the job's folder in the place of every "/nemo_run" of the script, also of those in
# the middle of a path.
_SPOILT = re.compile(r"[^\s=:,'\"]/nemo_run")

logger = logging.getLogger("setup_experiment")


def main():
    """Parse, build the job, submit it."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parser = parse_cli_args()
    args, overrides = parser.parse_known_args()
    if args.kubeflow_namespace:
        parser.error("this launcher submits to Slurm only")
    if not args.account:
        parser.error("Slurm needs an --account")
    if overrides:
        logger.info("Not flags of this launcher, forwarded to the configuration: %s", " ".join(overrides))
    submit(args, sys.argv[1:])


def submit(args, argv):
    """Submit one run, or show its batch script when it is a dry run."""
    # Here and not above: importing NeMo-Run takes a second, which --help and a wrong flag should not.
    import nemo_run as run
    from nemo_run.config import get_nemorun_home, set_nemorun_home
    from utils.executors import slurm_executor

    if args.log_dir:
        set_nemorun_home(args.log_dir)
    image = None if args.container_image in (None, "none") else args.container_image
    spoilt = [word for word in (get_nemorun_home(), str(SCRIPTS), *argv) if _SPOILT.search(word)]
    if spoilt and image is None:
        sys.exit(f"setup_experiment.py: without a container no path may contain /nemo_run: {' '.join(spoilt)}")
    tasks_per_node = args.gpus_per_node or GPUS_PER_NODE[args.gpu]
    executor = slurm_executor(
        args,
        nodes=-(-args.num_gpus // tasks_per_node),
        tasks_per_node=tasks_per_node,
        container_image=image,
        mounts=mounts(args),
        env_vars=environment(args),
    )
    script = run.Script(
        path=str(BOOTSTRAP),
        entrypoint="python3" if image else sys.executable,
        args=forwarded(argv),  # unquoted, as Megatron-Bridge does
    )
    name = experiment_name(args)
    logger.info("Submitting %s: %s", name, " ".join(script.to_command(with_entrypoint=True)))
    run.run(script, executor=executor, dryrun=args.dryrun, detach=args.detach, name=name)


def experiment_name(args):
    """The same every night unless --wandb_experiment_name says otherwise."""
    fields = (args.task, args.model_recipe_name, args.compute_dtype, f"gpus{args.num_gpus}", args.gpu)
    return args.wandb_experiment_name or "_".join((*fields, *([args.config_variant] if args.config_variant else ())))


def environment(args):
    """Variables of the job."""
    variables = {
        # The code lies in a tree that many jobs share and none may write to.
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENIZERS_PARALLELISM": "False",
        **({"HF_HUB_OFFLINE": "1"} if args.offline else {}),
        **args.custom_env_vars,
        **dict(args.env or ()),
    }
    return {name: shlex.quote(value) for name, value in variables.items()}


def mounts(args):
    """What a container sees of the host: this checkout's code at its own paths, and the checkpoint folder."""
    folders = [SCRIPTS, BRIDGE]
    if args.save_dir:
        save_dir = Path(args.save_dir).resolve()
        save_dir.mkdir(parents=True, exist_ok=True)
        folders.append(save_dir)
    return [*args.custom_mounts, *(f"{folder}:{folder}" for folder in folders)]


def forwarded(argv):
    """The command line for the job: everything but what concerns the launcher alone."""
    kept = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in LAUNCHER_ONLY and not name.startswith("--kubeflow_"):
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "400")  # rich wraps what NeMo-Run prints at 80 columns otherwise
    main()
