"""`python -m jaxserve.planning.worker`: compiles the plan on stdin and writes its facts to stdout, both as JSON.

A process of its own, because a compiler that aborts takes its process along, and because what jax is told before its
first use (platform, number of virtual devices) can be told once only.
"""

import json
import sys
from pathlib import Path

from checkpoints.errors import CheckpointError
from jaxserve.errors import JaxserveError
from jaxserve.planning.compilation import compiled_facts
from jaxserve.planning.described_model import describe_model
from jaxserve.planning.request import PlanRequest


def main() -> None:
    """Facts, or {"error": message} for what a person can put right."""
    request = PlanRequest.from_dict(json.load(sys.stdin))
    try:
        answer = compiled_facts(request, describe_model(Path(request.model), request.weights))
    except (JaxserveError, CheckpointError, ImportError, ValueError) as error:
        answer = {"error": f"{error}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
