"""Deploys a rendered manifest's application into a Ray instance of this machine, as KubeRay does into that of its pods.

    python -m tests.fakes.serve_rendered NAME PORT FOLDER

NAME of k8s/kustomize. What differs is what a pod has of its own: its port, the folder on its volume, paths in its
image, and what keeps Ray's files in a directory.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from mneme.cluster.config import ClusterConfig
from mneme.cluster.run.environment import apply, cluster_environment
from mneme.config import parse
from tests.k8s.renders import environment, pods, rendered, serve_config


def main(name: str, port: str, folder: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    config = serve_config(rendered(name))
    config["http_options"] |= {"host": "127.0.0.1", "port": int(port)}
    (application,) = config["applications"]
    application["args"]["cache"]["disk"]["folder"] = folder
    directory = tempfile.mkdtemp(dir=tempfile.gettempdir())
    own = cluster_environment(parse(ClusterConfig, application["args"]), "", Path(directory))
    of_image = ("RAY_SERVE_HAPROXY_BINARY_PATH", "MNEME_HAPROXY")
    apply(own | environment(pods(rendered(name))["worker"]) | {key: own[key] for key in of_image})
    # Ray reads the environment when it is imported.
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client  # what `serve deploy` calls behind the dashboard
    from ray.serve.schema import ServeDeploySchema

    ray.init(num_cpus=4, object_store_memory=256 * 2**20, include_dashboard=False, _temp_dir=directory)
    serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
    sys.stdout.write(f"deployed: http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
