"""GPU memory as shareable arenas: one CUDA VMM allocation each, shared by a POSIX file descriptor.

CUDA Driver API, section "Virtual Memory Management". The descriptor is the memory: it keeps the allocation alive
without any CUDA process, and whoever holds it can map it. Protection belongs to a mapping, not to the descriptor:
a reader's mapping is read-only for that reader, and no export-time restriction exists.

The driver is reached through cuda-bindings, in the primary context of the device, which is also torch's.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

from weightcache.errors import AttachFailed, DeviceUnavailable, NoRoom
from weightcache.memory import LARGE_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightcache.errors import WeightcacheError

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class CudaError(Exception):
    """A driver call that failed; ``name`` is CUDA's name of the error. It never leaves this module."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} failed with {name}")
        self.name = name


def is_out_of_memory(error: CudaError) -> bool:
    """Whether memory may help."""
    return error.name == _OUT_OF_MEMORY


class Driver:
    """The driver API with results checked: ``driver.cuMemMap(...)`` returns the values or raises CudaError."""

    def __init__(self, bindings: Any) -> None:
        self.bindings = bindings

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.bindings, name)

        def checked(*args: Any) -> Any:
            status, *values = function(*args)
            if int(status) != 0:
                raise CudaError(name, getattr(status, "name", str(status)))
            return values[0] if len(values) == 1 else tuple(values)

        return checked


class CudaRegion:
    """A range of device addresses with arenas mapped back to back, read-only. It must outlive every tensor from it."""

    def __init__(self, memory: CudaMemory, reserved: int) -> None:
        """Reserve ``reserved`` bytes of device addresses. Raises CudaError."""
        self.size = 0
        self._memory = memory
        self._reserved = reserved
        self._maps: list[tuple[int, int]] = []  # address, bytes
        self._base = 0
        if reserved:
            with memory.current():
                alignment = LARGE_PAGE if reserved >= LARGE_PAGE else memory.granularity
                self._base = int(memory.driver.cuMemAddressReserve(reserved, alignment, 0, 0))

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A uint8 CUDA tensor over ``size`` bytes at ``offset``, without a copy; it does not keep the region alive.

        Raises AttachFailed outside the mapped bytes.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise AttachFailed(f"bytes {offset} to {offset + size} lie outside the {self.size} bytes of the arenas")
        device = torch.device("cuda", self._memory.device)
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.as_tensor(_ArrayInterface(self._base + offset, size), device=device)

    def close(self) -> None:
        """Unmap and free the addresses. No tensor of the region may be used afterwards.

        Best effort: after a GPU fault every call fails, and the mappings go with the process.
        """
        driver = self._memory.driver
        with contextlib.suppress(CudaError), self._memory.current():
            if self._maps:
                with contextlib.suppress(CudaError):
                    driver.cuCtxSynchronize()  # kernels in flight may still read
            # One call for each arena: the driver's manual does not promise that one call may span several.
            while self._maps:
                with contextlib.suppress(CudaError):
                    driver.cuMemUnmap(*self._maps.pop())
            if self._reserved:
                driver.cuMemAddressFree(self._base, self._reserved)
        self.size = self._reserved = 0

    def _map(self, handle: Any, size: int) -> int:
        """Map ``handle`` at the end; the mapping keeps the allocation, so the handle can be released."""
        address = self._base + self.size
        self._memory.driver.cuMemMap(address, size, 0, handle, 0)
        self._maps.append((address, size))
        self.size += size
        return address

    def _unmap_last(self) -> None:
        address, size = self._maps.pop()
        self.size -= size
        with contextlib.suppress(CudaError):
            self._memory.driver.cuMemUnmap(address, size)


class CudaWritableRegion(CudaRegion):
    """Arenas under construction, mapped for writing; ``size`` is the number of bytes that arenas back so far."""

    def __init__(self, memory: CudaMemory, reserved: int) -> None:
        """Reserve ``reserved`` bytes of device addresses. Raises CudaError."""
        super().__init__(memory, reserved)
        self._fds: list[int] = []
        self._frozen = False

    def extend(self, size: int) -> None:
        """Create one more arena of ``size`` bytes (a multiple of the granularity) at the end; its bytes are undefined.

        Raises NoRoom, after torch's unused cached memory was given back, or DeviceUnavailable for any other failure.
        """
        memory = self._memory
        if self._frozen or size <= 0 or size % memory.granularity or self.size + size > self._reserved:
            raise ValueError(f"no arena of {size} bytes at {self.size} of {self._reserved} (frozen: {self._frozen})")
        with memory.failures(DeviceUnavailable, f"cannot create an arena of {size} bytes"), memory.current():
            try:
                handle = memory.driver.cuMemCreate(size, memory.properties(), 0)
            except CudaError as error:
                if not is_out_of_memory(error) or not _give_back_cached(memory.device):
                    raise
                handle = memory.driver.cuMemCreate(size, memory.properties(), 0)
            fd = -1
            try:
                fd = int(memory.driver.cuMemExportToShareableHandle(handle, memory.fd_type, 0))
                os.set_inheritable(fd, False)
                address = self._map(handle, size)
                try:
                    memory.set_access(address, size, writable=True)
                except BaseException:
                    self._unmap_last()
                    raise
            except BaseException:
                if fd >= 0:
                    os.close(fd)
                raise
            finally:
                # Descriptor and mapping keep the allocation; a handle left open would outlive both.
                with contextlib.suppress(CudaError):
                    memory.driver.cuMemRelease(handle)
        self._fds.append(fd)

    def freeze(self) -> tuple[int, ...]:
        """Wait for the device, make this process's own mapping read-only in place, return one descriptor per arena.

        The descriptors become the caller's. Addresses stay, so existing tensors stay valid. Raises DeviceUnavailable.
        """
        memory = self._memory
        with memory.failures(DeviceUnavailable, "cannot make the arenas read-only"), memory.current():
            memory.driver.cuCtxSynchronize()
            if self.size:
                memory.set_access(self._base, self.size, writable=False)
        fds = tuple(self._fds)
        self._fds.clear()
        self._frozen = True
        return fds

    def close(self) -> None:
        """Unmap and forget the arenas; they live on where their descriptors are held."""
        super().close()
        while self._fds:
            os.close(self._fds.pop())


class CudaMemory:
    """The memory of one GPU through CUDA VMM."""

    name = "cuda"

    def __init__(self, device: int = 0, bindings: Any = None) -> None:
        """Open CUDA device ordinal ``device`` (among the visible ones, as torch counts).

        ``bindings`` stands in for ``cuda.bindings.driver`` in tests. Raises DeviceUnavailable.
        """
        self.device = device
        self.driver = driver = _open_driver(bindings)
        api = driver.bindings
        with self.failures(DeviceUnavailable, f"cannot use GPU {device}"):
            self._handle = _device(driver, device)
            attributes = api.CUdevice_attribute
            for attribute, what in (
                (attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"),
                (
                    attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                    "sharing memory by file descriptor",
                ),
            ):
                if not int(driver.cuDeviceGetAttribute(attribute, self._handle)):
                    raise DeviceUnavailable(f"GPU {device} does not support {what}, which weightcache needs")
            self.fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            recommended = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            self.granularity = int(driver.cuMemGetAllocationGranularity(self.properties(), recommended))
            # Never released: torch uses the same primary context until the process ends.
            self._context = driver.cuDevicePrimaryCtxRetain(self._handle)

    def reserve(self, size: int) -> CudaWritableRegion:
        """Reserve addresses for ``size`` bytes without backing them. Raises NoRoom or DeviceUnavailable."""
        with self.failures(DeviceUnavailable, f"cannot reserve {size} bytes of GPU addresses"):
            return CudaWritableRegion(self, -(-size // self.granularity) * self.granularity)

    def map(self, fds: Sequence[int], sizes: Sequence[int]) -> CudaRegion:
        """Map arenas of ``sizes`` bytes back to back, read-only; the descriptors stay the caller's.

        Raises AttachFailed, or NoRoom where the driver runs out of memory; nothing stays mapped then.
        """
        if len(fds) != len(sizes):
            raise AttachFailed(f"{len(fds)} descriptors for {len(sizes)} arenas")
        if any(size <= 0 or size % self.granularity for size in sizes):
            raise AttachFailed(f"arenas of {list(sizes)} bytes, which are no multiples of {self.granularity}")
        with self.failures(AttachFailed, f"cannot map {len(fds)} arenas on GPU {self.device}"), self.current():
            region = CudaRegion(self, sum(sizes))
            try:
                for index, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
                    self._import(region, index, fd, size)
                if sizes:
                    self.set_access(region._base, region.size, writable=False)
            except BaseException:
                region.close()
                raise
        return region

    def free_bytes(self) -> int:
        """Free memory of the device now (cuMemGetInfo), in bytes. Raises DeviceUnavailable."""
        with self.failures(DeviceUnavailable, f"cannot ask GPU {self.device} for its free memory"), self.current():
            free, _ = self.driver.cuMemGetInfo()
        return int(free)

    def properties(self) -> Any:
        """CUmemAllocationProp of an arena: pinned on this device, exportable as a file descriptor."""
        api = self.driver.bindings
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._handle)
        properties.requestedHandleTypes = self.fd_type
        return properties

    def set_access(self, address: int, size: int, *, writable: bool) -> None:
        """Let this device read, or read and write, the mapped bytes at ``address``. Raises CudaError."""
        api = self.driver.bindings
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._handle)
        flags = api.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self.driver.cuMemSetAccess(address, size, [access], 1)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the primary context current on this thread, and leave the thread's own one as it was."""
        self.driver.cuCtxPushCurrent(self._context)
        try:
            yield
        finally:
            with contextlib.suppress(CudaError):
                self.driver.cuCtxPopCurrent()

    @contextlib.contextmanager
    def failures(self, kind: type[WeightcacheError], what: str) -> Iterator[None]:
        """Turn a CudaError into ``kind`` with the sentence ``what`` and CUDA's own name; out of memory is NoRoom."""
        try:
            yield
        except CudaError as error:
            if is_out_of_memory(error):
                raise NoRoom(f"{what}: GPU {self.device} is out of memory ({error})") from None
            raise kind(f"{what} ({error})") from None

    def _import(self, region: CudaRegion, index: int, fd: int, size: int) -> None:
        driver, api = self.driver, self.driver.bindings
        handle = driver.cuMemImportFromShareableHandle(fd, self.fd_type)
        try:
            properties = driver.cuMemGetAllocationPropertiesFromHandle(handle)
            on_device = properties.location.type == api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            if not on_device or int(properties.location.id) != int(self._handle):
                raise AttachFailed(f"arena {index} is not memory of GPU {self.device}")
            region._map(handle, size)
        finally:
            driver.cuMemRelease(handle)


class _ArrayInterface:
    """Device bytes as torch reads them: CUDA array interface, version 3 (numba.readthedocs.io, CUDA Array Interface).

    The read-only flag stays false because torch refuses it; the mapping itself is what refuses writes.
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_uuid(device: int = 0, bindings: Any = None) -> str:
    """The UUID of CUDA device ordinal ``device`` as nvidia-smi -L prints it: GPU-..., or MIG-... for a MIG instance.

    It is how an engine finds the agent of its GPU whatever CUDA_VISIBLE_DEVICES says. Raises DeviceUnavailable.
    """
    driver = _open_driver(bindings)
    # Where both exist the plain name is the old function, which answers with the parent GPU of a MIG instance.
    # cuda-bindings 13 has only the plain name, and it is the new function.
    name = "cuDeviceGetUuid_v2" if hasattr(driver.bindings, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    try:
        handle = _device(driver, device)
        raw = bytes(getattr(driver, name)(handle).bytes).hex()
    except CudaError as error:
        raise DeviceUnavailable(f"cannot read the UUID of GPU {device} ({error})") from None
    kind = "MIG" if " MIG " in device_name(device, bindings) else "GPU"
    return f"{kind}-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


def device_name(device: int = 0, bindings: Any = None) -> str:
    """The product name of CUDA device ordinal ``device``. Raises DeviceUnavailable."""
    driver = _open_driver(bindings)
    try:
        raw = bytes(driver.cuDeviceGetName(128, _device(driver, device)))
    except CudaError as error:
        raise DeviceUnavailable(f"cannot read the name of GPU {device} ({error})") from None
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def device_of_uuid(uuid: str, bindings: Any = None) -> int:
    """The ordinal, among the visible devices, of the GPU (or MIG instance) ``uuid``. Raises DeviceUnavailable."""
    for device in range(device_count(bindings)):
        if device_uuid(device, bindings).lower() == uuid.lower():
            return device
    raise DeviceUnavailable(f"the GPU {uuid} is not visible to this process (look at CUDA_VISIBLE_DEVICES)")


def device_count(bindings: Any = None) -> int:
    """How many devices this process can see. Raises DeviceUnavailable."""
    try:
        return int(_open_driver(bindings).cuDeviceGetCount())
    except CudaError as error:
        raise DeviceUnavailable(f"cannot count the GPUs ({error})") from None


def _open_driver(bindings: Any) -> Driver:
    if bindings is None:
        try:
            bindings = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DeviceUnavailable(
                f"the package cuda-bindings is missing in this environment ({error}): pip install cuda-bindings"
            ) from None
    driver = Driver(bindings)
    try:
        driver.cuInit(0)
    except CudaError as error:
        raise DeviceUnavailable(f"CUDA cannot start on this machine ({error})") from None
    except RuntimeError as error:  # cuda-bindings finds no libcuda.so.1
        raise DeviceUnavailable(f"no NVIDIA driver on this machine ({str(error).splitlines()[0]})") from None
    return driver


def _device(driver: Driver, device: int) -> Any:
    count = int(driver.cuDeviceGetCount())
    if not 0 <= device < count:
        raise DeviceUnavailable(f"there is no GPU {device}: {count} visible (CUDA_VISIBLE_DEVICES hides others)")
    return driver.cuDeviceGet(device)


def _give_back_cached(device: int) -> bool:
    """Return torch's unused cached memory to the device; whether there was any."""
    if not torch.cuda.is_initialized():
        return False
    before = int(torch.cuda.memory_reserved(device))
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device)) < before
