"""One long-lived two-way message stream between each frontend and each decode worker, on TCP (`tcp.py`).

Messages on one connection arrive in the order sent, and at most once. Both sides learn of a lost connection; messages
in flight are lost then, and the frontend submits the requests again under new ids.

`TcpStreamServer`, the decode worker's end, yields `(frontend id, message)` in order of arrival; a message of None means
that the frontend is gone. Messages that cannot be decoded are logged and skipped. `TcpStreamClient`, a frontend's end,
takes its worker for gone when the worker's process has ended, when it has sent nothing for a few seconds, not even
heartbeats (it hangs, or the network is cut), and when it has sent a message that cannot be decoded: tokens would be
missing. Both raise ProtocolError for a message that is too large or cannot be encoded: nothing was sent, and the
connection holds.
"""
