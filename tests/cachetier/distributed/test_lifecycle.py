"""The end of an application's actors; without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mneme.cachetier.distributed import lifecycle as ray_tier
from mneme.cachetier.distributed import nodes as ray_nodes
from mneme.cachetier.distributed.nodes import node_actor_name


def test_every_node_that_lives_is_closed_before_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may outlive its actor, and a directory's actor cannot be closed."""
    events: list[tuple[str, str]] = []

    class Actor:
        def __init__(self, name: str) -> None:
            self.name = name
            if name.startswith(node_actor_name("")):
                self.close = SimpleNamespace(remote=lambda timeout_s: events.append(("close", name)))

    def get_actor(name: str, namespace: str) -> Actor:
        if name == dead:
            raise ValueError
        return Actor(name)

    def kill(actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        events.append(("kill", actor.name))

    dead, *living = (node_actor_name("a"), "directory-0", node_actor_name("b"), node_actor_name("c"))
    names = [{"name": name, "namespace": "mneme-cache-app"} for name in (dead, *living)]
    fake = SimpleNamespace(get_actor=get_actor, kill=kill, get=lambda ref, timeout: None)
    monkeypatch.setattr(ray_nodes, "list_named_actors", lambda all_namespaces: names)
    monkeypatch.setattr(ray_nodes, "ray", fake)
    monkeypatch.setattr(ray_tier, "ray", fake)
    assert ray_tier.shutdown_cache_tier("app") == 3
    assert events[:2] == [("close", node_actor_name("b")), ("close", node_actor_name("c"))]
    assert events[2:] == [("kill", name) for name in living]
