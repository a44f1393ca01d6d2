"""SGLang's own weight cache on the same model and machine, for comparison: python -m tests.bench.own_cache LOGS.

Needs a GPU: on a CPU SGLang's own loader raises NotImplementedError. $WEIGHTCACHE_MODEL names the checkpoint. Prints
figures and asserts nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.gpu import rig
from tests.gpu.rig import MIB, Figures
from tests.support.engine import Engine


def ready_files() -> list[Path]:
    """What SGLang's daemon writes when it is ready (srt/weight_cache/daemon.py)."""
    return list(Path("/tmp").glob("sglang_weight_cache_*.ready"))


@contextlib.contextmanager
def daemon(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """SGLang's daemon, once it is ready."""
    argv = [sys.executable, "-m", "sglang.srt.weight_cache.daemon"]
    argv += ["--model-path", str(rig.profile().model), "--tp-size", "1"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=rig.variables(), start_new_session=True
        )
    try:
        rig.wait_for(lambda: ready_files() or process.poll() is not None, 300, "SGLang's daemon")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


def measure(figures: Figures, logs: Path) -> None:
    """The daemon, one client, and the daemon's death."""
    if rig.profile().backend != "cuda":
        figures.note("SGLang's cache", "does not run on a CPU (its loader raises NotImplementedError)")
        return
    baseline = rig.device_used()
    begin = time.monotonic()
    with daemon(logs / "own-daemon.log") as process:
        figures.note("SGLang's cache: load to ready, s", round(time.monotonic() - begin, 2))
        time.sleep(1)
        weights = sum(path.stat().st_size for path in rig.profile().model.glob("*.safetensors"))
        beside = round((rig.device_used() - baseline - weights) / MIB)
        figures.note("SGLang's cache: idle device memory beside the weights, MiB", beside)
        figures.note("SGLang's cache: resident part, host RSS in MB", round(rig.family_rss(process.pid) / 1e6))
        _client(figures, logs, process)


def _client(figures: Figures, logs: Path, process: subprocess.Popen[bytes]) -> None:
    made = Engine(
        rig.profile().model,
        log=logs / "own-client.log",
        command=[sys.executable, "-m", "sglang.launch_server"],
        base=rig.profile().base,
        arguments=("--weight-cache-mode", "client"),
    )
    made.environment = rig.variables()
    with rig.serving(made) as started:
        figures.note("SGLang's cache: start to first token, s", started.first_token)
        for line in re.findall(r"\[IpcModelLoader\][^\n]*|mapped \d+ tensors[^\n]*", made.text()):
            figures.note(f"SGLang's cache: log line {len(figures.rows)}", line[:200])
        figures.note("SGLang's cache: KV pool, tokens", rig.pool_tokens(made))
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        begin = time.monotonic()
        while time.monotonic() - begin < 15 and made.process.poll() is None and made.schedulers():
            time.sleep(0.1)
        dead = made.process.poll() is not None or not made.schedulers()
        outcome = f"dead after {time.monotonic() - begin:.1f} s" if dead else "alive after 15 s"
        figures.note("SGLang's cache: engine after its daemon was killed", outcome)


if __name__ == "__main__":
    measure(Figures(), Path(sys.argv[1]))
