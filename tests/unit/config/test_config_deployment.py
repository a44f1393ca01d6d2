"""[deployment]: what is accepted, what goes with it, and where it puts the ranks of a host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightcache import config, placement
from weightcache.config import Config, RankConfig
from weightcache.deployment import Deployment
from weightcache.errors import ConfigError, DeviceUnavailable, WeightcacheError

FILE = Path("/etc/w.toml")
MODEL = '[loader]\ncommand = ["python3"]\n[model]\narguments = ["--model-path", "/m"]\n'
GPUS = tuple(f"GPU-0000000{i}-89ab-cdef-0123-456789abcdef" for i in range(8))


def parse(text: str) -> Config:
    return config.parse(text, FILE)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.message.startswith("/etc/w.toml: ")
    return caught.value.message.removeprefix("/etc/w.toml: ")


def tables(*ranks: int) -> str:
    return "".join(f'[[rank]]\nrank = {rank}\ngpu = "{GPUS[rank]}"\n' for rank in ranks)


def test_a_full_table() -> None:
    got = parse(
        """
        [deployment]
        tp_size = 8
        pp_size = 2
        dp_size = 4
        ep_size = 8
        attention_dp = true
        nodes = ["a", "10.0.0.2"]
        port = 29700
        meet_seconds = 60
        base_gpu_id = 0
        gpu_id_step = 1
        """
    )
    assert got.deployment == Deployment(8, 2, 4, 8, True, ("a", "10.0.0.2"), 29700, 60.0)
    assert got.ranks == ()


def test_without_the_table_nothing_changes() -> None:
    assert parse("").ranks == (RankConfig(0),)
    assert parse(tables(1, 3)).deployment == Deployment()


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("tp_sise = 2", "deployment.tp_sise", 'did you mean "tp_size"'),
        ("tp_size = 0", "deployment.tp_size", "at least 1"),
        ("tp_size = 2.0", "deployment.tp_size", "a whole number"),
        ("tp_size = 4\nep_size = 3", "deployment.ep_size", "do not divide"),
        ("tp_size = 4\ndp_size = 3\nattention_dp = true", "deployment.dp_size", "do not divide"),
        ('nodes = ["a", "a"]', "deployment.nodes", "named twice"),
        ('nodes = "a"', "deployment.nodes", "expected a list"),
        ('nodes = ["a", "b"]\ndp_size = 2', "deployment.dp_size", "several deployments"),
        ('nodes = ["a", "b", "c"]\ntp_size = 4', "deployment.nodes", "do not divide"),
        ("port = 65535", "deployment.port", "1 to 65534"),
        ("meet_seconds = 0", "deployment.meet_seconds", "greater than 0"),
        ("meet_seconds = inf", "deployment.meet_seconds", "finite"),
        ("tp_size = 100000", "deployment", "more than 65536"),
        ("tp_size = 2\n" + tables(0), "rank[0].rank", "loaded together with rank 1"),
        ("tp_size = 2\n" + tables(0, 1, 2), "rank[2].rank", "ranks 0 to 1, not 2"),
    ],
)
def test_refusals_name_the_key(text: str, key: str, says: str) -> None:
    message = refusal(f"[deployment]\n{text}")
    assert message.startswith(f"{key}: ")
    assert says in message


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--tp-size", "tp_size"),
        ("--tp", "tp_size"),
        ("--tensor-parallel-size=2", "tp_size"),
        ("--pp-size", "pp_size"),
        ("--pipeline-parallel-size", "pp_size"),
        ("--dp", "dp_size"),
        ("--data-parallel-size", "dp_size"),
        ("--ep", "ep_size"),
        ("--expert-parallel-size", "ep_size"),
        ("--enable-dp-attention", "attention_dp"),
        ("--attn-dp-size", "dp_size and attention_dp"),
        ("--nnodes", "nodes"),
        ("--node-rank", "nodes"),
        ("--dist-init-addr", "port"),
        ("--nccl-init-addr", "port"),
        ("--nccl-port", "port"),
        ("--base-gpu-id", "base_gpu_id"),
        ("--gpu-id-step", "gpu_id_step"),
    ],
)
@pytest.mark.parametrize("table", ["", "[deployment]\ntp_size = 2\n"])
def test_arguments_that_say_the_same_are_refused(option: str, key: str, table: str) -> None:
    text = MODEL.replace('"/m"', f'"/m", {json.dumps(option)}, "2"')
    message = refusal(f'{text}[memory]\nbackend = "host"\n{table}')
    assert message.startswith(f'model.arguments[2]: "{option.partition("=")[0]}" is what {key} in [deployment] says')


@pytest.mark.parametrize("option", ["--ep-num-redundant-experts", "--dp-something", "--page-size", "tp", "--nccl"])
def test_other_arguments_stay(option: str) -> None:
    text = MODEL.replace('"/m"', f'"/m", "{option}", "2"') + '[memory]\nbackend = "host"\n'
    assert option in (parse(text).model or config.ModelConfig(())).arguments


def test_a_model_on_gpus_needs_tables_or_a_deployment() -> None:
    assert "backend cuda needs a [[rank]]" in refusal(MODEL)
    assert parse(MODEL + "[deployment]\n").ranks == ()
    assert parse(MODEL + "[deployment]\ntp_size = 2\n" + tables(1, 0)).ranks[0].rank == 1


def test_replicas_and_nodes_may_be_listed_in_part() -> None:
    assert len(parse("[deployment]\ndp_size = 4\n" + tables(2)).ranks) == 1
    text = '[deployment]\ntp_size = 4\nnodes = ["a", "b"]\n'
    assert len(parse(text + tables(2, 3)).ranks) == 2
    assert "rank 2 is loaded together with rank 3" in refusal(text + tables(0, 1, 2))


def test_which_ranks_a_node_has() -> None:
    text = '[deployment]\ntp_size = 4\nnodes = ["a", "b"]\n'
    assert placement.of_node(parse(text), 1) == (2, 3)
    assert placement.of_node(parse(text + tables(3, 2, 1, 0)), 1) == (2, 3)
    assert placement.of_node(parse(text + tables(2, 3)), 0) == ()
    assert placement.of_node(parse(tables(5, 3)), 0) == (3, 5)


@pytest.mark.parametrize(
    ("table", "rank", "gpu"),
    [
        ("tp_size = 2", 1, 1),
        ("tp_size = 2\nbase_gpu_id = 4\ngpu_id_step = 2", 1, 6),
        ("tp_size = 2\ndp_size = 2", 3, 3),
        ('tp_size = 4\nnodes = ["a", "b"]', 3, 1),
        ('tp_size = 2\npp_size = 4\nnodes = ["a", "b"]', 7, 3),
    ],
)
def test_gpus_follow_from_the_deployment(table: str, rank: int, gpu: int) -> None:
    got = placement.place(parse(f"[deployment]\n{table}"), rank, lambda: GPUS)
    assert got == RankConfig(rank, GPUS[gpu])


def test_tables_name_gpus_and_the_host_is_not_asked() -> None:
    got = placement.place(parse("[deployment]\ntp_size = 2\n" + tables(0, 1)), 1, lambda: pytest.fail("asked"))
    assert got.gpu == GPUS[1]


def test_host_memory_needs_no_gpu() -> None:
    chosen = parse('[memory]\nbackend = "host"\n[deployment]\ntp_size = 2')
    assert placement.place_all(chosen, (0, 1), lambda: pytest.fail("asked")) == (RankConfig(0), RankConfig(1))


@pytest.mark.parametrize(
    ("text", "rank", "error", "says"),
    [
        ("[deployment]\ntp_size = 8", 5, DeviceUnavailable, "rank 5 would be on GPU 5, and this host shows 4 GPUs"),
        ("[deployment]\nbase_gpu_id = 4", 0, DeviceUnavailable, "rank 0 would be on GPU 4, and this host shows 4 GPUs"),
        ("[deployment]\ntp_size = 2", 2, ConfigError, "/etc/w.toml: [deployment] has ranks 0 to 1, not 2"),
        (tables(1), 0, ConfigError, "/etc/w.toml: no [[rank]] table has rank = 0"),
    ],
)
def test_what_cannot_be_placed_is_one_sentence(text: str, rank: int, error: type[WeightcacheError], says: str) -> None:
    with pytest.raises(error) as caught:
        placement.place(parse(text), rank, lambda: GPUS[:4])
    assert caught.value.message == says


def test_a_gpu_whose_uuid_nobody_knows_yet_is_no_other_one() -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        placement.place(parse("[deployment]\ntp_size = 2"), 1, lambda: (GPUS[0], "", GPUS[2]))
    assert caught.value.message.startswith("rank 1 would be on GPU 1, whose UUID the driver does not know yet: run")
