"""The cache tier on Ray nodes of this machine: one cluster for all of these tests, an application for each file."""
