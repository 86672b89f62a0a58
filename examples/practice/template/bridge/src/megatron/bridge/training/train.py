"""The training loop. Every rank runs all of it on the same data; what differs is who prints and who saves what."""

import sys
import time
from datetime import datetime

import numpy as np
from megatron.bridge.training import faults
from megatron.bridge.training.checkpointing import Checkpoints, InterruptedSave
from megatron.bridge.training.config import as_path
from megatron.bridge.training.event_file import EventFile, scalars
from megatron.bridge.training.language_model import Adam, LanguageModel, SyntheticText, learning_rate
from megatron.bridge.training.measurements import declared_measurements, seed_of
from megatron.bridge.training.report import Report


def train(config, behaviour, ranks, job_name):
    """Train, and leave the process with exit code 1 where a fault is planned."""
    try:
        Training(config, behaviour, ranks, job_name).run()
    except (faults.Fault, InterruptedSave) as fault:
        # All have their say before the first exit, which makes Slurm kill the others.
        ranks.meet()
        ranks.complain(str(fault))
        ranks.meet()
        sys.exit(1)


class Training:
    """One run: the model, its optimizer, and how far it has come."""

    def __init__(self, config, behaviour, ranks, job_name):
        # The job's name and not the clock: a run repeats exactly, another night or attempt differs.
        seed = seed_of(config["model"]["recipe"], job_name)
        self._config = config
        self._behaviour = behaviour
        self._ranks = ranks
        self._iterations = config["train"]["train_iters"]
        self._text = SyntheticText(seed)
        self._model = LanguageModel(config["rng"]["seed"])
        self._optimizer = Adam(self._model.parameters, config["optimizer"])
        self._measured = declared_measurements(config, behaviour, ranks.size, seed)
        self._checkpoints = Checkpoints(config, ranks, behaviour, save_id=f"{seed:016x}")
        self._events = self._open_events()

    def _open_events(self):
        folder = as_path(self._config["logger"]["tensorboard_dir"])
        if folder is None or not self._ranks.is_last:
            return None
        self._ranks.say_last("> setting tensorboard ...")
        return EventFile(folder)

    def run(self):
        """Run to the end, to `stop_at`, or to a fault."""
        say = self._ranks.say_first
        say("Starting training loop at iteration 0")
        last = min(self._iterations, self._behaviour.stop_at or self._iterations)
        for iteration in range(1, last + 1):
            faults.before_iteration(iteration, self._behaviour)
            self._log(self._step(iteration))
            if self._checkpoints.is_due(iteration):
                self._save(iteration)
        if last < self._iterations:
            self._save_if_missing(last)
            self._flush()
            say(f"[exiting program at iteration {last}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")
            return
        say(f"[after training is done] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")
        self._save_if_missing(last)
        self._flush()
        faults.in_teardown(self._behaviour)

    def _step(self, iteration):
        train, model = self._config["train"], self._config["model"]
        faults.poison(iteration, self._behaviour, self._model.parameters)
        loss, gradients = self._model.loss_and_gradients(*self._text.batch())
        rate = learning_rate(iteration, self._config) * self._behaviour.lr_factor
        norm = self._optimizer.step(self._model.parameters, gradients, rate)
        return Report(
            iteration=iteration,
            iterations=self._iterations,
            loss=loss + self._behaviour.loss_offset,
            gradient_norm=norm,
            learning_rate=rate,
            consumed_samples=iteration * train["global_batch_size"],
            global_batch_size=train["global_batch_size"],
            micro_batch_size=train["micro_batch_size"],
            seq_length=model["seq_length"],
            world_size=self._ranks.size,
            seconds=float(self._measured.seconds[iteration - 1]),
            tflops_per_gpu=float(self._measured.tflops_per_gpu[iteration - 1]),
            memory=self._measured.memory(iteration),
            past_seconds=self._measured.seconds[:iteration],
        )

    def _log(self, report):
        logger = self._config["logger"]
        if self._events and report.iteration % logger["tensorboard_log_interval"] == 0:
            now = time.time()
            for tag, value, also_by_samples in scalars(report, logger):
                self._events.add(tag, value, report.iteration, now)
                if also_by_samples:
                    self._events.add(f"{tag} vs samples", value, report.consumed_samples, now)
        if report.iteration % logger["log_interval"] == 0:
            self._ranks.say_first(report.performance_line())
            self._ranks.say_last(report.step_line(datetime.now(), logger["log_throughput"]))
            if report.iteration <= 2:
                self._ranks.say_first(report.memory_line())

    def _save_if_missing(self, iteration):
        if self._checkpoints.is_missing(iteration):
            self._save(iteration)

    def _save(self, iteration):
        consumed = iteration * self._config["train"]["global_batch_size"]
        state = {
            "step": np.array(iteration),
            "consumed_train_samples": np.array(consumed),
            "skipped_train_samples": np.array(0),
            "consumed_valid_samples": np.array(0),
            "floating_point_operations_so_far": np.array(iteration * self._measured.flops_per_iteration),
            "do_train": np.array(True),
            "do_valid": np.array(False),
            "do_test": np.array(False),
        }
        self._checkpoints.save(iteration, {**self._model.parameters, **self._optimizer.state}, state)

    def _flush(self):
        if self._events:
            self._events.flush()
