"""The one exception that is meant for people."""


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what, where and what to do.

    The command line prints it as one line and exits with 2, the dashboard shows it in place.

    Args:
        message: What was wrong and what to do about it, one sentence or two, no traceback.
        field: Dotted name of the config field at fault, such as ``launch.gpus``, if there is one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message
