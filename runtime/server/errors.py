"""What can go wrong with one request, by whose fault it is; every message is fit for the client."""


class RequestError(Exception):
    """A request that gets no answer; the message is one plain sentence."""


class InvalidRequestError(RequestError):
    """The request cannot be answered as it is."""


class NotFoundError(RequestError):
    """No such model or version."""


class ExhaustedError(RequestError):
    """The request needs more memory, or more room in a queue, than there is."""


class AbandonedError(RequestError):
    """The client no longer waits: it cancelled, or its deadline passed before the session ran."""


class TimedOutError(RequestError):
    """The request waited longer than its model's queue policy allows."""


class UnavailableError(RequestError):
    """The model cannot answer now, and may later."""


class LoadFailedError(RequestError):
    """A model cannot be loaded; whatever was served before still is."""


class UnsupportedError(RequestError):
    """The server does not do this, or not as it was started."""
