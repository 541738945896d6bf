"""The node's own process: takes the orchestrator's requests and keeps one vLLM server alive."""
