"""Scalars for TensorBoard, written with TensorBoard's own writer."""


class EventFile:
    """One event file, kept by the language model's logging rank."""

    def __init__(self, folder):
        # Only that rank needs TensorBoard.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))

    def add(self, tag, value, step, wall_time):
        """Queue one scalar."""
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=float(value))])
        self._writer.add_event(self._event(wall_time=wall_time, step=step, summary=summary))

    def flush(self):
        """Write out what is held back."""
        self._writer.flush()
