"""What a token prefix leaves in a cache, as one integer."""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray


def prefix_hashes(tokens: Iterable[int], seed: Hashable = None) -> NDArray[np.int64]:
    """Hash every prefix of ``tokens``.

    Element ``n`` stands for the recurrent state after ``tokens[:n]``, and for the
    key and value of the token at position ``n - 1``: both depend on the whole
    prefix. ``seed`` separates what must never be shared (cache salt, adapter).
    """
    value = hash(("prefix", seed))
    values = [value]
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return np.array(values, dtype=np.int64)
