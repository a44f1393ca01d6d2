"""The page cache helpers, on a file on a real disk."""

import mmap
from pathlib import Path

import pytest

from tests.support import environments, pagecache

PAGES = 64


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pagecache") / "file"
    path.write_bytes(b"x" * (PAGES * mmap.PAGESIZE - 1))
    return path


def test_a_dropped_file_is_gone_and_a_read_brings_it_back(file: Path) -> None:
    pagecache.drop([file])
    if pagecache.resident([file]):
        pytest.skip(f"{file} lies on a filesystem in memory")
    with file.open("rb", buffering=0) as stream:
        stream.read(1)
    assert 0 < pagecache.resident([file]) <= PAGES * mmap.PAGESIZE
    file.read_bytes()
    assert pagecache.resident([file]) == PAGES * mmap.PAGESIZE
    assert pagecache.resident([file]) == PAGES * mmap.PAGESIZE, "counting must not change the count"
    pagecache.drop([file])
    assert pagecache.resident([file]) == 0


def test_files(tmp_path: Path, file: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("folder/b", "a"):
        (tmp_path / name).touch()
    assert pagecache.files(tmp_path) == [tmp_path / "a", tmp_path / "folder" / "b"]
    assert pagecache.files(file) == [file]
    assert pagecache.resident(pagecache.files(tmp_path)) == 0


def test_where_models_live_can_be_dropped_from_the_cache() -> None:
    """Tests that prove 'nothing was read from disk' mean something only on such a filesystem."""
    folder = environments.folder()
    if not folder.exists():
        pytest.skip("no environments")
    probe = folder / ".pagecache-probe"
    try:
        probe.write_bytes(b"x" * mmap.PAGESIZE)
        pagecache.drop([probe])
        assert pagecache.resident([probe]) == 0
    finally:
        probe.unlink(missing_ok=True)
