"""Deployments and what each of their ranks is, written by hand; a contract test compares them with SGLang, too."""

from __future__ import annotations

from dataclasses import dataclass

from weightcache.deployment import Deployment

TWO, FOUR = ("a", "b"), ("a", "b", "c", "d")


@dataclass(frozen=True, slots=True)
class Layout:
    """``gpus``: by node, the ordinals of the GPUs of its ranks; ``launches``: who is loaded together."""

    deployment: Deployment
    gpus: tuple[tuple[int, ...], ...]
    launches: tuple[tuple[int, ...], ...]


LAYOUTS = (
    Layout(Deployment(), ((0,),), ((0,),)),
    Layout(Deployment(tp_size=4), ((0, 1, 2, 3),), ((0, 1, 2, 3),)),
    Layout(Deployment(tp_size=2, base_gpu_id=4, gpu_id_step=2), ((4, 6),), ((0, 1),)),
    Layout(Deployment(tp_size=2, pp_size=2, base_gpu_id=1), ((1, 2, 3, 4),), ((0, 1, 2, 3),)),
    Layout(Deployment(tp_size=4, ep_size=2), ((0, 1, 2, 3),), ((0, 1, 2, 3),)),
    Layout(Deployment(tp_size=4, dp_size=2, attention_dp=True), ((0, 1, 2, 3),), ((0, 1, 2, 3),)),
    Layout(Deployment(dp_size=3, gpu_id_step=2), ((0, 2, 4),), ((0,), (1,), (2,))),
    Layout(Deployment(tp_size=2, dp_size=2), ((0, 1, 2, 3),), ((0, 1), (2, 3))),
    Layout(Deployment(tp_size=2, dp_size=2, gpu_id_step=2), ((0, 2, 4, 6),), ((0, 1), (2, 3))),
    Layout(Deployment(tp_size=2, pp_size=2, dp_size=2), (tuple(range(8)),), ((0, 1, 2, 3), (4, 5, 6, 7))),
    Layout(Deployment(tp_size=4, nodes=TWO), ((0, 1), (0, 1)), ((0, 1), (2, 3))),
    Layout(Deployment(tp_size=2, pp_size=2, nodes=TWO), ((0, 1), (0, 1)), ((0, 1), (2, 3))),
    Layout(Deployment(tp_size=2, pp_size=4, nodes=TWO), ((0, 1, 2, 3), (0, 1, 2, 3)), ((0, 1, 2, 3), (4, 5, 6, 7))),
    Layout(
        Deployment(tp_size=4, pp_size=2, nodes=FOUR, base_gpu_id=2, gpu_id_step=3),
        ((2, 5), (2, 5), (2, 5), (2, 5)),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
    ),
    Layout(
        Deployment(tp_size=8, dp_size=8, attention_dp=True, ep_size=8, nodes=TWO),
        ((0, 1, 2, 3), (0, 1, 2, 3)),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
    ),
)
