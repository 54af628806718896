"""A rank of a job that is probed in few turns."""

import json

import few_turns  # noqa: F401

import autopipe

cluster = autopipe.probe()
print(f"cluster {json.dumps(cluster.to_dict())}")
