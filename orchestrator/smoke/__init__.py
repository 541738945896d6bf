"""`splice smoke`: the whole loop on one host, from checkpoint to `name@N`, with the proof that what is served is what was trained."""
