"""`wcache doctor`: this host's part in the deployment, the GPUs for it, and whether other nodes can be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcache import nodes, placement
from weightcache.cli.findings import Finding, note, ok, problem
from weightcache.errors import WeightcacheError
from weightcache.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightcache.monitor.site import Site

LOOPBACK = ("127.", "::1")


def deployment(site: Site) -> Iterator[Finding]:
    """Nothing where there is neither a layout of several ranks nor a GPU to be derived."""
    config, layout = site.config, site.config.deployment
    if site.lost:
        yield problem("deployment", site.lost.message, "`wcache ranks --node N` tries a number")
        return
    if config.ranks and len(layout.ranks) == 1:
        return
    here = f"{count(len(layout.ranks), 'rank')} on {count(layout.node_count, 'node')}"
    own = " ".join(map(str, site.ranks))
    yield ok("deployment", f"{here}; this is node {site.node}, with {f'rank {own}' if own else 'no rank'}")
    if not config.ranks:
        yield from _gpus(site)
    yield from _others(site)


def _gpus(site: Site) -> Iterator[Finding]:
    try:
        placed = placement.place_all(site.config, site.ranks, lambda: site.gpus)
    except WeightcacheError as error:
        advice = (
            "compare deployment.base_gpu_id, gpu_id_step and the sizes with `nvidia-smi -L`, or write [[rank]] tables"
        )
        yield problem("GPUs", error.message, advice)
        return
    for entry in placed:
        if entry.gpu:
            yield ok(f"rank {entry.rank}", f"on {entry.gpu}, GPU {site.gpus.index(entry.gpu)} of {len(site.gpus)}")


def _others(site: Site) -> Iterator[Finding]:
    names = site.config.deployment.nodes
    if len(names) < 2:
        return
    # The first one's address is where all meet: on that host itself, it must not be the loopback's.
    looked_up = [node for node in range(len(names)) if node != site.node or node == 0]
    known = nodes.addresses([names[node] for node in looked_up])
    for node in looked_up:
        name, subject = names[node], f"node {node}"
        found = known[name]
        if not found:
            yield problem(subject, f"the name {name} is not known here", "mend DNS or /etc/hosts, or write its address")
        elif node == 0 and all(address.startswith(LOOPBACK) for address in found):
            text = f"{name} is {found[0]} here, where no other node can meet this one"
            yield note(subject, text, "write its address on the cluster's network, or mend /etc/hosts")
        elif node != site.node:
            yield ok(subject, f"{name} is {found[0]}")
