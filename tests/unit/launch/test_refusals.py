"""Options of SGLang that weightcache cannot serve are named before anything starts."""

from __future__ import annotations

import pytest

from weightcache.launch.refusals import refused
from weightcache.sglang_options import given


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--cpu-offload-gb", "10"], "--cpu-offload-gb"),
        (["--offload-group-size", "2"], "--offload-group-size"),
        (["--enable-eplb"], "--enable-eplb"),
        (["--elastic-ep-backend", "mooncake"], "--elastic-ep-backend"),
        (["--elastic-ep-rejoin"], "--elastic-ep-rejoin"),
        (["--dwdp-size=2"], "--dwdp-size"),
        (["--torchao-config", "int8wo"], "--torchao-config"),
        (["--load-format", "remote_instance"], "remote_instance"),
        (["--remote-instance-weight-loader-start-seed-via-transfer-engine"], "transfer-engine"),
        (["--startup-weight-load-mode", "overlap"], "--startup-weight-load-mode overlap"),
        (["--encoder-only"], "--encoder-only"),
        (["--enable-paged-experts"], "--enable-paged-experts"),
        (["--enable-amd-monokernel"], "--enable-amd-monokernel"),
        (["--use-ray"], "--use-ray"),
    ],
)
def test_refused_by_name(argv, named):
    assert named in refused(given(argv))


@pytest.mark.parametrize(
    "argv",
    [
        ["--cpu-offload-gb", "0"],
        ["--elastic-ep-backend", "none"],
        ["--dwdp-size", "1"],
        ["--startup-weight-load-mode", "serial"],
        ["--encoder-urls", "http://x"],
        ["--eplb-algorithm", "auto"],
        ["--cpu-offload-gb", "many"],
        [],
    ],
)
def test_harmless_values_pass(argv):
    assert refused(given(argv)) == ""
