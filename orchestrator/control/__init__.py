"""The orchestrator's end of the control protocol: who is connected, what was asked, who answers."""
