"""Everything that must be equal for a rank's resident bytes to mean the same to an engine.

SGLang calls its smaller version of this CacheConfig (sglang/srt/weight_cache). Loader and engine compute the
fingerprint with the same function, at the same point, from live objects (weightcache.engine.observe); this module
only holds, compares and explains it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from weightcache import records

Value = str | int


def _row(consequence: str) -> Any:
    return field(metadata={"consequence": consequence})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fields of one weight set's fingerprint, each with the consequence of a difference."""

    schema: int = _row("the manifest would be read wrongly")
    role: str = _row("target and draft models hold different weights")
    model_path: str = _row("different weights entirely")
    model_arch: str = _row("different weights entirely")
    revision: str = _row("another revision of the weights")
    checkpoint: str = _row("the checkpoint's files changed: different weights under the same path")
    override_args: str = _row("overridden configuration: same shapes may hold other values (rotary caches)")
    load_format: str = _row("another loader may lay the weights out differently")
    tp_size: int = _row("wrong shard for this rank")
    tp_rank: int = _row("wrong shard for this rank")
    pp_size: int = _row("wrong layers for this pipeline stage")
    pp_rank: int = _row("wrong layers for this pipeline stage")
    dp_size: int = _row("wrong distribution of the weights")
    ep_size: int = _row("wrong experts on this rank")
    ep_rank: int = _row("wrong experts on this rank")
    attention_dp: int = _row("attention weights are sharded differently")
    attention_cp_size: int = _row("attention weights are sharded differently")
    moe_dp_size: int = _row("wrong experts on this rank")
    quant_method: str = _row("unquantized against quantized weights")
    quant_config_hash: str = _row("another quantization of the same weights")
    dtype: str = _row("another data type: wrong values")
    device: str = _row("another kind of device lays weights out differently")
    device_capability: str = _row("post-processing may have taken another branch: wrong numerics")
    torch_version: str = _row("post-processing may have taken another branch: wrong numerics")
    sglang_version: str = _row("another version of the model code")
    kernel_versions: str = _row("another kernel package may expect another layout")
    backends: str = _row("another GEMM or MoE backend expects another layout")
    environment: str = _row("an environment switch changes the layout")
    plugins: str = _row("a plugin may replace layers on one side only")

    def digest(self) -> str:
        """32 hex digits over all fields, for display and for names."""
        text = json.dumps(records.to_plain(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Difference:
    """One differing field: what the resident set has, what the engine has, and what serving it anyway would mean."""

    field: str
    cached: Value
    engine: Value
    consequence: str

    def clipped(self, longest: int) -> Difference:
        """The same with texts of at most ``longest`` characters."""
        return dataclasses.replace(self, cached=_clip(self.cached, longest), engine=_clip(self.engine, longest))


def _clip(value: Value, longest: int) -> Value:
    return value if isinstance(value, int) or len(value) <= longest else value[:longest] + "..."


CONSEQUENCES = {f.name: str(f.metadata["consequence"]) for f in dataclasses.fields(Fingerprint)}


def diff(cached: Fingerprint, engine: Fingerprint) -> tuple[Difference, ...]:
    """All fields in which the two differ, in the order of declaration."""
    return tuple(
        Difference(name, getattr(cached, name), getattr(engine, name), consequence)
        for name, consequence in CONSEQUENCES.items()
        if getattr(cached, name) != getattr(engine, name)
    )
