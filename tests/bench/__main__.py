"""``make bench``: weightcache beside SGLang's own weight cache, in one run. Prints figures, asserts nothing.

On a GPU machine $WEIGHTCACHE_MODEL names the checkpoint (tests.models.make_large writes one). Without a GPU the same
steps run on the CPU with SmolLM2 and host memory, where SGLang's own cache does not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.bench import own_cache
from tests.gpu import rig
from tests.gpu.rig import MIB, Agent, Figures


def choose_machine() -> None:
    """Without a GPU: host memory and the small model."""
    if not Path("/dev/nvidiactl").exists():
        from tests import models

        os.environ["WEIGHTCACHE_RIG"] = "host"
        os.environ.setdefault("WEIGHTCACHE_MODEL", str(models.smollm2()))
    elif not os.environ.get("WEIGHTCACHE_MODEL"):
        sys.exit("bench: set WEIGHTCACHE_MODEL to a checkpoint (python -m tests.models.make_large OUT writes one)")


def from_disk(figures: Figures, folder: Path) -> None:
    """A plain engine."""
    made = rig.engine(folder / "disk.log", "--weight-cache-mode", "off")
    with rig.serving(made) as started:
        figures.note("disk: start to first token, s", started.first_token)


def cached(figures: Figures, folder: Path) -> None:
    """Load, idle, attach, and the agent's death under a serving engine."""
    baseline = rig.device_used()
    agent = Agent(folder, model=True).start()
    try:
        begin = time.monotonic()
        rig.wcache(agent, "load", "--wait", "400")
        figures.note("weightcache: load to ready, s", round(time.monotonic() - begin, 2))
        rig.wait_for(lambda: not rig.process_used(), 30, "the loader to be gone")
        held = agent.status()["sets"][0]
        if rig.profile().backend == "cuda":
            beside = (rig.device_used() - baseline - held["bytes"]) / MIB
            figures.note("weightcache: idle device memory beside the weights, MiB", round(beside, 1))
        rss = psutil.Process(agent.pid).memory_info().rss
        figures.note("weightcache: resident part, host RSS in MB", round(rss / 1e6, 1))
        made = rig.engine(folder / "attached.log", directory=folder)
        with rig.serving(made) as started:
            figures.note("weightcache: start to first token, s", started.first_token)
            figures.note("weightcache: attach steps, ms", rig.milliseconds(made))
            agent.kill()
            time.sleep(6)
            alive = made.process.poll() is None and len(made.tokens([5, 17, 99], 4)) == 4
            figures.note("weightcache: engine 6 s after its agent was killed", "serves" if alive else "dead")
    finally:
        if agent.process is not None and agent.process.poll() is None:
            agent.stop()


def bytes_do_not_matter() -> None:
    """The same number of tensors in a small and in a large set, from a synthetic publisher."""
    host = rig.profile().backend == "host"
    sizes = ("0.05", "0.5") if host else ("7", "100")
    backend = "host" if host else "cuda"
    command = [sys.executable, "-m", "tests.bench.synthetic", "compare", "--backend", backend, "--tensors", "292"]
    subprocess.run([*command, "--gib", *sizes], check=False, timeout=300, env=rig.variables())


def main() -> int:
    """Run every step that this machine can run, and print the table."""
    choose_machine()
    figures = Figures()
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    from_disk(figures, folder)
    cached(figures, folder)
    own_cache.measure(figures, folder)
    bytes_do_not_matter()
    width = max(map(len, figures.rows))
    print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in figures.rows.items()))
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
