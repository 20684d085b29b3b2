"""Import path of the example's modules, which are files in its folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "megatron_gpt"))
