"""The training loop. Every rank runs all of it on the same data; what differs is who says and who saves what."""

import sys
from pathlib import Path

from examples.mimo.model_providers.nemotron_moe_vlm import (
    MockPictures,
    ResumableAdam,
    VisionLanguageModel,
    trainable,
)
from examples.mimo.training import faults
from examples.mimo.training.behaviour import read_behaviour
from examples.mimo.training.hetero.args import prepare_args
from examples.mimo.training.hetero.checkpointing import InterruptedSave, Saver, load, newest
from examples.mimo.training.hetero.logging import Step, TrainingLogger
from examples.mimo.training.hetero.scheduler import learning_rate
from examples.mimo.training.measurements import declared_measurements, seed_of


def run_train_loop(args, ranks, job_name):
    """Train, and leave the process with exit code 1 where a fault is planned."""
    encoder_size, llm_size = prepare_args(args, ranks.size)
    try:
        _Training(args, ranks, job_name).run(encoder_size, llm_size)
    except (faults.Fault, InterruptedSave) as fault:
        # All have their say before the first exit, which makes torchrun end the others.
        ranks.meet()
        ranks.complain(str(fault))
        ranks.meet()
        sys.exit(1)


class _Training:
    """One run: the model, its optimizer, and how far it has come."""

    def __init__(self, args, ranks, job_name):
        self._args = args
        self._ranks = ranks
        self._behaviour = read_behaviour()
        self._data = MockPictures(args.seed)
        self._model = VisionLanguageModel(args.seed, args.num_moe_experts)
        self._optimizer = ResumableAdam(self._model.parameters, _adam_settings(args))
        self._free = trainable(args, self._model.parameters)
        # The job's name and not the clock: a run repeats exactly, another night or attempt differs.
        seed = seed_of(job_name)
        self._measured = declared_measurements(_declared_config(args), self._behaviour, ranks.size, seed)
        self._saver = Saver(args, ranks, self._behaviour, save_id=f"{seed:016x}")

    def run(self, encoder_size, llm_size):
        """Run to the end, to `stop_at`, or to a fault."""
        args = self._args
        start = self._load()
        if start >= args.train_iters:
            self._ranks.say_first(
                f"Resume iteration ({start}) >= --train-iters ({args.train_iters}); nothing to train."
            )
            return
        self._ranks.say_first(
            f"Starting hetero MIMO training: world_size={self._ranks.size}, encoder_size={encoder_size}, "
            f"llm_size={llm_size}, iters={start + 1}..{args.train_iters}, dataset_provider={args.dataset_provider}"
        )
        logger = TrainingLogger(args, self._ranks, consumed_samples=start * args.global_batch_size)
        last = min(args.train_iters, self._behaviour.stop_at or args.train_iters)
        saved = start
        for iteration in range(start + 1, last + 1):
            faults.before_iteration(iteration, self._behaviour)
            logger.record(self._step(iteration), self._measured.gigabytes)
            if args.save and args.save_interval and iteration % args.save_interval == 0:
                self._saver.save(iteration, self._state())
                saved = iteration
        if args.save and saved != last:
            self._saver.save(last, self._state())
        faults.in_teardown(self._behaviour)

    def _load(self):
        """Take up what the flags name; return the iteration that it ended with, 0 for weights alone."""
        args = self._args
        if args.load_nemotron_checkpoint:
            load(Path(args.load_nemotron_checkpoint), self._model.parameters)
            return 0
        found = newest(args.load) if args.load else None
        if found is None:
            return 0
        folder, iteration = found
        with_optimizer = not (args.no_load_optim or args.finetune)
        self._ranks.say_first(
            f"loading hetero checkpoint from {folder} (optimizer={'yes' if with_optimizer else 'no'}, "
            f"finetune={args.finetune})"
        )
        load(folder, self._state() if with_optimizer else self._model.parameters)
        start = 0 if args.finetune else iteration
        self._optimizer.resume_after(start if with_optimizer else 0)
        self._ranks.say_first(f"resuming hetero training at iteration {start}")
        return start

    def _state(self):
        """Tensors by name; the optimizer's are left out where the flags say so."""
        return self._model.parameters | ({} if self._args.no_save_optim else self._optimizer.state)

    def _step(self, iteration):
        args = self._args
        faults.poison(iteration, self._behaviour, self._model.parameters)
        batch = self._data.batch(iteration, args.global_batch_size)
        # One micro-batch of one lane after the other, so that another layout of ranks adds up in another order.
        loss, gradients = 0.0, {}
        for part in batch.split(args.num_microbatches * args.llm_dp):
            part_loss, part_gradients = self._model.loss_and_gradients(part)
            loss += part_loss
            for name, gradient in part_gradients.items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        tokens = len(batch.tokens)
        means = {name: gradient / tokens for name, gradient in gradients.items() if name in self._free}
        zeros = sum(int((gradient == 0).sum()) for gradient in means.values()) if args.log_num_zeros_in_grad else None
        rate = learning_rate(iteration, args) * self._behaviour.lr_factor
        norm = self._optimizer.step(self._model.parameters, means, rate)
        return Step(
            iteration=iteration,
            loss=loss / tokens + self._behaviour.loss_offset,
            gradient_norm=norm,
            zeros=zeros,
            learning_rate=rate,
            milliseconds=1e3 * float(self._measured.seconds[iteration - 1]),
            load_balancing_loss=self._model.load_balancing_loss(batch),
        )


def _adam_settings(args):
    return {
        "clip_grad": args.clip_grad,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_eps": 1e-8,
    }


def _declared_config(args):
    """What the declaration of step times asks about a run."""
    return {
        "model": {"recipe": "nemotron_moe_vlm", "seq_length": args.seq_length},
        "train": {"train_iters": args.train_iters, "global_batch_size": args.global_batch_size},
        "env_vars": {"PRACTICE_GPU": "h100"},
        "mixed_precision": "bf16",
    }
