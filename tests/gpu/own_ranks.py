"""SGLang's own weight cache over several GPUs, for comparison: python -m tests.gpu.own_ranks LOGS [RANKS].

The large model ($WEIGHTCACHE_MODEL) with tensor parallelism, by default over all GPUs. Prints figures and asserts
nothing; tests/bench/own_cache.py does the same for one GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.own_cache import ready_files
from tests.gpu import rig
from tests.gpu.deployed import PLAIN, QUIET, SMALL
from tests.gpu.rig import MIB, Figures
from tests.support.engine import Engine, end_with_parent

LOAD_SECONDS, START_SECONDS = 240.0, 240.0


def measure(figures: Figures, logs: Path, ranks: int) -> None:
    """One daemon a rank, started by one command, and one engine."""
    if rig.profile().backend != "cuda" or ranks < 2:
        figures.note("SGLang's cache", f"not run: needs two GPUs, and there are {rig.gpu_count()}")
        return
    model, environment = rig.profile().model, rig.variables() | QUIET
    baseline = [rig.device_used(gpu) for gpu in range(ranks)]
    argv = [sys.executable, "-m", "sglang.srt.weight_cache.daemon", "--model-path", str(model), "--tp-size", str(ranks)]
    begin = time.monotonic()
    with (logs / "own-daemons.log").open("wb") as log:
        daemon = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            preexec_fn=end_with_parent,
        )  # fmt: skip
    try:
        everyone = f"SGLang's {ranks} daemons"
        rig.wait_for(lambda: len(ready_files()) >= ranks or daemon.poll() is not None, LOAD_SECONDS, everyone)
        figures.note("SGLang's cache: load to ready, s", round(time.monotonic() - begin, 2))
        weights = sum(path.stat().st_size for path in model.glob("*.safetensors")) / ranks
        beside = [round((rig.device_used(gpu) - baseline[gpu] - weights) / MIB) for gpu in range(ranks)]
        figures.note("SGLang's cache: idle device memory beside a share of the weights by GPU, MiB", beside)
        figures.note("SGLang's cache: host memory of the daemons, MB", round(rig.family_rss(daemon.pid) / 1e6))
        _client(figures, logs, ranks, environment)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait(timeout=20)


def _client(figures: Figures, logs: Path, ranks: int, environment: dict[str, str]) -> None:
    profile = rig.profile()
    made = Engine(
        profile.model,
        log=logs / "own-engine.log",
        command=[sys.executable, "-m", "sglang.launch_server"],
        base=(*profile.base, *profile.fast, *SMALL, *PLAIN),
        arguments=("--weight-cache-mode", "client", "--tp-size", str(ranks)),
    )
    made.environment = environment
    with rig.serving(made, START_SECONDS) as started:
        figures.note("SGLang's cache: start to first token, s", started.first_token)
        for number, line in enumerate(re.findall(r"\[IpcModelLoader\][^\n]*|mapped \d+ tensors[^\n]*", made.text())):
            figures.note(f"SGLang's cache: log line {number}", line[:200])


if __name__ == "__main__":
    measure(Figures(), Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else rig.gpu_count())
