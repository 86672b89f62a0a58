"""The learning rate. Time is counted in consumed samples, whatever the flags count in."""

import math

_TAILS = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1.0),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


def learning_rate(iteration, args):
    """The learning rate of an iteration, which is that of the samples consumed before it."""
    batch = args.global_batch_size
    warm_up = args.lr_warmup_iters * batch if args.lr_warmup_samples is None else args.lr_warmup_samples
    end = (args.lr_decay_iters or args.train_iters) * batch if args.lr_decay_samples is None else args.lr_decay_samples
    done = iteration * batch
    least = args.min_lr or 0.0
    if warm_up and done <= warm_up:
        return args.lr * done / warm_up
    if args.lr_decay_style == "constant":
        return args.lr
    if done > end:
        return least
    if args.lr_decay_style == "inverse-square-root":
        return max(least, args.lr * math.sqrt(max(warm_up, 1)) / math.sqrt(max(done, 1)))
    if args.lr_decay_style == "WSD":
        tail = done - (end - args.lr_wsd_decay_samples)
        share = _TAILS[args.lr_wsd_decay_style](tail / args.lr_wsd_decay_samples) if tail > 0 else 1.0
    else:
        share = _TAILS[args.lr_decay_style]((done - warm_up) / max(1, end - warm_up))
    return least + share * (args.lr - least)
