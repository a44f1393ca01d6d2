"""The fingerprint: each field counts, and says what ignoring it would mean."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.test_loader import fingerprint
from weightcache.fingerprint import CONSEQUENCES, Difference, Fingerprint, diff

FIELDS = [f.name for f in dataclasses.fields(Fingerprint)]


def other(name: str) -> Fingerprint:
    value = getattr(fingerprint(), name)
    return fingerprint(**{name: value + 1 if isinstance(value, int) else f"{value}-other"})


def test_equal_fingerprints_do_not_differ() -> None:
    assert diff(fingerprint(), fingerprint()) == ()
    assert fingerprint().digest() == fingerprint().digest()


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_compared_explained_and_digested(name: str) -> None:
    (row,) = diff(fingerprint(), other(name))
    assert row == Difference(name, getattr(fingerprint(), name), getattr(other(name), name), CONSEQUENCES[name])
    assert row.consequence
    assert other(name).digest() != fingerprint().digest()


def test_differences_come_in_the_order_of_the_fields() -> None:
    changed = {name: getattr(other(name), name) for name in reversed(FIELDS)}
    assert [row.field for row in diff(fingerprint(), fingerprint(**changed))] == FIELDS


def test_every_field_has_a_consequence_that_reads_like_one() -> None:
    assert list(CONSEQUENCES) == FIELDS
    for text in CONSEQUENCES.values():
        assert text
        assert not text.endswith(".")
        assert text[0].islower()


def test_the_fields_that_were_asked_for_are_there() -> None:
    assert {
        "model_path", "model_arch", "revision", "tp_size", "tp_rank", "pp_size", "pp_rank", "dp_size", "ep_size",
        "quant_method", "quant_config_hash", "dtype", "device_capability", "torch_version", "checkpoint",
        "override_args", "sglang_version", "kernel_versions", "backends", "environment", "schema",
    } <= set(FIELDS)  # fmt: skip


def test_digests_do_not_run_fields_together() -> None:
    assert (
        fingerprint(model_path="ab", model_arch="c").digest() != fingerprint(model_path="a", model_arch="bc").digest()
    )
    assert len(fingerprint().digest()) == 32
