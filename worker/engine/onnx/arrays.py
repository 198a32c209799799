"""The type of arrays of any shape and numbers, for modules that must not wait for onnxruntime to be imported."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
