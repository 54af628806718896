"""A rank of a job that is probed, and trains the small pipeline in few turns."""

import json

import autopipe
from autopipe.api import rehearsal

rehearsal._TURNS = 2
cluster = autopipe.probe()
print(f"cluster {json.dumps(cluster.to_dict())}")
