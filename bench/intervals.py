"""How often a job of 1,024 nodes should save, by the planner alone: ``ds_ucp plan --mtbf`` into docs/benchmarks.md.

    python bench/intervals.py     writes its section of docs/benchmarks.md

That its formula is right is for tests/examine/test_sizing.py to say, which simulates failures one by one.
"""

from __future__ import annotations

import io
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from report import INTERVALS, put_part  # noqa: E402

from deepspeed_ucp.cli.dispatch import main  # noqa: E402

COMMAND = (
    "ds_ucp plan --params 1T --ranks 8192 --target tp=8,pp=64 --mtbf 4h --restart 2m "
    "--read-gbs 273 --write-gbs 273 --net-gbs 25"
)


def make_section() -> str:
    """The section of docs/benchmarks.md."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        main(shlex.split(COMMAND)[1:])
    return f"""## How often to save, on 1,024 nodes

Written by `python bench/intervals.py`, by arithmetic alone: nothing is measured. 10^12 parameters on 8,192 ranks, a
storage that takes and gives 273 GB/s in all, 25 GB/s of network a rank, and a failure every four hours, of one kind in
each row. [What the columns mean](cli.md#how-often-to-save)

```console
$ {COMMAND}
{printed.getvalue().rstrip()}
```"""


if __name__ == "__main__":
    page = ROOT / "docs" / "benchmarks.md"
    page.write_text(put_part(page.read_text(), INTERVALS, make_section()))
