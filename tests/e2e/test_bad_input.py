"""The corpus of bad requests against the running servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.bad_request_checks import BadRequestChecker
from tests.cluster.bad_requests import BAD_REQUESTS, RAW_REQUESTS, BadRequest, RawRequest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checker(each_server: str) -> Iterator[BadRequestChecker]:
    checker = BadRequestChecker(each_server)
    yield checker
    checker.close()


@pytest.mark.parametrize("case", BAD_REQUESTS, ids=lambda case: case.name)
def test_a_bad_request_is_refused_and_harms_nobody(checker: BadRequestChecker, case: BadRequest) -> None:
    checker.check(case)


@pytest.mark.parametrize("case", RAW_REQUESTS, ids=lambda case: case.name)
def test_bad_bytes_harm_nobody(checker: BadRequestChecker, case: RawRequest) -> None:
    checker.check_raw(case)
