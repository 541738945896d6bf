"""How a version reaches every replica: states, one attempt, and rolling forward."""
