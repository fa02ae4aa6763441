"""How many threads products take."""

from __future__ import annotations

import numpy as np
import torch
from threadpoolctl import threadpool_info

from isthmus.compiling import limited_threads


def blas_threads() -> set[int]:
    np.ones((2, 2)) @ np.ones((2, 2))
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


def test_a_limit_holds_for_torch_and_for_the_products_of_numpy_and_ends() -> None:
    with limited_threads(2):
        assert torch.get_num_threads() == 2 and blas_threads() == {2}
        with limited_threads(1):
            assert torch.get_num_threads() == 1 and blas_threads() == {1}
        assert torch.get_num_threads() == 2 and blas_threads() == {2}
