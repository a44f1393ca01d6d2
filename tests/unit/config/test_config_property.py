"""Properties: what is accepted survives being written again, and nothing but ConfigError ever comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st

from weightcache import config
from weightcache.deployment import Deployment
from weightcache.errors import ConfigError

FILE = Path("/etc/w.toml")
NAMES = sorted({f.name for cls in config.SECTIONS.values() for f in dataclasses.fields(cls)} | set(config.SECTIONS))

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
word = text.filter(bool)
seconds = st.floats(min_value=1e-3, max_value=1e9)
uuid = st.uuids().map(str)


def deployments(last: int) -> st.SearchStrategy[Deployment]:
    """Deployments of replicas with one rank each, up to ``last``."""
    return st.builds(
        Deployment,
        dp_size=st.integers(last + 1, 65536),
        port=st.integers(1, 65534),
        meet_seconds=seconds,
        base_gpu_id=st.integers(0, 100),
        gpu_id_step=st.integers(1, 100),
    )


@st.composite
def configs(draw: st.DrawFn) -> config.Config:
    backend = draw(st.sampled_from(["cuda", "host"]))
    numbers = draw(st.lists(st.integers(0, 65535), min_size=1, max_size=4, unique=True))
    gpus = draw(st.lists(uuid, min_size=len(numbers), max_size=len(numbers), unique=True))
    prefix = draw(st.sampled_from(["GPU-", "MIG-"]))
    names = word.filter(lambda name: "=" not in name)
    arguments = draw(st.none() | word.filter(lambda value: not value.startswith("--")))
    return config.Config(
        agent=config.AgentConfig(draw(st.none() | text.map(lambda tail: Path("/run") / tail.strip("/"))), draw(text)),
        loader=config.LoaderConfig(
            (draw(word), *draw(st.lists(text, max_size=3))),
            draw(st.dictionaries(names, text)),
            draw(seconds),
            draw(seconds),
        ),
        model=None if arguments is None else config.ModelConfig(("--model-path", arguments)),
        memory=config.MemoryConfig(backend, draw(st.integers(0, 2**20)) * 2 * 2**20),  # type: ignore[arg-type]
        deployment=draw(st.just(Deployment()) | deployments(max(numbers))),
        policy=config.PolicyConfig(draw(st.booleans()), draw(st.booleans()), tuple(draw(st.lists(word, max_size=3)))),
        ranks=tuple(
            config.RankConfig(number, prefix + gpu if backend == "cuda" else "")
            for number, gpu in zip(numbers, gpus, strict=True)
        ),
        path=FILE,
    )


def toml(value: Any) -> str:
    if isinstance(value, Path | str):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def table(header: str, value: Any) -> str:
    lines = [
        f"{f.name} = {toml(got)}" for f in dataclasses.fields(value) if (got := getattr(value, f.name)) is not None
    ]
    return "\n".join([header, *lines, ""])


def written(value: config.Config) -> str:
    parts = [
        table(f"[{name}]", got)
        for name in config.SECTIONS
        if (got := getattr(value, name, None)) is not None
        # The default goes with any ranks where it is not written.
        and (name != "deployment" or got != Deployment() or not value.ranks)
    ]
    return "".join(
        parts + [table("[[rank]]", rank) for rank in value.ranks if rank.gpu or value.memory.backend == "host"]
    )


@given(configs())
def test_written_and_read_again_it_is_the_same(value: config.Config) -> None:
    assert config.parse(written(value), FILE) == value


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.sampled_from(["cuda", "host", "--model"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | text, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(NAMES), plain, max_size=6))
def test_any_plausible_table_is_accepted_or_one_sentence(data: dict[str, Any]) -> None:
    lines = []
    for key, value in data.items():
        with contextlib.suppress(TypeError):
            lines.append(f"{key} = {toml_any(value)}")
    try:
        got = config.parse("\n".join(lines), FILE)
    except ConfigError as error:
        sentence = error.message
    else:
        assert config.parse(written(got), FILE) == got
        return
    assert sentence.startswith("/etc/w.toml: ")
    assert sentence.isprintable()


def toml_any(value: Any) -> str:
    if value is None:
        raise TypeError
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_any, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml_any(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    return toml(value)


@given(st.text() | st.text(alphabet="[]{}=\"'\\\n#.,0a"))
def test_random_text_is_never_another_error(garbage: str) -> None:
    with contextlib.suppress(ConfigError):
        config.parse(garbage, FILE)


@given(garbage=st.binary())
def test_random_bytes_are_never_another_error(garbage: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.toml"
    path.write_bytes(garbage)
    with contextlib.suppress(ConfigError):
        config.load(path)
