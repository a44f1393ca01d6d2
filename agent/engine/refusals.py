"""Verbs that would write into shared weights answer with a failure, and the server lives on.

Raising inside these handlers would end the scheduler, and with it the server; returning the verb's own output type
with success=False does not. Releasing and resuming memory have no such field: there the refusal travels in the
request id, and the HTTP process turns it into an error (see ``released`` below).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from weightcache.engine import state

OUTPUTS = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    "begin_weight_update": "BeginWeightUpdateReqOutput",
    "end_weight_update": "EndWeightUpdateReqOutput",
    "check_weights": "CheckWeightsReqOutput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqOutput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqOutput",
}
"""Scheduler verb → the type it answers with (sglang.srt.managers.io_struct)."""

MARK = "weightcache-refused:"


def hook(verb: str) -> Callable[..., Any]:
    """The AROUND hook for one verb of SGLang's SchedulerWeightUpdaterManager."""

    def around(original: Callable[..., Any], manager: Any, request: Any) -> Any:
        reason = _reason(verb, request)
        if not reason:
            return original(manager, request)
        from sglang.srt.managers import io_struct

        output = getattr(io_struct, OUTPUTS[verb])
        if verb.endswith("memory_occupation"):
            return output(rid=f"{MARK}{reason}")
        return output(success=False, message=reason)

    return around


def _reason(verb: str, request: Any) -> str:
    if not state.process.shares_weights:
        return ""
    if verb == "check_weights" and getattr(request, "action", "") != "reset_tensors":
        return ""
    if verb.endswith("memory_occupation"):
        tags = getattr(request, "tags", None)
        if tags and "weights" not in tags:
            return ""
        return (
            "this engine's weights are shared through weightcache and cannot be released; "
            'pass tags=["kv_cache"] to release the KV cache alone'
        )
    return (
        f"{verb} would write into weights that are shared through weightcache; "
        "start the server with --weight-cache-mode off to use it"
    )


def released(verb: str) -> Callable[..., Awaitable[None]]:
    """The AROUND hook for the HTTP side of releasing and resuming memory: it drops the answers, this one reads them."""

    async def around(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> None:
        communicator = getattr(manager, f"{verb}_communicator")
        manager.auto_create_handle_loop()
        for answer in await communicator(obj):
            rid = getattr(answer, "rid", None)
            if isinstance(rid, str) and rid.startswith(MARK):
                raise ValueError(rid.removeprefix(MARK))

    return around
