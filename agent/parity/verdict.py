"""What a comparison found: what it covered, what differs, and whether that matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weightcache import records
from weightcache.parity import inventory
from weightcache.parity.inventory import Deviation, Inventory
from weightcache.parity.server import Answer

SHOWN = 40
"""Deviations that are printed; the file holds all."""


@dataclass(frozen=True, slots=True)
class Side:
    """One server's inventories by name, and its answers; ``repeated`` are those to the same prompts asked again."""

    inventories: dict[str, Inventory]
    answers: tuple[Answer, ...]
    repeated: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``broken`` says in a sentence why the two are not the same; empty when they are.

    ``deterministic``: the disk load answers the same prompt twice in the same way, so that answers can be compared.
    """

    sglang_version: str
    capability: str
    methods: dict[str, int]
    tensors: int
    bytes: int
    unreached: int
    tokens: int
    deterministic: bool
    deviations: tuple[Deviation, ...]
    broken: str

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        whole: dict[str, Any] = records.to_plain(self)
        return whole

    def text(self) -> str:
        """For people."""
        lines = [
            f"SGLang {self.sglang_version}" + f", compute capability {self.capability}" * bool(self.capability),
            f"compared: {self.tensors} tensors, {self.bytes / 1e9:.3f} GB, {self.tokens} tokens with log probabilities",
            *(f"  {count:5} layers  {signature}" for signature, count in sorted(self.methods.items())),
        ]
        if self.unreached:
            lines.append(f"not below the model, and not compared: {self.unreached / 1e6:.1f} MB")
        if not self.deterministic:
            lines.append("the disk load does not answer twice in the same way: answers were not compared")
        lines += [
            f"  {d.path}: {d.what}: disk {d.disk:.200}, attached {d.attached:.200}" for d in self.deviations[:SHOWN]
        ]
        if (left := len(self.deviations) - SHOWN) > 0:
            lines.append(f"  ... and {left} more")
        lines.append("differs: " + self.broken if self.broken else "equal: disk load and attach are the same engine")
        return "\n".join(lines)


def judge(disk: Side, attached: Side) -> Verdict:
    """Compare both sides."""
    deviations: list[Deviation] = []
    for name in sorted({*disk.inventories, *attached.inventories}):
        one, other = disk.inventories.get(name), attached.inventories.get(name)
        if one is None or other is None:
            deviations.append(
                Deviation(name, "model", "absent" if one is None else "", "absent" if other is None else "")
            )
        else:
            deviations += inventory.compare(one, other)
    deterministic = disk.answers == disk.repeated
    differing = deterministic and (disk.answers, disk.repeated) != (attached.answers, attached.repeated)
    reasons = []
    if deviations:
        reasons.append(f"{len(deviations)} places differ, the first is {deviations[0].path} ({deviations[0].what})")
    if differing:
        reasons.append("the answers differ" + _largest(disk.answers, attached.answers))
    taken = [[answer.drafts for answer in answers] for answers in (disk.answers, disk.repeated, attached.answers)]
    if taken[0] == taken[1] != taken[2]:
        reasons.append("other tokens of the draft model are taken")
    models = list(disk.inventories.values())
    return Verdict(
        sglang_version=models[0].sglang_version,
        capability=models[0].capability,
        methods={
            signature: sum(m.methods.get(signature, 0) for m in models) for m in models for signature in m.methods
        },
        tensors=sum(len(model.tensors) for model in models),
        bytes=sum(model.bytes for model in models),
        unreached=sum(model.unreached for model in models),
        tokens=sum(len(answer.tokens) for answer in disk.answers),
        deterministic=deterministic,
        deviations=tuple(deviations),
        broken="; ".join(reasons),
    )


def _largest(disk: tuple[Answer, ...], attached: tuple[Answer, ...]) -> str:
    if disk == attached:
        return ""  # the same prompts asked again
    if [answer.tokens for answer in disk] != [answer.tokens for answer in attached]:
        return " in their tokens"
    pairs = [
        pair
        for one, other in zip(disk, attached, strict=True)
        for pair in zip(one.logprobs, other.logprobs, strict=False)
    ]
    return f" by up to {max((abs(a - b) for a, b in pairs), default=0.0):g} in a log probability"
