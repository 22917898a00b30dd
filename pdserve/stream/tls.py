"""TLS for a connection, as bytes to bytes: below it is the connection's own transport.

Not asyncio's TLS transports: those tell of a connection only once its handshake has ended, so that what never ends it
could be neither counted nor closed; they cannot close half, which is how a worker's last messages arrive; and what they
call unsent leaves out what waits in the transport below.

Frames say how long they are, and a connection that ends is one that is lost. So no `close_notify` is sent: an end that
a stranger makes up says no more than a cut network.
"""

import ssl

_RECORD = 1 << 14
"""bytes: the most that TLS puts into one"""


class Tls:
    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._unsent, server_side=server)
        self._early = b""
        """what is to be sent after the handshake"""
        self._begun = False

    def encrypt(self, data: bytes) -> bytes:
        """What to send for `data`, and what else TLS has to say. Before the handshake has ended, which the client's
        first call begins, `data` waits here. Raises ssl.SSLError."""
        self._early += data
        if self._early and self._shake_hands():
            rest = memoryview(self._early)
            while rest:
                rest = rest[self._tls.write(rest) :]
            self._early = b""
        return self._unsent.read()

    def decrypt(self, received: bytes) -> bytes:
        """Raises ssl.SSLError where the other side does not speak TLS, is not of this graph, or says that this one is
        not. `encrypt` afterwards, though it be nothing: there may be something to answer."""
        self._received.write(received)
        found = []
        if self._shake_hands():
            try:
                while self._received.pending or self._tls.pending():
                    if not (data := self._tls.read(_RECORD)):
                        raise ssl.SSLZeroReturnError(ssl.SSL_ERROR_ZERO_RETURN, "TLS was closed")
                    found.append(data)
            except ssl.SSLWantReadError:
                pass
        return b"".join(found)

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
