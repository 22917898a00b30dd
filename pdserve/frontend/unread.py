"""Pause a request whose client does not read, so that other clients get its places at the workers."""

import logging

from pdserve.frontend.admission.control import Admission
from pdserve.frontend.models import ServedModel
from pdserve.frontend.trace import RequestTrace

logger = logging.getLogger(__name__)


class PauseWhileUnread:
    """Call it regularly with whether the client has stopped reading. The request is paused when it has and requests of
    other clients wait, and resumed when it reads again."""

    def __init__(self, model: ServedModel, admission: Admission, trace: RequestTrace) -> None:
        self._model = model
        self._admission = admission
        self._trace = trace
        self._paused = False

    def __call__(self, unread: bool) -> None:
        processor = self._model.processor
        if processor is None or unread == self._paused:
            return
        if unread and self._model.admission.others_wait(self._admission):
            logger.info("%s: paused, its client does not read and others wait", self._trace.request_id)
            processor.core.pause(self._trace)
            self._paused = True
        elif self._paused and not unread:
            processor.core.resume(self._trace)
            self._paused = False
