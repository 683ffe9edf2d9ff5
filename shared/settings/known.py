"""The names of other servers that are known here."""

from shared.settings.names_elsewhere import NamesElsewhere
from shared.settings.other_servers.tables import OtherServers

ELSEWHERE: tuple[type[NamesElsewhere], ...] = (
    OtherServers,
    NamesElsewhere,
)
"""The first one is used."""
NAMES = ELSEWHERE[0]()
