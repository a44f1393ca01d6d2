"""An environment in which SGLang is a stand-in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    package = tmp_path / "path" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").touch()
    # A load begins with this import, and never gets further.
    (package / "srt" / "__init__.py").write_text("import time\nprint('fake load', flush=True)\ntime.sleep(600)\n")
    shutil.copy(Path(__file__).with_name("fake_sglang.py"), package / "launch_server.py")
    return {**os.environ, "PYTHONPATH": str(package.parent)}
