"""The model loader that SGLang gets: attach to a resident set, or load from disk and donate, or just load.

Everything is decided before anything is built on ``meta``: that build leaves meta tensors in SGLang's process-wide
caches (its rotary embeddings), so a failure after it ends the process, and the launcher starts it again from disk.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightcache import checkpoint
from weightcache.engine import adapter, state
from weightcache.engine.agree import Agreement, Vote, agree
from weightcache.engine.ask import Invitation, Offer, ask, socket_of
from weightcache.engine.directive import Decision, Directive, send_report
from weightcache.engine.donate import donate
from weightcache.engine.lease import Lease
from weightcache.engine.observe import observe, role_of
from weightcache.engine.rebuild import copy_private, rebuild
from weightcache.engine.tree import look_through
from weightcache.errors import AttachFailed, Mismatch, NoRoom, UnsupportedMethod, WeightcacheError
from weightcache.fingerprint import Fingerprint
from weightcache.memory import Memory, open_memory

logger = logging.getLogger(__name__)

LAUNCHER_SECONDS = 5.0


@dataclass(slots=True)
class Answer:
    """What this rank could do before the ranks agreed, and why not more."""

    vote: Vote
    offer: Offer | None = None
    invitation: Invitation | None = None
    reason: WeightcacheError | None = None
    fingerprint: Fingerprint | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)

    def withdraw(self) -> None:
        """Give back what the agent gave."""
        for held in (self.offer, self.invitation):
            if held is not None:
                held.withdraw()


class ServingLoader:
    """Stands in for SGLang's loader inside one ModelRunner.load_model call."""

    def __init__(self, inner: Any, runner: Any, directive: Directive) -> None:
        self.inner = inner
        self.runner = runner
        self.directive = directive
        # Read by 0.5.23 when it sizes the KV pool (Scheduler.init_target_memory_pool).
        self.preloaded_weights_bytes = 0

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while unpickling or copying, before __init__ ran
            raise AttributeError(name)
        return getattr(self.inner, name)

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Same contract as SGLang's BaseModelLoader.load_model."""
        device = device_of(device_config)
        role = role_of(model_config, self.inner.load_config)
        if role != "target" and int(adapter.parallel().pp_size) > 1:
            return self._apart(role, model_config, device_config)
        answer = self._answer(model_config, device)
        started = time.perf_counter()
        resident = sum(arena.bytes for arena in answer.offer.arenas) if answer.offer else 0
        group = answer.offer.group if answer.offer else self.directive.group
        agreement = self._together(answer, agree(answer.vote, resident, group), model_config, device)
        answer.milliseconds["collective"] = (time.perf_counter() - started) * 1000
        if self.directive.explain:
            self._explain(answer, role)
        if agreement.vote is Vote.ATTACH and answer.offer is not None:
            return self._attach(answer, answer.offer, agreement, model_config, device)
        if agreement.vote is Vote.DONATE and answer.invitation is not None and answer.fingerprint is not None:
            return self._donate(
                answer.invitation, answer.fingerprint, agreement.group, model_config, device_config, device
            )
        answer.withdraw()
        if agreement.vote is Vote.REFUSE:
            self._refuse(answer, agreement, role)
        reason = answer.reason or AttachFailed(f"rank {agreement.reluctant} could not attach, so no rank does")
        self._report(role, "disk", error=reason, milliseconds=answer.milliseconds)
        model: nn.Module = self.inner.load_model(model_config=model_config, device_config=device_config)
        return model

    def _apart(self, role: str, model_config: Any, device_config: Any) -> nn.Module:
        """A draft of a pipeline: only the last stage builds it, so that the ranks could not vote on it together."""
        self._report(role, "disk", error=UnsupportedMethod("the drafts of pipelines are not shared"))
        model: nn.Module = self.inner.load_model(model_config=model_config, device_config=device_config)
        return model

    def _together(self, answer: Answer, agreement: Agreement, model_config: Any, device: torch.device) -> Agreement:
        """The same, unless all ranks hold weights, but not those of one load."""
        if agreement.apart is None:
            return agreement
        answer.reason = AttachFailed(
            f"rank {agreement.apart} holds weights of another load than rank 0: `wcache load --again`"
        )
        refuses = self.directive.on_mismatch == "error"
        if short := self._shortage(model_config, device):
            refuses, answer.reason = True, short
        return dataclasses.replace(agreement, vote=Vote.REFUSE if refuses else Vote.DISK)

    def _answer(self, model_config: Any, device: torch.device) -> Answer:
        """Never raises: whatever happens here is one rank's vote, and all ranks must get to the vote."""
        answer = Answer(Vote.DISK)
        try:
            self._ask(answer, model_config, device)
        except WeightcacheError as error:
            answer.reason = error
        except Exception as error:
            logger.exception("weightcache: unexpected error before the decision")
            answer.reason = WeightcacheError(f"{type(error).__name__}: {error}")
        if answer.vote is Vote.DISK:
            if self.directive.on_mismatch == "error" and not self.directive.from_disk:
                answer.vote = Vote.REFUSE
            elif isinstance(answer.reason, Mismatch) and (short := self._shortage(model_config, device)):
                answer.vote, answer.reason = Vote.REFUSE, short
        return answer

    def _ask(self, answer: Answer, model_config: Any, device: torch.device) -> None:
        if self.directive.from_disk:
            raise AttachFailed(self.directive.from_disk)
        if option := adapter.refused(self.runner.server_args):
            raise AttachFailed(f"weightcache cannot serve with {option}")
        if type(self.inner).__name__ not in adapter.SUPPORTED_LOADERS:
            raise UnsupportedMethod(f"weightcache cannot serve models that {type(self.inner).__name__} loads")
        started = time.perf_counter()
        answer.fingerprint = observe(model_config, self.inner.load_config, self.runner.server_args, device)
        answer.milliseconds["observe"] = (time.perf_counter() - started) * 1000
        path = socket_of(self.directive, device, adapter.global_rank())
        with _no_collection():
            given = ask(path, self.directive, answer.fingerprint, _memory(device), _log_progress)
        if isinstance(given, Offer):
            answer.vote, answer.offer = Vote.ATTACH, given
            answer.milliseconds |= given.milliseconds
        else:
            answer.vote, answer.invitation = Vote.DONATE, given

    def _shortage(self, model_config: Any, device: torch.device) -> NoRoom | None:
        """An error when a second copy of the weights would not fit beside the resident one. Unknown sizes are none."""
        try:
            directory = adapter.checkpoint_directory(model_config)
            if directory is None:
                return None
            topology = adapter.parallel()
            needed = checkpoint.size(directory) // max(1, int(topology.tp_size) * int(topology.pp_size))
            free = _memory(device).free_bytes()
        except Exception:  # whatever it is: this rank has to get to the vote
            logger.debug("weightcache: how much a second copy needs is unknown", exc_info=True)
            return None
        if needed <= free:
            return None
        return NoRoom(
            f"loading from disk needs about {needed / 1e9:.1f} GB beside the resident set and {free / 1e9:.1f} GB are "
            "free: start with --wcache-on-mismatch evict, run `wcache evict`, or use a matching model"
        )

    def _attach(
        self, answer: Answer, offer: Offer, agreement: Agreement, model_config: Any, device: torch.device
    ) -> nn.Module:
        spent = answer.milliseconds
        try:
            state.process.keep.append(offer.region)
            base = offer.region.bytes_at(0, offer.manifest.bytes)
            marks = [time.perf_counter()]
            private = copy_private(offer.manifest, base)
            marks.append(time.perf_counter())
            with _no_collection():
                model = adapter.build_on_meta(model_config, self.inner.load_config)
                tree = look_through(model)
                marks.append(time.perf_counter())
                rebuilt = rebuild(model, offer.manifest, base, state.process.rebuilt, private, tree)
                marks.append(time.perf_counter())
        except Exception as error:
            # Not unmapped: tensors may look into it, and this process ends.
            offer.conversation.close()
            known = error if isinstance(error, WeightcacheError) else AttachFailed(f"{type(error).__name__}: {error}")
            self._report(offer.role, "failed", error=known, milliseconds=spent)
            raise
        spent |= {
            name: (end - start) * 1000
            for name, start, end in zip(("private", "build", "bind"), marks, marks[1:], strict=False)
        }
        state.process.rebuilt[offer.role] = rebuilt
        state.process.shares_weights = True
        state.process.resident_bytes[offer.role] = agreement.resident_bytes
        self.preloaded_weights_bytes = agreement.resident_bytes
        path = socket_of(self.directive, device, adapter.global_rank())
        state.process.leases.append(Lease(path, offer.set_id, offer.role, offer.conversation))
        self._report(
            offer.role,
            "attached",
            milliseconds=spent,
            set_id=offer.set_id,
            tensors=len(offer.manifest.tensors),
            arenas=len(offer.arenas),
            mapped_bytes=sum(arena.bytes for arena in offer.arenas),
            private_bytes=offer.manifest.private_bytes,
        )
        return model.eval()

    def _donate(
        self,
        invitation: Invitation,
        fingerprint: Fingerprint,
        group: str,
        model_config: Any,
        device_config: Any,
        device: torch.device,
    ) -> nn.Module:
        path = socket_of(self.directive, device, adapter.global_rank())
        donation = donate(
            lambda: self.inner.load_model(model_config=model_config, device_config=device_config),
            self.inner,
            fingerprint,
            _memory(device),
            device,
            path,
            invitation.token,
            group,
            self.directive,
        )
        if donation.produced is None:
            invitation.withdraw()
            self._report(fingerprint.role, "disk", error=donation.reason)
            return donation.model
        produced = donation.produced
        state.process.shares_weights = True
        state.process.keep.append(produced.region)
        state.process.leases.append(Lease(path, produced.set_id, fingerprint.role, invitation.conversation))
        self._report(
            fingerprint.role,
            "donated",
            milliseconds=dict(produced.milliseconds),
            set_id=produced.set_id,
            tensors=len(produced.manifest.tensors),
            arenas=len(produced.arenas),
            mapped_bytes=sum(arena.bytes for arena in produced.arenas),
            private_bytes=produced.manifest.private_bytes,
        )
        return donation.model

    def _explain(self, answer: Answer, role: str) -> None:
        answer.withdraw()
        self._report(role, "explained", error=answer.reason, milliseconds=answer.milliseconds)
        self._await_the_end()
        raise SystemExit(0)

    def _refuse(self, answer: Answer, agreement: Agreement, role: str) -> None:
        error = answer.reason or AttachFailed(f"rank {agreement.reluctant} could not attach")
        self._report(role, "refused", error=error, milliseconds=answer.milliseconds)
        self._await_the_end()
        raise error

    def _await_the_end(self) -> None:
        """The launcher ends an engine that will not serve; by itself it would end with tracebacks of SGLang's."""
        if self.directive.report:
            time.sleep(LAUNCHER_SECONDS)

    def _report(self, role: str, outcome: Any, error: WeightcacheError | None = None, **facts: Any) -> None:
        if facts.get("milliseconds"):
            facts["milliseconds"] = {name: round(value, 3) for name, value in facts["milliseconds"].items()}
        decision = Decision(
            rank=adapter.global_rank(),
            role=role,
            outcome=outcome,
            code=error.code if error else "",
            message=error.message if error else "",
            differences=error.differences if isinstance(error, Mismatch) else (),
            **facts,
        )
        logger.info("weightcache: %s", decision)
        send_report(self.directive, decision)


def device_of(device_config: Any) -> torch.device:
    """The torch device of SGLang's DeviceConfig, with the ordinal on CUDA."""
    device = torch.device(device_config.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of new objects start the garbage collector, which then walks all of SGLang's: tenths of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _memory(device: torch.device) -> Memory:
    return open_memory("cuda" if device.type == "cuda" else "host", device.index or 0)


def _log_progress(progress: Any) -> None:
    logger.info("weightcache: waiting for the load: %s", progress)
