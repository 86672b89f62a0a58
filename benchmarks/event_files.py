"""How fast a TensorBoard event file becomes a table, against TensorBoard's own reader and tbparse.

    python benchmarks/event_files.py [--events 1000000] [--tbparse-python PYTHON] [--folder DIRECTORY]

Writes one file of that many v1 scalars (20 tags, as a training writes them) with TensorBoard's own record writer, and
has every reader make a table or lists of all of it, each in a process of its own. Prints the processor time that
reading takes (imports not counted), events per second of it, the ratio to nightbridge's, and the most memory that the
process took. Then one byte in the middle of a copy is changed, and each reader says how much of the file it gives and
whether it complains. `--tbparse-python` is a Python that has tbparse installed; without it tbparse is left out.

Last, the seconds by the clock beside TensorBoard's data server (Rust), which keeps every point and checks every CRC as
well, in turns: for this file, and for a run of 100 files with as many scalars in all. The server's are what its log
says of one load; nightbridge's are those of `scalars`, imports not counted.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensorboard_data_server
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

ROOT = Path(__file__).parents[1]

TAGS = (
    "lm loss",
    "iteration-time",
    "throughput/tflops/device",
    "grad-norm",
    "learning-rate",
    "batch-size",
    "memory/mem-max-allocated-gigabytes",
    *(f"timers/stage {number}" for number in range(13)),
)

# Each reads the file named by its first argument into `rows` and prints what that took.
MEASURE = """
import json, re, time
from pathlib import Path
before, began = time.process_time(), time.perf_counter()
{read}
seconds, wall = time.process_time() - before, time.perf_counter() - began
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps(dict(seconds=seconds, wall=wall, rows=rows, memory=peak, said=said)))
"""

NIGHTBRIDGE = """
import sys
import pandas
from nightbridge.outputs.event_files import find_event_files, read_event_files, scalar_table
""" + MEASURE.format(
    read="""files, damage = read_event_files(find_event_files(Path(sys.argv[1]).parent))
rows, said = len(scalar_table(files)), "; ".join(damage)"""
)

EVENT_ACCUMULATOR = """
import sys, logging
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
""" + MEASURE.format(
    read="""accumulator = EventAccumulator(str(Path(sys.argv[1]).parent), size_guidance={"scalars": 0})
accumulator.Reload()
found = [accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]]
rows, said = sum(map(len, found)), "" """
)

TBPARSE = """
import sys
from tbparse import SummaryReader
""" + MEASURE.format(read="table = SummaryReader(str(Path(sys.argv[1]).parent)).scalars\nrows, said = len(table), ''")


FILES = 100

LOADED = re.compile(r"Finished load cycle \(([\d.]+)(\S*s)\)")

SECONDS_OF = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--tbparse-python", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    readers = {"nightbridge": (sys.executable, NIGHTBRIDGE), "EventAccumulator": (sys.executable, EVENT_ACCUMULATOR)}
    if options.tbparse_python:
        readers["tbparse"] = (str(options.tbparse_python), TBPARSE)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="nightbridge-events-") as scratch:
        whole = write_events(Path(scratch) / "whole", options.events)
        print(f"{options.events:,} scalars of {len(TAGS)} tags, {whole.stat().st_size / 1e6:.0f} MB", flush=True)
        compare(readers, whole)
        print("the same with one byte changed in the middle of the file", flush=True)
        for name, (python, program) in readers.items():
            found = read(python, program, damaged(whole, Path(scratch) / "damaged"))
            print(f"{name:18} gives {found['rows']:,} scalars and says: {found['said'] or 'nothing'}", flush=True)
        beside_data_server(whole, options.repeats, "one file")
        many = Path(scratch) / "many"
        part = write_events(many, options.events // FILES)
        for number in range(1, FILES):
            shutil.copy(part, many / f"events.out.tfevents.{1760000000 + number}.node1.4242.{number}")
        beside_data_server(part, options.repeats, f"{FILES} files of one run")


def beside_data_server(file: Path, repeats: int, what: str) -> None:
    """The seconds by the clock of a run's event files in turns with TensorBoard's data server: all points, all CRCs."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        ours.append(read(sys.executable, NIGHTBRIDGE, file)["wall"])
        theirs.append(data_server_seconds(file.parent))
    one, other = statistics.median(ours), statistics.median(theirs)
    print(
        f"{what}: nightbridge {one:.2f} s ({min(ours):.2f}-{max(ours):.2f}), data server {other:.2f} s"
        f" ({min(theirs):.2f}-{max(theirs):.2f}): {other / one:.2f} times as fast; median of {repeats}",
        flush=True,
    )


def data_server_seconds(folder: Path) -> float:
    """What TensorBoard's data server (Rust) says that one load of a folder takes."""
    command = [tensorboard_data_server.server_binary(), "--logdir", str(folder), "--checksum", "--reload", "once"]
    command += ["--samples-per-plugin", "scalars=2000000000", "--port", "0", "-v"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        assert server.stderr is not None
        try:
            found = next(match for line in server.stderr if (match := LOADED.search(line)))
        finally:
            server.kill()
    return float(found[1]) * SECONDS_OF[found[2]]


def compare(readers: dict[str, tuple[str, str]], file: Path) -> None:
    ours: float | None = None
    for name, (python, program) in readers.items():
        found = read(python, program, file)
        ours = ours or found["seconds"]
        print(
            f"{name:18} {found['rows'] / found['seconds'] / 1e6:7.3f} M events/s of CPU"
            f"  {found['seconds'] / ours:6.1f} times our time  {found['memory'] / 1e6:6.0f} MB",
            flush=True,
        )


def write_events(folder: Path, events: int) -> Path:
    """One event file as TensorBoard's writer makes it."""
    folder.mkdir()
    path = folder / "events.out.tfevents.1760000000.node1.4242.0"
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        writer.write(Event(wall_time=1.76e9, file_version="brain.Event:2").SerializeToString())
        for number in range(events):
            step, tag = divmod(number, len(TAGS))
            value = Summary.Value(tag=TAGS[tag], simple_value=1.0 + number % 977 / 977)
            event = Event(wall_time=1.76e9 + step / 4, step=step + 1, summary=Summary(value=[value]))
            writer.write(event.SerializeToString())
    return path


def damaged(whole: Path, folder: Path) -> Path:
    """A copy with one byte changed in its middle."""
    folder.mkdir(exist_ok=True)
    content = bytearray(whole.read_bytes())
    content[len(content) // 2] ^= 1
    path = folder / whole.name
    path.write_bytes(content)
    return path


def read(python: str, program: str, file: Path) -> dict[str, Any]:
    """One reader in a process of its own."""
    ended = subprocess.run([python, "-c", program, str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return dict(json.loads(ended.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
