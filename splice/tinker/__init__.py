"""A Tinker server: Tinker's SDK and recipes train a run of splice.

    SDK -- HTTP --> server.py -- turns.py --> training.py -- SpliceClient --> orchestrator
                        |-- sampling.py -- OpenAI API --> inference nodes
                        '-- books.py: sessions, models, samplers, checkpoints, futures (SQLite)

A request passes through `wire.py` (protobuf and JSON to arrays) and `losses.py` (Tinker's losses to
splice's batches), both pure. The server is a separate process and a client of the orchestrator.
It needs the extra `tinker`; docs/tinker.md has the rest.
"""
