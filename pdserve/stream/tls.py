"""TLS for a connection, from bytes to bytes, above the connection's own transport.

asyncio's TLS transports do not fit: they report a connection only after its handshake, so that unfinished ones could
be neither counted nor closed; they cannot close one direction only, which a worker does so that its last messages
arrive; and their size of the unsent data leaves out what waits in the transport below.

No `close_notify` is sent. Frames state their length, and a connection that ends counts as lost in any case, so a forged
end does no more harm than a cut network.
"""

import ssl

_RECORD = 1 << 14
"""bytes: the most that a TLS record holds"""


class Tls:
    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._unsent, server_side=server)
        self._early = b""
        """data to send after the handshake"""
        self._begun = False

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes to send: `data` encrypted, and whatever TLS itself has to send. The client's first call
        begins the handshake; `data` is kept until it is complete. Raises ssl.SSLError."""
        self._early += data
        if self._early and self._shake_hands():
            rest = memoryview(self._early)
            while rest:
                rest = rest[self._tls.write(rest) :]
            self._early = b""
        return self._unsent.read()

    def decrypt(self, received: bytes) -> bytes:
        """Raises ssl.SSLError if the other side does not speak TLS, is not of this graph, or rejects this side. Call
        `encrypt` afterwards, with b"" if need be: TLS may have an answer to send."""
        self._received.write(received)
        parts = []
        if self._shake_hands():
            try:
                while self._received.pending or self._tls.pending():
                    if not (data := self._tls.read(_RECORD)):
                        raise ssl.SSLZeroReturnError(ssl.SSL_ERROR_ZERO_RETURN, "TLS was closed")
                    parts.append(data)
            except ssl.SSLWantReadError:
                pass
        return b"".join(parts)

    def _shake_hands(self) -> bool:
        if not self._begun:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLError:
                self._early = b""
                raise
            self._begun = True
        return True
