"""The arithmetic of a deployment, against layouts that were written by hand (and SGLang's own, in tests/engine)."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tests.support.layouts import LAYOUTS, Layout
from weightcache.deployment import Deployment, LayoutError


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(LAYOUTS.index(layout)))
def test_layouts(layout: Layout) -> None:
    deployment = layout.deployment
    deployment.check()
    assert deployment.node_count == len(layout.gpus)
    of_nodes = [deployment.of_node(node) for node in range(deployment.node_count)]
    assert [rank for ranks in of_nodes for rank in ranks] == list(deployment.ranks)
    assert tuple(tuple(map(deployment.gpu_index, ranks)) for ranks in of_nodes) == layout.gpus
    assert tuple(dict.fromkeys(tuple(deployment.launch_of(rank)) for rank in deployment.ranks)) == layout.launches
    for node, ranks in enumerate(of_nodes):
        assert {deployment.node_of(rank) for rank in ranks} == {node}


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    sizes = st.integers(1, 8)
    return Deployment(
        *(draw(sizes) for _ in range(4)),
        attention_dp=draw(st.booleans()),
        nodes=tuple(map(str, range(draw(st.integers(0, 8))))),
        base_gpu_id=draw(st.integers(0, 3)),
        gpu_id_step=draw(st.integers(1, 3)),
    )


@given(deployments())
def test_whatever_is_accepted_puts_each_rank_on_a_gpu_of_its_own(deployment: Deployment) -> None:
    try:
        deployment.check()
    except LayoutError:
        return
    places = [(deployment.node_of(rank), deployment.gpu_index(rank)) for rank in deployment.ranks]
    assert len(set(places)) == len(places)
    for rank in deployment.ranks:
        together = deployment.launch_of(rank)
        assert rank in together
        assert {deployment.launch_of(other) for other in together} == {together}
        assert {deployment.replica_of(other) for other in together} == {deployment.replica_of(rank)}
        assert rank in deployment.of_node(deployment.node_of(rank))


@pytest.mark.parametrize(
    ("deployment", "key"),
    [
        (Deployment(tp_size=0), "tp_size"),
        (Deployment(base_gpu_id=-1), "base_gpu_id"),
        (Deployment(tp_size=4, ep_size=3), "ep_size"),
        (Deployment(tp_size=4, dp_size=3, attention_dp=True), "dp_size"),
        (Deployment(dp_size=2, nodes=("a", "b")), "dp_size"),
        (Deployment(tp_size=3, nodes=("a", "b")), "nodes"),
        (Deployment(tp_size=2, pp_size=3, nodes=("a", "b")), "nodes"),
        (Deployment(nodes=("a b",)), "nodes"),
        (Deployment(nodes=("",)), "nodes"),
        (Deployment(tp_size=2, pp_size=2, gpu_id_step=2), "gpu_id_step"),
        (Deployment(port=0), "port"),
        (Deployment(meet_seconds=-1), "meet_seconds"),
    ],
)
def test_what_cannot_be(deployment: Deployment, key: str) -> None:
    with pytest.raises(LayoutError) as caught:
        deployment.check()
    assert caught.value.key == key


def test_arguments_for_the_launch_on_a_node() -> None:
    assert Deployment().arguments(0) == ()
    assert Deployment(dp_size=2).arguments(0) == ()
    spread = Deployment(tp_size=4, dp_size=2, ep_size=4, attention_dp=True, nodes=("a", "b"))
    assert spread.arguments(1) == (
        *("--tp-size", "4", "--ep-size", "4", "--dp-size", "2", "--enable-dp-attention"),
        *("--nnodes", "2", "--node-rank", "1"),
    )
