"""The errors that are meant for the person at the keyboard."""


class TqError(Exception):
    """What is wrong, which value, what to do next. The command line prints it as one line and exits with 2."""


class EngineError(TqError, RuntimeError):
    """llama.cpp could not be loaded, or refused a model or a context."""


class CacheTypeError(TqError, ValueError):
    """A cache type that does not exist, or that does not fit the model."""
