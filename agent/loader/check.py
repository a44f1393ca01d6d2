"""The ``check`` role: map a resident set without an engine, read-only, and compare every arena with its digest.

It runs in the loader's environment and exits afterwards: the agent and ``wcache`` never open a GPU themselves, and
memory that kills whoever reads it kills only this process. torch is imported late, so that the other roles can say in
a sentence that it is missing.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from weightcache import manifest, protocol, transport
from weightcache.client import DEFAULT_TIMEOUT, Conversation
from weightcache.errors import AttachFailed, DamagedSet, NoRoom, ProtocolError
from weightcache.memory import MAX_ARENAS, Memory, memfd, open_memory

if TYPE_CHECKING:
    import argparse

DESCRIPTION = "Map a resident set read-only, without an engine, and compare its digests."


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found. ``damaged`` holds the numbers of damaged arenas; times are milliseconds."""

    code: str
    message: str
    set_id: str
    bytes: int
    tensors: int
    arenas: int
    connect_ms: float
    receive_ms: float
    map_ms: float
    digest_ms: float
    digest_gb_per_s: float
    damaged: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the role's arguments."""
    parser.add_argument("--socket", required=True, metavar="PATH", help="the status socket of the rank's agent")
    parser.add_argument("--backend", required=True, choices=("host", "cuda"), help="the kind of memory the set is in")
    parser.add_argument("--set", metavar="ID", help="the set to check (default: the newest target set)")
    parser.add_argument("--gpu", metavar="UUID", help="the GPU that holds the set (default: the agent says which)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--announce",
        action="store_true",
        help="print a line before touching the set: from then on a death is the set's fault",
    )


def run(args: argparse.Namespace) -> int:
    """Check one set and print what was found: 0 intact. Raises DamagedSet (with ``--json``: returns its exit status).

    Raises AgentUnavailable, NotReady, AttachFailed or DeviceUnavailable where nothing could be checked.
    """
    # Everything that is slow only once happens before the clock starts: the context, the kernels, the tables.
    memory = _memory(args)
    if args.announce:
        print(json.dumps({"code": "armed"}), flush=True)
    try:
        verdict = check(memory, args.socket, args.set)
    except AttachFailed as error:
        if not args.json:
            raise
        print(json.dumps({"code": error.code, "message": error.message}), flush=True)
        return error.exit_status
    if args.json:
        print(json.dumps(asdict(verdict)), flush=True)
        return DamagedSet.exit_status if verdict.damaged else 0
    print(_table(verdict), flush=True)
    if verdict.damaged:
        raise DamagedSet(verdict.message)
    return 0


def check(memory: Memory, socket: str, set_id: str | None = None) -> Verdict:
    """Receive a set from the agent behind its status ``socket``, map it, and compare every arena with its digest."""
    import torch

    from weightcache.memory.digest import digest

    started = time.perf_counter()
    with Conversation(socket) as conversation:
        connected = time.perf_counter()
        conversation.send(protocol.Inspect(set_id))
        answer, fds = conversation.receive(DEFAULT_TIMEOUT, 1 + MAX_ARENAS)
        received = time.perf_counter()
        try:
            if not isinstance(answer, protocol.Attached) or len(fds) != 1 + len(answer.arenas):
                raise ProtocolError(
                    f"the agent at {socket} answered {type(answer).__name__} with {len(fds)} descriptors"
                )
            content = manifest.decode(memfd.read_sealed(fds[0], manifest.MAX_BYTES))
            arenas = answer.arenas
            if any(not 0 <= arena.used <= arena.bytes for arena in arenas):
                raise ProtocolError(f"the agent at {socket} describes an arena that uses more than it has")
            before_map = time.perf_counter()
            region = memory.map(fds[1:], [arena.bytes for arena in arenas])
            mapped = time.perf_counter()
        finally:
            transport.close_all(fds)
    try:
        if content.bytes > region.size:
            raise AttachFailed(f"the manifest describes {content.bytes} bytes, and the arenas have {region.size}")
        damaged: list[int] = []
        offset = 0
        digesting = time.perf_counter()
        for index, arena in enumerate(arenas):
            try:
                actual = digest(region.bytes_at(offset, arena.used))
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                    raise NoRoom(f"there is too little free memory to compute digests ({error})") from None
                # A GPU fault while reading, after which nothing else can be read either.
                damaged += range(index, len(arenas))
                break
            if actual != arena.digest:
                damaged.append(index)
            offset += arena.bytes
        seconds = time.perf_counter() - digesting
    finally:
        region.close()
    used = sum(arena.used for arena in arenas)
    message = f"{len(damaged)} of {len(arenas)} arenas of set {answer.set_id} do not hold what was published"
    return Verdict(
        code=DamagedSet.code if damaged else "ok",
        message=message if damaged else "",
        set_id=answer.set_id,
        bytes=used,
        tensors=len(content.tensors),
        arenas=len(arenas),
        connect_ms=_ms(connected - started),
        receive_ms=_ms(received - connected),
        map_ms=_ms(mapped - before_map),
        digest_ms=_ms(seconds),
        digest_gb_per_s=round(used / seconds / 1e9, 2) if seconds else 0.0,
        damaged=tuple(damaged),
    )


def _memory(args: argparse.Namespace) -> Memory:
    import torch

    from weightcache.memory.digest import BLOCK, digest

    if args.backend == "host":
        memory = open_memory("host")
        device = torch.device("cpu")
    else:
        from weightcache.memory.cuda_vmm import device_of_uuid

        with Conversation(args.socket) as conversation:
            uuid = args.gpu or conversation.request(protocol.Status(), protocol.RankReport).status.gpu_uuid
        ordinal = device_of_uuid(uuid) if uuid else 0
        memory = open_memory("cuda", ordinal)
        device = torch.device("cuda", ordinal)
    digest(torch.zeros(8 * BLOCK + 1, dtype=torch.uint8, device=device))
    return memory


def _table(verdict: Verdict) -> str:
    damaged = ", ".join(map(str, verdict.damaged))
    rows = (
        ("set", verdict.set_id),
        ("bytes", f"{verdict.bytes:,}"),
        ("tensors", str(verdict.tensors)),
        ("arenas", str(verdict.arenas)),
        ("connect", f"{verdict.connect_ms:.2f} ms"),
        ("receive", f"{verdict.receive_ms:.2f} ms"),
        ("map", f"{verdict.map_ms:.2f} ms"),
        ("digest", f"{verdict.digest_ms:.2f} ms ({verdict.digest_gb_per_s:g} GB/s)"),
        ("verdict", f"damaged: arenas {damaged}" if damaged else "intact"),
    )
    return "\n".join(f"{name:<8}  {value}" for name, value in rows)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
