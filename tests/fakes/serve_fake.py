"""`mneme serve` with a fake engine and a minimal API: the cluster's mechanics without a model."""

from __future__ import annotations

import sys

from mneme.cluster.cli.serve import serve
from mneme.cluster.config import load_config
from tests.fakes.fake_api import build_fake_api
from tests.fakes.fake_engine import load_fake_engine

if __name__ == "__main__":
    sys.exit(serve(load_config(None, sys.argv[1:]), build_engine=load_fake_engine, build_api=build_fake_api))
