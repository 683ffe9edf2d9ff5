"""``shoal serve``: the whole mesh on one machine."""

import asyncio
import signal
import sys

from cli.run_directory import RunDirectory
from cli.supervisor import StartFailedError, Supervisor
from cli.table import Screen
from shared.config import ServeConfig
from shared.errors import ConfigError


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 after a drain, 1 when a service cannot start, 2 for a wrong
    setting."""
    try:
        config = ServeConfig.load(arguments, "shoal serve")
    except ConfigError as error:
        print(f"shoal serve: {error}", file=sys.stderr)
        return 2
    directory = RunDirectory(config.mesh_dir)
    try:
        with Screen(config) as screen:
            return asyncio.run(_serve(Supervisor(config, directory, screen.print), screen))
    finally:
        directory.remove()


async def _serve(supervisor: Supervisor, screen: Screen) -> int:
    stopping: set[asyncio.Task[None]] = set()

    def on_signal() -> None:
        if stopping:
            screen.print("stopping at once")
            supervisor.kill()
        else:
            screen.print("draining; once more to stop at once")
            stopping.add(asyncio.create_task(supervisor.stop()))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        await supervisor.run(lambda: screen.show(supervisor.children))
    except* StartFailedError as errors:
        supervisor.kill()
        screen.print(f"shoal serve: {errors.exceptions[0]}")
        return_code = 1
    else:
        return_code = 0
    return return_code
