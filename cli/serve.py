"""``shoal serve``: the whole mesh on one machine."""

import asyncio
import errno
import signal
import socket
import sys

from cli.exit_codes import FAILED, INTERRUPTED, OK, WRONG
from cli.run_directory import RunDirectory
from cli.settings_help import show_help
from cli.supervisor import StartFailedError, Supervisor
from cli.table import Screen
from shared.errors import ConfigError
from shared.link.tcp import listen_on_both
from shared.model_location import locate_model
from shared.settings.known import NAMES
from shared.settings.load import load_settings
from shared.settings.names_elsewhere import LISTS, TRUTHS, VALUE
from shared.settings.serve import ServeConfig


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 after a drain, 1 if a service cannot start, 2 for a wrong setting,
    130 for a second Ctrl-C."""
    show_help(ServeConfig, "shoal serve", arguments)
    try:
        config = load_settings(ServeConfig, with_model(arguments), "shoal serve")
        locate_model(config.model)
        check_port(config)
        directory = RunDirectory(config.mesh_dir)
        try:
            with Screen(config, directory.path) as screen:
                return asyncio.run(_serve(config, directory, screen))
        finally:
            directory.remove()
    except ConfigError as error:
        print(f"shoal serve: {error}", file=sys.stderr)
        return WRONG


def with_model(arguments: list[str]) -> list[str]:
    """Turns a model as first or last word into a flag."""
    if arguments and not arguments[0].startswith("-"):
        return ["--model", *arguments]
    if arguments and _is_stray(arguments):
        return [*arguments[:-1], "--model", arguments[-1]]
    return arguments


def _is_stray(arguments: list[str]) -> bool:
    """True if the last word belongs to no flag: neither one, nor the value of the one before."""
    *others, last = arguments
    if not VALUE.fullmatch(last):
        return False
    num_values = 0
    while others and VALUE.fullmatch(others[-1]):
        num_values += bool(others.pop())
    if not others:
        return False
    flag, is_joined, _ = others[-1].partition("=")
    name = NAMES.name_of(flag).partition(".")[0]
    if name in LISTS:
        return bool(is_joined)
    takes_value = not is_joined and _takes_value(name, last)
    return num_values == takes_value


def _takes_value(name: str, word: str) -> bool:
    """True if a flag takes the next ``word``; a foreign switch takes a truth only."""
    fields = ServeConfig.model_fields
    if name in fields:
        return fields[name].annotation is not bool
    if found := NAMES.find(name):
        return found.takes_value or word.lower() in TRUTHS
    return name.removeprefix("no_") not in fields


def check_port(config: ServeConfig) -> None:
    """Raises ConfigError if another process listens on the port. The check precedes the start
    because gateways share their port, and would share it with another mesh's gateways."""
    if config.gateways > 1 and config.port == 0:
        raise ConfigError("port: 0 takes a free port, which several gateways cannot share")
    may_be_taken = config.reuse_port and config.gateways == 1
    if may_be_taken or config.uds is not None or config.node_rank:
        return
    try:
        with listen_on_both(config.host, config.port) or _listen(config.host, config.port):
            pass
    except OSError as error:
        where = f"{config.host}:{config.port}"
        reason = str(error.strerror).partition(" (")[0]
        hint = f"; try --port {config.port ^ 1}" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"host, port: cannot listen on {where}: {reason}{hint}") from None


def _listen(host: str, port: int) -> socket.socket:
    """Listens on the first address of ``host``, or on every address without a host. Raises
    OSError."""
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    return socket.create_server((host, port), family=found[0][0])


async def _serve(config: ServeConfig, directory: RunDirectory, screen: Screen) -> int:
    supervisor = Supervisor(config, directory, screen.print)

    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            screen.print("stopping; Ctrl-C again to stop at once")
        supervisor.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    code = OK
    try:
        await supervisor.run(lambda: screen.show(supervisor.children))
    except* StartFailedError as errors:
        (error, *_) = errors.exceptions
        assert isinstance(error, StartFailedError)
        screen.print(f"shoal serve: {error}")
        code = WRONG if error.code == WRONG else FAILED
    return INTERRUPTED if code == OK and num_signals > 1 else code
