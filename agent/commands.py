"""Command lines for people, who are not to learn the secrets in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

LONGEST = 4000

_SECRETS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SECRET_WORD = re.compile(r"-(?:key|keyfile|password|passwd|secret|credentials?|auth|token)(?:-|$)", re.IGNORECASE)


def shown(command: Sequence[str]) -> str:
    """A command line: quoted as for a shell, without secrets, of at most LONGEST characters."""
    words, secret = [], False
    for word in command:
        name, equals, _ = word.partition("=")
        hidden = _is_secret(name)
        words.append("***" if secret else f"{name}=***" if hidden and equals else shlex.quote(word))
        secret = hidden and not equals
    return " ".join(words)[:LONGEST]


def _is_secret(name: str) -> bool:
    if not name.startswith("--"):
        return False
    name = name.replace("_", "-")  # both are common, and some parsers take either
    # argparse takes abbreviations.
    return bool(_SECRET_WORD.search(name)) or (len(name) > 3 and any(option.startswith(name) for option in _SECRETS))
