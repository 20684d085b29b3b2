"""Runs the writer of saves: ``python -P -m deepspeed_ucp.saves FOLDER``."""

import os
import sys

if __name__ == "__main__":
    if os.fork():  # not a child of the rank: a launcher that ends the rank's children would end the writer too
        os._exit(0)
    from .writer import main

    sys.exit(main(*sys.argv[1:]))
