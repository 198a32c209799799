"""The type of numpy arrays of any shape and element type."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
