"""A synthetic weight set of any size, made on the device from a seed, and a light child that attaches to it.

    python -m tests.bench.synthetic compare --backend cuda --gib 7 100 --tensors 292
    python -m tests.bench.synthetic publish --backend cuda --gib 100 --socket PUBLISH_SOCKET [--token TOKEN]
    python -m tests.bench.synthetic attach  --backend cuda --socket STATUS_SOCKET
    python -m tests.bench.synthetic churn   --backend cuda --socket STATUS_SOCKET --count 50
    python -m tests.bench.synthetic donate  --backend cuda --gib 16 --socket PUBLIC_SOCKET
    python -m tests.bench.synthetic rescue  --backend cuda --socket PUBLIC_SOCKET --kill AGENT_PID

``compare`` publishes one set after the other to a holder without torch, kills each publisher, attaches a child, and
prints one row each: with the same number of tensors, bytes should not matter. ``publish`` and ``attach`` work with an
agent too. ``donate`` publishes as a serving engine would. ``rescue`` starts its device, kills the agent, attaches as
soon as anybody answers, and compares the digests: ``answered_ms`` is from the kill to the bound tensors. All of them
print JSON lines except ``compare``, which prints a table. Times are milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weightcache import manifest, protocol, records, transport
from weightcache.client import Conversation
from weightcache.fingerprint import Fingerprint
from weightcache.memory import MAX_ARENAS, Memory, arena_sizes, memfd, open_memory
from weightcache.memory.digest import digest
from weightcache.memory.views import dtype_of, view
from weightcache.paths import RankPaths

DTYPE = "bfloat16"
REPOSITORY = Path(__file__).resolve().parents[2]
FILL_BYTES = 1 << 30
"""Bytes filled by one call: random_ needs no scratch memory, but 32-bit indexing is the faster kernel."""


def synthetic_manifest(total: int, tensors: int) -> manifest.Manifest:
    """One module with ``tensors`` parameters (bfloat16, 1-d) of equal size that together have about ``total`` bytes."""
    each = max(total // tensors // manifest.ALIGNMENT, 1) * manifest.ALIGNMENT
    elements = each // dtype_of(DTYPE).itemsize
    return manifest.Manifest(
        bytes=each * tensors,
        storages=tuple(manifest.Storage(i * each, each, True) for i in range(tensors)),
        inline=(),
        tensors=tuple(
            manifest.Tensor(i, 0, (elements,), (1,), DTYPE, "parameter", "torch.nn.parameter.Parameter", False, ())
            for i in range(tensors)
        ),
        modules=(manifest.Module(("",), "torch.nn.modules.module.Module"),),
        slots=tuple(manifest.Slot(0, manifest.PARAMETER, (("attr", f"weight_{i}"),), i) for i in range(tensors)),
        removed=(),
        scalars=(),
    )


def make(
    memory: Memory, total: int, tensors: int, seed: int = 1, arena_bytes: int = 0
) -> tuple[manifest.Manifest, protocol.SetInfo, tuple[int, ...]]:
    """Make and freeze a set: (manifest, what a publisher says of it, one descriptor an arena, the caller's)."""
    started = time.monotonic()
    content = synthetic_manifest(total, tensors)
    sizes = arena_sizes(content.bytes, memory.granularity, arena_bytes)
    region = memory.reserve(sum(sizes))
    try:
        generator: torch.Generator | None = None
        infos, offset = [], 0
        for size in sizes:
            region.extend(size)
            used = min(size, content.bytes - offset)
            for start in range(offset, offset + size, FILL_BYTES):
                words = region.bytes_at(start, min(FILL_BYTES, offset + size - start)).view(torch.int64)
                generator = generator or torch.Generator(device=words.device).manual_seed(seed)
                words.random_(generator=generator)
            infos.append(protocol.ArenaInfo(size, used, digest(region.bytes_at(offset, used))))
            offset += size
        fds = region.freeze()
    finally:
        region.close()
    seconds = round(time.monotonic() - started, 3)
    info = protocol.SetInfo("target", "synthetic", "", _fingerprint(seed), tuple(infos), tensors, seconds, 0)
    return content, info, fds


def publish(socket: str, content: manifest.Manifest, info: protocol.SetInfo, fds: tuple[int, ...], **begin: str) -> str:
    """Hand a set over at a publish socket and commit it; closes ``fds``. Returns the set's id."""
    fds = (memfd.sealed("synthetic-manifest", manifest.encode(content)), *fds)
    try:
        with Conversation(socket) as conversation:
            source, token = begin.get("source", "loader"), begin.get("token", "")
            conversation.request(protocol.Begin(source, "synthetic", token), protocol.Accepted)
            conversation.send(protocol.Publish(info), fds)
            published, _ = conversation.receive(120.0)
            assert isinstance(published, protocol.Published), published
            conversation.request(protocol.Commit(1), protocol.Committed, 120.0)
            return published.set_id
    finally:
        transport.close_all(fds)


def leased(status_socket: Path) -> tuple[Path, protocol.Attach]:
    """The public socket beside a status socket, and what an engine that matches the newest set asks there."""
    with Conversation(status_socket) as conversation:
        status = conversation.request(protocol.Status(), protocol.RankReport).status
    held = status.sets[-1]
    request = protocol.Attach(held.role, "churn", held.fingerprint, 0.0)
    return RankPaths(status_socket.parent, status.rank).public, request


def attach(
    memory: Memory, socket: Path | str, request: protocol.Attach | protocol.Inspect | None = None
) -> tuple[dict[str, Any], list[torch.nn.Parameter], Any]:
    """Attach as an engine does, without one: (figures in ms, the bound tensors, the region that they look into)."""
    marks = [time.perf_counter()]
    with Conversation(socket) as conversation:
        marks.append(time.perf_counter())
        conversation.send(request or protocol.Inspect(None))
        answer, fds = conversation.receive(30.0, 1 + MAX_ARENAS)
        assert isinstance(answer, protocol.Attached), answer
        marks.append(time.perf_counter())
        content = manifest.decode(memfd.read_sealed(fds[0], manifest.MAX_BYTES))
        marks.append(time.perf_counter())
        region = memory.map(fds[1:], [arena.bytes for arena in answer.arenas])
        marks.append(time.perf_counter())
        base = region.bytes_at(0, content.bytes)
        bound = []
        for row in content.tensors:
            storage = content.storages[row.storage]
            dtype = dtype_of(row.dtype)
            start = storage.offset + row.offset * dtype.itemsize
            bound.append(torch.nn.Parameter(view(base, start, row.shape, row.stride, dtype), row.requires_grad))
        marks.append(time.perf_counter())
        transport.close_all(fds)
    steps = ("connect", "receive", "decode", "map", "bind")
    figures: dict[str, Any] = {
        f"{name}_ms": round((end - start) * 1000, 3)
        for name, start, end in zip(steps, marks[:-1], marks[1:], strict=True)
    }
    starts = itertools.accumulate((arena.bytes for arena in answer.arenas), initial=0)
    figures.update(
        set_id=answer.set_id,
        bytes=content.bytes,
        tensors=len(bound),
        arenas=len(answer.arenas),
        places=[(start, arena.used) for start, arena in zip(starts, answer.arenas, strict=False)],
        digests=[arena.digest for arena in answer.arenas],
    )
    return figures, bound, region


def warm_up(memory: Memory) -> None:
    """Start the device and enlarge the descriptor table: what every engine has done long before it attaches."""
    transport.make_room()
    region = memory.reserve(memory.granularity)
    region.extend(memory.granularity)
    region.bytes_at(0, 8).fill_(1).sum().item()
    region.close()


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A holder process at ``path``, ended on the way out."""
    command = [sys.executable, "-m", "tests.bench.holder", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield process
        finally:
            process.kill()


def child(verb: str, backend: str, socket: Path, *extra: str) -> subprocess.Popen[str]:
    """This file in another process; its first line of output is a JSON object."""
    command = [sys.executable, "-m", "tests.bench.synthetic", verb, "--backend", backend, "--socket", str(socket)]
    return subprocess.Popen([*command, *extra], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def first_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON object that ``process`` prints. Raises RuntimeError when it ends without one."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("{"):
        process.kill()
        raise RuntimeError(f"{process.args} ended with {process.wait()} after {line!r}")
    body: dict[str, Any] = json.loads(line)
    return body


def compare(backend: str, sizes: list[float], tensors: int, rounds: int = 3) -> list[dict[str, Any]]:
    """For each size in GiB: publish, SIGKILL the publisher, attach ``rounds`` times; the fastest round of each."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="wc-") as folder:
        for number, gib in enumerate(sizes):
            socket = Path(folder) / f"{number}.sock"
            with holder(socket) as keeper:
                extra = ["--gib", str(gib), "--tensors", str(tensors), "--linger"]
                with child("publish", backend, socket, *extra) as publisher:
                    made = first_line(publisher)
                    publisher.send_signal(signal.SIGKILL)
                results = []
                for _ in range(rounds):
                    with child("attach", backend, socket, "--verify") as reader:
                        results.append(first_line(reader))
                assert all(result["intact"] for result in results), "the bytes changed"
                best = min(results, key=lambda r: r["receive_ms"] + r["map_ms"] + r["bind_ms"])
                rows.append({"gib": gib, "make_s": made["make_s"], "holder_kb": _resident_kb(keeper.pid), **best})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of ``compare`` for people."""
    names = ("gib", "tensors", "arenas", "connect_ms", "receive_ms", "decode_ms", "map_ms", "bind_ms", "holder_kb")
    cells = [[str(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (names, *cells)]
    return "\n".join(lines)


def _resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def _fingerprint(seed: int) -> Fingerprint:
    values: dict[str, Any] = {
        field.name: 0 if field.type in ("int", int) else "" for field in dataclasses.fields(Fingerprint)
    }
    known = {"schema": manifest.SCHEMA, "role": "target", "model_path": f"synthetic:{seed}", "tp_size": 1, "pp_size": 1}
    return Fingerprint(**(values | known))


def _publish(args: argparse.Namespace) -> None:
    started = time.monotonic()
    memory = open_memory(args.backend)
    content, info, fds = make(memory, int(args.gib * 2**30), args.tensors, args.seed)
    made = time.monotonic() - started
    set_id = publish(args.socket, content, info, fds, source=args.source, token=args.token)
    print(json.dumps({"set_id": set_id, "bytes": content.bytes, "make_s": round(made, 3)}), flush=True)
    if args.linger:
        signal.pause()


def _attach(args: argparse.Namespace) -> None:
    memory = open_memory(args.backend)
    warm_up(memory)
    figures, bound, region = attach(memory, args.socket)
    places, digests = figures.pop("places"), figures.pop("digests")
    if args.verify:
        started = time.perf_counter()
        figures["intact"] = [digest(region.bytes_at(*place)) for place in places] == digests
        figures["digest_ms"] = round((time.perf_counter() - started) * 1000, 3)
    if args.write:
        try:
            bound[0].data.fill_(1)
            if bound[0].is_cuda:
                torch.cuda.synchronize()
            figures["write"] = "succeeded"
        except RuntimeError as error:
            figures["write"] = f"refused: {str(error).splitlines()[0]}"
    print(json.dumps(figures), flush=True)
    if args.linger:
        signal.pause()
    if args.write:
        os._exit(0)  # the context may be broken, and taking it down in order would fail


def donate(socket: Path, memory: Memory, total: int, tensors: int, seed: int) -> tuple[str, int, Conversation]:
    """Publish as an engine that found its rank empty: (the set's id, bytes, the connection that is its lease)."""
    content, info, fds = make(memory, total, tensors, seed)
    conversation = Conversation(socket)
    request = protocol.Attach("target", "synthetic", info.fingerprint, 30.0, donate=True)
    invited = conversation.request(request, protocol.DonationInvited, 30.0)
    rank = int(socket.name.partition(".")[0])
    place = RankPaths(socket.parent, rank).publish
    return publish(str(place), content, info, fds, source="donor", token=invited.token), content.bytes, conversation


def _donate(args: argparse.Namespace) -> None:
    memory = open_memory(args.backend)
    set_id, size, _lease = donate(Path(args.socket), memory, int(args.gib * 2**30), args.tensors, args.seed)
    print(json.dumps({"set_id": set_id, "bytes": size}), flush=True)
    if args.linger:
        signal.pause()


def _rescue(args: argparse.Namespace) -> None:
    memory = open_memory(args.backend)
    warm_up(memory)
    request = protocol.Attach("target", "rescue", _fingerprint(args.seed), 30.0)
    if args.fingerprint:
        request = dataclasses.replace(
            request, fingerprint=records.from_plain(Fingerprint, json.loads(args.fingerprint))
        )
    started = time.perf_counter()
    if args.kill:
        os.kill(args.kill, signal.SIGKILL)
    figures, _bound, region = attach(memory, args.socket, request)
    figures["answered_ms"] = round((time.perf_counter() - started) * 1000, 1)
    figures["intact"] = [digest(region.bytes_at(*place)) for place in figures.pop("places")] == figures.pop("digests")
    print(json.dumps(figures), flush=True)


def _churn(args: argparse.Namespace) -> None:
    """``count`` children one after the other that attach and end: in order, at once, or by SIGKILL."""
    figures = []
    for number in range(args.count):
        reader, writer = os.pipe()
        pid = os.fork()  # torch is imported here and CUDA is not started: importing again is what would take long
        if pid == 0:
            os.close(reader)
            socket, request = leased(Path(args.socket)) if args.lease else (args.socket, None)
            result, _bound, region = attach(open_memory(args.backend), socket, request)
            os.write(writer, json.dumps(result).encode())
            if number % 3 == 0:
                region.close()
            elif number % 3 == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            data = pipe.read()
        os.waitpid(pid, 0)
        figures.append(json.loads(data))
    print(json.dumps({"attached": len(figures), "map_ms": max(f["map_ms"] for f in figures)}), flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run one verb."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("publish", "attach", "churn", "compare", "donate", "rescue"):
        verb = verbs.add_parser(name)
        verb.add_argument("--backend", choices=("host", "cuda"), required=True)
        if name != "compare":
            verb.add_argument("--socket", required=True)
        if name == "publish":
            verb.add_argument("--gib", type=float, required=True)
            verb.add_argument("--seed", type=int, default=1)
            verb.add_argument("--source", choices=("loader", "donor"), default="loader")
            verb.add_argument("--token", default="")
        if name in ("donate", "rescue"):
            verb.add_argument("--seed", type=int, default=1)
        if name == "donate":
            verb.add_argument("--gib", type=float, required=True)
        if name == "rescue":
            verb.add_argument("--kill", type=int, default=0, help="the agent's process number")
            verb.add_argument("--fingerprint", default="", help="JSON, where the set is no synthetic one")
        if name in ("publish", "compare", "donate"):
            verb.add_argument("--tensors", type=int, default=292)
        if name in ("publish", "attach", "donate"):
            verb.add_argument("--linger", action="store_true", help="stay after the work, until a signal")
        if name == "attach":
            verb.add_argument("--verify", action="store_true", help="compare the digests too")
            verb.add_argument("--write", action="store_true", help="try to write through the mapping")
        if name == "churn":
            verb.add_argument("--count", type=int, default=50)
            verb.add_argument("--lease", action="store_true", help="attach with a lease, at an agent")
        if name == "compare":
            verb.add_argument("--gib", type=float, nargs="+", default=[7.0, 100.0])
    args = parser.parse_args(arguments)
    if args.verb == "compare":
        print(table(compare(args.backend, args.gib, args.tensors)))
    else:
        verbs_by_name = {
            "publish": _publish,
            "attach": _attach,
            "churn": _churn,
            "donate": _donate,
            "rescue": _rescue,
        }
        verbs_by_name[args.verb](args)


if __name__ == "__main__":
    main()
