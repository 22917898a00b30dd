"""A long-lived two-way message stream on TCP between each frontend and each decode worker (`tcp.py`).

The messages of a connection arrive in the order sent, and at most once. Both sides notice a lost connection. Messages
in flight are then lost, and the frontend submits the requests again under new ids.

`TcpStreamServer`, the decode worker's end, yields `(frontend id, message)`; a message of None means that the frontend
is gone. It skips undecodable messages. `TcpStreamClient`, a frontend's end, raises PeerGone if the connection ends, if
nothing arrives for a few seconds, or if a message of a known type cannot be decoded, because tokens may be missing.
Either end raises ProtocolError for a message that it cannot send. The connection then stays open.
"""
