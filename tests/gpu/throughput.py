"""A fixed load on a server that runs: SGLang's own benchmark, always with the same requests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.gpu import rig

BENCHMARK = """
import importlib.machinery, sys, types
absent = types.ModuleType("datasets")  # SGLang imports it for data that are not used here
absent.__spec__, absent.load_dataset = importlib.machinery.ModuleSpec("datasets", None), None
sys.modules["datasets"] = absent
from sglang.bench_serving import cli_main
cli_main()
"""
FIGURES = ("Total token throughput (tok/s)", "Mean TTFT (ms)", "Mean TPOT (ms)", "Successful requests")
REQUESTS = 160
TOGETHER = 16
INPUT, OUTPUT = 512, 64
"""Tokens of each request."""


def measure(port: int, log: Path, seconds: float) -> dict[str, float | str]:
    """What it says, by its own names; the end of its log where it says nothing. Raises TimeoutExpired."""
    argv = [sys.executable, "-c", BENCHMARK, "--backend", "sglang", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dataset-name", "random-ids", "--random-range-ratio", "1", "--seed", "1"]
    argv += ["--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    argv += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(TOGETHER)]
    # Prompts are the same each time: without an empty prefix cache only the first load computes them.
    argv += ["--model", str(rig.profile().model), "--disable-tqdm", "--flush-cache"]
    with log.open("wb") as file:
        subprocess.run(argv, stdout=file, stderr=file, timeout=seconds, env=rig.variables(), check=False)
    said = log.read_text(errors="replace")
    found = {name: re.search(rf"{re.escape(name)}:\s+([0-9.]+)", said) for name in FIGURES}
    return {name: float(match[1]) if match else said[-300:] for name, match in found.items()}
