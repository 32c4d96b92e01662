"""Some of the corpus of bad requests against running servers; tests/cluster/http/test_guard.py plays all of it.

Whole servers add what is before the application: HAProxy, and the server's own reading of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.bad_request_checks import BadRequestChecker
from tests.cluster.bad_requests import BAD_REQUESTS, RAW_REQUESTS, BadRequest, RawRequest

pytestmark = pytest.mark.e2e

EACH = 16
STALLED = ("stalled chunked body", "body that never starts")  # as "stalled body": each is waited for for 10 s


@pytest.fixture(scope="module")
def checker(each_server: str) -> Iterator[BadRequestChecker]:
    checker = BadRequestChecker(each_server)
    yield checker
    checker.close()


@pytest.mark.parametrize("case", BAD_REQUESTS[::EACH], ids=lambda case: case.name)
def test_a_bad_request_is_refused_and_harms_nobody(checker: BadRequestChecker, case: BadRequest) -> None:
    checker.check(case)


@pytest.mark.parametrize(
    "case", [case for case in RAW_REQUESTS if case.name not in STALLED], ids=lambda case: case.name
)
def test_bad_bytes_harm_nobody(checker: BadRequestChecker, case: RawRequest) -> None:
    checker.check_raw(case)
