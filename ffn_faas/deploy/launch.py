"""The one launcher of all recipes: runs the pods of one node, or prints those of all nodes.

    python -m ffn_faas.deploy.launch deploy/recipes/NAME.env
    DRY_RUN=1 LAYOUT=2A2F python -m ffn_faas.deploy.launch deploy/recipes/NAME.env

Every key of a recipe can be given as an environment variable as well, which wins. The pods run until SIGTERM or Ctrl-C
(a second one kills them), each change of theirs is a line of JSON on stdout, their output goes to --logs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ffn_faas import env
from ffn_faas.config import is_loopback
from ffn_faas.deploy import launch_plan, recipe
from ffn_faas.deploy.local import run_until_signalled
from ffn_faas.errors import FfnError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; runs until SIGTERM or SIGINT unless DRY_RUN=1. FFN_FAAS_TOKEN goes to all pods."""
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas.deploy.launch", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("recipe", type=Path, help="a file of KEY=VALUE lines, such as those under deploy/recipes")
    parser.add_argument("--logs", type=Path, help="directory for the pods' output (default: a temporary one)")
    args = parser.parse_args(argv)
    try:
        chosen = recipe.read(args.recipe, env.recipe_setting)
        pods = launch_plan.plan(chosen)
        if env.recipe_setting("DRY_RUN") in ("1", "true", "yes"):
            print("\n".join(launch_plan.shell(pods)))
            return 0
        node = env.recipe_setting("NODE_RANK") or "0"
        here = [pod for pod in pods if str(pod.node) == node]
        if not here:
            raise UsageError(f"NODE_RANK={node}: the layout has {len(chosen.nodes)} node(s)")
        token = env.token()
        if token is None and (exposed := [pod.address for pod in here if not is_loopback(pod.address)]):
            raise UsageError(
                f"{exposed[0]} can be reached from other hosts, so F will ask for a token",
                remedy="set FFN_FAAS_TOKEN (openssl rand -hex 32), the same on all nodes",
            )
        run_until_signalled(launch_plan.manifests(chosen, here, token), args.logs)
    except FfnError as error:
        print(f"ffn_faas: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
