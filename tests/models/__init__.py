"""The models that tests and the demo run, each made once per machine beside the environments.

``python -m tests.models smollm2`` (or ``tiny``, ``kind NAME``) makes one if needed and prints its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.environments import REPOSITORY, environments, folder


def smollm2() -> Path:
    """SmolLM2-135M-Instruct in bf16, tied embeddings: "The capital of France is" goes on with " Paris"."""
    return _once("smollm2-135m", "make_smollm2.py", ())


def tiny(family: str = "qwen3", *options: str) -> Path:
    """A random model of a few million parameters; ``options`` are those of make_tiny.py."""
    name = "-".join(["tiny", family, *(option.lstrip("-") for option in options)])
    return _once(name, "make_tiny.py", ("--family", family, *options))


def kind(name: str) -> Path:
    """The checkpoint of one kind of tests/models/kinds.py."""
    return _once(f"kind-{name}", "make_kind.py", (name,))


def _once(name: str, maker: str, options: Sequence[str]) -> Path:
    """The folder of a model, made first if it is missing or if what makes it has changed."""
    script = Path(__file__).with_name(maker)
    target = folder() / "models" / name
    stamp = target / ".stamp"
    # What makes a kind is in several files: any change here makes all anew, which takes a second each.
    sources = sorted(script.parent.glob("*.py")) if maker == "make_kind.py" else [script]
    texts = [source.read_text() for source in sources]
    key = hashlib.sha256("\0".join([*texts, *options]).encode()).hexdigest()
    with _locked(target.with_name(f".{name}.lock")):
        if not stamp.is_file() or stamp.read_text() != key:
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.") as work:
                fresh = Path(work) / name
                module = f"{__name__}.{script.stem}"
                command = [str(environments().engine()), "-m", module, *options, str(fresh)]
                made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
                if made.returncode != 0:
                    raise RuntimeError(f"{maker} failed:\n{made.stderr[-2000:]}")
                for file in filter(Path.is_file, fresh.rglob("*")):
                    file.chmod(0o644)  # safetensors writes 0600; an engine may run as another user
                (fresh / ".stamp").write_text(key)
                if target.exists():
                    target.rename(Path(work) / "old")
                fresh.rename(target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
