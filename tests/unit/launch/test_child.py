"""How the server's main process is started."""

from __future__ import annotations

import errno
import os

import pytest

from weightcache.errors import NoRoom, UsageError, WeightcacheError
from weightcache.launch import child


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOENT, UsageError), (errno.EACCES, UsageError), (errno.EAGAIN, NoRoom), (errno.ENOMEM, NoRoom)],
)
def test_what_may_pass_by_itself_is_no_mistake_of_the_operators(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[WeightcacheError]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(child.subprocess, "Popen", fails)
    with pytest.raises(WeightcacheError, match="python cannot be started") as caught:
        child.fresh(["python"], {}, lambda: None)
    assert type(caught.value) is kind
