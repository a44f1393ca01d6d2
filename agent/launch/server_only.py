"""Leave out what a loader must not have: secrets, ports, and whatever only a serving process uses.

A configuration file outlives the launch that wrote it, so no key or password may get into it, in whatever spelling:
argparse takes abbreviations (``--ap KEY``), hence everything that abbreviates a listed option goes as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SECRET = (
    "--api-key",
    "--admin-api-key",
    "--ssl-keyfile",
    "--ssl-keyfile-password",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--watermark-config",
    "--enable-watermark",
    "--hicache-storage-backend-extra-config",
    "--unified-cache-external-linker-config",
    "--modelexpress-config",
)
SERVING = (
    "--host",
    "--port",
    "--nccl-port",
    "--grpc-port",
    "--gated-launch-port",
    "--smg-http-sidecar-port",
    "--grpc-http-sidecar-port",
    "--engine-info-bootstrap-port",
    "--disaggregation-bootstrap-port",
    "--encoder-bootstrap-port",
    "--encoder-urls",
    "--encoder-register-urls",
    "--enable-ssl-refresh",
    "--log-requests",
    "--log-requests-level",
    "--log-requests-format",
    "--log-requests-target",
    "--uvicorn-access-log-exclude-prefixes",
    "--enable-metrics",
    "--enable-metrics-for-all-schedulers",
    "--export-metrics-to-file",
    "--export-metrics-to-file-dir",
    "--extra-metric-labels",
    "--tokenizer-metrics-custom-labels-header",
    "--tokenizer-metrics-allowed-custom-labels",
    "--enable-forward-pass-metrics",
    "--forward-pass-metrics-worker-id",
    "--forward-pass-metrics-ipc-name",
    "--enable-trace",
    "--trace-modules",
    "--otlp-traces-endpoint",
    "--kv-events-config",
    "--load-publish-endpoint",
    "--file-storage-path",
    "--crash-dump-folder",
    "--skip-server-warmup",
    "--warmups",
    "--weight-cache-socket",
    "--weight-cache-timeout",
)
_DROPPED = (*SECRET, *SERVING)
_KEPT = frozenset({"--model", "--ep"})
"""Whole options that happen to begin one of the dropped ones."""
_SECRET_WORD = re.compile(r"(?:^|-)(?:api-?key|key|keys|keyfile|password|passwd|secret|credentials?|auth)(?:-|$)")


def without(arguments: Sequence[str]) -> tuple[str, ...]:
    """``arguments`` without secrets and server-only options and their values."""
    return tuple(_kept(arguments))


def _kept(arguments: Sequence[str]) -> Iterator[str]:
    dropping = False
    for token in arguments:
        if re.match(r"-(?:-|[A-Za-z])", token) and " " not in token.partition("=")[0]:
            dropping = _drops(token.partition("=")[0])
        # Values follow their option; a dropped option takes all of them along.
        if not dropping:
            yield token


def _drops(name: str) -> bool:
    if name in _KEPT:
        return False
    return bool(_SECRET_WORD.search(name[2:])) or any(option.startswith(name) for option in _DROPPED)
