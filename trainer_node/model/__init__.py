"""One rank's model: building it, experts, offload."""
