"""Reads what the HTTP API needs of a model: its tokenizer, its context, and what holds where a request says nothing."""

from __future__ import annotations

import time

from mneme.cluster.config import ClusterConfig
from mneme.cluster.http.api_state import Backend, ServedModel
from mneme.cluster.serve.engine_client import EngineClient
from mneme.replicas.card import sampling_defaults
from mneme.replicas.model.directory import load_model_config, model_directory
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.truncation import default_for


def load_backend(client: EngineClient, config: ClusterConfig) -> Backend:
    """Read a model's directory; `config` is of this model alone. Raises `CheckpointError`."""
    directory = model_directory(config.model)
    tokenizer = Tokenizer.load(directory)
    tokenizer.warm_up()  # before /ready is asked: while the replicas load
    described = load_model_config(directory)
    max_context = described.max_context
    model = ServedModel(
        id=config.model_name,
        max_context=min(max_context, config.engine.max_context or max_context),
        created=int(time.time()),
        root=str(directory) if config.is_private else config.model_name,
        aliases=config.model_names[1:],
        sampling_defaults=sampling_defaults(directory, config.engine.generation_config),
    )
    return Backend(
        client,
        model,
        tokenizer,
        truncation=default_for(config.engine.truncation, described.immovable),
        blend=config.engine.blend,
        default_timeout_s=config.engine.request_timeout_s,
        max_waiting=config.engine.max_waiting,
    )
