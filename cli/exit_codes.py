"""What the exit code of a command means."""

OK = 0
FAILED = 1  # the answer is no, or not all went well
WRONG = 2  # a wrong setting or file, or a server that does not answer
INTERRUPTED = 130  # Ctrl-C
