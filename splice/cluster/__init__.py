"""Starts the roles of a run, on one host or with Slurm, Ray or Kubernetes, and checks hosts first.

from splice.cluster import Cluster
"""

from splice.cluster.one_host import Cluster

__all__ = ["Cluster"]
