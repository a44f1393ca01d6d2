"""Which checkpoint it is, and whether it is whole."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support import pagecache
from weightcache import checkpoint
from weightcache.errors import CheckpointError


def safetensors(path: Path, data: bytes, header: dict[str, Any] | None = None) -> None:
    """A safetensors file of one tensor."""
    text = json.dumps(header or {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small whole checkpoint."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["X"]}')
    for number in (1, 2):
        safetensors(folder / f"model-{number}.safetensors", os.urandom(100_000))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_reading_changes_nothing(model: Path) -> None:
    first = checkpoint.identity(model)
    for path in model.iterdir():
        path.read_bytes()
    checkpoint.check(model)
    assert checkpoint.identity(model) == first
    assert len(first) == 32


def rewritten_in_place(path: Path) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-60_000, 2)
        file.write(b"\0" * 10)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert path.stat().st_mtime_ns == stat.st_mtime_ns


def replaced_by_equal_bytes(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.rename(path)


def changed_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"U8", b"I8", 1))


def changed_config(path: Path) -> None:
    (path.parent / "config.json").write_text('{"architectures": ["Y"]}')


def added_file(path: Path) -> None:
    (path.parent / "tokenizer.json").write_text("{}")


def removed_file(path: Path) -> None:
    path.unlink()


def renamed(path: Path) -> None:
    path.rename(path.with_name("model-3.safetensors"))


@pytest.mark.parametrize(
    "change",
    [
        rewritten_in_place, replaced_by_equal_bytes, changed_header, changed_config, added_file, removed_file, renamed,
    ],
)  # fmt: skip
def test_a_change_shows(model: Path, change: Any) -> None:
    first = checkpoint.identity(model)
    change(model / "model-1.safetensors")
    assert checkpoint.identity(model) != first


def test_content_counts_even_where_inode_and_times_are_equal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header and the sampled blocks are read, not only described by stat."""
    seen: list[bytes] = []
    original = checkpoint._blocks

    def blocks(path: Path, length: int) -> Any:
        for block in original(path, length):
            seen.append(block)
            yield block

    monkeypatch.setattr(checkpoint, "_blocks", blocks)
    checkpoint.identity(model)
    assert any(b"data_offsets" in block for block in seen)
    assert sum(len(block) == checkpoint.SAMPLE_BYTES for block in seen) == 2 * checkpoint.SAMPLES
    assert (model / "config.json").read_bytes() in seen


def test_what_does_not_shape_the_weights_does_not_count(model: Path) -> None:
    first = checkpoint.identity(model)
    (model / "README.md").write_text("words")
    (model / "folder").mkdir()
    assert checkpoint.identity(model) == first


def test_sizes(model: Path) -> None:
    assert checkpoint.size(model) == sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert [path.name for path in checkpoint.weight_files(model)] == ["model-1.safetensors", "model-2.safetensors"]


def test_a_whole_checkpoint_passes(model: Path) -> None:
    checkpoint.check(model)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def headless(path: Path) -> None:
    os.truncate(path, 4)


def long_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}" * 50)


def written(header: Any) -> Any:
    def write(path: Path) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text)

    return write


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: shutil.rmtree(p.parent), "there is no model at"),
        (lambda p: (p.parent / "config.json").unlink(), "has no config.json"),
        (lambda p: (p.parent / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda p: (p.parent / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
        (lambda p: (p.parent / "config.json").write_bytes(b"\xff\xfe\xff"), "config.json is not valid JSON"),
        (cut, "is truncated or damaged"),
        (headless, "its header is missing or cut off"),
        (long_header, "its header is missing or cut off"),
        (written(b"{]"), "its header is damaged"),
        (written([]), "its header is damaged"),
        (written({"a": {}}), "its header is damaged"),
        (written({"a": {"data_offsets": [0]}}), "its header is damaged"),
        (written({"a": {"data_offsets": [0, "x"]}}), "its header is damaged"),
        (written({"a": {"data_offsets": [0, None]}}), "its header is damaged"),
        (written(b"[" * 100_000), "its header is damaged"),
        (lambda p: p.unlink(), "lacks 1 weight files that its index names, first model-1.safetensors"),
        (lambda p: [f.unlink() for f in p.parent.glob("*.safetensors")], "holds no weight files"),
        (lambda p: (p.parent / "model.safetensors.index.json").write_text("{}"), "index.json is damaged"),
        (
            lambda p: (p.parent / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
            "index.json is damaged",
        ),
    ],
)
def test_what_cannot_load_is_one_sentence(model: Path, change: Any, text: str) -> None:
    change(model / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=text) as caught:
        checkpoint.check(model)
    assert "\n" not in caught.value.message


def test_a_file_is_no_checkpoint(model: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory"):
        checkpoint.check(model / "config.json")


def test_identity_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        checkpoint.identity(tmp_path / "none")


def test_identity_of_damaged_files_is_no_crash(model: Path) -> None:
    headless(model / "model-1.safetensors")
    long_header(model / "model-2.safetensors")
    assert len(checkpoint.identity(model)) == 32


def test_identity_reads_samples_and_nothing_around_them(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = 200 << 20
    text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(size >> 20):
            file.write(block)
    (tmp_path / "config.json").write_text("{}")
    pagecache.drop([path])
    if pagecache.resident([path]) > 1 << 20:
        pytest.skip("this file system does not let go of its pages")
    checkpoint.identity(tmp_path)
    assert 0 < pagecache.resident([path]) < 300 << 10
    path.read_bytes()
    assert pagecache.resident([path]) > 100 << 20, "the measurement itself works"
