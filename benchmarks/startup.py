"""How long `nightbridge --help` and `nightbridge validate` take, against Python's own start and CloudAI-style imports.

    python benchmarks/startup.py [REPEATS]

Prints the median of REPEATS (default 11) cold-process runs of each, and their ratio to importing Prefect, which is what
a command line that imports everything would pay.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NIGHTBRIDGE = str(Path(sys.executable).with_name("nightbridge"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "nightbridge --help": [NIGHTBRIDGE, "--help"],
    "nightbridge validate": [NIGHTBRIDGE, "validate", "conf/practice/nightly.toml"],
    "python -c 'import prefect, pandas, boto3'": [sys.executable, "-c", "import prefect, pandas, boto3"],
}


def median_seconds(command: list[str], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(repeats: int) -> None:
    seconds = {name: median_seconds(command, repeats) for name, command in COMMANDS.items()}
    slowest = seconds[list(COMMANDS)[-1]]
    for name, median in seconds.items():
        print(f"{name:45} {median:6.3f} s   {median / slowest:5.2f} of importing everything")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 11)
