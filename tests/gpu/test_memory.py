"""CUDA VMM arenas on a real GPU: who keeps the memory, who may write, what is left behind.

python -m pytest tests/gpu/test_memory.py -s        prints the figures too
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.bench import synthetic
from tests.bench.holder import Holder
from weightcache.errors import AttachFailed, NoRoom
from weightcache.loader.check import check
from weightcache.memory import GIB, open_memory
from weightcache.memory.digest import BLOCK, digest

MIB = 1 << 20
SLACK = 16 * MIB
"""What the driver may keep or release by itself while a test looks at the free memory."""


@pytest.fixture(scope="module")
def memory():
    memory = open_memory("cuda")
    synthetic.warm_up(memory)
    digest(torch.zeros(8 * BLOCK + 1, dtype=torch.uint8, device="cuda"))
    return memory


@pytest.fixture
def holder(runtime_dir):
    serving = Holder(runtime_dir / "0.sock").start()
    yield serving
    serving.close()


def settled(memory, wanted: int, seconds: float = 15.0) -> int:
    """Free bytes, once they are at least ``wanted`` or time is up: contexts of ended processes go a little later."""
    torch.cuda.empty_cache()
    deadline = time.monotonic() + seconds
    while (free := memory.free_bytes()) < wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return free


def published_by_a_process_that_is_killed(holder, gib: float, tensors: int = 292) -> dict:
    """Publish from a process of its own, and SIGKILL it: only the holder's descriptors are left."""
    extra = ["--gib", str(gib), "--tensors", str(tensors), "--linger"]
    with synthetic.child("publish", "cuda", holder.path, *extra) as publisher:
        made = synthetic.first_line(publisher)
        publisher.send_signal(signal.SIGKILL)
    return made


def test_bytes_outlive_their_killed_exporter(memory, holder):
    before = memory.free_bytes()
    published_by_a_process_that_is_killed(holder, 3.5)
    held = sum(arena.bytes for arena in holder.info.arenas)
    # The arenas are in use, and nothing else is: no context, no cache.
    assert abs(settled(memory, before - held) - (before - held)) <= SLACK
    verdict = check(memory, holder.path)
    print(verdict)
    assert verdict.code == "ok"
    assert verdict.bytes == sum(arena.used for arena in holder.info.arenas)
    holder.close()
    assert settled(memory, before - SLACK) >= before - SLACK, "the last closed descriptor frees the memory"


def test_mapping_keeps_the_memory_after_the_last_descriptor(memory, holder):
    before = memory.free_bytes()
    published_by_a_process_that_is_killed(holder, 1, 16)
    infos = holder.info.arenas
    region = memory.map(holder.fds[1:], [arena.bytes for arena in infos])
    holder.close()
    assert digest(region.bytes_at(0, infos[0].used)) == infos[0].digest
    region.close()
    assert settled(memory, before - SLACK) >= before - SLACK


def test_write_through_a_mapping_is_refused_and_harms_nobody(memory, holder):
    published_by_a_process_that_is_killed(holder, 1, 16)
    infos = holder.info.arenas
    other = memory.map(holder.fds[1:], [arena.bytes for arena in infos])
    with synthetic.child("attach", "cuda", holder.path, "--write") as writer:
        result = synthetic.first_line(writer)
    print(result)
    assert result["write"].startswith("refused")
    assert digest(other.bytes_at(0, infos[0].used)) == infos[0].digest, "a reader that was there goes on"
    other.close()
    with synthetic.child("attach", "cuda", holder.path, "--verify") as reader:
        assert synthetic.first_line(reader)["intact"], "and the next one finds the bytes as published"


def test_frozen_arenas_are_read_only_for_their_publisher_too():
    code = (
        "import torch\n"
        "from weightcache.memory import open_memory\n"
        "memory = open_memory('cuda')\n"
        "region = memory.reserve(memory.granularity)\n"
        "region.extend(memory.granularity)\n"
        "tensor = region.bytes_at(0, 1024).fill_(7)\n"
        "fds = region.freeze()\n"
        "assert tensor.cpu().unique().tolist() == [7]\n"
        "try:\n"
        "    tensor.fill_(1)\n"
        "    torch.cuda.synchronize()\n"
        "except RuntimeError:\n"
        "    print('refused', flush=True)\n"
        "import os\n"
        "os._exit(0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "refused\n", result.stderr


def test_fifty_short_lived_children_leave_the_memory_where_it_was(memory, holder):
    published_by_a_process_that_is_killed(holder, 1, 292)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    before = settled(memory, memory.free_bytes())
    with synthetic.child("churn", "cuda", holder.path, "--count", "50") as process:
        result = synthetic.first_line(process)
    print(result)
    assert result["attached"] == 50
    assert settled(memory, before - SLACK) >= before - SLACK
    # The holder lives in this process: its ends of the last conversations may still be closing.
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 2
    assert check(memory, holder.path).code == "ok"


def test_arenas_cost_their_size_and_a_second_mapping_nothing(memory):
    sizes = (memory.granularity, 512 * MIB, 2 * memory.granularity)
    region = memory.reserve(sum(sizes))
    for size in sizes:
        before = memory.free_bytes()
        region.extend(size)
        assert 0 <= before - memory.free_bytes() - size <= SLACK
    fds = region.freeze()
    before = memory.free_bytes()
    reader = memory.map(fds, sizes)
    assert before - memory.free_bytes() <= SLACK, "a second mapping is no second copy"
    reader.close()
    region.close()
    for fd in fds:
        os.close(fd)


def test_packing_tensor_by_tensor_stays_below_one_copy_and_an_arena(memory):
    """The low-water mark of free memory while originals move into arenas and are freed one by one."""
    count, each, arena = 16, 256 * MIB, GIB
    torch.cuda.empty_cache()
    start = memory.free_bytes()
    originals = [torch.full((each,), i, dtype=torch.uint8, device="cuda") for i in range(count)]
    region = memory.reserve(count * each)
    low = memory.free_bytes()
    for i in range(count):
        if (i + 1) * each > region.size:
            region.extend(arena)
        low = min(low, memory.free_bytes())
        region.bytes_at(i * each, each).copy_(originals[i])
        originals[i] = None
        torch.cuda.empty_cache()
    print(f"peak {(start - low) / MIB:.0f} MiB for {count * each / MIB:.0f} MiB")
    assert start - low <= count * each + arena + each + SLACK
    assert [int(region.bytes_at(i * each, each).max()) for i in range(count)] == list(range(count))
    region.close()
    assert settled(memory, start - SLACK) >= start - SLACK


def test_full_device_is_no_room_and_leaves_everything_usable(memory):
    wanted = (memory.free_bytes() // memory.granularity + 1024) * memory.granularity
    region = memory.reserve(wanted)
    before = memory.free_bytes()
    with pytest.raises(NoRoom, match="CUDA_ERROR_OUT_OF_MEMORY"):
        region.extend(wanted)
    assert memory.free_bytes() >= before - SLACK
    region.extend(memory.granularity)
    assert int(region.bytes_at(0, 8).fill_(3).sum()) == 24
    region.close()


def test_torchs_unused_cache_makes_room_for_an_arena(memory):
    cached = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    del cached
    assert torch.cuda.memory_reserved() >= 2 * GIB
    wanted = (memory.free_bytes() + GIB) // memory.granularity * memory.granularity
    region = memory.reserve(wanted)
    region.extend(wanted)
    region.close()


def test_descriptors_that_are_no_arenas_are_refused(memory):
    before = memory.free_bytes()
    with open(os.devnull) as file, pytest.raises(AttachFailed, match="CUDA_ERROR"):
        memory.map([file.fileno()], [memory.granularity])
    region = memory.reserve(memory.granularity)
    region.extend(memory.granularity)
    (fd,) = region.freeze()
    with pytest.raises(AttachFailed, match="CUDA_ERROR"):
        memory.map([fd], [2 * memory.granularity])
    memory.map([fd], [memory.granularity]).close()
    os.close(fd)
    region.close()
    assert settled(memory, before - SLACK) >= before - SLACK


@pytest.mark.parametrize("size", [0, 1, 13, BLOCK * 8, 5 * BLOCK * 8 + 3, 200 * MIB + 5])
def test_digests_are_equal_on_cpu_and_gpu(memory, size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    on_device = data.cuda()
    assert digest(on_device) == digest(data)
    assert digest(on_device, 3) == digest(data, 5)


def test_figures_of_the_digest(memory):
    data = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda").random_()
    for chunk in (256, 512, 1024, 2048, 4096):
        digest(data[: 64 * MIB], chunk)
        torch.cuda.synchronize()
        started = time.perf_counter()
        digest(data, chunk)
        print(f"{chunk} blocks at a time: {data.numel() / (time.perf_counter() - started) / 1e9:.0f} GB/s")


def test_uuid_is_the_one_of_nvidia_smi():
    from weightcache.memory.cuda_vmm import device_of_uuid, device_uuid

    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    assert device_uuid(0) in listed
    assert device_of_uuid(device_uuid(0)) == 0


def test_permuted_devices_still_find_their_own_arenas(runtime_dir):
    """The second GPU under its own ordinal, and as the only visible one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    code = (
        "import json, os, sys\n"
        "from weightcache.memory import open_memory\n"
        "from weightcache.memory.cuda_vmm import device_of_uuid\n"
        "memory = open_memory('cuda', device_of_uuid(sys.argv[1]))\n"
        "region = memory.map([int(sys.argv[2])], [memory.granularity])\n"
        "print(json.dumps([memory.device, int(region.bytes_at(0, 8).sum())]))\n"
    )
    from weightcache.memory.cuda_vmm import device_uuid

    memory = open_memory("cuda", 1)
    region = memory.reserve(memory.granularity)
    region.extend(memory.granularity)
    region.bytes_at(0, 8).fill_(5)
    fds = region.freeze()
    for visible, ordinal in (("0,1", 1), ("1", 0), ("1,0", 0)):
        result = subprocess.run(
            [sys.executable, "-c", code, device_uuid(1), str(fds[0])],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            pass_fds=fds, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert json.loads(result.stdout or "null") == [ordinal, 40], result.stderr
    os.close(fds[0])
    region.close()


@pytest.mark.slow
def test_attach_does_not_depend_on_bytes(memory):
    """7 GiB against 100 GiB in the same number of tensors. The table is the result; times are not asserted."""
    free = settled(memory, 104 * GIB, 5.0)
    if free < 104 * GIB:
        pytest.skip(f"needs 104 GiB of free GPU memory, has {free / GIB:.0f}")
    rows = synthetic.compare("cuda", [7.0, 100.0], 292)
    print("\n" + synthetic.table(rows))
    print(json.dumps(rows))
    assert [row["tensors"] for row in rows] == [292, 292]
    assert all(row["intact"] for row in rows)


@pytest.mark.slow
def test_attach_of_three_thousand_tensors(memory):
    """What the largest models have; the table is the result, times are not asserted."""
    rows = synthetic.compare("cuda", [7.0], 3000)
    print("\n" + synthetic.table(rows))
    print(json.dumps(rows))
    assert [row["tensors"] for row in rows] == [3000]
    assert all(row["intact"] for row in rows)
