"""An in-memory stand-in for cuda.bindings.driver: the calls weightcache uses, with the driver's own rules.

Descriptors are real (memfds), so that a leak shows in /proc/self/fd. ``fail_at`` makes call number N fail.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

GRANULARITY = 2 << 20
CONTEXT = "primary"
UUID = bytes(range(16))


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_UNKNOWN = 999


def _enum(*names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: name for name in names})


@dataclass
class Allocation:
    size: int
    location: int
    handles: int = 0


@dataclass
class FakeDriver:
    fail_at: int = -1
    error: CUresult = CUresult.CUDA_ERROR_UNKNOWN
    free: int = 64 * GRANULARITY
    devices: int = 1
    missing_attribute: str = ""
    product: bytes = b"NVIDIA H200"

    calls: list[str] = field(default_factory=list)
    contexts: list[str] = field(default_factory=list)
    handles: dict[int, Allocation] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, tuple[int, Allocation]] = field(default_factory=dict)
    access: dict[int, str] = field(default_factory=dict)
    exported: dict[int, Allocation] = field(default_factory=dict)  # inode -> allocation
    cleared: list[tuple[int, int]] = field(default_factory=list)

    CUmemLocationType = _enum("CU_MEM_LOCATION_TYPE_DEVICE", "CU_MEM_LOCATION_TYPE_HOST")
    CUmemAllocationType = _enum("CU_MEM_ALLOCATION_TYPE_PINNED")
    CUmemAllocationHandleType = _enum("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
    CUmemAllocationGranularity_flags = _enum("CU_MEM_ALLOC_GRANULARITY_RECOMMENDED")
    CUmemAccess_flags = _enum("CU_MEM_ACCESS_FLAGS_PROT_READ", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
    CUdevice_attribute = _enum(
        "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    )

    def __post_init__(self) -> None:
        self._next_handle = itertools.count(1000)
        self._next_address = itertools.count(0x7F00_0000_0000, 1 << 36)

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def __getattribute__(self, name: str):
        attribute = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return attribute

        def call(*args):
            self.calls.append(name)
            if len(self.calls) - 1 == self.fail_at:
                return (self.error, None)
            result = attribute(*args)
            return result if isinstance(result, tuple) else (result,)

        return call

    def cuInit(self, flags):  # noqa: N802
        return CUresult.CUDA_SUCCESS if self.devices else CUresult.CUDA_ERROR_NO_DEVICE

    def cuDeviceGetCount(self):  # noqa: N802
        return 0, self.devices

    def cuDeviceGet(self, ordinal):  # noqa: N802
        return 0, ordinal

    def cuDeviceGetName(self, length, device):  # noqa: N802
        return 0, self.product.ljust(length, b"\0")

    def cuDeviceGetUuid(self, device):  # noqa: N802
        return 0, SimpleNamespace(bytes=UUID)

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return 0, int(not self.missing_attribute or self.missing_attribute not in attribute)

    def cuMemGetAllocationGranularity(self, properties, option):  # noqa: N802
        return 0, GRANULARITY

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return 0, CONTEXT

    def cuCtxPushCurrent(self, context):  # noqa: N802
        self.contexts.append(context)
        return CUresult.CUDA_SUCCESS

    def cuCtxPopCurrent(self):  # noqa: N802
        return 0, self.contexts.pop()

    def cuCtxSynchronize(self):  # noqa: N802
        return CUresult.CUDA_SUCCESS if self.contexts else CUresult.CUDA_ERROR_INVALID_CONTEXT

    def cuMemGetInfo(self):  # noqa: N802
        if not self.contexts:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None, None
        return 0, self.free, 64 * GRANULARITY

    def cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        if size <= 0 or size % GRANULARITY:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        base = next(self._next_address)
        self.reserved[base] = size
        return 0, base

    def cuMemAddressFree(self, address, size):  # noqa: N802
        if self.reserved.get(address) != size or any(address <= a < address + size for a in self.mapped):
            return CUresult.CUDA_ERROR_INVALID_VALUE
        del self.reserved[address]
        return CUresult.CUDA_SUCCESS

    def cuMemCreate(self, size, properties, flags):  # noqa: N802
        assert properties.type == "CU_MEM_ALLOCATION_TYPE_PINNED"
        assert properties.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        if size <= 0 or size % GRANULARITY:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        if size > self.free:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.free -= size
        return 0, self._handle(Allocation(size, properties.location.id))

    def _handle(self, allocation: Allocation) -> int:
        handle = next(self._next_handle)
        self.handles[handle] = allocation
        return handle

    def _collect(self, allocation: Allocation) -> None:
        """Give memory back that nothing refers to any more."""
        held = [*self.handles.values(), *self.exported.values(), *(mapped for _, mapped in self.mapped.values())]
        if not any(allocation is other for other in held):
            self.free += allocation.size

    def cuMemRelease(self, handle):  # noqa: N802
        found = self.handles.pop(handle, None)
        if found:
            self._collect(found)
        return CUresult.CUDA_SUCCESS if found else CUresult.CUDA_ERROR_INVALID_VALUE

    def cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        inside = any(base <= address and address + size <= base + room for base, room in self.reserved.items())
        overlap = any(address < a + n and a < address + size for a, (n, _) in self.mapped.items())
        allocation = self.handles.get(handle)
        if not inside or overlap or allocation is None or size > allocation.size:
            return CUresult.CUDA_ERROR_INVALID_VALUE
        self.mapped[address] = (size, allocation)
        return CUresult.CUDA_SUCCESS

    def cuMemUnmap(self, address, size):  # noqa: N802
        if address not in self.mapped or self.mapped[address][0] != size:
            return CUresult.CUDA_ERROR_INVALID_VALUE
        _, allocation = self.mapped.pop(address)
        self.access.pop(address, None)
        self._collect(allocation)
        return CUresult.CUDA_SUCCESS

    def cuMemSetAccess(self, address, size, descriptions, count):  # noqa: N802
        (description,) = descriptions
        end = address + size
        while address < end:
            if address not in self.mapped:
                return CUresult.CUDA_ERROR_INVALID_VALUE
            self.access[address] = description.flags.removeprefix("CU_MEM_ACCESS_FLAGS_PROT_")
            address += self.mapped[address][0]
        return CUresult.CUDA_SUCCESS if address == end and count == 1 else CUresult.CUDA_ERROR_INVALID_VALUE

    def cuMemsetD8(self, address, value, size):  # noqa: N802
        if value != 0 or self.mapped.get(address, (0,))[0] != size or self.access.get(address) != "READWRITE":
            return CUresult.CUDA_ERROR_INVALID_VALUE
        self.cleared.append((address, size))
        return CUresult.CUDA_SUCCESS

    def cuMemExportToShareableHandle(self, handle, kind, flags):  # noqa: N802
        if handle not in self.handles or flags != 0:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        fd = os.memfd_create("fake-arena", 0)
        self.exported[os.fstat(fd).st_ino] = self.handles[handle]
        return 0, fd

    def cuMemImportFromShareableHandle(self, fd, kind):  # noqa: N802
        allocation = self.exported.get(os.fstat(fd).st_ino)
        return (0, self._handle(allocation)) if allocation else (CUresult.CUDA_ERROR_INVALID_VALUE, None)

    def cuMemGetAllocationPropertiesFromHandle(self, handle):  # noqa: N802
        location = SimpleNamespace(type="CU_MEM_LOCATION_TYPE_DEVICE", id=self.handles[handle].location)
        return 0, SimpleNamespace(location=location)

    def assert_clean(self) -> None:
        """Nothing is left: handles, mappings, reservations, pushed contexts, descriptors."""
        assert not self.handles
        assert not self.mapped
        assert not self.reserved
        assert not self.contexts
        assert open_arena_fds() == []


def open_arena_fds() -> list[str]:
    """The descriptors of this process that refer to a fake arena."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if "fake-arena" in target:
            found.append(link.name)
    return found
