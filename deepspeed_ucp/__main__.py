"""``python -m deepspeed_ucp``: the ``ds_ucp`` command."""

import sys

from .cli import main

sys.exit(main())
