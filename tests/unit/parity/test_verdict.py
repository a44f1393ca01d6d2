"""The verdict: what makes two engines the same, and what is said when they are not."""

from __future__ import annotations

import dataclasses
import json

from weightcache.parity.inventory import Inventory, TensorRow
from weightcache.parity.server import Answer
from weightcache.parity.verdict import SHOWN, Side, judge

ROW = TensorRow("parameter", "torch.nn.Parameter", (2,), (1,), "bfloat16", "cuda", False, "w", "w", 0, "00")
INVENTORY = Inventory("target", 0, "0.5.17", "9.0", {"M()": 3}, {"w": ROW}, {"x": "1"}, 4, 0)
ANSWERS = (Answer((1, 2), (-0.5, -1.0), (((-0.5, 1),), ((-1.0, 2),))),)
SIDE = Side({INVENTORY.name: INVENTORY}, ANSWERS, ANSWERS)


def with_tensors(count: int, sha256: str) -> Side:
    rows = {f"w{number}": dataclasses.replace(ROW, sha256=sha256) for number in range(count)}
    return dataclasses.replace(SIDE, inventories={INVENTORY.name: dataclasses.replace(INVENTORY, tensors=rows)})


def test_equal() -> None:
    verdict = judge(SIDE, SIDE)
    assert (verdict.broken, verdict.deviations, verdict.deterministic) == ("", (), True)
    assert verdict.text().splitlines() == [
        "SGLang 0.5.17, compute capability 9.0",
        "compared: 1 tensors, 0.000 GB, 2 tokens with log probabilities",
        "      3 layers  M()",
        "equal: disk load and attach are the same engine",
    ]
    assert json.loads(json.dumps(verdict.plain()))["methods"] == {"M()": 3}


def test_every_deviation_is_counted_and_some_are_shown() -> None:
    verdict = judge(with_tensors(100, "00"), with_tensors(100, "01"))
    assert verdict.broken == "100 places differ, the first is w0 (sha256)"
    lines = verdict.text().splitlines()
    assert lines[3] == "  w0: sha256: disk 00, attached 01"
    assert lines[3 + SHOWN] == f"  ... and {100 - SHOWN} more"
    assert lines[-1].startswith("differs: 100 places differ")


def test_a_model_that_one_side_has_not() -> None:
    verdict = judge(SIDE, dataclasses.replace(SIDE, inventories={}))
    assert verdict.broken == "1 places differ, the first is rank-0.target.json (model)"


def test_answers_differ() -> None:
    other = (dataclasses.replace(ANSWERS[0], logprobs=(-0.5, -1.25)),)
    assert judge(SIDE, dataclasses.replace(SIDE, answers=other)).broken == (
        "the answers differ by up to 0.25 in a log probability"
    )
    other = (dataclasses.replace(ANSWERS[0], tokens=(1, 3)),)
    assert judge(SIDE, dataclasses.replace(SIDE, repeated=other)).broken == "the answers differ"
    assert judge(SIDE, dataclasses.replace(SIDE, answers=other)).broken == "the answers differ in their tokens"


def test_a_disk_load_that_answers_differently_each_time_proves_nothing_by_its_answers() -> None:
    other = (dataclasses.replace(ANSWERS[0], tokens=(1, 3)),)
    verdict = judge(dataclasses.replace(SIDE, repeated=other), dataclasses.replace(SIDE, answers=other))
    assert (verdict.broken, verdict.deterministic) == ("", False)
    assert "answers were not compared" in verdict.text()


def test_a_draft_whose_tokens_are_taken_otherwise() -> None:
    def taking(*drafts: int) -> tuple[Answer, ...]:
        return (dataclasses.replace(ANSWERS[0], drafts=drafts),)

    disk = Side({INVENTORY.name: INVENTORY}, taking(6, 3), taking(6, 3))
    assert judge(disk, disk).broken == ""
    assert judge(disk, dataclasses.replace(disk, answers=taking(6, 2))).broken == (
        "other tokens of the draft model are taken"
    )
    changing = dataclasses.replace(disk, repeated=taking(6, 2))
    verdict = judge(changing, dataclasses.replace(disk, answers=taking(6, 1)))
    assert (verdict.broken, verdict.deterministic) == ("", True)
