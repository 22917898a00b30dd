"""Streams over ZeroMQ: the only place that imports zmq.

A ROUTER in the worker, a DEALER for each connection in the frontend, one message per multipart. A message
of one byte is a control message, an empty one a heartbeat, everything else msgpack. ZeroMQ's own
reconnection is off, because it loses messages without a word: a connection that breaks is gone, and whoever
wants another one makes it.
"""

from pdserve.stream.zmq.client import ZmqStreamClient as connect
from pdserve.stream.zmq.server import ZmqStreamServer as listen

__all__ = ["connect", "listen"]
