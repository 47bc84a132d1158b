"""A real model's attention tensors: see README.md beside this file for where they come from."""

from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np


class ModelTensors(NamedTuple):
    """One layer of a trained transformer, and what torch's autograd computed there. Each (3, 12, 32, 32) float32."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mask: np.ndarray  # (3, 1, 1, 32) bool, True = real token
    output: np.ndarray
    weights: np.ndarray
    grad_output: np.ndarray
    grad_query: np.ndarray
    grad_key: np.ndarray
    grad_value: np.ndarray


def load_model_tensors() -> ModelTensors:
    """The tensors that are shipped with the package."""
    with as_file(files(__name__) / "minilm_attention.npz") as path, np.load(path, allow_pickle=False) as arrays:
        return ModelTensors(**arrays)
