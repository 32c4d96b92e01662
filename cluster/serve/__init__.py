"""Ray Serve deployments: the ingress, the replicas, and the link between them that survives either's death.

Public: `ingress`, `replica`, `ray_client.RayEngineClient`, `local_client.LocalEngineClient` (one engine, no Ray),
`engine_client`, the interface for the HTTP room.
"""
