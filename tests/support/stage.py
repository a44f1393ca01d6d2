"""The tree that packages install, made from this checkout without a network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.environments import REPOSITORY, environments


def staged(folder: Path, **variables: str) -> Path:
    """Lay the tree out in ``folder``, which is returned."""
    [vendor] = environments().agent.parent.with_name("lib").glob("python3.*/site-packages")
    done = subprocess.run(
        [REPOSITORY / "packaging" / "stage.sh", folder],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "VENDOR": str(vendor), **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder
