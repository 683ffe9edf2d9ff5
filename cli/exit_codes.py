"""Exit codes of commands."""

OK = 0
FAILED = 1  # a negative answer, or a partial failure
WRONG = 2  # a wrong setting or file, or a server that does not answer
INTERRUPTED = 130  # Ctrl-C
