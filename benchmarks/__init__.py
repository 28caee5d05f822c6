"""Scripts that measure. They import each other by their own names, as `python benchmarks/NAME.py` has it, where Python
puts their folder on the path; for `python -m benchmarks.NAME` this does.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
