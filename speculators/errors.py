"""The one exception for what a user can fix. The command line prints its sentence and exits with code 2."""


class UserError(Exception):
    """One sentence: where, what is wrong (with the value seen), what is allowed, and what to do."""
