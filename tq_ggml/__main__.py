"""``python -m tq_ggml`` is ``tq-ggml``."""

import sys

from tq_ggml.cli import main

sys.exit(main())
