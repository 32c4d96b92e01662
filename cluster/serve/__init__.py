"""Ray Serve deployments: the ingress, the replicas, and the link between them that survives either's death.

Public: `ingress`, `replica`, `client.RayEngineClient`, `engine_client`, the interface for the HTTP room.
"""
