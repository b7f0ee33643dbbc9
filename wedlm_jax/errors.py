"""The one error type for bad input."""


class InputError(ValueError):
    """Something the caller gave is unusable.

    Its message is one sentence that names the file, field or row and what was
    expected. The command line prints it and exits with status 2.
    """
