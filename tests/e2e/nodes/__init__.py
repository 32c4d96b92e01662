"""The cache tier and the application on Ray nodes of this machine, one cluster for most; what comes, goes or dies."""
