"""What an application binds; Serve shows that nowhere else."""

from __future__ import annotations

from typing import Any

from ray.serve import Application, Deployment


def bound(application: Application) -> Deployment:
    deployment: Deployment = application._bound_deployment
    return deployment


def engines_of(application: Application) -> Any:
    """The deployment of its first model's engines."""
    return bound(bound(application).init_args[1][0])
