"""Orders in which tensors may go over the wire."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence


def shuffled_order(count: int, num_chunks: int, seed: int) -> list[list[int]]:
    indices = list(range(count))
    random.Random(seed).shuffle(indices)
    return [indices[c::num_chunks] for c in range(num_chunks)]


def vllm_order(names: Sequence[str]) -> list[list[int]]:
    """q, k, v; gate, up (of each expert); down: what is adjacent in vLLM's fused tensors. A chunk
    boundary amid a layer's experts.
    """
    index = {name: n for n, name in enumerate(names)}
    fused = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 3, "up_proj": 4}

    def key(name: str) -> tuple[object, ...]:
        *_, linear_name, _ = ["", "", *name.split(".")]
        layer = re.search(r"layers\.(\d+)\.", name)
        expert = re.search(r"experts\.(\d+)\.", name)
        where = int(layer.group(1)) if layer else -1
        return (
            where,
            linear_name == "down_proj",
            linear_name not in fused,
            int(expert.group(1)) if expert else -1,
            fused.get(linear_name, 9),
            name,
        )

    ordered = [index[name] for name in sorted(names, key=key)]
    gates = [
        n for n, i in enumerate(ordered) if ".experts.1." in names[i] and "gate_proj" in names[i]
    ]
    cuts = [0, *(gates or [len(ordered) // 2]), len(ordered)]
    return [ordered[a:b] for a, b in itertools.pairwise(cuts)]
