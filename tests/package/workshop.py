"""Where packages are built and looked at: a Debian 12 with the tools of both families, below a throw-away layer."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support import environments

ROOT = environments.folder() / "root-packages"
WORK = "/build"
"""Where the workshop's folder is inside."""
SECONDS = 600.0


def missing(*names: str) -> str:
    """Why packages cannot be built, or not be installed in these roots; empty when they can."""
    if os.geteuid() != 0:
        return "only root can enter a root"
    for root in (ROOT, *(environments.folder() / f"root-{name}" for name in names)):
        if not (root / ".stamp").is_file():
            return f"there is no {root}: run tests/env/package.sh"
    return "" if shutil.which("unshare") else "there is no unshare"


@dataclass(frozen=True, slots=True)
class Workshop:
    """Commands run inside with ``folder`` as /build; nothing that they write elsewhere stays."""

    folder: Path

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command; with ``check`` its failure is an AssertionError."""
        inside = Path(__file__).with_name("inside.sh")
        with tempfile.TemporaryDirectory() as layer:
            done = subprocess.run(
                ["unshare", "--mount", "--propagation=private", inside, ROOT, self.folder, layer, *command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def sh(self, script: str, check: bool = True) -> str:
        """What a shell script printed; it runs in the workshop's folder."""
        return self.run("bash", "-euo", "pipefail", "-c", f"cd {WORK}; {script}", check=check).stdout
