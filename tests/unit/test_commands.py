"""Command lines for people."""

from __future__ import annotations

import pytest

from weightcache.commands import LONGEST, shown


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "-m", "x y"], "python -m 'x y'"),
        (["s", "--api-key", "k", "--port", "1"], "s --api-key *** --port 1"),
        (["s", "--api-key=k", "--admin-api-key=k"], "s --api-key=*** --admin-api-key=***"),
        (["s", "--api_key", "k", "--hf_token=k", "--port", "1"], "s --api_key *** --hf_token=*** --port 1"),
        (["s", "--admin_api-key=k", "--API_KEY", "k"], "s --admin_api-key=*** --API_KEY ***"),
        (["s", "--api", "k", "--ssl-keyfile-password", "k"], "s --api *** --ssl-keyfile-password ***"),
        (["s", "--hf-token", "k", "--db-password=k"], "s --hf-token *** --db-password=***"),
        (["s", "--max-total-tokens", "4096", "--tokenizer-path", "t"], "s --max-total-tokens 4096 --tokenizer-path t"),
        (["s", "--max_total_tokens", "4096", "--tokenizer_path", "t"], "s --max_total_tokens 4096 --tokenizer_path t"),
        (["s", "--a", "k"], "s --a k"),
        (["x" * 10_000], "x" * LONGEST),
        ([], ""),
    ],
)
def test_what_people_get_to_see(command: list[str], expected: str) -> None:
    assert shown(command) == expected
