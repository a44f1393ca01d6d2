"""The GPUs of a host, as the driver's files in /proc list them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from weightcache import gpus

UUID = "GPU-0123456{}-89ab-cdef-0123-456789abcdef"


def card(root: Path, bus: str, uuid: str) -> None:
    (root / bus).mkdir(parents=True)
    text = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 177\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
    (root / bus / "information").write_text(text)


def test_in_the_order_of_the_bus(tmp_path: Path) -> None:
    for bus, number in (("10000:01:00.0", 4), ("0000:ba:00.0", 2), ("0001:03:00.0", 3), ("0000:19:00.0", 1)):
        card(tmp_path, bus, UUID.format(number))
    assert gpus.installed(tmp_path) == tuple(UUID.format(i) for i in range(1, 5))


def test_one_spelling(tmp_path: Path) -> None:
    card(tmp_path, "0000:19:00.0", UUID.format("A").upper())
    assert gpus.installed(tmp_path) == (UUID.format("a"),)


def test_without_a_driver(tmp_path: Path) -> None:
    assert gpus.installed(tmp_path / "none") == ()


def test_a_gpu_that_nobody_has_opened_yet_takes_its_place(tmp_path: Path) -> None:
    """Else the others would move up, and a rank would get another one's."""
    (tmp_path / "0000:19:00.0").mkdir()
    card(tmp_path, "0000:20:00.0", "GPU-????????-????-????-????-????????????")
    card(tmp_path, "0000:21:00.0", UUID.format(1))
    assert gpus.installed(tmp_path) == ("", "", UUID.format(1))


def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "0000:19:00.0").mkdir()
    pipe = tmp_path / "0000:19:00.0/information"
    os.mkfifo(pipe)  # opening it hangs as the driver does
    began = time.monotonic()
    assert gpus.installed(tmp_path, 0.1) == ()
    assert time.monotonic() - began < 2
    os.close(os.open(pipe, os.O_WRONLY))  # and the thread ends
