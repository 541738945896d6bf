"""`splice smoke`: the whole loop on one host, from checkpoint to `name@N`.

It proves that the served weights are the trained ones.
"""
