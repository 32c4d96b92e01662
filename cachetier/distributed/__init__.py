"""All of the cache tier that knows Ray: a node's actor, the directory of who has what, and chunks as objects.

Public: `lifecycle` (start and end), `ray_store.RayChunkStore`, `session_logs.RaySessionLogs`. Imports all other rooms;
only replicas' processes and the cluster's lifecycle import it.
"""
