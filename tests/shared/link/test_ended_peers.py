from shared.link import link
from shared.link.link import MEMORY_S, EndedPeers
from shared.link.peer import Peer
from shared.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello


def worker(instance: str) -> Peer:
    hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "worker", instance)
    return Peer(hello, lambda *_: None)


def test_a_peer_is_remembered_until_it_is_back_or_for_a_while(monkeypatch):
    monkeypatch.setattr(link, "MAX_ENDED", 2)
    ended = EndedPeers()
    ended.add(worker("a"), True, 0.0)
    ended.add(worker("b"), False, 10.0)
    seen = [(each.peer.hello.instance, each.is_lost) for each in ended.recent(MEMORY_S)]
    assert seen == [("a", True), ("b", False)]
    assert [each.peer.hello.instance for each in ended.recent(MEMORY_S + 5)] == ["b"]
    ended.pop(worker("b"))
    ended.add(worker("c"), True, 20.0)
    ended.add(worker("d"), True, 20.0)
    assert [each.peer.hello.instance for each in ended.recent(20.0)] == ["c", "d"]
