"""Every SGLang name, parameter and option that weightcache leans on exists: a new release fails here, and loudly.

The comparison itself (contract.py) runs in each release's environment.
"""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import pytest

from tests.support.environments import REPOSITORY, VERSIONS, engine_variables, environments

pytestmark = pytest.mark.timeout(300)


@functools.cache
def contracts() -> dict[str, dict[str, Any]]:
    """What contract.py found, by release. Both run at once: each is ten seconds of importing on one core."""
    running = {
        version: subprocess.Popen(
            [str(environments().engine(version)), "-m", "tests.engine.contract"],
            cwd=REPOSITORY,
            env=engine_variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for version in VERSIONS
    }
    found = {}
    for version, process in running.items():
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
        found[version] = dict(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_release_has_what_the_adapter_needs(version: str) -> None:
    found = contracts()[version]
    assert found["version"] == version
    assert found["problems"] == []


@pytest.mark.parametrize("table", ["arguments", "options"])
def test_every_listed_name_exists_in_some_release(table: str) -> None:
    tables = [contracts()[version][table] for version in VERSIONS]
    assert len(tables[0]) > 20
    assert [name for name in tables[0] if not any(found[name] for found in tables)] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_release_has_what_every_launch_needs(version: str) -> None:
    found = contracts()[version]
    for name in ("json_model_override_args", "tp_size", "pp_size", "dp_size", "nnodes", "cpu_offload_gb"):
        assert found["arguments"][name], name
    for name in ("--model-path", "--tp-size", "--dtype", "--device", "--port", "--api-key", "--help"):
        assert found["options"][name], name
