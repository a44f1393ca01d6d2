"""What command line and checkpoint already show about a match, without torch. The engine decides, from live objects.

A field is ``differs`` only where that is certain; what SGLang resolves while it starts stays ``unknown``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weightcache import __version__
from weightcache.checkpoint import identity
from weightcache.fingerprint import CONSEQUENCES, Difference, Fingerprint, Value

if TYPE_CHECKING:
    from weightcache.sglang_options import Given

Verdict = Literal["equal", "differs", "unknown"]
UNKNOWN = "unknown until the engine runs"
MAX_CONFIG = 16 << 20
_DTYPES = {"half": "float16", "float": "float32", "float16": "float16", "bfloat16": "bfloat16", "float32": "float32"}
_SIZES = {"tp_size": 1, "pp_size": 1}
_UNSAID = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One field of a resident set beside what this launch will have; ``launch`` None: not known yet."""

    field: str
    resident: Value
    launch: Value | None

    @property
    def verdict(self) -> Verdict:
        """Whether the two are certain to be equal or to differ."""
        if self.launch is None:
            return "unknown"
        return "equal" if self.launch == self.resident else "differs"

    def difference(self) -> Difference:
        """As a row of the field table."""
        launch: Value = UNKNOWN if self.launch is None else self.launch
        return Difference(self.field, self.resident, launch, CONSEQUENCES[self.field])


def model_directory(given: Given) -> Path | None:
    """The launch's checkpoint where it is a directory of this host (else SGLang looks it up in the hub's cache)."""
    path = given.text("model_path")
    return Path(path).resolve() if path and Path(path).is_dir() else None


def compare(resident: Fingerprint, given: Given, content: bool = False) -> tuple[Finding, ...]:
    """A finding for each field that a launch's arguments and its checkpoint's config.json bear on.

    ``content``: look at the checkpoint's files too (headers and a few sampled blocks).
    """
    directory = model_directory(given)
    checkpoint = _checkpoint(directory)
    values: dict[str, Value | None] = {
        "model_path": str(directory) if directory else _UNSAID,
        "model_arch": _architectures(checkpoint, given),
        "revision": given.text("revision"),
        "override_args": "" if given.text("override_args") == "{}" else given.text("override_args"),
        "load_format": _load_format(given, resident),
        **{name: given.number(name, default) for name, default in _SIZES.items()},
        "dp_size": _dp_size(given),
        "ep_size": _ep_size(given),
        "quant_method": _quantization(checkpoint, given),
        "dtype": _dtype(checkpoint, given),
    }
    if content and directory is not None:
        values["checkpoint"] = identity(directory)
    if given.opaque:
        # The --config file holds more than this launcher reads: what no argument says may be said there.
        values = {name: value if name in (*given.values, "checkpoint") else _UNSAID for name, value in values.items()}
    return tuple(Finding(name, getattr(resident, name), values[name]) for name in CONSEQUENCES if name in values)


def differing(findings: tuple[Finding, ...]) -> tuple[Difference, ...]:
    """The rows that certainly differ."""
    return tuple(finding.difference() for finding in findings if finding.verdict == "differs")


def skew(version: str) -> str:
    """A sentence if the agent is of another version, else an empty text."""
    return "" if version == __version__ else f"the agent is version {version}, this launcher {__version__}"


def _checkpoint(directory: Path | None) -> dict[str, Any] | None:
    if directory is None:
        return None
    try:
        with (directory / "config.json").open("rb") as file:
            data = json.loads(file.read(MAX_CONFIG))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _architectures(checkpoint: dict[str, Any] | None, given: Given) -> str | None:
    names = (checkpoint or {}).get("architectures")
    if given.text("override_args") not in ("", "{}") or not isinstance(names, list):
        return None
    # SGLang renames some architectures while it reads the configuration, so only the plain case is certain.
    return ",".join(map(str, names)) if len(names) == 1 and str(names[0]).endswith("ForCausalLM") else None


def _load_format(given: Given, resident: Fingerprint) -> str | None:
    value = given.text("load_format", "auto").lower()
    if value not in ("auto", "safetensors"):
        return value
    # What auto becomes depends on the checkpoint (GGUF, Mistral's own format) and on the quantization.
    return "auto" if resident.load_format == "auto" else None


def _dp_size(given: Given) -> int | None:
    # Without attention groups these are replicas, each of which has the whole model.
    return given.number("dp_size") if "dp_size" in given.values and given.flag("enable_dp_attention") else _UNSAID


def _ep_size(given: Given) -> int | None:
    if "ep_size" not in given.values or given.text("moe_a2a_backend", "none") != "none":
        return None  # several all-to-all backends set the size themselves
    return given.number("ep_size")


def _quantization(checkpoint: dict[str, Any] | None, given: Given) -> str | None:
    if checkpoint is None or given.text("override_args") not in ("", "{}"):
        return None
    section = checkpoint.get("quantization_config")
    if section is None and "compression_config" not in checkpoint and "quantization" not in given.values:
        return ""
    if isinstance(section, dict) and "quantization" not in given.values:
        method = section.get("quant_method")
        return str(method) if method == "fp8" else None  # others are renamed by what the kernels can do
    return None


def _dtype(checkpoint: dict[str, Any] | None, given: Given) -> str | None:
    chosen = given.text("dtype", "auto")
    if chosen != "auto":
        return _DTYPES.get(chosen)
    if given.text("override_args") not in ("", "{}") or checkpoint is None or "quantization_config" in checkpoint:
        return None
    stored = checkpoint.get("torch_dtype", checkpoint.get("dtype"))
    return "bfloat16" if stored == "bfloat16" else None
