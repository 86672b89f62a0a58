"""The flags of the standalone program, and what must hold between them."""

import argparse
import math

from examples.mimo.model_providers.nemotron_moe_vlm import add_model_provider_args


def parse_args(argv=None):
    """Parse the command line; an unknown flag is an error."""
    parser = argparse.ArgumentParser(description="Train a vision-language model on two grids of ranks.")

    grid = parser.add_argument_group("module grids")
    grid.add_argument("--encoder-offset", type=int, default=0)
    grid.add_argument("--encoder-tp", type=int, default=2)
    grid.add_argument("--encoder-cp", type=int, default=1)
    grid.add_argument("--encoder-pp", type=int, default=2)
    grid.add_argument("--encoder-dp", type=int, default=1)
    grid.add_argument("--encoder-ep", type=int, default=1)
    grid.add_argument("--encoder-expt-tp", type=int, default=None)
    grid.add_argument("--llm-offset", type=int, default=4)
    grid.add_argument("--llm-tp", type=int, default=1)
    grid.add_argument("--llm-cp", type=int, default=1)
    grid.add_argument("--llm-pp", type=int, default=2)
    grid.add_argument("--llm-dp", type=int, default=2)
    grid.add_argument("--llm-ep", type=int, default=2)
    grid.add_argument("--llm-expt-tp", type=int, default=1)

    add_model_provider_args(parser)

    data = parser.add_argument_group("data")
    data.add_argument("--dataset-provider", choices=["mock"], default="mock")
    data.add_argument("--num-workers", type=int, default=2)
    data.add_argument("--packing-buffer-size", type=int, default=None)

    train = parser.add_argument_group("training")
    train.add_argument("--micro-batch-size", type=int, default=2)
    train.add_argument("--global-batch-size", type=int, default=None)
    train.add_argument("--num-microbatches", type=int, default=2)
    train.add_argument("--train-iters", type=int, default=2)
    train.add_argument("--train-samples", type=int, default=None)
    train.add_argument("--lr", type=float, default=1e-4)
    train.add_argument("--min-lr", type=float, default=None)
    train.add_argument(
        "--lr-decay-style", default="constant", choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    )
    train.add_argument("--lr-warmup-iters", type=int, default=0)
    train.add_argument("--lr-decay-iters", type=int, default=None)
    train.add_argument("--lr-warmup-samples", type=int, default=None)
    train.add_argument("--lr-decay-samples", type=int, default=None)
    train.add_argument("--lr-wsd-decay-samples", type=int, default=None)
    train.add_argument("--lr-wsd-decay-style", default=None, choices=["linear", "cosine", "exponential", "minus_sqrt"])
    train.add_argument("--weight-decay", type=float, default=0.01)
    train.add_argument("--adam-beta1", type=float, default=0.9)
    train.add_argument("--adam-beta2", type=float, default=0.999)
    train.add_argument("--clip-grad", type=float, default=1.0)
    train.add_argument("--log-num-zeros-in-grad", action="store_true")
    train.add_argument("--overlap-grad-reduce", action=argparse.BooleanOptionalAction, default=False)
    train.add_argument("--overlap-param-gather", action=argparse.BooleanOptionalAction, default=False)
    train.add_argument("--ddp-bucket-size", type=int, default=10000)
    train.add_argument("--ddp-num-buckets", type=int, default=None)
    train.add_argument("--ddp-pad-buckets-for-high-nccl-busbw", action=argparse.BooleanOptionalAction, default=False)
    train.add_argument(
        "--correct-encoder-grad-for-partial-participation", action=argparse.BooleanOptionalAction, default=True
    )
    train.add_argument("--seed", type=int, default=12345)
    train.add_argument("--log-interval", type=int, default=1)
    train.add_argument("--log-memory", action="store_true")
    train.add_argument("--tensorboard-dir", default=None)

    checkpoint = parser.add_argument_group("checkpointing")
    checkpoint.add_argument("--save", default=None)
    checkpoint.add_argument("--load", default=None)
    checkpoint.add_argument("--save-interval", type=int, default=None)
    checkpoint.add_argument("--no-save-optim", action="store_true")
    checkpoint.add_argument("--no-load-optim", action="store_true")
    checkpoint.add_argument("--no-load-scheduler", action="store_true")
    checkpoint.add_argument("--no-save-rng", action="store_true")
    checkpoint.add_argument("--no-load-rng", action="store_true")
    checkpoint.add_argument("--finetune", action="store_true")
    checkpoint.add_argument("--load-nemotron-checkpoint", default=None)
    checkpoint.add_argument("--dist-ckpt-optim-fully-reshardable", action=argparse.BooleanOptionalAction, default=False)
    return parser.parse_args(argv)


def prepare_args(args, world_size):
    """Fill in what follows from other flags, and check the whole.

    Returns:
        The ranks of the encoder, and of the language model.

    Raises:
        ValueError: The flags contradict each other, or the grids do not cover the ranks.

    """
    if args.encoder_cp != 1 or args.llm_cp != 1:
        raise ValueError("context parallel sizes above 1 are not supported")
    if args.num_moe_experts and args.num_moe_experts % args.llm_ep:
        raise ValueError("--num-moe-experts must be a multiple of --llm-ep")
    if args.load and args.load_nemotron_checkpoint:
        raise ValueError("--load and --load-nemotron-checkpoint exclude each other")
    if args.save_interval is not None and not args.save:
        raise ValueError("--save-interval needs --save")
    if args.lr_decay_style == "WSD" and None in (args.lr_wsd_decay_samples, args.lr_wsd_decay_style):
        raise ValueError("WSD needs --lr-wsd-decay-samples and --lr-wsd-decay-style")
    _prepare_batches(args)
    return _grid_sizes(args, world_size)


def _prepare_batches(args):
    step = args.micro_batch_size * args.llm_dp
    if args.global_batch_size is None:
        args.global_batch_size = step * args.num_microbatches
    if args.global_batch_size % step:
        raise ValueError(f"--global-batch-size {args.global_batch_size} is no multiple of {step}")
    args.num_microbatches = args.global_batch_size // step
    if args.train_samples is not None:
        args.train_iters = math.ceil(args.train_samples / args.global_batch_size)


def _grid_sizes(args, world_size):
    if args.micro_batch_size * args.llm_dp % args.encoder_dp:
        raise ValueError("--micro-batch-size x --llm-dp must be a multiple of --encoder-dp")
    encoder_size = args.encoder_tp * args.encoder_pp * args.encoder_dp
    llm_size = args.llm_tp * args.llm_pp * args.llm_dp
    encoder = set(range(args.encoder_offset, args.encoder_offset + encoder_size))
    llm = set(range(args.llm_offset, args.llm_offset + llm_size))
    if encoder & llm:
        raise ValueError(f"the grids share the ranks {sorted(encoder & llm)}")
    if encoder | llm != set(range(world_size)):
        raise ValueError(f"the grids cover the ranks {sorted(encoder | llm)} of {world_size}")
    return encoder_size, llm_size
