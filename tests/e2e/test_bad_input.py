"""The corpus of bad requests against the running servers: some in `make test`, the rest in `make test-all`.

All of it goes to an application in the test's process, too (tests/cluster/http/test_guard.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

from tests.cluster.bad_request_checks import BadRequestChecker
from tests.cluster.bad_requests import BAD_REQUESTS, RAW_REQUESTS, BadRequest, RawRequest

pytestmark = pytest.mark.e2e

T = TypeVar("T")
EACH = 8  # is tried in `make test`


def some(cases: Sequence[T]) -> list[T | ParameterSet]:
    return [
        case if index % EACH == 0 else pytest.param(case, marks=pytest.mark.slow) for index, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def checker(each_server: str) -> Iterator[BadRequestChecker]:
    checker = BadRequestChecker(each_server)
    yield checker
    checker.close()


@pytest.mark.parametrize("case", some(BAD_REQUESTS), ids=lambda case: case.name)
def test_a_bad_request_is_refused_and_harms_nobody(checker: BadRequestChecker, case: BadRequest) -> None:
    checker.check(case)


@pytest.mark.parametrize("case", some(RAW_REQUESTS), ids=lambda case: case.name)
def test_bad_bytes_harm_nobody(checker: BadRequestChecker, case: RawRequest) -> None:
    checker.check_raw(case)
