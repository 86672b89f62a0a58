"""Training: configuration, model, measurements, logs, event files and checkpoints."""
