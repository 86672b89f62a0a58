"""Scalars for TensorBoard, written with TensorBoard's own writer."""


class EventFile:
    """One event file, kept by the last rank; like torch's writer it holds up to 1000 events back."""

    def __init__(self, folder):
        # Only the last rank needs TensorBoard.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = EventFileWriter(str(folder), max_queue_size=1000, flush_secs=120)

    def add(self, tag, value, step, wall_time):
        """Queue one scalar."""
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=float(value))])
        self._writer.add_event(self._event(wall_time=wall_time, step=step, summary=summary))

    def flush(self):
        """Write out what is held back."""
        self._writer.flush()


def scalars(report, logger):
    """Tag, value and whether a twin with samples on its axis exists, of one iteration, as the flags of `logger` say.

    `report` is a `train.Report`.
    """
    if logger["log_throughput_to_tensorboard"]:
        yield from ((tag, value, False) for tag, value in report.window_rates(logger["throughput_window_size"]))
    if logger["log_memory_to_tensorboard"]:
        yield from ((f"memory/{name}", value, False) for name, value in report.memory.items())
    yield "learning-rate", report.learning_rate, True
    yield "batch-size", report.global_batch_size, True
    yield "lm loss", report.loss, True
    if logger["log_loss_scale_to_tensorboard"]:
        yield "loss-scale", 1.0, True
    if logger["log_world_size_to_tensorboard"]:
        yield "world-size", report.world_size, True
    yield "grad-norm", report.gradient_norm, True
    if logger["log_throughput_to_tensorboard"]:
        yield "throughput/tflops/device", report.tflops_per_gpu, False
        yield "throughput/tflops", report.tflops_per_gpu * report.world_size, False
    if logger["log_timers_to_tensorboard"]:
        yield "iteration-time", report.seconds, False
