"""``numpy-sdpa info``: versions, BLAS and array modules on this machine."""

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

import numpy as np

from numpy_sdpa._version import __version__

HELP = "Show versions, BLAS, cores and the array modules that are installed."
_OPTIONAL = ("cupy", "jax", "ml_dtypes", "safetensors", "matplotlib", "tqdm", "dask", "distributed", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    facts = collect()
    if arguments.json:
        print(json.dumps(facts))
        return 0
    for name, fact in facts.items():
        text = ", ".join(f"{key} {value}" for key, value in fact.items()) if isinstance(fact, dict) else fact
        print(f"{name:<12} {text or 'none'}")
    return 0


def collect() -> dict[str, Any]:
    from threadpoolctl import threadpool_info

    blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {
        "numpy_sdpa": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "numpy": np.__version__,
        "scipy": importlib.metadata.version("scipy"),
        "blas": "; ".join(
            f"{pool['internal_api']} {pool['version']} ({pool.get('architecture', 'unknown kernel')}, "
            f"{pool['num_threads']} threads)"
            for pool in blas
        ),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "optional": {name: version for name in _OPTIONAL if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    names = ("cupy-cuda12x", "cupy-cuda13x", "cupy") if name == "cupy" else (name,)
    for distribution in names:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
