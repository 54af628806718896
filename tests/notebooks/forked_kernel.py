"""A kernel in a process that is forked: ``forked_kernel.py FOLDER -f CONNECTION_FILE``."""

import os
import sys

from ipykernel.kernelapp import launch_new_instance

os.chdir(sys.argv.pop(1))
launch_new_instance()
