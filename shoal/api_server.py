"""``python -m shoal.api_server``: ``shoal serve`` under the name of vLLM's server."""

import sys

from cli.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
