"""`python -m tests.chaos`: a real orchestrator under a nemesis, and a checker that reads what
happened.
"""
