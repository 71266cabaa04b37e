"""``python -m ffn_faas COMMAND``."""

from __future__ import annotations

import sys

from ffn_faas.cli import main

if __name__ == "__main__":
    sys.exit(main())
