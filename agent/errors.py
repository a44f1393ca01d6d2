"""One exception tree: every error has a stable code, one operator sentence and an exit status.

    WeightcacheError            internal        70
    ├── UsageError              usage            2
    ├── ConfigError             config          78
    ├── AgentUnavailable        no-agent        69
    ├── ProtocolError           protocol        76
    │   └── VersionSkew         version-skew    76
    ├── PermissionRefused       permission      77
    ├── NotReady                not-ready        1
    │   ├── StillLoading        loading         75
    │   ├── Empty               empty            1
    │   ├── Drained             drained          1
    │   └── Degraded            degraded         1
    ├── Mismatch                mismatch         1   (carries the differing fields)
    ├── LoadFailed              load-failed      1
    ├── CheckpointError         checkpoint      66
    ├── ExportRefused           export-refused   1
    │   ├── UnsupportedMethod   unsupported      1
    │   └── UnplacedTensor      unplaced-tensor  1
    ├── AttachFailed            attach-failed    1
    ├── DamagedSet              damaged          1
    ├── NoRoom                  no-room          1
    ├── DeviceUnavailable       no-device       69
    ├── StoreRejected           store-rejected   1
    ├── ParityBroken            parity-broken    1
    └── InUse                   in-use           1

A message is one sentence an operator can act on; it never needs a traceback to be understood.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcache.fingerprint import Difference


class WeightcacheError(Exception):
    """Base of all errors that weightcache raises on purpose."""

    code = "internal"
    exit_status = 70

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(WeightcacheError):
    """The command line makes no sense."""

    code = "usage"
    exit_status = 2


class ConfigError(WeightcacheError):
    """The configuration file is wrong; the message names file, key and the nearest known key."""

    code = "config"
    exit_status = 78


class AgentUnavailable(WeightcacheError):
    """No agent answers on the socket (absent, refused, silent)."""

    code = "no-agent"
    exit_status = 69


class ProtocolError(WeightcacheError):
    """A packet that is not what the protocol allows at this point."""

    code = "protocol"
    exit_status = 76


class VersionSkew(ProtocolError):
    """Both sides speak weightcache, but not the same protocol version."""

    code = "version-skew"


class PermissionRefused(WeightcacheError):
    """The peer's user may not do this."""

    code = "permission"
    exit_status = 77


class NotReady(WeightcacheError):
    """The rank holds nothing that could be given out now."""

    code = "not-ready"
    exit_status = 1


class StillLoading(NotReady):
    """A load is under way."""

    code = "loading"
    exit_status = 75


class Empty(NotReady):
    """The rank holds no weight set and has no model configured."""

    code = "empty"


class Drained(NotReady):
    """An operator drained the rank."""

    code = "drained"


class Degraded(NotReady):
    """The resident set failed verification."""

    code = "degraded"


class Mismatch(WeightcacheError):
    """The resident set is not what the engine needs; ``differences`` says in which fields."""

    code = "mismatch"
    exit_status = 1
    differences: tuple[Difference, ...] = ()


class LoadFailed(WeightcacheError):
    """The loader ended without publishing."""

    code = "load-failed"
    exit_status = 1


class CheckpointError(WeightcacheError):
    """The checkpoint is missing, unreadable or damaged."""

    code = "checkpoint"
    exit_status = 66


class ExportRefused(WeightcacheError):
    """The loaded model holds something that cannot be carried over faithfully."""

    code = "export-refused"
    exit_status = 1


class UnsupportedMethod(ExportRefused):
    """A layer uses a quantization method that is not proven yet."""

    code = "unsupported"


class UnplacedTensor(ExportRefused):
    """A device tensor was found in a place that the walk does not understand."""

    code = "unplaced-tensor"


class AttachFailed(WeightcacheError):
    """Binding a resident set into an engine failed after the decision was made."""

    code = "attach-failed"
    exit_status = 1


class DamagedSet(WeightcacheError):
    """Bytes in an arena do not match the digest recorded at publish."""

    code = "damaged"
    exit_status = 1


class NoRoom(WeightcacheError):
    """The device or host has too little free memory, or this process or the host no descriptor left."""

    code = "no-room"
    exit_status = 1


class DeviceUnavailable(WeightcacheError):
    """No such GPU, no driver, or no support for shareable memory."""

    code = "no-device"
    exit_status = 69


class StoreRejected(WeightcacheError):
    """The service manager does not keep all descriptors of a set, so the set would die with the agent."""

    code = "store-rejected"
    exit_status = 1


class ParityBroken(WeightcacheError):
    """An attached engine is not what a disk load gives."""

    code = "parity-broken"
    exit_status = 1


class InUse(WeightcacheError):
    """The operation would pull weights away from attached engines."""

    code = "in-use"
    exit_status = 1


def tree(base: type[WeightcacheError] = WeightcacheError) -> Iterator[type[WeightcacheError]]:
    """Yield ``base`` and every error class below it."""
    yield base
    for child in base.__subclasses__():
        yield from tree(child)


_BY_CODE = {cls.code: cls for cls in tree()}


def from_code(code: str, message: str) -> WeightcacheError:
    """Rebuild an error that travelled as (code, message); an unknown code stays a plain WeightcacheError."""
    return _BY_CODE.get(code, WeightcacheError)(message)
