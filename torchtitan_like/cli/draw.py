"""`titan draw`: draw the mesh and the pipeline schedule of a configuration."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from torchtitan_like.cli.common import positive_int, run_report
from torchtitan_like.cli.settings import HelpWithSettings, with_config

EXAMPLE = "titan draw debug_model.toml --world-size 8 --parallelism.tensor_parallel_degree 2 --mesh mesh.svg"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", metavar="CONFIG", help="the TOML file")
    parser.add_argument(
        "--world-size", type=positive_int, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--ranks-per-node", type=positive_int, default=8, metavar="N", help="default: 8"
    )
    parser.add_argument(
        "--mesh", type=Path, metavar="FILE", help="draw the ranks of the layout as .svg or .png"
    )
    parser.add_argument(
        "--pipeline", type=Path, metavar="FILE", help="draw the schedule of a step as .svg or .png"
    )
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.epilog = (
        "Ranks of one row hold parts of one layer and one sequence; each node has a color. The unit\n"
        "of the schedule is a forward pass of one stage, and messages take no time. Needs the extra\n"
        "`plot`, and no GPU. Returns 78 if the configuration has problems.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the pictures. Returns the exit code."""
    from torchtitan_like.config import ConfigError
    from torchtitan_like.distributed.dims import resolve_degrees
    from torchtitan_like.distributed.stages import plan_stages
    from torchtitan_like.preflight import load_checked
    from torchtitan_like.preflight.context import build_context
    from torchtitan_like.preflight.model import check_model
    from torchtitan_like.util.modules import searching_modules_in
    from torchtitan_like.util.output import show_error
    from torchtitan_like.util.pictures import check_picture

    def action() -> int:
        outputs = [path for path in (arguments.mesh, arguments.pipeline) if path is not None]
        if not outputs:
            raise ValueError(
                "Nothing is drawn. Expected --mesh or --pipeline with a file: give one."
            )
        for path in outputs:
            check_picture(path)
        settings = with_config(arguments.config, arguments.settings, show_error)
        with searching_modules_in(Path.cwd()), redirect_stdout(sys.stderr):
            config, _ = load_checked(settings, arguments.world_size, training=False)
        spec, args, _ = check_model(config)
        facts = build_context(config, arguments.world_size, spec, args)
        from torchtitan_like.plan.pictures import draw_mesh, draw_timeline

        if arguments.mesh is not None:
            has_experts = bool(facts.size("n_experts"))
            dims, _ = resolve_degrees(
                config.parallelism, arguments.world_size, has_experts=has_experts
            )
            assert dims is not None
            draw_mesh(dims, arguments.ranks_per_node, arguments.mesh)
        if arguments.pipeline is not None:
            if facts.pp == 1:
                raise ValueError(
                    "The configuration has no pipeline: parallelism.pipeline_parallel_degree is 1. "
                    "Expected 2 or more. Set it, or leave out --pipeline."
                )
            assert spec is not None
            stages = plan_stages(spec, args, config.parallelism)
            order = stages.order(facts.num_micro_batches)
            draw_timeline(stages.csv or stages.schedule, order, arguments.pipeline)
        for path in outputs:
            print(f"Wrote {path}")
        return 0

    try:
        return run_report(action)
    except ConfigError as error:
        show_error(str(error))
        return os.EX_CONFIG
