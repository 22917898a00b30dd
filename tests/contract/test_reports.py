"""A process's report of its outages (`pdserve/contract/reports.py`)."""

from pdserve.contract.reports import OutageTracker


def test_an_outage_is_reported_by_address_while_it_lasts() -> None:
    up, connections = True, OutageTracker()
    connections.add("NATS", "nats://user:secret@10.0.0.5:4222, tls://10.0.0.6:4222", lambda: up)
    connections.add("etcd", "10.0.0.5:2379", lambda: True)
    assert connections.outages() == []
    up = False
    (first,) = connections.outages()
    assert (first.server, first.address) == ("NATS", "10.0.0.5:4222,10.0.0.6:4222")
    (later,) = connections.outages()
    assert later.seconds > first.seconds
    up = True
    assert connections.outages() == []
