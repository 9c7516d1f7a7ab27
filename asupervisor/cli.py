"""The command line, ``asupervisor``; needs the extra ``cli``.

Nothing heavy is imported before a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from asupervisor import __version__

try:
    import click
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the command line of asupervisor needs click: pip install 'asupervisor[cli]'", name=error.name
    ) from None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Supervised training for TensorFlow graph programs."""


class _ProgramCommand(click.Command):
    """A command whose options end where the program begins, as the Python interpreter's do.

    So everything after a file name or after ``-m`` belongs to the program, even if it looks like an option of ours.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        taking = {
            name
            for parameter in self.params
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for name in parameter.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--" and not _is_module_option(args[at]):
            at += 2 if args[at] in taking else 1
        if at < len(args) and _is_module_option(args[at]):
            args = [*args[:at], "--", *args[at:]]
        return super().parse_args(ctx, args)


def _is_module_option(text: str) -> bool:
    return text.startswith("-m")


@main.command(
    cls=_ProgramCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Run a program as a cluster on this machine.",
    epilog="Example: asupervisor launch --ps 1 --workers 2 train.py --steps 1000",
)
@click.option("--ps", type=click.IntRange(0), default=0, metavar="N", help="Parameter servers.  [default: 0]")
@click.option(
    "--workers", type=click.IntRange(0), default=0, metavar="M", help="Workers, beside the chief.  [default: 0]"
)
@click.option("--chief/--no-chief", default=True, help="Without a chief, worker 0 is the chief.  [default: --chief]")
@click.option("--evaluator", is_flag=True, help="Start an evaluator too.")
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=3,
    metavar="K",
    help="How often a task that crashed is started again within the window.  [default: 3]",
)
@click.option(
    "--restart-window-secs",
    type=click.FloatRange(0),
    default=300.0,
    metavar="SECS",
    help="Restarts longer ago do not count.  [default: 300]",
)
@click.option(
    "--grace-secs",
    type=click.FloatRange(0),
    default=30.0,
    metavar="SECS",
    help="What chief and workers may take to end after SIGTERM, before they are killed.  [default: 30]",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write what each task prints into a file of its own as well.",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]...")
@click.pass_context
def launch(
    ctx: click.Context,
    *,
    ps: int,
    workers: int,
    chief: bool,
    evaluator: bool,
    restarts: int,
    restart_window_secs: float,
    grace_secs: float,
    log_dir: Path | None,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM as a cluster on this machine, one process per task.

    PROGRAM is a Python file, or -m and a module; what follows are its own arguments. Each task gets TF_CONFIG, with
    addresses on 127.0.0.1. A task that exits with 1 to 127 ends the job, which exits with the same status; one that
    exits with 128 or more, or is killed, is started again. The job is over when the chief and all workers are done.

    Ctrl-C or SIGTERM ends everything in order, a second one at once.
    """
    if os.name != "posix":
        raise click.UsageError("clusters can be launched on Linux and macOS only", ctx)
    if not _is_module_option(program[0]) and not Path(program[0]).exists():
        raise click.UsageError(f"there is no program {program[0]!r}", ctx)
    from asupervisor.cluster.launcher import Launcher

    try:
        launcher = Launcher(
            program,
            ps=ps,
            workers=workers,
            chief=chief,
            evaluator=evaluator,
            restarts=restarts,
            restart_window_secs=restart_window_secs,
            grace_secs=grace_secs,
            log_dir=log_dir,
            handle_signals=True,
        )
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from error
    try:
        status = asyncio.run(launcher.run())
    except OSError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:  # before the first task, or after the last one
        status = 128 + signal.SIGINT
    ctx.exit(status)
