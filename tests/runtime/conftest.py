"""Helpers of this folder, importable from the folders below."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
