"""TLS as bytes in, bytes out, above a plain transport.

asyncio's TLS transports do not fit. They report a connection only after its handshake, so that unfinished handshakes
could be neither counted nor closed. And they cannot close one direction, which a worker does to deliver its last
messages.

No `close_notify` is sent: frames have lengths and an ended connection counts as lost, so that a forged end does no more
harm than a cut network.
"""

import ssl

_RECORD = 1 << 14
"""Maximum size of a TLS record in bytes."""


class Tls:
    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._received = ssl.MemoryBIO()
        self._unsent = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._unsent, server_side=server)
        self._early = b""
        """data to send after the handshake"""
        self._is_established = False

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes to send: `data` encrypted, and TLS's own messages. The client's first call starts the
        handshake, and `data` is kept until the handshake is complete. Raises ssl.SSLError."""
        self._early += data
        if self._early and self._shake_hands():
            rest = memoryview(self._early)
            while rest:
                rest = rest[self._tls.write(rest) :]
            self._early = b""
        return self._unsent.read()

    def decrypt(self, received: bytes) -> bytes:
        """Return the decrypted data. Then send `encrypt(b"")`, because TLS may have to reply. Raises ssl.SSLError if
        the other side does not speak TLS, is not of this graph, or rejects this side."""
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
        if not self._is_established:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLError:
                self._early = b""
                raise
            self._is_established = True
        return True
