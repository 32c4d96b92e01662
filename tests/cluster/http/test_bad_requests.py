"""The corpus of bad requests against the API on a real server, with a fake engine behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mneme.cluster.config import HttpConfig
from tests.cluster.api_fixtures import serving
from tests.cluster.bad_request_checks import BadRequestChecker
from tests.cluster.bad_requests import BAD_REQUESTS, RAW_REQUESTS, BadRequest, RawRequest


@pytest.fixture(scope="module")
def checker() -> Iterator[BadRequestChecker]:
    with serving(config=HttpConfig(body_idle_timeout_s=2.0)) as server:
        checker = BadRequestChecker(server.url)
        yield checker
        checker.close()


@pytest.mark.parametrize("case", BAD_REQUESTS, ids=lambda case: case.name)
def test_a_bad_request_is_refused_and_harms_nobody(checker: BadRequestChecker, case: BadRequest) -> None:
    checker.check(case)


@pytest.mark.parametrize("case", RAW_REQUESTS, ids=lambda case: case.name)
def test_bad_bytes_harm_nobody(checker: BadRequestChecker, case: RawRequest) -> None:
    checker.check_raw(case)


def test_there_are_enough_cases_and_each_has_its_name() -> None:
    names = [case.name for case in BAD_REQUESTS] + [case.name for case in RAW_REQUESTS]
    assert len(names) == len(set(names))
    assert len(names) >= 60
