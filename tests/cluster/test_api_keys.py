"""Who may call, from which sources that is read, what it is held to, and the command that edits the file of keys."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mneme.cluster.api_keys import ApiKey, Keyring, Meter, read_key_file, sha256_of
from mneme.cluster.cli.main import main
from mneme.cluster.config import HttpConfig, from_mapping
from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.cluster.tenancy import PUBLIC
from mneme.errors import ConfigError, RateLimited, ReplicaUnavailable, Unauthorized
from tests.cluster.api_fixtures import CHAT, MODEL, TOKENIZER, api, get, keys_file, post
from tests.cluster.fake_engine_client import FakeEngineClient


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(name: str = "a", **limits: Any) -> ApiKey:
    return ApiKey(name=name, sha256=sha256_of(f"secret-{name}"), **limits)


def test_without_keys_everyone_is_one_tenant_and_admin() -> None:
    assert Keyring(clock=Clock()).authenticate(None) == (PUBLIC, PUBLIC, True, None)


def test_each_key_is_a_tenant_with_its_role(tmp_path: Path) -> None:
    file = Path(keys_file(tmp_path, key("a"), key("b", role="admin")))
    keyring = Keyring(["k0", "k1"], file, clock=Clock())
    secrets = ("k0", "k1", "secret-a", "secret-b")
    callers = [keyring.authenticate(f"bearer  {secret} ") for secret in secrets]
    assert [caller.tenant for caller in callers] == keyring.tenants
    assert len(set(keyring.tenants)) == 4
    assert [caller.is_admin for caller in callers] == [True, True, False, True]
    assert Keyring(["k1"], clock=Clock()).authenticate("Bearer k1").tenant == callers[1].tenant


def test_hashes_of_keys_are_compared_in_constant_time_alone() -> None:
    """Read the source: times cannot be told apart in a test.

    Nothing in it that stops at the first difference may see what was sent or a key's hash: no `==`, `in`, look-up.
    """
    secret, found = {"digest", "sha256"}, []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(Keyring.authenticate)))):
        names = {getattr(each, "id", None) or getattr(each, "attr", None) for each in ast.walk(node)}
        if names & secret and isinstance(node, ast.Compare | ast.Subscript):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and any(
            isinstance(each, ast.Name | ast.Attribute)
            and (getattr(each, "id", "") or getattr(each, "attr", "")) in secret
            for each in node.args
        ):
            found.append(ast.unparse(node.func))
    assert set(found) == {"hmac.compare_digest", "tenant_of_secret"}, found  # the second behind the first, of the found


@pytest.mark.parametrize(
    "authorization", [None, "Bearer é", "Bearer", "", "Bearer \udcff", "Basic k1", "Bearer k", "k1"]
)
def test_odd_authorization_headers_are_refused(authorization: str | None) -> None:
    with pytest.raises(Unauthorized):
        Keyring(["k1"], clock=Clock()).authenticate(authorization)


def test_a_changed_file_is_read_again_and_a_bad_one_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), Path(keys_file(tmp_path, key("a")))
    keyring = Keyring(file=path, clock=clock)

    def may_call(name: str) -> bool:
        clock.now += 2
        try:
            keyring.authenticate(f"Bearer secret-{name}")
        except Unauthorized:
            return False
        return True

    assert [may_call("a"), may_call("b")] == [True, False]
    keys_file(tmp_path, key("a"), key("b"))
    assert [may_call("a"), may_call("b")] == [True, True]
    for bad in ("keys: [{name: c}]", "keys: {", "x" * 5_000_000):
        path.write_text(bad)
        assert [may_call("a"), may_call("b"), may_call("c")] == [True, True, False]
    assert "the keys that were read before stay" in caplog.text
    path.unlink()
    assert may_call("a")
    keys_file(tmp_path)
    assert [may_call("a"), may_call("a")] == [False, False]  # no keys: nobody, and not everybody


def test_a_tenant_of_an_admins_name_is_refused(tmp_path: Path) -> None:
    """Logs and figures go by names."""
    file = Path(keys_file(tmp_path, ApiKey(name="key-0", sha256=sha256_of("x"))))
    with pytest.raises(ConfigError, match="two have the name key-0"):
        HttpConfig(api_keys=("secret",), keys_file=str(file)).keyring()


def test_a_file_that_is_bad_at_the_start_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        from_mapping({"http": {"keys_file": str(path)}})
    zeros = "sha256: " + "0" * 64
    for text in (
        "keys: [{name: a, sha256: short}]",
        f"keys: [{{name: 'a b', {zeros}}}]",
        f"keys: [{{name: a, {zeros}, role: root}}]",
        f"keys: [{{name: a, {zeros}, requests_per_min: 0}}]",
        f"keys: [{{name: a, {zeros}}}, {{name: a, sha256: {'1' * 64}}}]",
        "secret",
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"keys\.yaml: "):
            from_mapping({"http": {"keys_file": str(path)}})


@pytest.mark.parametrize(
    ("limits", "used", "wait_s"),
    [({"requests_per_min": 2}, 0, 30), ({"tokens_per_min": 60}, 100, 41), ({"concurrency": 2}, 0, None)],
)
def test_a_limit_is_waited_for(limits: dict[str, int], used: int, wait_s: float | None) -> None:
    """Requests and tokens come back evenly within a minute, what runs at once when it ends."""
    clock = Clock()
    meter = Meter(key(**limits), clock)
    meter.begin()
    meter.use(used)
    if not used:
        meter.begin()
    with pytest.raises(RateLimited) as refused:
        meter.begin()
    if wait_s is None:
        meter.end()
    else:
        assert refused.value.retry_after_s == pytest.approx(wait_s)
        clock.now += wait_s
    meter.begin()


def test_a_limit_is_a_429_that_says_when_to_come_back(tmp_path: Path) -> None:
    with api(keys_file=keys_file(tmp_path, key(requests_per_min=2, tokens_per_min=1000))) as client:
        client.headers["Authorization"] = "Bearer secret-a"
        first, second, third = (client.post("/v1/chat/completions", json=CHAT) for _ in range(3))
    used = first.json()["usage"]["total_tokens"]
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert 1000 - 2 * used <= int(third.headers["x-ratelimit-remaining-tokens"]) < 1000
    assert third.headers["x-ratelimit-reset-requests"].endswith("s")
    assert 1 <= int(third.headers["retry-after"]) <= 60
    assert "x-should-retry" not in third.headers
    error = third.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "rate_limit_exceeded")
    assert not [name for name in get("/v1/models").headers if name.startswith("x-ratelimit")]


def test_a_prompt_of_several_choices_is_charged_once(tmp_path: Path) -> None:
    config = HttpConfig(keys_file=keys_file(tmp_path, key(tokens_per_min=1000)))
    app = build_api([Backend(FakeEngineClient(TOKENIZER), MODEL, TOKENIZER)], config, clock=Clock())
    client = TestClient(app, "http://api", headers={"Authorization": "Bearer secret-a"})
    usage = client.post("/v1/chat/completions", json={**CHAT, "n": 3}).json()["usage"]
    left = int(client.post("/v1/chat/completions", json=CHAT).headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - usage["total_tokens"] - usage["prompt_tokens"]  # of the second one its prompt, so far


def test_a_stream_counts_until_its_end(tmp_path: Path) -> None:
    clock, engine = Clock(), FakeEngineClient(TOKENIZER, is_endless=True)
    config = HttpConfig(keys_file=keys_file(tmp_path, key(tokens_per_min=60)))
    app = build_api([Backend(engine, MODEL, TOKENIZER)], config, clock=clock)
    transport = httpx.ASGITransport(app)

    async def run() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            client.headers["Authorization"] = "Bearer secret-a"
            body = {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 60}
            return [(await client.post("/v1/chat/completions", json=body)).status_code for _ in range(2)]

    assert asyncio.run(run()) == [200, 429]


@pytest.mark.parametrize(
    ("body", "status"), [(CHAT, 503), ({"messages": 1}, 400), ({**CHAT, "stream": True, "n": 0}, 400)]
)
def test_what_is_refused_or_fails_counts_no_longer(body: dict[str, Any], status: int, tmp_path: Path) -> None:
    """Of requests at once; else a key would be refused for ever."""
    engine = FakeEngineClient(TOKENIZER, refusal=ReplicaUnavailable("gone"))
    config = HttpConfig(keys_file=keys_file(tmp_path, key(concurrency=1)))
    client = TestClient(build_api([Backend(engine, MODEL, TOKENIZER)], config), "http://api")
    headers = {"Authorization": "Bearer secret-a"}
    answers = [client.post("/v1/chat/completions", json=body, headers=headers).status_code for _ in range(3)]
    assert answers == [status] * 3


def test_only_admins_see_what_all_tenants_have(tmp_path: Path) -> None:
    file = keys_file(tmp_path, key("a"), key("b", role="admin"))
    for name, status in (("a", 403), ("b", 200)):
        response = get("/v1/kv/stats", keys_file=file, headers={"Authorization": f"Bearer secret-{name}"})
        assert response.status_code == status
    assert post("/v1/chat/completions", CHAT, keys_file=file).status_code == 401


def test_the_command_adds_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"

    def run(*args: str) -> tuple[int, str, str]:
        status = main(["keys", args[0], "--file", str(path), *args[1:]])
        return (status, *capsys.readouterr())

    status, secret, _ = run("add", "team", "--role", "admin", "--tokens-per-min", "1000")
    assert status == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret.strip() not in path.read_text()
    assert [each.name for each in read_key_file(path)] == ["team"]
    clock = Clock()
    keyring = Keyring(file=path, clock=clock)
    assert keyring.authenticate(f"Bearer {secret.strip()}").is_admin
    assert run("add", "team")[0] == 2
    assert run("add", "bad name")[0] == 2
    assert run("add", "other")[0] == 0
    listed = run("list")[1]
    assert [line.split()[:2] for line in listed.splitlines()] == [["team", "admin"], ["other", "user"]]
    assert "tokens_per_min=1000" in listed
    assert run("revoke", "team")[0] == 0
    assert run("revoke", "team")[0] == 2
    clock.now += 2
    with pytest.raises(Unauthorized):
        keyring.authenticate(f"Bearer {secret.strip()}")
    assert os.listdir(tmp_path) == ["keys.yaml"]
