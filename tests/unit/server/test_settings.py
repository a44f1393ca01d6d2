"""The rank and the GPU of an agent, as options and configuration say them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from weightcache import placement
from weightcache.errors import ConfigError
from weightcache.server import settings
from weightcache.server.settings import Options, Settings

GPUS = tuple(f"GPU-0000000{i}-89ab-cdef-0123-456789abcdef" for i in range(4))
NODES = 'nodes = ["a", "b"]\n'


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.placement, "place", partial(placement.place, find=lambda: GPUS))


def resolve(directory: Path, text: str, rank: int) -> Settings:
    file = directory / "w.toml"
    file.write_text(text)
    return settings.resolve(Options(rank, config=file, runtime_dir=directory))


@pytest.mark.parametrize(
    ("text", "rank", "gpu", "node", "launch"),
    [
        ("[deployment]\ntp_size = 2\n", 1, 1, 0, (0, 1)),
        ("[deployment]\ntp_size = 2\ndp_size = 2\n", 3, 3, 0, (2, 3)),
        (f"[deployment]\ntp_size = 4\n{NODES}", 3, 1, 1, (2, 3)),
        (f'[deployment]\ntp_size = 1\n[[rank]]\nrank = 0\ngpu = "{GPUS[3]}"\n', 0, 3, 0, (0,)),
        (f'[[rank]]\nrank = 3\ngpu = "{GPUS[2]}"\n', 3, 2, 0, (3,)),
    ],
)
def test_where_a_rank_is(tmp_path: Path, text: str, rank: int, gpu: int, node: int, launch: tuple[int, ...]) -> None:
    got = resolve(tmp_path, text, rank)
    assert (got.error, got.gpu, got.node, got.launch) == (None, GPUS[gpu], node, launch)


def test_host_memory_needs_no_gpu(tmp_path: Path) -> None:
    got = resolve(tmp_path, '[memory]\nbackend = "host"\n[deployment]\ntp_size = 8\n', 7)
    assert (got.error, got.gpu, got.launch) == (None, "", tuple(range(8)))


@pytest.mark.parametrize(
    ("text", "rank", "says"),
    [
        ("[deployment]\ntp_size = 2\n", 2, "[deployment] has ranks 0 to 1, not 2"),
        ("[deployment]\ntp_size = 8\n", 5, "rank 5 would be on GPU 5, and this host shows 4 GPUs"),
        (f'[[rank]]\nrank = 3\ngpu = "{GPUS[2]}"\n', 2, "no [[rank]] table has rank = 2"),
        (
            "[deployment]\ntp_size = 3\nep_size = 2\n",
            2,
            "deployment.ep_size: 2 expert groups do not divide tp_size = 3",
        ),
    ],
)
def test_what_cannot_be_is_a_state(tmp_path: Path, text: str, rank: int, says: str) -> None:
    got = resolve(tmp_path, text, rank)
    assert got.error is not None
    assert got.error.code == ConfigError.code
    assert says in got.error.message
    assert (got.gpu, rank in got.launch) == ("", True)
