"""Which failures of an engine speak against its memory."""

from __future__ import annotations

import pytest
import torch

from weightcache.engine import faults, state


def caused(error: Exception, by: Exception) -> Exception:
    try:
        try:
            raise by
        except Exception as cause:
            raise error from cause
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (caused(RuntimeError("the batch failed"), RuntimeError("CUDA error: misaligned address")), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (caused(RuntimeError("the batch failed"), torch.OutOfMemoryError("CUDA error: out of memory")), False),
        (ValueError("a prompt that is too long"), False),
        (KeyError("CUDA"), False),
    ],
)
def test_faults(error: Exception, expected: bool) -> None:
    assert faults.is_fault(error) is expected


def test_every_lease_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Lease:
        def fault(self, reason: str) -> None:
            told.append(reason)

    monkeypatch.setattr(state.process, "leases", [Lease(), Lease()])
    faults.report(ValueError("no"))
    assert told == []
    faults.report(RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA"))
    assert told == ["RuntimeError: CUDA error: unspecified launch failure"] * 2
