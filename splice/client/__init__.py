"""A client's side of a run: run.toml, the clients, their batches and the list of ready replicas."""
