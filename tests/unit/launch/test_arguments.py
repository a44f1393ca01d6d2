"""The launcher's options are taken out; SGLang's arguments come out unchanged and in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from weightcache.errors import UsageError
from weightcache.launch.arguments import LEVERS, Options, split
from weightcache.sglang_options import given as read
from weightcache.standby.places import SlotName

SGLANG = st.one_of(
    st.sampled_from(["--model-path", "/m", "--tp", "2", "-h", "--weight-cache-socket", "--weight-cache", "", "=", "-"]),
    st.text().filter(lambda s: s != "--" and not s.startswith(("--wcache", "--weight-cache-m"))),
)
OWN = st.sampled_from(
    [
        (["--weight-cache-mode", "off"], {"mode": "off"}),
        (["--weight-cache-mode=off"], {"mode": "off"}),
        (["--weight-cache-mod", "off"], {"mode": "off"}),
        (["--wcache-wait", "5"], {"wait_seconds": 5.0}),
        (["--wcache-wait=5"], {"wait_seconds": 5.0}),
        (["--wcache-on-mismatch", "evict"], {"on_mismatch": "evict"}),
        (["--wcache-explain"], {"explain": "short"}),
        (["--wcache-explain=full"], {"explain": "full"}),
        (["--wcache-python=--odd"], {"python": "--odd"}),
        (["--wcache-help"], {"help": True}),
    ]
)


@given(st.lists(st.one_of(SGLANG.map(lambda s: ([s], None)), OWN)), st.booleans(), st.lists(SGLANG))
def test_sglang_arguments_are_unchanged_and_in_order(parts, separated, behind):
    argv = [token for tokens, _ in parts for token in tokens]
    expected = [token for tokens, own in parts if own is None for token in tokens]
    if separated:
        argv += ["--", *behind]
        expected += behind
    options = split(argv)
    assert list(options.sglang) == expected
    for _, own in parts:
        if own and len([o for _, o in parts if o and o.keys() == own.keys()]) == 1:
            for name, value in own.items():
                assert getattr(options, name) == value


@given(st.lists(SGLANG))
def test_without_own_options_everything_passes(argv):
    assert split(argv) == Options(sglang=tuple(argv))


def test_the_mode_is_consumed_behind_the_separator_too():
    options = split(["--wcache-wait=1", "--", "--model-path", "m", "--weight-cache-mode", "daemon", "--tp", "2"])
    assert options.mode == "daemon"
    assert options.sglang == ("--model-path", "m", "--tp", "2")
    assert options.reaction == "error"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--wcache-wiat", "3"], "did you mean --wcache-wait?"),
        (["--wcachemode"], "there is no option --wcachemode"),
        (["--wcache-wait"], "needs a value"),
        (["--wcache-wait", "soon"], "number of seconds"),
        (["--wcache-wait", "nan"], "number of seconds"),
        (["--wcache-wait", "-1"], "number of seconds"),
        (["--weight-cache-mode"], "needs a value"),
        (["--weight-cache-mode", "on"], "daemon, client or off"),
        (["--wcache-explain=all"], "--wcache-explain=full"),
        (["--wcache-on-mismatch=die"], "fallback, evict or error"),
        (["--wcache-config="], "empty value"),
        (["--", "--wcache-explain"], "put it before the --"),
        (["--weight-cache-mode", "daemon", "--wcache-on-mismatch", "fallback"], "does not go with"),
        (["--wcache-unproven=yes"], "--wcache-unproven takes no value"),
        (["--wcache-unproven", "--model-path", "m"], "goes with --weight-cache-mode daemon; .* policy.unproven"),
    ],
)
def test_nonsense_is_a_usage_error(argv, words):
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        split(argv)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--tp", "2"], "tp_size", "2"),
        (["--tp-size=2"], "tp_size", "2"),
        (["--tensor-parallel-size", "2"], "tp_size", "2"),
        (["--ep", "2"], "ep_size", "2"),
        (["--tp", "2", "--tp-size", "4"], "tp_size", "4"),
        (["--model", "/m"], "model_path", "/m"),
        (["--model-path=/m=n"], "model_path", "/m=n"),
        (["--enable-eplb"], "enable_eplb", "true"),
        (["--ep-num-redundant-experts", "2"], "ep_size", ""),
        (["--model-impl", "x"], "model_path", ""),
        (["--quantization-param-path", "x"], "quantization", ""),
    ],
)
def test_values_are_read_in_all_of_sglangs_spellings(argv, field, value):
    assert read(argv).text(field) == value


def test_a_yaml_file_is_read_as_far_as_plain_lines_go(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("# comment\nmodel-path: /m  # here\ntp_size: 2\ndtype: 'float16'\nenable-eplb: true\n")
    found = read(["--config", str(file), "--tp", "4"])
    assert (found.text("model_path"), found.text("tp_size"), found.text("dtype")) == ("/m", "4", "float16")
    assert found.flag("enable_eplb")
    assert not found.opaque
    file.write_text("lora-paths:\n  - a\n")
    assert read(["--config", str(file)]).opaque
    assert read(["--config", str(tmp_path / "none")]).opaque


def test_restart_mode() -> None:
    assert split(["--wcache-restart", "--model-path", "m"]).restart
    assert split(["--wcache-restart", "--wcache-hold-port", "--model-path", "m"]).hold_port
    assert not split(["--model-path", "m"]).restart


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--wcache-hold-port", "goes with --wcache-restart"),
        ("--wcache-restart=1", "takes no value"),
        ("--wcache-restart --wcache-explain", "leaves nothing to start again"),
        ("--wcache-restart --weight-cache-mode off", "leaves nothing to start again"),
    ],
)
def test_restart_mode_has_conditions(options: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        split([*options.split(), "--model-path", "m"])


def test_levers_that_are_not_wanted() -> None:
    assert split(["--model-path", "m"]).levers == LEVERS
    some = split(["--wcache-without", "workers, graphs", "--wcache-without", "warmup", "--model-path", "m"])
    assert some.levers == ("caches",)
    with pytest.raises(UsageError, match="caches, graphs, warmup, workers, separated by commas, not 'graph'"):
        split(["--wcache-without", "graph", "--model-path", "m"])


def test_a_slot_has_everything_from_its_file():
    assert split(["--wcache-slot", "chat-a"]) == Options(slot=SlotName("chat", "a"))
    assert split(["--wcache-slot=x-y-b", "--wcache-config", "/c", "--wcache-runtime-dir", "/r"]) == Options(
        slot=SlotName("x-y", "b"), config=Path("/c"), runtime_dir=Path("/r")
    )


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--wcache-slot", "chat"], "names no slot"),
        (["--wcache-slot", "../x-a"], "cannot name an engine"),
        (["--wcache-slot", "chat-a", "--model-path", "m"], "'--model-path' belongs there"),
        (["--wcache-slot", "chat-a", "--", "m"], "from the engine's file, chat.toml"),
        (["--wcache-slot", "chat-a", "--wcache-python", "p"], "the rest is in its file"),
        (["--wcache-slot", "chat-a", "--wcache-restart"], "the rest is in its file"),
        (["--wcache-slot", "chat-a", "--weight-cache-mode", "daemon"], "the rest is in its file"),
        (["--wcache-slot", "chat-a", "--wcache-explain"], "the rest is in its file"),
    ],
)
def test_what_a_slot_does_not_go_with(argv, reason):
    with pytest.raises(UsageError, match=reason):
        split(argv)
