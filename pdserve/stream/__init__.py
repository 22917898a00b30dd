"""A long-lived two-way message stream on TCP between each frontend and each decode worker (`tcp.py`).

The messages of a connection arrive in the order sent, and at most once. Both sides notice a lost connection. Messages
in flight are then lost, and the frontend submits the requests again under new ids.

`TcpStreamServer`, the decode worker's end, yields `(frontend id, message)` in order of arrival; a message of None means
that the frontend is gone. It logs and skips undecodable messages. To `TcpStreamClient`, a frontend's end, its
worker is gone in three cases: its process ends; nothing arrives for a few seconds, not even heartbeats (the process is
frozen, or the network is cut); or a message of a known type cannot be decoded, because tokens may be missing.
Both ends raise ProtocolError for a message that is too large, a client also for one that it cannot encode; then nothing
was sent, and the connection stays open.
"""
