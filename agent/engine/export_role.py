"""The model loader inside a loader process: publish each model of the launch, then end before any KV memory."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, NoReturn

from torch import nn

from weightcache.engine import adapter, state
from weightcache.engine.agree import wait_for_all
from weightcache.engine.ask import socket_of
from weightcache.engine.directive import Directive, token_for
from weightcache.engine.donate import publish_path
from weightcache.engine.observe import observe
from weightcache.engine.serve import device_of
from weightcache.engine.together import Source, load_together
from weightcache.errors import LoadFailed, NoRoom, WeightcacheError
from weightcache.loader.publication import Publication
from weightcache.memory import open_memory
from weightcache.paths import RankPaths


class PublishingLoader:
    """Stands in for SGLang's loader inside a loader process."""

    def __init__(self, inner: Any, runner: Any, directive: Directive) -> None:
        self.inner = inner
        self.runner = runner
        self.directive = directive

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Load, publish; on any failure tell the agent the reason before the process ends."""
        device = device_of(device_config)
        publication = _publication(self.directive, device)
        try:
            if option := adapter.refused(self.runner.server_args):
                raise LoadFailed(f"weightcache cannot serve with {option}")
            fingerprint = observe(model_config, self.inner.load_config, self.runner.server_args, device)
            source = Source(
                lambda: self.inner.load_model(model_config=model_config, device_config=device_config),
                self.inner,
                fingerprint,
                open_memory(self.directive.backend, device.index or 0),
                device,
                self.directive,
                build=lambda: adapter.build_on_meta(model_config, self.inner.load_config),
                drafts_apart=_drafts_apart(self.runner.server_args),
            )
            return load_together(source, publication)
        except WeightcacheError as error:
            publication.abort(error)
            raise
        except Exception as error:
            traceback.print_exc()
            # torch.OutOfMemoryError, under whichever name this torch has it.
            kind = NoRoom if "OutOfMemory" in type(error).__name__ else LoadFailed
            publication.abort(kind(f"loading failed: {type(error).__name__}: {_first_line(error)}"))
            raise


def _drafts_apart(server_args: Any) -> bool:
    return int(adapter.parallel().pp_size) > 1 and bool(adapter.resolved(server_args, "speculative_algorithm"))


def _publication(directive: Directive, device: Any) -> Publication:
    if state.process.publication is None:
        public = socket_of(directive, device, adapter.global_rank())
        token = token_for(RankPaths.of(public).rank)
        state.process.publication = Publication(
            publish_path(public), source="loader", group=directive.group, token=token
        )
    return state.process.publication


def finish() -> NoReturn:
    """All models of all ranks are published or held: commit, and end the process before it allocates KV memory."""
    publication = state.process.publication
    if publication is None:
        raise SystemExit(1)
    try:
        wait_for_all()  # a rank that cannot publish leaves nothing of the others behind
    except Exception as error:
        publication.abort(LoadFailed(f"another rank of the launch has failed: {_first_line(error)}"))
        raise
    if publication.sets:
        publication.commit()
    else:  # this rank had lost nothing
        publication.retain(state.process.rejoined)
    publication.close()
    # Nothing is left to flush, and an orderly end of SGLang and NCCL keeps the CUDA context for seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]
