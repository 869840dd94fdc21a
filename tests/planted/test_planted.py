"""Every planted bug is found, every clean program is let through, and the table says so."""

import time
from typing import Any

import pytest

from tests.planted.bug import DEVIATIONS, LADDER, NUMBERS, TAPE_SETTINGS, Bug
from tests.planted.table import TABLE, all_bugs, findings, table

BUGS = all_bugs()


def test_there_are_at_least_forty() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 40


def test_all_are_found_in_a_minute_and_the_table_is_current() -> None:
    start = time.process_time()
    found = findings()
    assert time.process_time() - start < 60
    assert [name for name, finding in found.items() if finding is None] == []
    assert {name: finding.tape for name, finding in found.items() if finding and finding.deviations > DEVIATIONS} == {}
    for bug in BUGS:
        finding = found[bug.name]
        assert finding is not None
        assert bug.words in finding.complaint, f"{bug.name}: {finding.complaint}"
        assert bool(bug.words) == (finding.complaint != NUMBERS), f"{bug.name}: {finding.complaint}"
    assert TABLE.read_text() == table(found), "run: python -m tests.planted"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_without_the_bug_nothing_is_said(bug: Bug) -> None:
    usual = bug.run(False)
    settings: list[dict[str, Any]] = [*LADDER.values(), *({**TAPE_SETTINGS, "choices": seed} for seed in range(5))]
    for keywords in settings:
        assert bug.run(False, **keywords) == usual, keywords
